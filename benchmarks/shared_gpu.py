"""Several ranks where there is only one GPU: they run at once, under NVIDIA's Multi-Process Service.

    nvidia-cuda-mps-control -d
    python benchmarks/shared_gpu.py --ranks 2 --ranks-per-domain 1
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 python benchmarks/shared_gpu.py --ranks 2 --ranks-per-domain 2 --mode balance

The first times calls between domains. The second times a MoE layer whose ranks have half of the SMs each, with a
uniform routing and with 30 % of the tokens at one expert.

Each rank has SMs of its own, and all share the memory that stands for NVLink and the network. So two builds can be
compared, and no figure says what a network would give. Without the service ranks take turns of milliseconds.
"""

from __future__ import annotations

import click

from hybrid_ep import env
from hybrid_ep.bench.balance import POLICIES
from hybrid_ep.bench.command import print_to_terminal
from hybrid_ep.bench.launch import measure_all
from hybrid_ep.bench.plan import BALANCE, BenchPlan, Candidate
from hybrid_ep.testing.cluster import VirtualCluster
from hybrid_ep.workload import Workload


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--ranks-per-domain", default=1, show_default=True)
@click.option("--mode", type=click.Choice(["normal", BALANCE]), default="normal", show_default=True)
@click.option("--tokens", default=4096, show_default=True, help="Of each rank.")
@click.option("--topk", default=8, show_default=True)
@click.option("--num-sms", type=int, multiple=True, help="Of each rank; give it several times for several rows.")
@click.option("--runs", default=20, show_default=True)
def main(
    ranks: int, ranks_per_domain: int, mode: str, tokens: int, topk: int, num_sms: tuple[int, ...], runs: int
) -> None:
    is_balance = mode == BALANCE
    plans = [
        BenchPlan(
            workload=Workload(
                num_tokens=tokens, hidden=7168, num_topk=topk, num_experts=256, dtype="bf16", routing=routing, seed=0
            ),
            mode=mode,
            candidates=tuple(
                [Candidate(policy) for policy in POLICIES]
                if is_balance
                else [Candidate("hybrid_ep", count) for count in num_sms or [None]]
            ),
            num_warmups=3,
            num_runs=runs,
            no_sync=False,
            device="cuda",
            wire=False,
            num_held=0,
        )
        for routing in (("uniform", "hot") if is_balance else ("uniform",))
    ]
    variables = {
        env.ENGINE.name: "cuda",
        env.NUM_RANKS_PER_DOMAIN.name: str(ranks_per_domain),
        env.TRANSPORT.name: "loopback",
    }
    with VirtualCluster(ranks, device="cuda", ranks_share_gpus=True, variables=variables) as cluster:
        print_to_terminal(measure_all(plans, cluster.run, lambda *_: None))


if __name__ == "__main__":
    main()
