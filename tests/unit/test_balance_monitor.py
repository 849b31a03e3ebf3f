"""`LoadMonitor` and traces."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.balance import ExpertPlacement, LoadMonitor, load_trace, save_trace
from hybrid_ep.errors import ConfigError, TimeoutError
from tests.conftest import RunRanks


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
def test_what_is_not_allowed(change: dict[str, object], message: str) -> None:
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
