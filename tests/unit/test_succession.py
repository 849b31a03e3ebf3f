"""Placements after ranks were lost or came: who keeps what, what is loaded where, and what cannot be served."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from hybrid_ep.balance import ExpertPlacement, next_placement
from hybrid_ep.elastic.succession import Roster, Succession, arrange, succeed
from hybrid_ep.errors import ConfigError, TopologyError

HOST = "a"
# 4 ranks × 3 slots, 8 experts: 0, 3, 4 and 6 have two replicas.
PLACEMENT = ExpertPlacement(((0, 1, 4, 2, 3, 0, 4, 5, 6, 6, 7, 3),), 8, 4, 2, version=7)


def check(before: ExpertPlacement, roster: Roster, made: Succession) -> None:
    """What holds of every succession: weights that are kept are those of the expert, all others are loaded."""
    loads = {(load.rank, load.layer, load.slot): load.expert for load in made.loads}
    size = made.placement.num_slots
    for rank, old in enumerate(roster.ranks):
        for layer, experts in enumerate(made.placement.experts):
            for slot, expert in enumerate(experts[rank * size : (rank + 1) * size]):
                kept = int(made.kept[rank, layer, slot])
                if kept < 0:
                    assert loads.pop((rank, layer, slot)) == expert
                else:
                    assert old >= 0
                    assert before.experts[layer][old * before.num_slots + kept] == expert
    assert not loads


def test_survivors_keep_their_slots_where_every_expert_has_a_replica() -> None:
    roster = Roster((0, 1, 2, 3), 2)
    made = succeed(PLACEMENT, roster, [False] * 4)
    assert made.placement == dataclasses.replace(PLACEMENT, version=8)
    assert made.kept.tolist() == [[[0, 1, 2]]] * 4
    assert not made.loads


def test_experts_without_a_replica_are_named_or_loaded() -> None:
    roster = Roster((0, 1, 3), 1)  # rank 2 held 4, 5 and 6; 5 is on no other
    named = succeed(PLACEMENT, roster, [False] * 3)
    assert named.placement.unserved == ((5,),)
    assert named.placement.experts == ((0, 1, 4, 2, 3, 0, 6, 7, 3),)
    check(PLACEMENT, roster, named)
    loaded = succeed(PLACEMENT, roster, [True] * 3)
    assert loaded.placement.unserved == ()
    assert [(load.expert, load.layer) for load in loaded.loads] == [(5, 0)]
    check(PLACEMENT, roster, loaded)
    refused = succeed(PLACEMENT, roster, [True] * 3, refused={(0, 5)})
    assert refused.placement.unserved == ((5,),)
    assert not refused.loads


def test_only_ranks_that_can_load_do() -> None:
    roster = Roster((0, 1, 3), 1)
    made = succeed(PLACEMENT, roster, [False, False, True])
    assert {load.rank for load in made.loads} == {2}
    check(PLACEMENT, roster, made)


def test_ranks_get_slots_where_there_are_too_few() -> None:
    roster = Roster((0, 1), 2)
    wide = succeed(ExpertPlacement.contiguous(2, 8, 4, 2), roster, [True, True])
    assert wide.placement.num_slots == 4
    assert wide.placement.unserved == ()
    assert len(wide.loads) == 8
    check(ExpertPlacement.contiguous(2, 8, 4, 2), roster, wide)
    tight = succeed(ExpertPlacement.contiguous(2, 8, 4, 2), roster, [True, True], max_slots=3)
    assert tight.placement.num_slots == 3
    assert [len(experts) for experts in tight.placement.unserved] == [2, 2]
    with pytest.raises(ConfigError, match="max_slots is 1; allowed: ≥ 2, as ranks have"):
        succeed(ExpertPlacement.contiguous(2, 8, 4, 2), roster, [True, True], max_slots=1)


def test_a_newcomer_takes_what_is_lost_and_then_the_fullest() -> None:
    weight = torch.tensor([[1.0, 1, 9, 1, 1, 1, 1, 1]])
    roster = Roster((0, 1, -1, 3), 2)
    made = succeed(PLACEMENT, roster, [True] * 4, weight=weight)
    assert made.placement.unserved == ()
    new = made.placement.experts[0][6:9]
    assert new[0] == 5  # which nobody had
    assert new[1] == 2  # the fullest
    assert made.placement.experts[0][:6] + made.placement.experts[0][9:] == (*PLACEMENT.experts[0][:6], 6, 7, 3)
    check(PLACEMENT, roster, made)
    with pytest.raises(ConfigError, match="that a new rank could load are 0"):
        succeed(PLACEMENT, roster, [True] * 4, refused={(0, expert) for expert in range(8)})


@pytest.mark.parametrize("seed", range(60))
def test_every_succession_serves_all_that_it_can(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, num_slots, num_layers = draw.randint(2, 8), draw.randint(1, 4), draw.randint(1, 3)
    num_experts = draw.randint(1, num_ranks * num_slots)
    layers = []
    for _ in range(num_layers):
        rest = [draw.randrange(num_experts) for _ in range(num_ranks * num_slots - num_experts)]
        layer = [*range(num_experts), *rest]
        draw.shuffle(layer)
        layers.append(tuple(layer))
    before = ExpertPlacement(tuple(layers), num_experts, num_ranks, num_ranks)
    ranks = sorted(draw.sample(range(num_ranks), draw.randint(1, num_ranks)))
    newcomers = draw.randint(0, 2)
    roster = Roster((*ranks, *(-1 - i for i in range(newcomers))), 1)
    can_load = [draw.random() < 0.5 for _ in ranks] + [True] * newcomers
    made = succeed(before, roster, can_load)
    check(before, roster, made)
    held = [{e for r in ranks for e in layer[r * num_slots : (r + 1) * num_slots]} for layer in layers]
    for layer, experts in enumerate(held):
        unserved = set(made.placement.unserved[layer]) if made.placement.unserved else set()
        assert unserved == (set() if any(can_load) else set(range(num_experts)) - experts)


def test_domains_after_a_loss() -> None:
    assert arrange([0, 1, 2, 4, 5, 6, 7], 8, [HOST] * 7) == Roster((0, 1, 2, 4, 5, 6, 7), 7)
    assert arrange([0, 1, 2, 3, 4, 6], 4, [HOST] * 6) == Roster((0, 1, 2, 3, 4, 6), 2)
    assert arrange([0, 1, 2, 4, 5, 6, 7], 4, [HOST] * 7).num_ranks_per_domain == 1
    with pytest.raises(TopologyError, match=r"domains of \[3, 4\] ranks left; allowed: \[1\]"):
        arrange([0, 1, 2, 4, 5, 6, 7], 4, [HOST] * 7, 4)
    assert arrange([0, 1, 2, 3, 4, 6], 4, [HOST] * 6, 1).num_ranks_per_domain == 1


def test_a_newcomer_stands_in_the_domain_of_its_host() -> None:
    hosts = ["a", "a", "b"]
    assert arrange([0, 1, 2], 2, [*hosts, "b"]) == Roster((0, 1, 2, -1), 2)
    assert arrange([0, 2, 3], 2, ["a", "b", "b", "a"]) == Roster((0, -1, 2, 3), 2)
    assert arrange([0, 2, 3], 2, ["a", "b", "b", "c"]) == Roster((0, 2, 3, -1), 1)


def test_a_placement_without_ranks_serves_what_others_hold() -> None:
    left = PLACEMENT.without([2])
    assert (left.lost_ranks, left.unserved, left.version) == ((2,), ((5,),), 8)
    assert left.experts == PLACEMENT.experts
    slots = left.on("cpu", 3).map_topk(0, torch.arange(8).repeat(40, 1))
    assert not ((slots >= 6) & (slots < 9)).any()
    assert (slots[:, 5] == -1).all()
    assert (left.phy2log[0][slots[:, [0, 1, 2, 3, 4, 6, 7]]] == torch.tensor([0, 1, 2, 3, 4, 6, 7])).all()
    assert float(left.rank_loads(torch.ones(1, 8))[0, 2]) == 0
    assert left.without([1]).lost_ranks == (1, 2)
    with pytest.raises(ConfigError, match="lost ranks of the placement"):
        next_placement(left, torch.ones(1, 8), max_moves=1)
    with pytest.raises(ConfigError, match="all but one rank at most"):
        left.without([0, 1, 3])
    with pytest.raises(ConfigError, match="of 0 … 3"):
        left.without([4])


def test_a_placement_that_does_not_serve_all_goes_to_a_file_and_back() -> None:
    left = PLACEMENT.without([2])
    assert ExpertPlacement.from_json({**left.to_json(), "unserved": [[5]]}) == left
    with pytest.raises(ConfigError, match="expert 5 of layer 0 has no slot"):
        ExpertPlacement.from_json({**left.to_json(), "unserved": []})
    with pytest.raises(ConfigError, match="expert 4 of layer 0 is both served and unserved"):
        ExpertPlacement.from_json({**left.to_json(), "unserved": [[4, 5]]})
