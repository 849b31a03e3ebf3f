"""NVLink domains found by the ranks of a real process group."""

from __future__ import annotations

import torch.distributed as dist

from hybrid_ep.topology import Fabric, Gpu, Topology, gather_domains
from tests.conftest import RunRanks


def _find(clique_of_rank: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every rank has one GPU without NVLink inside the node; its clique comes from the table, 0 = no fabric."""
    rank = dist.get_rank()
    clique = clique_of_rank[rank]
    fabric = Fabric("0123456789abcdef" * 2, clique, state=3, status=0) if clique else None
    gpu = Gpu(0, "GPU", f"GPU-{rank}", "0000:01:00.0", 0, 0, (), fabric, ())
    return gather_domains(Topology((gpu,), (), (), ((),), ((),), 1, "", "", 0, {}), 0)


def test_every_rank_finds_the_same_domains(run_ranks: RunRanks) -> None:
    assert run_ranks(4, _find, (1, 2, 1, 0)) == [((0, 2), (1,), (3,))] * 4
