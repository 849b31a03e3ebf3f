"""`next_placement` moves few experts, and no more than it may."""

from __future__ import annotations

import pytest
import torch

from benchmarks.balance import make_loads
from hybrid_ep.balance import ExpertPlacement, next_placement
from hybrid_ep.errors import ConfigError

BEFORE = make_loads(4, 64)["drifting"]
NOISE = torch.randn(BEFORE.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
AFTER = BEFORE * (0.5 * NOISE).exp()


def present(num_ranks_per_domain: int = 8, num_groups: int = 1) -> ExpertPlacement:
    return ExpertPlacement.from_loads(
        BEFORE, 80, 8, num_groups=num_groups, num_ranks_per_domain=num_ranks_per_domain, version=4
    )


@pytest.mark.parametrize("max_moves", [0, 1, 2, 3, 5, 8, 40])
def test_never_more_moves_than_allowed(max_moves: int) -> None:
    found = next_placement(present(), AFTER, max_moves=max_moves)
    assert found.num_moves.max() <= max_moves
    assert torch.equal(found.num_moves, found.placement.num_moves(present()))
    assert torch.equal(found.balancedness, found.placement.balancedness(AFTER))
    assert found.placement.version == 5
    assert (found.balancedness >= present().balancedness(AFTER) - 1e-12).all()


def test_no_moves_change_nothing() -> None:
    assert next_placement(present(), AFTER, max_moves=0).placement.experts == present().experts


def test_moves_close_most_of_the_gap() -> None:
    stale = 1 - present().balancedness(AFTER)
    few, many = (1 - next_placement(present(), AFTER, max_moves=m).balancedness for m in (4, 16))
    assert (few < 0.7 * stale).all()
    assert (many < 0.3 * stale).all()


def test_a_single_hot_expert_gets_the_spare_slots() -> None:
    before = ExpertPlacement((tuple([*range(8), 0, 1, 2, 3]),), 8, 4, 4)
    weight = torch.ones(1, 8)
    weight[0, 7] = 9
    found = next_placement(before, weight, max_moves=3)
    assert before.balancedness(weight) < 0.4
    assert found.balancedness > 0.9


def test_replicas_stay_in_their_domain() -> None:
    before = present(num_ranks_per_domain=4, num_groups=8)
    home = {e: r for r, experts in enumerate(before.phy2log[0].view(2, -1).tolist()) for e in experts}
    found = next_placement(before, AFTER, max_moves=20).placement
    for domain, experts in enumerate(found.phy2log[0].view(2, -1).tolist()):
        assert {home[expert] for expert in experts} == {domain}


def test_what_is_not_allowed() -> None:
    with pytest.raises(ConfigError, match="max_moves is -1"):
        next_placement(present(), AFTER, max_moves=-1)
    with pytest.raises(ConfigError, match=r"weight.shape is \[4, 63\]"):
        next_placement(present(), AFTER[:, 1:], max_moves=1)
