"""Drives the virtual cluster through the demo, one phase after another, and puts together what the ranks found."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from hybrid_ep import env
from hybrid_ep.demo.lose_rank import lose_a_rank
from hybrid_ep.demo.results import (
    DemoResult,
    HopBytes,
    PathResult,
    WireResult,
    all_gather_bytes,
    all_to_all_bytes,
    tokens_per_expert,
)
from hybrid_ep.demo.settings import PATHS, ROUTINGS, Path, Settings
from hybrid_ep.demo.skew import run_skewed
from hybrid_ep.demo.train import train
from hybrid_ep.demo.verify import RankCheck, check_path
from hybrid_ep.errors import ConfigError
from hybrid_ep.testing.batch import make_routing
from hybrid_ep.testing.cluster import VirtualCluster
from hybrid_ep.workload import Workload

NUM_PHASES = len(PATHS) * len(ROUTINGS) + 2


def run_demo(settings: Settings, begin_phase: Callable[[str], None]) -> DemoResult:
    """Runs the whole demo.

    Args:
        settings: sizes.
        begin_phase: is called with the name of the next phase, `NUM_PHASES` times.

    Raises:
        RankError: a rank failed.
    """
    if env.ENGINE.get() == "cuda":
        raise ConfigError(
            f"{env.ENGINE.name} is 'cuda'; allowed for the demo, whose tokens are on the CPU: auto or torch"
        )
    begin = time.perf_counter()
    begin_phase(f"starting {settings.num_ranks} ranks")
    paths: list[PathResult] = []
    wire: list[WireResult] = []
    engine = ""
    # The ranks keep their tokens on the CPU, also where there are GPUs: a machine seldom has as many as ranks.
    with VirtualCluster(settings.num_ranks, variables={env.ENGINE.name: "torch"}) as cluster:
        for routing in ROUTINGS:
            for path in PATHS:
                begin_phase(f"checking {path.title}, {path.dtype} tokens, {routing} routing")
                checks = cluster.run(check_path, path, routing, settings)
                engine = checks[0].engine
                paths.append(_path_result(path, routing, checks))
                if path.flavour == "buffer":
                    wire += _wire_results(settings.workload(routing, path.dtype), settings, checks)
        begin_phase(f"training a small MoE layer for {settings.num_steps} steps")
        losses = cluster.run(train, settings)[0]
        skew = []
        if settings.skew:
            begin_phase("balancing a skewed router")
            skew = cluster.run(run_skewed, settings)[0]
        loss = None
        if settings.lose_rank:
            begin_phase("losing a rank")
            loss = lose_a_rank(cluster, settings)
    load = {}
    for routing in ROUTINGS:
        workload = settings.workload(routing, "bf16")
        topk_idx = [make_routing(workload, rank)[0] for rank in range(settings.num_ranks)]
        load[routing] = tokens_per_expert(topk_idx, settings.num_experts)
    seconds = time.perf_counter() - begin
    in_order = sorted(wire, key=lambda item: (ROUTINGS.index(item.routing), item.step.startswith("combine")))
    return DemoResult(settings, engine, tuple(paths), tuple(in_order), load, losses, seconds, tuple(skew), loss)


def _path_result(path: Path, routing: str, checks: list[RankCheck]) -> PathResult:
    squared_error = sum(check.squared_error for check in checks)
    return PathResult(
        path=path,
        routing=routing,
        max_error=max(check.max_error for check in checks),
        rms_error=(squared_error / sum(check.squared_reference for check in checks)) ** 0.5,
        worst_of_allowed=max(check.worst_of_allowed for check in checks),
        counts_match=all(check.num_tokens_per_expert == check.num_expected_per_expert for check in checks),
        milliseconds={
            phase: 1e3 * statistics.median(check.seconds[phase] for check in checks) for phase in checks[0].seconds
        },
    )


def _wire_results(workload: Workload, settings: Settings, checks: list[RankCheck]) -> Iterator[WireResult]:
    """Dispatch in the workload's dtype and, once, combine, which is bf16 whatever was dispatched."""
    topk_idx = [make_routing(workload, rank)[0] for rank in range(settings.num_ranks)]
    num_tokens = [routing.shape[0] for routing in topk_idx]
    steps = {"dispatch": workload.row_bytes}
    if workload.dtype == "bf16":
        steps["combine"] = workload.combine_row_bytes
    for phase, row_bytes in steps.items():
        sent = [check.sent_bytes[phase] for check in checks]
        yield WireResult(
            step=f"{phase} {workload.dtype}",
            routing=workload.routing,
            measured=HopBytes(sum(within for within, _ in sent), sum(between for _, between in sent)),
            all_to_all=all_to_all_bytes(topk_idx, settings.num_experts, settings.num_ranks_per_domain, row_bytes),
            all_gather=all_gather_bytes(num_tokens, settings.num_ranks_per_domain, row_bytes),
        )
