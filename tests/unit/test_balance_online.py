"""The online plan: equal loads where slots allow, else near the optimum, and copies that find their expert."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hybrid_ep.balance import online
from hybrid_ep.balance.online import OnlinePlan, map_online, plan_online
from hybrid_ep.errors import ConfigError


def least_maximum(load: list[int], num_ranks: int, num_spare: int) -> int:
    """The smallest maximum that any choice of replicas allows, by trying them all.

    For given replicas it is the largest, over sets of ranks, of the load of experts that are on these ranks only,
    divided by the size of the set (source: the max-flow min-cut theorem).
    """
    num_local = len(load) // num_ranks
    home = [expert // num_local for expert in range(len(load))]
    mean = -(-sum(load) // num_ranks)
    best = sum(load)
    others = [[e for e in range(len(load)) if home[e] != rank] for rank in range(num_ranks)]
    for replicas in itertools.product(*(list(itertools.combinations(experts, num_spare)) for experts in others)):
        hosts = [1 << rank for rank in home]
        for rank, experts in enumerate(replicas):
            for expert in experts:
                hosts[expert] |= 1 << rank
        most = 0
        for ranks in range(1, 1 << num_ranks):
            bound = sum(n for n, on in zip(load, hosts, strict=True) if not on & ~ranks)
            most = max(most, -(-bound // ranks.bit_count()))
            if most >= best:
                break
        best = min(best, most)
        if best == mean:
            break
    return best


def plan_of(load: list[int], num_ranks: int, num_spare: int) -> OnlinePlan:
    counts = torch.zeros(num_ranks, len(load), dtype=torch.int64)
    counts[0] = torch.tensor(load)
    return plan_online(counts, num_ranks_per_domain=num_ranks, num_spare=num_spare)


@pytest.mark.parametrize(
    ("num_ranks", "num_local", "num_spare", "num_cases"),
    [(2, 4, 1, 30), (2, 4, 2, 30), (3, 2, 1, 60), (3, 3, 1, 60), (3, 3, 2, 5), (4, 2, 1, 10)],
)
def test_within_a_hundredth_of_the_best_plan(num_ranks: int, num_local: int, num_spare: int, num_cases: int) -> None:
    draw = random.Random(7)
    for _ in range(num_cases):
        exponent = draw.uniform(0, 2)
        load = [int(draw.uniform(0.5, 1) * 3000 / (i + 1) ** exponent) for i in range(num_ranks * num_local)]
        draw.shuffle(load)
        got = int(plan_of(load, num_ranks, num_spare).loads.max())
        assert got <= 1.01 * least_maximum(load, num_ranks, num_spare), load


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[Tensor], int, int, int]:
    """Top-k indices of each rank, experts, ranks of a domain, and spare slots."""
    per_domain = draw(st.integers(1, 4))
    num_ranks = per_domain * draw(st.integers(1, 3))
    num_local = draw(st.integers(1, 4))
    num_experts = num_ranks * num_local
    num_topk = draw(st.integers(1, min(4, num_experts)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    hot = draw(st.sampled_from((0.0, 0.5, 1.0)))
    routing = []
    for _ in range(num_ranks):
        num_tokens = draw(st.sampled_from((0, 1, 7, 40)))
        topk_idx = torch.rand(num_tokens, num_experts, generator=generator).topk(num_topk).indices
        wants = torch.rand(num_tokens, generator=generator) < hot
        topk_idx[wants, 0] = 0  # may now stand twice
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.1] = -1
        routing.append(topk_idx)
    return routing, num_experts, per_domain, draw(st.integers(0, num_local + 1))


def count(routing: list[Tensor], num_experts: int) -> Tensor:
    return torch.stack([torch.bincount(idx[idx >= 0], minlength=num_experts) for idx in routing])


@settings(max_examples=60, deadline=None)
@given(routings())
def test_every_copy_finds_its_expert_and_loads_are_as_planned(given: tuple[list[Tensor], int, int, int]) -> None:
    routing, num_experts, per_domain, num_spare = given
    num_ranks = len(routing)
    num_local = num_experts // num_ranks
    counts = count(routing, num_experts)
    plan = plan_online(counts, num_ranks_per_domain=per_domain, num_spare=num_spare)
    slots = torch.cat([torch.arange(num_experts).view(num_ranks, num_local), plan.spare], 1)
    arrived = torch.zeros(num_ranks, dtype=torch.int64)
    for rank, topk_idx in enumerate(routing):
        slot = map_online(plan, counts, topk_idx, rank)
        assert torch.equal(torch.where(slot >= 0, slots.flatten()[slot], -1), topk_idx)
        arrived += torch.bincount(slot[slot >= 0] // slots.shape[1], minlength=num_ranks)
    assert torch.equal(arrived, plan.loads)
    # Replicas stay in their domain, and no rank keeps two of one expert.
    for rank, experts in enumerate(plan.spare.tolist()):
        used = [expert for expert in experts if expert >= 0]
        assert len(set(used)) == len(used)
        assert all(e // num_local != rank and e // num_local // per_domain == rank // per_domain for e in used)
    before = counts.sum(0).view(num_ranks, num_local).sum(1)
    by_domain = plan.loads.view(-1, per_domain)
    assert (by_domain.amax(1) <= before.view(-1, per_domain).amax(1)).all()
    if num_spare >= num_local:
        mean = -(-by_domain.sum(1) // per_domain)
        assert (by_domain.amax(1) == mean).all()


def hot_expert(num_ranks: int, num_local: int, share: float) -> list[Tensor]:
    num_experts, generator = num_ranks * num_local, torch.Generator().manual_seed(0)
    odds = torch.full((num_experts,), (1 - share) / (num_experts - 1))
    odds[3] = share
    return [odds.multinomial(4096 * 8, replacement=True, generator=generator).view(-1, 8) for _ in range(num_ranks)]


@pytest.mark.parametrize(("num_spare", "allowed"), [(32, 1.0), (2, 1.05)])
def test_one_expert_with_three_tenths_of_the_copies(num_spare: int, allowed: float) -> None:
    counts = count(hot_expert(8, 32, 0.3), 256)
    assert counts.sum(0).view(8, 32).sum(1).max() > 2.4 * 4096 * 8
    plan = plan_online(counts, num_ranks_per_domain=8, num_spare=num_spare)
    assert plan.loads.max() <= allowed * 4096 * 8


def test_a_tolerance_saves_replicas() -> None:
    counts = count(hot_expert(8, 4, 0.05), 32)
    exact, loose = (
        plan_online(counts, num_ranks_per_domain=8, num_spare=4, tolerance=tolerance) for tolerance in (0.0, 0.1)
    )
    assert loose.loads.max() <= 1.1 * loose.loads.double().mean() + 1
    assert exact.loads.max() == 4096 * 8
    assert (loose.spare >= 0).sum() < (exact.spare >= 0).sum()


def test_copies_stay_at_home_where_the_quota_allows() -> None:
    counts = count(hot_expert(4, 2, 0.6), 8)
    plan = plan_online(counts, num_ranks_per_domain=4, num_spare=2)
    routing = hot_expert(4, 2, 0.6)
    for rank in range(4):
        slot = map_online(plan, counts, routing[rank], rank)
        stayed = ((slot // 4 == rank) & (routing[rank] == 3)).sum()
        assert stayed == min(int(counts[rank, 3]), int(plan.quota[3, rank]))


def test_the_host_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whatever asks for one raises. Indices are looked at only where they are on a CPU."""
    monkeypatch.setattr(online, "require_expert_indices", lambda *_: None)
    with FakeTensorMode():
        counts = torch.zeros(8, 64, dtype=torch.int64)
        plan = plan_online(counts, num_ranks_per_domain=4, num_spare=3, tolerance=0.1)
        slot = map_online(plan, counts, torch.zeros(50, 4, dtype=torch.int64), 5)
    assert plan.spare.shape == (8, 3)
    assert plan.quota.shape == (64, 4)
    assert slot.shape == (50, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": torch.zeros(4, 8)}, "counts.dtype"),
        ({"counts": torch.zeros(4, 9, dtype=torch.int64)}, "experts of counts is 9"),
        ({"num_ranks_per_domain": 3}, "ranks of counts is 4"),
        ({"num_spare": -1}, "num_spare is -1"),
        ({"tolerance": -0.1}, "tolerance is -0.1"),
    ],
)
def test_what_is_not_allowed(change: dict[str, object], message: str) -> None:
    given = {"counts": torch.zeros(4, 8, dtype=torch.int64), "num_ranks_per_domain": 4, "num_spare": 1} | change
    with pytest.raises(ConfigError, match=message):
        plan_online(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": torch.zeros(4, 8)}, "counts.dtype is torch.float32"),
        ({"rank": 4}, "rank is 4"),
        ({"rank": -1}, "rank is -1"),
        ({"topk_idx": torch.zeros(3, 2)}, "topk_idx.dtype is torch.float32"),
        ({"topk_idx": torch.full((3, 2), 8)}, "topk_idx is 8; allowed: −1 … 7"),
        ({"topk_idx": torch.full((3, 2), -2)}, "topk_idx is -2; allowed: −1 … 7"),
        ({"counts": torch.zeros(2, 8, dtype=torch.int64)}, "spare of the plan.shape"),
        ({"counts": torch.zeros(4, 12, dtype=torch.int64)}, "quota of the plan.shape"),
    ],
)
def test_what_cannot_be_mapped(change: dict[str, object], message: str) -> None:
    counts = torch.zeros(4, 8, dtype=torch.int64)
    plan = plan_online(counts, num_ranks_per_domain=4, num_spare=1)
    given = {"counts": counts, "topk_idx": torch.zeros(0, 2, dtype=torch.int64), "rank": 0} | change
    with pytest.raises(ConfigError, match=message):
        map_online(plan, **given)  # type: ignore[arg-type]
