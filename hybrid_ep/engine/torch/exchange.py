"""Point-to-point messages between ranks, and their errors when a rank is lost.

They are not collectives, because a failed collective cannot name the missing rank, and cannot leave out a masked rank.
A call begins with a header that ranks compare (`agree.fields`). Its other messages carry the number of the call as a
tag.

If a message does not arrive, the error names the rank that caused it (`agree.blame`). The connections are closed,
because half-sent messages on them would be read as part of a later call. `leave_out` connects the ranks that are left,
and `barrier` all ranks, after a rendezvous at the store (`agree.rendezvous`).
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.agree.blame import Blame, blamed
from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.agree.fields import CALLS, FIELDS, encode, first_refusal, require_agreement
from hybrid_ep.agree.refusals import Refusals
from hybrid_ep.agree.rendezvous import Rendezvous, rendezvous
from hybrid_ep.core.checks import packed
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.base import Traffic
from hybrid_ep.engine.torch.link import Link, uses_gloo
from hybrid_ep.errors import ConfigError, TimeoutError, TransportError

_LOG = logging.getLogger(__name__)
_MIN_WAIT_S = 1e-3  # gloo counts whole milliseconds, and takes 0 as no limit
_NUM_STEPS = 16  # of a call, at most; step 0 is the header, which has the same tag in every call
_MAX_TAG = 1 << 30
_MAX_MASK_BITS = 62


@dataclass
class _Failure:
    peer: int
    error: RuntimeError


class Exchange:
    """Moves byte tensors between the ranks of one group.

    Args:
        group: the process group, or None for a single rank.
        grid: its geometry.
        timeout_s: how long to wait for a rank, from the moment in which it is needed until its loss is raised.
        number: of the buffer among those of the group, equal at all ranks.
        lag_s: by how much later than this rank another one may find the same loss, where calls find losses without
            closing connections. Ranks that meet after a loss wait so much longer.

    Attributes:
        grid: as given.
        traffic: bytes sent to other ranks.
        masked: ranks that calls may leave out.
        may_mask: whether the caller allows that.
        is_left_out: whether the others have gone on without this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, grid: RankGrid, timeout_s: float, number: int, lag_s: float = 0.0
    ) -> None:
        self.grid, self.traffic, self.number = grid, Traffic(), number
        self.masked: set[int] = set()
        self.may_mask = self.is_left_out = False
        self._timeout_s, self._lag_s = timeout_s, lag_s
        self._call_number = 0
        self._tag = 0
        self._step = 0
        self._label = ""
        self._group = group
        self._link: Link | None = None
        self._blame = Blame(None, grid.rank, timeout_s)
        self._generation = 0  # of the connections
        self._members: list[int] = []  # that were connected last
        self._reconnects = group is not None and uses_gloo(group)
        self._is_cleaned = False  # since the last rendezvous
        self._may_go_on = False  # whether connections of this generation were lost in a call
        self._lost: TransportError | None = None  # why there are no connections
        self._board: Board | None = None
        self._refusals = Refusals(None, grid.rank)
        if group is not None and grid.num_ranks > 1:
            self._board = Board.of(group).at(f"buffer {number}")
            self._refusals = Refusals(self._board.at("refusals"), grid.rank)
            self._connect(list(range(grid.num_ranks)))

    def take_number(self) -> int:
        """Returns the number of a new call: ranks that make the same calls in the same order get the same.

        Raises:
            TimeoutError, TransportError: this is the first call after `clean`, and a rank did not come to it.
        """
        if self._is_cleaned:
            self._meet_cleaned()
        self._call_number += 1
        return self._call_number

    def handle_number(self, call_number: int) -> int:
        """Returns a number that is unique among the handles of the group, of every buffer."""
        return self.number << 32 | call_number

    def begin(
        self,
        call: str,
        ranks: list[int],
        device: torch.device,
        same: dict[str, int],
        *,
        call_number: int | None = None,
        counts: Tensor | None = None,
        wait_stats: Tensor | None = None,
    ) -> tuple[int, Tensor]:
        """Starts a call; every rank of `ranks` starts the same calls in the same order.

        Ranks that disagree must not get beyond this: gloo ends the process when more bytes arrive than it waits for.

        Args:
            call: one of `agree.fields.CALLS`.
            ranks: that take part.
            device: where the tensors of the call are.
            same: values that must be equal at all ranks, by the keys of `agree.fields.FIELDS`.
            call_number: from `take_number`, where the call has been numbered before; None: now.
            counts: ``[R]`` int32 or int64 that go with the header.
            wait_stats: as in `swap`; a rank that comes late to the call is waited for here.

        Returns:
            The number of the call, equal at all ranks, and ``[len(ranks), R]`` int64 counts of all.

        Raises:
            ConfigError: another rank has started another call, or has something else in `same`.
            TimeoutError, TransportError: a rank was lost, here or in an earlier call.
        """
        self._label = call
        number = self.take_number() if call_number is None else call_number
        mine = encode({"buffer": self.number, "call": CALLS.index(call), "call_number": number, **same})
        headers, gathered = self._swap_headers(mine, counts, ranks, device, wait_stats)
        told = dict(zip(ranks, headers, strict=True))
        if (refusal := first_refusal(told)) is not None:
            raise self._refusals.read(*refusal)
        require_agreement(mine, self.grid.rank, told)
        self._tag, self._step = number, 0
        return number, gathered

    def refuse(self, call: str, error: ConfigError) -> None:
        """Begins a call as the other ranks do, so that they raise an error of this rank.

        Raises:
            ConfigError: the error that every rank raises.
            TimeoutError, TransportError: a rank was lost, here or in an earlier call.
        """
        if self.grid.num_ranks == 1:
            return
        self._label = call
        refusal, told = self._refusals.tell(error)
        same = {"buffer": self.number, "call": CALLS.index(call), "call_number": self.take_number()}
        mine = encode({**same, "refusal": refusal})
        self._swap_headers(mine, None, self.active(range(self.grid.num_ranks)), torch.device("cuda"), None)
        raise told from error

    def swap(
        self, step: str, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], wait_stats: Tensor | None = None
    ) -> None:
        """Sends `outgoing[r]` to rank r and fills `incoming[r]` from it; returns when all have arrived.

        Args:
            step: names the step in errors.
            outgoing: uint8 tensors, contiguous; empty ones are not sent.
            incoming: uint8 tensors, contiguous; empty ones are not waited for. This rank's own are copied locally.
            wait_stats: ``[R]`` int64, is added the microseconds waited for each rank.

        Raises:
            TimeoutError: a rank did not send or take its bytes in time.
            TransportError: a rank closed its end.
        """
        self._step += 1
        self._swap(step, outgoing, incoming, (self._tag * _NUM_STEPS + self._step) % _MAX_TAG, wait_stats)

    def all_gather(self, step: str, tensor: Tensor, ranks: list[int], wait_stats: Tensor | None = None) -> Tensor:
        """Returns ``[len(ranks), *shape]``: the same small tensor from every rank of `ranks`."""
        mine = packed(tensor)
        gathered = mine.new_empty(len(ranks), *mine.shape)
        incoming = {r: _bytes(gathered[i]) for i, r in enumerate(ranks)}
        self.swap(step, dict.fromkeys(ranks, _bytes(mine)), incoming, wait_stats)
        return gathered

    def active(self, ranks: range) -> list[int]:
        """`ranks` without the masked ones."""
        return [r for r in ranks if r not in self.masked]

    def mask_bits(self) -> int:
        """Returns a number in which bit r is set if rank r is masked, for the ranks that it has bits for."""
        return sum(1 << r for r in self.masked if r < _MAX_MASK_BITS)

    def barrier(self, *, after_loss: bool = False) -> None:
        """Returns when every rank that is not masked has called it. After a loss, it waits longer by `lag_s`.

        Ranks agree here on the number of the next call: one that was masked has counted fewer, and may join again.
        Connections that were given up, or that leave out a rank which is masked no longer, are made again.
        """
        if self._link is None and self._board is None:
            return
        self._is_cleaned = False
        ranks = self.active(range(self.grid.num_ranks))
        self._label = "barrier"
        if self._link is None and not self._reconnects:
            assert self._lost is not None
            raise type(self._lost)(**vars(self._lost))
        if self._link is None or not set(ranks) <= set(self._link.members):
            self._meet_again(ranks)
            return
        mine = encode({"buffer": self.number, "call": CALLS.index("barrier")})
        numbers = torch.full((self.grid.num_ranks,), self._call_number, device="cpu")
        lag_s = self._lag_s if after_loss else 0.0
        headers, numbers = self._swap_headers(mine, numbers, ranks, torch.device("cuda"), None, lag_s)
        require_agreement(mine, self.grid.rank, dict(zip(ranks, headers, strict=True)))
        self._call_number = int(numbers.max())

    def leave_out(self, peer: int) -> None:
        """Goes on without a lost rank: agrees with the other survivors on who is left, and connects them.

        All survivors make this call after the one that failed, each within the timeout and `lag_s`. A rank that does
        not is left out, and its next call raises. Only `barrier` brings it back.

        Over NCCL no rank goes on: every later call raises. Messages of the failed call stay in the communicator, and a
        later call would receive them. And ranks that mask without agreement could split into groups that go on alone.
        """
        if self._link is not None:
            self.masked.add(peer)  # it is left out already
            return
        if not self._may_go_on:
            return
        self._may_go_on = False
        try:
            joined = self._rendezvous(self._generation + 1, {peer})
        except StoreLostError as error:
            _LOG.warning("who is left cannot be agreed on: the store of the process group is lost (%s)", error)
            return
        if self.grid.rank in joined.members:
            self.masked = set(range(self.grid.num_ranks)) - set(joined.members)
            self._connect(joined.members)
            return
        self.is_left_out = True
        self._lost = TransportError(
            self._label, self.grid.rank, joined.members[0], "the other ranks went on without this one, which was late"
        )

    def clean(self) -> None:
        """Takes every rank back in. Local; the next call begins with a rendezvous that agrees on numbers of calls."""
        self.masked.clear()
        self._is_cleaned = self._board is not None

    def _meet_cleaned(self) -> None:
        self._is_cleaned = False
        self._label = "first call of cleaned ranks"
        if self._reconnects:
            self._meet_again(list(range(self.grid.num_ranks)))
        else:
            self.barrier()

    def close(self) -> None:
        """Closes the connections, and returns when they and their threads are gone. Local."""
        if self._link is not None:
            self._link.close()
        self._link = None
        self._blame.close()

    def _swap_headers(
        self,
        mine: list[int],
        counts: Tensor | None,
        ranks: list[int],
        device: torch.device,
        wait_stats: Tensor | None,
        lag_s: float = 0.0,
    ) -> tuple[list[list[int]], Tensor]:
        """Returns the headers of all ranks, and the counts that came with them.

        The message has the same size in every call, with counts or without: gloo would end the process otherwise.
        """
        if self._link is not None:
            device = self._link.device or device
        header = torch.zeros(len(FIELDS) + self.grid.num_ranks, dtype=torch.int64, device=device)
        header[: len(FIELDS)] = torch.tensor(mine, device=device)
        if counts is not None:
            header[len(FIELDS) :] = counts.to(device)
        gathered = header.new_empty(len(ranks), header.numel())
        incoming = {r: _bytes(gathered[i]) for i, r in enumerate(ranks)}
        self._swap("header", dict.fromkeys(ranks, _bytes(header)), incoming, 0, wait_stats, lag_s)
        headers: list[list[int]] = gathered[:, : len(FIELDS)].tolist()
        return headers, gathered[:, len(FIELDS) :]

    def _swap(
        self,
        step: str,
        outgoing: dict[int, Tensor],
        incoming: dict[int, Tensor],
        tag: int,
        wait_stats: Tensor | None,
        lag_s: float = 0.0,
    ) -> None:
        me = self.grid.rank
        if me in incoming and incoming[me].numel():
            incoming[me].copy_(outgoing[me])
        sends = {r: t for r, t in outgoing.items() if r != me and t.numel()}
        receives = {r: t for r, t in incoming.items() if r != me and t.numel()}
        for r, tensor in sends.items():
            if r in self.grid.domain:
                self.traffic.within_domain += tensor.numel()
            else:
                self.traffic.between_domains += tensor.numel()
        if not sends and not receives:
            return
        link = self._link_to({*sends, *receives}, step)
        # gloo carries CPU memory only; the staging copies are all that it changes.
        staged = {r: _stage(t, link) for r, t in receives.items()}
        begun = link.transfer({r: _stage(t, link) for r, t in sends.items()}, staged, tag)
        failures: list[_Failure] = []
        deadline = time.perf_counter() + max(self._blame.wait_s, _MIN_WAIT_S) + lag_s
        for peer, work in begun:
            self._wait(peer, work, deadline, failures, wait_stats)
        if failures:
            link.abort()
            self._raise(step, failures[0], self._timeout_s + lag_s)
        for r, tensor in receives.items():
            if staged[r] is not tensor:
                tensor.copy_(staged[r])

    def _wait(
        self,
        peer: int,
        work: dist.Work | RuntimeError,
        deadline: float,
        failures: list[_Failure],
        wait_stats: Tensor | None,
    ) -> None:
        """Waits for one message. After a failure the others are still drained: their memory must not be written later.

        A timeout makes gloo close every connection of the link, so that only the first failure means something then.
        """
        begin = time.perf_counter()
        try:
            if isinstance(work, RuntimeError):
                raise work
            self._blame.begin_wait(peer)
            work.wait(timedelta(seconds=max(deadline - begin, _MIN_WAIT_S)))
        except RuntimeError as error:
            if not failures:
                self._blame.write_lost(peer)
            failures.append(_Failure(peer, error))
        finally:
            self._blame.end_wait()
        if wait_stats is not None:
            wait_stats[peer] += int(1e6 * (time.perf_counter() - begin))

    def _link_to(self, ranks: set[int], step: str) -> Link:
        """Returns the connections, which must reach `ranks`."""
        if self._link is None:
            assert self._lost is not None
            raise type(self._lost)(**vars(self._lost))
        away = ranks - set(self._link.members)
        if away:
            where = f"{self._label}: {step}"
            raise TransportError(where, self.grid.rank, min(away), "it was lost in an earlier call and is left out")
        return self._link

    def _raise(self, step: str, first: _Failure, timeout_s: float) -> NoReturn:
        """Raises the error, which names the rank that caused the failure."""
        culprit = self._blame.find(first.peer)
        where, detail = f"{self._label}: {step}", str(first.error).splitlines()[0]
        error = TransportError(where, self.grid.rank, first.peer, detail)
        if "imed out" in str(first.error):
            error = TimeoutError(where, self.grid.rank, first.peer, detail, timeout_s=timeout_s)
        error = blamed(error, culprit)
        if culprit is not None:
            self._blame.write_lost(culprit)
            other = self._blame.other_buffer(culprit) if isinstance(error, TimeoutError) else None
            if other is not None:
                detail = (
                    f"it has waited in a call of another buffer, whose number on the group is {other} there and "
                    f"{self.number} here; allowed: the same order on every rank, or a thread for each buffer"
                )
                error = replace(error, detail=detail)
        if self._link is not None:
            self._link = None
            self._may_go_on = self._reconnects
            again = f"lost in an earlier call ({where}): {error.detail}"
            if not self._reconnects:
                again += "; allowed then: a new process group, and a buffer of it"
            self._lost = type(error)(**{**vars(error), "detail": again})
        raise error from first.error

    def _connect(self, members: list[int]) -> None:
        """Connects the ranks of a rendezvous, under the next generation."""
        assert self._board is not None
        assert self._group is not None
        board = self._board.at(f"connections {self._generation}")
        self._lost, self._members, self.is_left_out = None, members, False
        everywhere = Board.of(self._group)
        self._blame = Blame(board, self.grid.rank, self._timeout_s, group_board=everywhere, number=self.number)
        try:
            self._link = Link(self._group, members, self.grid.rank, board, self._blame.wait_s)
        except (RuntimeError, StoreLostError) as error:
            peer = self._absent(board, members)
            self._lost = TransportError("connecting", self.grid.rank, peer, str(error).splitlines()[0])
            raise self._lost from error

    def _absent(self, board: Board, members: list[int]) -> int | None:
        """Returns the first rank that does not report within the grace that it could not connect, or None."""
        try:
            joined = rendezvous(board.at("failed"), self.grid.rank, members, "", timeout_s=self._blame.grace_s)
        except StoreLostError:
            return None
        return min(set(members) - set(joined.members), default=None)

    def _rendezvous(self, generation: int, lost: set[int]) -> Rendezvous:
        assert self._board is not None
        joined = rendezvous(
            self._board.at(f"generation {generation}"),
            self.grid.rank,
            self.active(range(self.grid.num_ranks)),
            json.dumps(self._call_number),
            timeout_s=self._timeout_s + self._lag_s,
            lost=lost,
        )
        if self.grid.rank in joined.members:
            self._generation = generation
            self._call_number = max(json.loads(text) for text in joined.texts.values())
        return joined

    def _meet_again(self, ranks: list[int]) -> None:
        """Meets `ranks` under the first generation that has not been decided, and connects them."""
        assert self._board is not None
        self._link = None
        self._may_go_on = False
        generation = self._generation + 1
        try:
            while True:
                if self._board.at(f"generation {generation}").read("outcome") is None:
                    joined = self._rendezvous(generation, set())
                    if self.grid.rank in joined.members:
                        break
                generation += 1  # this one was decided before this rank came
        except StoreLostError as error:
            self._lost = error.at_step(self._label, self.grid.rank)
            raise self._lost from error
        missing = [r for r in ranks if r not in joined.members]
        came = set(joined.members) & set(self._members)
        if 2 * len(came) > len(self._members) and (self.may_mask or not missing):
            # More than half of those who were together: no others can have agreed without them.
            self.masked |= set(missing)
            self._connect(joined.members)
        if missing:
            waited_s = self._timeout_s + self._lag_s
            late = TimeoutError(self._label, self.grid.rank, missing[0], "it did not come", timeout_s=waited_s)
            self._lost = late if self._link is None else None
            raise late


def _stage(tensor: Tensor, link: Link) -> Tensor:
    return tensor if link.device is None else tensor.to(link.device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
