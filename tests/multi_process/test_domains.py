"""Domains found by the ranks of a real process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import TimeoutError
from hybrid_ep.testing.cluster import VirtualCluster
from hybrid_ep.topology import DomainMember, Fabric, Gpu, Topology, gather_domains
from tests.conftest import RunRanks


def _find(clique_of_rank: tuple[int, ...], **options: Any) -> tuple[tuple[int, ...], ...]:
    """Every rank has one GPU without NVLink inside the node; its clique comes from the table, 0 = no fabric."""
    rank = dist.get_rank()
    clique = clique_of_rank[rank]
    fabric = Fabric("0123456789abcdef" * 2, clique, state=3, status=0) if clique else None
    gpu = Gpu(0, "GPU", f"GPU-{rank}", "0000:01:00.0", 0, 0, (), fabric, ())
    return gather_domains(Topology((gpu,), (), (), ((),), ((),), 1, "", "", 0, {}), 0, **options)


def test_every_rank_finds_the_same_domains(run_ranks: RunRanks) -> None:
    assert run_ranks(4, _find, (1, 2, 1, 0)) == [((0, 2), (1,), (3,))] * 4


def _find_alone() -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(TimeoutError) as missed:
        _find((1, 1), timeout_s=0.5)
    return str(missed.value)


def test_a_rank_that_looks_for_no_domain_is_named() -> None:
    with VirtualCluster(2) as cluster:
        told, _ = cluster.run(_find_alone)
    assert told == "domains: rank 0 waited 0.5 s for rank 1: it does not look for its own"


def test_what_a_rank_tells_of_its_gpu_comes_back() -> None:
    for fabric in (("0123", 7), None):
        member = DomainMember(3, "boot", "GPU-3", frozenset({"GPU-1", "GPU-2"}), fabric)
        assert DomainMember.from_json(member.to_json()) == member


def _domains_on_hosts(hosts: str) -> tuple[int, bool]:
    """The size of a domain where rank r is on hosts[r], and whether a layout counts tokens by domain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: hosts[dist.get_rank()])
        with hybrid_ep.Buffer() as buffer:
            topk_idx = torch.arange(8).view(4, 2)
            _, per_domain, *_ = buffer.get_dispatch_layout(topk_idx, 8)
            return buffer.grid.num_ranks_per_domain, per_domain is not None


@pytest.mark.parametrize(
    ("hosts", "want"),
    [("aaaa", (4, False)), ("aabb", (2, True)), ("abab", (4, False)), ("aaab", (4, False)), ("abcd", (1, True))],
)
def test_a_host_is_a_domain(run_ranks: RunRanks, hosts: str, want: tuple[int, bool]) -> None:
    assert run_ranks(4, _domains_on_hosts, hosts) == [want] * 4
