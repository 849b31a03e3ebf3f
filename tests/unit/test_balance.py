"""Placements from loads: EPLB's interface, balance that is never below EPLB's, files, and the mapping of tokens.

`next_placement` moves few experts, `LoadMonitor` and traces keep loads, and arguments of a wrong type are a ConfigError
that names them in every function of `hybrid_ep.balance`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hybrid_ep
from benchmarks.balance import make_loads
from benchmarks.eplb_baseline import eplb_baseline
from hybrid_ep.balance import ExpertPlacement, LoadMonitor, load_trace, next_placement, rebalance_experts, save_trace
from hybrid_ep.balance.online import plan_online
from hybrid_ep.balance.placement import balancedness
from hybrid_ep.balance.rebalance import gpu_loads
from hybrid_ep.errors import ConfigError, TimeoutError
from tests.conftest import RunRanks

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


def test_what_moves_do_not_allow() -> None:
    with pytest.raises(ConfigError, match="max_moves is -1"):
        next_placement(present(), AFTER, max_moves=-1)
    with pytest.raises(ConfigError, match=r"weight.shape is \[4, 63\]"):
        next_placement(present(), AFTER[:, 1:], max_moves=1)


_PLACEMENT = ExpertPlacement.contiguous(1, 4, 2)


def _placement(**fields: Any) -> ExpertPlacement:
    return ExpertPlacement(
        **{"experts": ((0, 1, 2, 3),), "num_experts": 4, "num_ranks": 2, **fields}, num_ranks_per_domain=2
    )


def _monitor(**fields: Any) -> LoadMonitor:
    return LoadMonitor(1, 4, rank=0, num_ranks=2, window=1, **fields)


def _plan(tolerance: Any) -> None:
    plan_online(torch.ones(2, 4, dtype=torch.int64), num_ranks_per_domain=2, num_spare=1, tolerance=tolerance)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda bad: _placement(experts=bad), "experts of the placement"),
        (lambda bad: _placement(experts=((0, 1, 2, bad),)), "experts of the placement"),
        (lambda bad: _placement(lost_ranks=bad), "lost_ranks of the placement"),
        (lambda bad: _placement(unserved=(bad,)), "unserved of the placement"),
        (lambda bad: ExpertPlacement.from_json(bad), "type of document"),
        (lambda bad: ExpertPlacement.load(bad), "type of path"),
        (lambda bad: _PLACEMENT.save(bad), "type of path"),
        (lambda bad: _PLACEMENT.without(bad), "type of ranks"),
        (lambda bad: _PLACEMENT.without([bad]), "type of a rank of ranks"),
        (lambda bad: _PLACEMENT.num_moves(bad), "type of other"),
        (lambda bad: _PLACEMENT.on(bad, 0), "device is"),
        (lambda bad: next_placement(bad, torch.ones(1, 4), max_moves=1), "type of present"),
        (_plan, "tolerance is"),
        (lambda bad: _monitor(device=bad), "device is"),
        (lambda bad: setattr(_monitor(), "placement", bad), "type of placement"),
        (lambda bad: _monitor().record(0, bad), "type of counts"),
        (lambda bad: _monitor().record(0, [0, bad]), "counts is"),
        (lambda bad: _monitor().loads(timeout_s=bad), "timeout_s is"),
        (lambda bad: save_trace(bad, [torch.ones(1, 4)]), "type of path"),
        (lambda bad: save_trace(Path("/nonexistent"), bad), "type of windows"),
        (lambda bad: save_trace(Path("/nonexistent"), [bad]), "type of a window"),
        (lambda bad: load_trace(bad), "type of path"),
    ],
)
@pytest.mark.parametrize("bad", [1j, object()], ids=["complex", "object"])
def test_wrong_types(call: Callable[[Any], Any], message: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=message):
        call(bad)


@pytest.mark.parametrize("tolerance", [-0.1, 2.0**70, float("nan"), True])
def test_tolerances_that_are_none(tolerance: float) -> None:
    with pytest.raises(ConfigError, match="tolerance is"):
        _plan(tolerance)


def test_lists_are_taken_as_tuples() -> None:
    placement = _placement(experts=[[0, 1, 2, 3]], lost_ranks=[])
    assert placement.experts == ((0, 1, 2, 3),)
    assert hash(placement) == hash(_placement())


def monitor(**changes: object) -> LoadMonitor:
    given = {"num_layers": 2, "num_experts": 4, "rank": 1, "num_ranks": 2, "window": 2} | changes
    return LoadMonitor(**given)  # type: ignore[arg-type]


def test_old_steps_leave_the_window() -> None:
    kept = monitor()
    kept.record(0, [1, 2])
    kept.record(0, torch.tensor([10, 20], dtype=torch.int32))
    kept.step()
    kept.record(1, [5, 0])
    assert kept.local_loads().tolist() == [[0, 0, 11, 22], [0, 0, 5, 0]]
    kept.step()
    assert kept.local_loads().tolist() == [[0, 0, 0, 0], [0, 0, 5, 0]]


def test_replicas_count_for_their_expert() -> None:
    placement = ExpertPlacement(((0, 1, 2, 3, 3, 3), (0, 1, 2, 3, 1, 0)), 4, 2, 2)
    kept = monitor(placement=placement)
    kept.record(0, [1, 2, 4])
    kept.record(1, [1, 2, 4])
    assert kept.local_loads().tolist() == [[0, 0, 0, 7], [4, 2, 0, 1]]
    kept.placement = ExpertPlacement(((0, 1, 2, 0, 1, 3), (0, 1, 2, 0, 1, 3)), 4, 2, 2)
    kept.record(0, [100, 0, 0])
    assert kept.local_loads()[0].tolist() == [100, 0, 0, 7]


def test_prometheus_text() -> None:
    kept = monitor()
    kept.record(1, [5, 6])
    text = kept.prometheus()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['hybrid_ep_expert_tokens{rank="1",layer="1",expert="3"}'] == "6"
    assert samples['hybrid_ep_expert_tokens{rank="1",layer="0",expert="2"}'] == "0"
    assert len(samples) == 5
    assert text.count("# TYPE") == len({name.partition("{")[0] for name in samples})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank is 2"),
        ({"window": 0}, "window is 0"),
        ({"num_experts": 5}, "num_experts is 5"),
        ({"placement": ExpertPlacement.contiguous(3, 4, 2)}, "layers, experts and ranks of placement"),
    ],
)
def test_what_a_monitor_does_not_allow(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        monitor(**change)


def test_counts_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"counts.shape is \[3\]"):
        monitor().record(0, [1, 2, 3])
    with pytest.raises(ConfigError, match="layer is 2"):
        monitor().record(2, [1, 2])


def _record_a_dispatch() -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    topk_idx = torch.rand(50, 8, generator=generator).topk(2).indices
    x = torch.zeros(50, 16, dtype=torch.bfloat16)
    kept = LoadMonitor(1, 8, rank=dist.get_rank(), num_ranks=dist.get_world_size(), window=3)
    with hybrid_ep.Buffer() as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, 8)
        _, _, _, counts, _, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            topk_idx=topk_idx,
            topk_weights=torch.ones(50, 2),
        )
    assert counts is not None
    kept.record(0, counts)
    return kept.loads().tolist(), torch.bincount(topk_idx.flatten(), minlength=8).tolist()


def test_loads_are_those_of_all_ranks(run_ranks: RunRanks) -> None:
    results = run_ranks(4, _record_a_dispatch)
    want = torch.tensor([chosen for _, chosen in results]).sum(0).tolist()
    for loads, _ in results:
        assert loads == [want]


def _sum_without_a_rank() -> tuple[str, float, str, list[list[int]]]:
    """Rank 1 does not come; then ranks differ; then all is well."""
    rank, told, took = dist.get_rank(), "", 0.0
    kept = monitor(rank=rank)
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(TimeoutError) as missed:
            kept.loads(timeout_s=1)
        told, took = str(missed.value), time.monotonic() - began
    else:
        time.sleep(3)
    other = monitor(rank=rank, num_experts=(4, 8)[rank])
    with pytest.raises(ConfigError) as differ:
        other.loads()
    kept.record(0, [1, 2])
    return told, took, str(differ.value), kept.loads().tolist()


def test_a_rank_that_does_not_come_to_the_sum_is_named(run_ranks: RunRanks) -> None:
    (told, took, differ, loads), (_, _, differ_there, loads_there) = run_ranks(2, _sum_without_a_rank)
    assert told == "sum of loads: rank 0 waited 1 s for rank 1: it has not called loads"
    assert took < 3
    assert differ.startswith("layers and experts of the monitor are [2, 4] at rank 0 and [2, 8] at rank 1; allowed")
    assert differ_there.startswith("layers and experts of the monitor are [2, 8] at rank 1 and [2, 4] at rank 0")
    assert loads == loads_there == [[1, 2, 1, 2], [0] * 4]


def test_a_trace_goes_to_a_file_and_back(tmp_path: Path) -> None:
    windows = [torch.arange(6).view(2, 3), torch.ones(2, 3)]
    save_trace(tmp_path / "trace.json", windows)
    assert torch.equal(load_trace(tmp_path / "trace.json"), torch.stack([w.double() for w in windows]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "format of .* is 'list'"),
        (json.dumps({"format": "hybrid_ep.LoadTrace/1"}), "are not numbers"),
        (json.dumps({"format": "hybrid_ep.LoadTrace/1", "loads": [[1, 2]]}), r"shape of loads of .* is \[1, 2\]"),
        (json.dumps({"format": "hybrid_ep.LoadTrace/1", "loads": [[[1, -2]]]}), "a load in weight is -2"),
        (json.dumps({"format": "hybrid_ep.LoadTrace/1", "loads": [[[1], [1, 2]]]}), "are not numbers"),
    ],
)
def test_traces_that_do_not_fit(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(path)
