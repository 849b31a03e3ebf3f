"""Errors of refused calls, as ranks tell them through the store."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.errors import ConfigError


def test_every_rank_raises_the_same() -> None:
    board = Board(HashStore(), "refusals")
    mine, theirs = Refusals(board, 3), Refusals(board, 0)
    for i in range(3):
        number, told = mine.tell(ConfigError(f"x.shape is [{i}]; allowed: [8]; allowed twice"))
        assert number == i + 1
        assert str(told) == f"x.shape is [{i}] at rank 3; allowed: [8]; allowed twice"
        assert str(theirs.read(3, number)) == str(told)


def test_without_the_store_the_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise StoreLostError("it has not answered")

    board = Board(HashStore(), "refusals")
    monkeypatch.setattr(board, "_access", lost)
    number, told = Refusals(board, 1).tell(ConfigError("x is int; allowed: a torch.Tensor"))
    assert str(told) == "x is int at rank 1; allowed: a torch.Tensor"
    for read in (Refusals(board, 0), Refusals(None, 0)):
        assert str(read.read(1, number)).startswith("an argument does not fit at rank 1; allowed: ")
