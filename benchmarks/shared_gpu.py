"""Calls between domains where there is only one GPU: its ranks run at once, under NVIDIA's Multi-Process Service.

    nvidia-cuda-mps-control -d
    python benchmarks/shared_gpu.py --ranks 2 --ranks-per-domain 1

Each rank has SMs of its own, and all share the memory that stands for NVLink and the network. So two builds can be
compared, and no figure says what a network would give. Without the service ranks take turns of milliseconds.
"""

from __future__ import annotations

import click

from hybrid_ep import env
from hybrid_ep.bench.command import print_to_terminal
from hybrid_ep.bench.launch import measure_all
from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.testing.cluster import VirtualCluster
from hybrid_ep.testing.workload import Workload


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--ranks-per-domain", default=1, show_default=True)
@click.option("--tokens", default=4096, show_default=True, help="Of each rank.")
@click.option("--num-sms", type=int, multiple=True, help="Of each rank; give it several times for several rows.")
@click.option("--runs", default=20, show_default=True)
def main(ranks: int, ranks_per_domain: int, tokens: int, num_sms: tuple[int, ...], runs: int) -> None:
    plan = BenchPlan(
        workload=Workload(
            num_tokens=tokens, hidden=7168, num_topk=8, num_experts=256, dtype="bf16", routing="uniform", seed=0
        ),
        mode="normal",
        candidates=tuple(Candidate("hybrid_ep", count) for count in num_sms or [None]),
        num_warmups=3,
        num_runs=runs,
        no_sync=False,
        device="cuda",
        wire=False,
        num_held=0,
    )
    variables = {
        env.ENGINE.name: "cuda",
        env.NUM_RANKS_PER_DOMAIN.name: str(ranks_per_domain),
        env.TRANSPORT.name: "loopback",
    }
    with VirtualCluster(ranks, device="cuda", ranks_share_gpus=True, variables=variables) as cluster:
        print_to_terminal(measure_all([plan], cluster.run, lambda *_: None))


if __name__ == "__main__":
    main()
