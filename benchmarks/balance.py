"""How balanced, and how fast, placements are, beside EPLB's algorithm: `python benchmarks/balance.py`, on one core.

61 layers × 256 experts, 288 replicas on 32 GPUs; balancedness is the mean over the largest load of the GPUs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.eplb_baseline import eplb_baseline
from hybrid_ep.balance import rebalance_experts
from hybrid_ep.balance.placement import balancedness
from hybrid_ep.balance.rebalance import gpu_loads

__all__ = ["make_loads"]

LAYERS, EXPERTS, REPLICAS, GPUS = 61, 256, 288, 32
POLICIES = {"global": (1, 1), "hierarchical, 8 groups on 4 nodes": (8, 4)}
_RUNS = 7


def make_loads(num_layers: int, num_experts: int) -> dict[str, Tensor]:
    """Loads ``[layers, E]`` by name; of the drifting one, each layer is the next moment of a router that wanders."""
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_layers)]) + 1.0
    uniform = torch.rand(num_layers, num_experts, generator=generator, dtype=torch.float64)
    normal = torch.randn(2, num_layers, num_experts, generator=generator, dtype=torch.float64)
    drift = [normal[1, 0]]
    for step in 0.4 * normal[1, 1:]:
        drift.append(0.9 * drift[-1] + step)
    return {
        "uniform": uniform + 0.5,
        "zipf 0.5": order.double() ** -0.5,
        "zipf 1": order.double() ** -1.0,
        "zipf 1.5": order.double() ** -1.5,
        "log-normal": normal[0].exp(),
        "drifting": torch.stack(drift).exp(),
    }


def main() -> None:
    """Prints one table for each policy."""
    torch.set_num_threads(1)
    console = Console()
    for policy, (num_groups, num_nodes) in POLICIES.items():
        sizes = (REPLICAS, num_groups, num_nodes, GPUS)
        columns = (
            "loads",
            "mean",
            "worst layer",
            "EPLB mean",
            "EPLB worst",
            "layers better",
            "worse",
            "CPU ms",
            "EPLB",
        )
        table = Table(*columns, title=f"{policy}: {LAYERS} layers, {EXPERTS} experts, {REPLICAS} on {GPUS} GPUs")
        for name, weight in make_loads(LAYERS, EXPERTS).items():
            seconds = []
            for _ in range(_RUNS):
                begin = time.process_time()
                ours, _, _ = rebalance_experts(weight, *sizes)
                seconds.append(time.process_time() - begin)
            begin = time.process_time()
            theirs = eplb_baseline(weight, *sizes)
            loops = time.process_time() - begin
            a, b = (balancedness(gpu_loads(weight, placed, GPUS)) for placed in (ours, theirs))
            means = [f"{value:.4f}" for value in (a.mean(), a.min(), b.mean(), b.min())]
            counts = [str(int((a > b + 1e-9).sum())), str(int((a < b - 1e-9).sum()))]
            table.add_row(name, *means, *counts, f"{1e3 * sorted(seconds)[_RUNS // 2]:.0f}", f"{1e3 * loops:.0f}")
        console.print(table)


if __name__ == "__main__":
    main()
