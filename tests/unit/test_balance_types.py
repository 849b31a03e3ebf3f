"""Arguments of a wrong type are a ConfigError that names them, in every function of `hybrid_ep.balance`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_ep.balance import ExpertPlacement, LoadMonitor, load_trace, next_placement, save_trace
from hybrid_ep.balance.online import plan_online
from hybrid_ep.errors import ConfigError

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
