"""Placements from loads: EPLB's interface, balance that is never below EPLB's, files, and the mapping of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.balance import make_loads
from benchmarks.eplb_baseline import eplb_baseline
from hybrid_ep.balance import ExpertPlacement, rebalance_experts
from hybrid_ep.balance.placement import balancedness
from hybrid_ep.balance.rebalance import gpu_loads
from hybrid_ep.errors import ConfigError

LAYERS, EXPERTS = 6, 64


LOADS = make_loads(LAYERS, EXPERTS)
SIZES = [(80, 1, 1, 8), (80, 8, 2, 8), (96, 8, 4, 16), (72, 1, 1, 24), (64, 8, 4, 4), (128, 3, 2, 4)]


def balance(weight: Tensor, phy2log: Tensor, num_gpus: int) -> Tensor:
    return balancedness(gpu_loads(weight, phy2log, num_gpus))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LOADS)
def test_never_less_balanced_than_eplb(name: str, sizes: tuple[int, int, int, int]) -> None:
    weight = LOADS[name]
    ours, _, _ = rebalance_experts(weight, *sizes)
    theirs = eplb_baseline(weight, *sizes)
    difference = balance(weight, ours, sizes[3]) - balance(weight, theirs, sizes[3])
    assert difference.min() > -1e-12


def test_more_balanced_than_eplb_on_most_loads() -> None:
    better = []
    for weight in make_loads(6, 256).values():
        ours, _, _ = rebalance_experts(weight, 288, 1, 1, 32)
        theirs = eplb_baseline(weight, 288, 1, 1, 32)
        better += (balance(weight, ours, 32) - balance(weight, theirs, 32) > 1e-4).tolist()
    assert sum(better) > 0.75 * len(better)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_three_maps_agree(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 3), "nodes")
    num_gpus = num_nodes * data.draw(st.integers(1, 3), "GPUs of a node")
    num_groups = data.draw(st.integers(1, 6), "groups")
    num_experts = num_groups * data.draw(st.integers(1, 4), "experts of a group")
    num_replicas = num_gpus * -(-num_experts // num_gpus + -data.draw(st.integers(0, 2), "more"))
    weight = torch.tensor(
        data.draw(
            st.lists(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts), min_size=1, max_size=3)
        )
    ).view(-1, num_experts)
    phy2log, log2phy, logcnt = rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus)
    num_layers = weight.shape[0]
    assert phy2log.shape == (num_layers, num_replicas)
    assert logcnt.shape == (num_layers, num_experts)
    assert {t.dtype for t in (phy2log, log2phy, logcnt)} == {torch.int64}
    assert log2phy.shape[2] == int(logcnt.max())
    for layer in range(num_layers):
        for expert in range(num_experts):
            slots = log2phy[layer, expert].tolist()
            used = slots[: int(logcnt[layer, expert])]
            assert used == torch.nonzero(phy2log[layer] == expert).flatten().tolist()
            assert used
            assert set(slots[len(used) :]) <= {-1}
            if num_groups % num_nodes == 0:
                assert len({slot * num_nodes // num_replicas for slot in used}) == 1


def test_groups_stay_on_a_node() -> None:
    phy2log, _, _ = rebalance_experts(LOADS["log-normal"], 80, 8, 2, 8)
    group = phy2log.view(LAYERS, 2, 40) // 8
    for layer in group:
        assert not set(layer[0].tolist()) & set(layer[1].tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_replicas": 60}, "num_replicas is 60"),
        ({"num_replicas": 66}, "num_replicas is 66; .* multiple of 8"),
        ({"num_nodes": 3}, "num_gpus is 8; .* multiple of 3"),
        ({"num_groups": 6}, "num_groups is 6"),
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"weight": torch.full((1, 64), float("nan"))}, "a load in weight is nan"),
        ({"weight": torch.full((1, 64), -1.0)}, "a load in weight is -1"),
        ({"weight": torch.ones(64)}, r"weight.shape is \[64\]"),
        ({"weight": [[1.0]]}, "weight is list"),
    ],
)
def test_what_is_not_allowed(change: dict[str, object], message: str) -> None:
    given = {"weight": LOADS["uniform"], "num_replicas": 80, "num_groups": 8, "num_nodes": 2, "num_gpus": 8} | change
    with pytest.raises(ConfigError, match=message):
        rebalance_experts(**given)  # type: ignore[arg-type]


def placement(num_ranks_per_domain: int = 8) -> ExpertPlacement:
    return ExpertPlacement.from_loads(LOADS["zipf 1"], 80, 8, num_ranks_per_domain=num_ranks_per_domain, version=3)


def test_a_file_gives_the_same_placement(tmp_path: Path) -> None:
    made = placement(4)
    made.save(tmp_path / "placement.json")
    read = ExpertPlacement.load(tmp_path / "placement.json")
    assert read == made
    assert read.version == 3
    assert hash(read) == hash(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format of .* is 'other'"),
        ({"num_experts": 65}, "expert 64 of layer 0 has no slot"),
        ({"num_experts": 63}, "expert 63 of layer 0 is not one of 0 … 62"),
        ({"num_ranks": 7}, "num_ranks is 7"),
        ({"num_ranks": "8"}, "num_ranks is '8'"),
        ({"experts": [[0, 1], [0]]}, "slots of a layer is 2"),
        ({"experts": 5}, "experts of .* is not a list of lists"),
        ({"experts": []}, "layers of experts is 0"),
        ({"version": -1}, "version is -1"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "placement.json"
    placement(4).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        ExpertPlacement.load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        ExpertPlacement.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        ExpertPlacement.load(path)
    path.write_text(json.dumps({"format": "hybrid_ep.ExpertPlacement/1"}))
    with pytest.raises(ConfigError, match="has no experts, num_experts"):
        ExpertPlacement.load(path)


@pytest.mark.parametrize("num_ranks_per_domain", [8, 4, 2])
def test_tokens_go_to_a_replica_of_their_expert_in_the_own_domain(num_ranks_per_domain: int) -> None:
    made = placement(num_ranks_per_domain)
    topk_idx = torch.randint(-1, EXPERTS, (500, 4), generator=torch.Generator().manual_seed(0))
    for rank in range(8):
        mapper = made.on("cpu", rank)
        for layer in (0, LAYERS - 1):
            slot = mapper.map_topk(layer, topk_idx)
            assert torch.equal(torch.where(slot >= 0, made.phy2log[layer][slot], -1), topk_idx)
            own = made.phy2log[layer].view(-1, num_ranks_per_domain * made.num_slots)[rank // num_ranks_per_domain]
            is_near = torch.isin(topk_idx, own)
            domain = slot // (num_ranks_per_domain * made.num_slots)
            assert (domain[is_near] == rank // num_ranks_per_domain).all()


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 64])
def test_replicas_share_the_tokens_of_an_expert_evenly(stride: int) -> None:
    made = ExpertPlacement(((0, 1, 0, 2, 0, 3, 0, 4, 0, 5),), 6, 5, 5)
    topk_idx = torch.full((4000, 1), -1)
    topk_idx[::stride] = 0
    for rank in (0, 3):
        slot = made.on("cpu", rank).map_topk(0, topk_idx)
        count = torch.bincount(slot[slot >= 0], minlength=10)[::2]
        assert count.max() <= 1.05 * count.float().mean() + 2


def test_ranks_start_with_different_replicas() -> None:
    made = ExpertPlacement(((0, 1, 0, 2, 0, 3, 0, 4, 0, 5),), 6, 5, 5)
    first = {int(made.on("cpu", rank).map_topk(0, torch.zeros(1, 1, dtype=torch.int64))) for rank in range(5)}
    assert len(first) > 2


def test_loads_of_ranks_are_what_the_mapping_sends() -> None:
    generator = torch.Generator().manual_seed(5)
    for per_domain in (8, 4, 2):
        made = placement(per_domain)
        topk_idx = torch.multinomial(LOADS["zipf 1"][0], 20_000, replacement=True, generator=generator).view(-1, 4)
        slots = torch.cat([made.on("cpu", rank).map_topk(0, topk_idx).flatten() for rank in range(8)])
        got = torch.bincount(slots // made.num_slots, minlength=8).double()
        counts = torch.bincount(topk_idx.flatten(), minlength=EXPERTS).double() * 8
        want = made.rank_loads(counts.expand(LAYERS, -1))[0]
        assert ((got - want).abs() / want).max() < 0.03


def test_map_topk_refuses_what_does_not_fit() -> None:
    mapper = placement().on("cpu", 0)
    with pytest.raises(ConfigError, match="layer is 6"):
        mapper.map_topk(6, torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ConfigError, match="topk_idx is 64"):
        mapper.map_topk(0, torch.full((1, 1), 64))
    with pytest.raises(ConfigError, match="dtype"):
        mapper.map_topk(0, torch.zeros(1, 1))


def test_moves_count_what_a_rank_did_not_hold() -> None:
    before = ExpertPlacement(((0, 1, 2, 3, 0, 1),), 4, 3, 3)
    assert before.num_moves(before).tolist() == [0]
    swapped_slots = ExpertPlacement(((1, 0, 3, 2, 0, 1),), 4, 3, 3)
    assert swapped_slots.num_moves(before).tolist() == [0]
    other = ExpertPlacement(((0, 2, 2, 3, 3, 1),), 4, 3, 3)
    assert other.num_moves(before).tolist() == [2]
    with pytest.raises(ConfigError, match="layers, ranks and experts"):
        other.num_moves(ExpertPlacement(((0, 1, 2, 3),), 4, 2, 2))
