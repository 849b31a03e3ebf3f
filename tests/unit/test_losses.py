"""The logs of lost ranks: in any order of reports, no rank that goes on has lost another rank that goes on."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist

from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.agree.losses import Losses, LossLog


def _board() -> Board:
    return Board(dist.HashStore(), "losses")


def test_who_is_in_the_log_is_told_so_and_others_read_on() -> None:
    board = _board()
    logs = [LossLog(board, rank) for rank in range(4)]
    assert logs[0].report(2) is None
    assert logs[1].report(3) is None
    assert logs[1].left_out == {2, 3}
    assert logs[2].report(0) == 0
    assert logs[3].report(2) == 1
    assert logs[0].report(2) is None
    assert logs[0].left_out == {2, 3}


@pytest.mark.parametrize("order", itertools.permutations([(0, 1), (1, 0), (1, 2), (2, 1), (0, 2)]))
def test_ranks_that_blame_each_other_do_not_both_go_on(order: tuple[tuple[int, int], ...]) -> None:
    board = _board()
    logs = [LossLog(board, rank) for rank in range(3)]
    told: set[int] = set()
    for rank, peer in order:
        if rank not in told and logs[rank].report(peer) is not None:
            told.add(rank)
    first_lost = order[0][1]  # it is in the log, so that this only reads on
    told |= {rank for rank in {0, 1, 2} - told if logs[rank].report(first_lost) is not None}
    alive = {0, 1, 2} - told
    assert alive
    assert all(logs[rank].left_out == told for rank in alive)


def test_a_store_that_is_lost_is_told() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=5))
    log = LossLog(Board(client, "losses"), 1)
    assert log.report(0) is None
    del store
    with pytest.raises(StoreLostError):
        log.report(2)
    error = Losses(Board(client, "buffer"), 1).report(2)
    assert error is not None
    assert error.peer is None
    assert "the store of the process group is lost" in str(error)


def test_the_error_names_who_goes_on() -> None:
    board = _board()
    first, second = Losses(board, 0), Losses(board, 1)
    assert first.report(1) is None
    assert first.left_out == {1}
    error = second.report(0)
    assert error is not None
    assert error.peer == 0
    assert "the other ranks went on without this one, which was late" in str(error)


def test_a_log_begins_anew_after_a_cleaning_and_after_a_barrier() -> None:
    board = _board()
    first, second = Losses(board, 0), Losses(board, 1)
    assert first.report(1) is None
    for losses in (first, second):
        losses.clean()
    assert first.left_out == set()
    assert second.report(0) is None
    for losses in (first, second):
        losses.begin(7)
    assert second.left_out == set()
    assert first.report(1) is None


def test_without_a_group_there_is_nothing_to_agree_on() -> None:
    alone = Losses(None, 0)
    assert alone.report(0) is None
    assert alone.left_out == set()
