"""Bytes between ranks, point to point, and who is to blame when they do not arrive.

Point-to-point messages, not collectives: a collective that fails cannot say which rank was missing, and cannot leave a
masked rank out. Every message carries the number of its call as a tag, so that what a failed call left behind is never
taken for part of the next one.

A rank that loses a peer writes the peer's name to the process group's store before it raises. A rank that then loses
*it* finds the name there, so that all survivors blame the rank that died and not the messenger.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.base import Traffic
from hybrid_ep.errors import ConfigError, TimeoutError, TransportError

__all__ = ["Exchange"]

_LOG = logging.getLogger(__name__)
_BLAME_GRACE_S = 1.0  # how long to wait for a peer that is itself about to time out to say whom it waits for
_MIN_TIMEOUT_S = 1e-3  # gloo takes whole milliseconds, and none of them as no limit
_MAX_TAG = 1 << 30
_CALLS = ("dispatch", "cached dispatch", "counts of experts", "combine", "low_latency_dispatch", "low_latency_combine")
_HEADER_SIZE = 4  # the call, and what must be equal at all ranks


@dataclass
class _Failure:
    peer: int
    error: RuntimeError


@dataclass
class Exchange:
    """Moves byte tensors between the ranks of one group.

    Attributes:
        group: the process group, or None for a single rank.
        grid: its geometry.
        timeout_s: how long to wait for a peer.
        traffic: bytes sent to other ranks.
        masked: ranks that calls may leave out.
    """

    group: dist.ProcessGroup | None
    grid: RankGrid
    timeout_s: float
    traffic: Traffic = field(default_factory=Traffic)
    masked: set[int] = field(default_factory=set)
    _call: int = 0  # 0 inside a barrier
    _barrier: int = 0
    _step: int = 0
    _label: str = ""

    def begin(
        self,
        call: str,
        ranks: list[int],
        device: torch.device,
        same: dict[str, int],
        wait_stats: Tensor | None = None,
    ) -> int:
        """Starts a call; every rank of the group starts the same calls in the same order.

        Ranks that disagree must not get beyond this: gloo ends the process when more bytes arrive than it waits for.

        Args:
            call: one of `_CALLS`.
            ranks: that take part.
            device: where the tensors of the call are.
            same: what must be equal at all ranks, by the name that an error shall give it.
            wait_stats: as in `swap`; a rank that comes late to the call is waited for here.

        Returns:
            The number of the call, equal at all ranks.

        Raises:
            ConfigError: another rank has started another call, or has something else in `same`.
        """
        self._call += 1
        self._step = 0
        self._label = call
        mine = [_CALLS.index(call), *same.values()]
        header = torch.tensor(mine + [0] * (_HEADER_SIZE - len(mine)), device=device)
        headers = self.all_gather("sizes", header, ranks, wait_stats).tolist()
        for rank, (their_call, *values) in zip(ranks, headers, strict=True):
            if their_call != mine[0]:
                raise ConfigError(
                    f"call is {call!r} at rank {self.grid.rank} and {_CALLS[their_call]!r} at rank {rank}; "
                    "allowed: the same on every rank"
                )
            for (name, value), theirs in zip(same.items(), values, strict=False):
                if value != theirs:
                    raise ConfigError(
                        f"{name} is {value} at rank {self.grid.rank} and {theirs} at rank {rank}; "
                        "allowed: the same on every rank"
                    )
        return self._call

    def swap(
        self, step: str, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], wait_stats: Tensor | None = None
    ) -> None:
        """Sends `outgoing[r]` to rank r and fills `incoming[r]` from it; returns when all have arrived.

        Args:
            step: names the step in errors.
            outgoing: uint8 tensors, contiguous; empty ones are not sent.
            incoming: uint8 tensors, contiguous; empty ones are not waited for. The own rank is copied locally.
            wait_stats: ``[R]`` int64, is added the microseconds waited for each rank.

        Raises:
            TimeoutError: a rank did not send or take its bytes in time.
            TransportError: a rank closed its end.
        """
        self._step += 1
        tag = (self._call * 16 + self._step) % _MAX_TAG
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
        # gloo carries CPU memory only; the staging copies are all that it changes.
        staged = {r: self._stage(t) for r, t in receives.items()}
        ops = [self._op(dist.isend, r, self._stage(t), tag) for r, t in sends.items()]
        ops += [self._op(dist.irecv, r, t, tag) for r, t in staged.items()]
        failures: list[_Failure] = []
        for op, work in self._launch(ops, failures):
            self._wait(op, work, failures, wait_stats)
        if failures:
            self._raise(step, failures)
        for r, tensor in receives.items():
            if staged[r] is not tensor:
                tensor.copy_(staged[r])

    def all_gather(self, step: str, tensor: Tensor, ranks: list[int], wait_stats: Tensor | None = None) -> Tensor:
        """Returns ``[len(ranks), *shape]``: the same small tensor from every rank of `ranks`."""
        mine = tensor.contiguous()
        gathered = mine.new_empty(len(ranks), *mine.shape)
        incoming = {r: _bytes(gathered[i]) for i, r in enumerate(ranks)}
        self.swap(step, dict.fromkeys(ranks, _bytes(mine)), incoming, wait_stats)
        return gathered

    def active(self, ranks: range) -> list[int]:
        """`ranks` without the masked ones."""
        return [r for r in ranks if r not in self.masked]

    def barrier(self) -> None:
        """Returns when every rank that is not masked has called it.

        Ranks agree here on the numbers of the next call and barrier: one that was masked has counted fewer, and may
        join again.
        """
        on_gpu = self.group is not None and dist.get_backend(self.group) == "nccl"
        call, self._call, self._step, self._label = self._call, 0, 0, "barrier"
        self._barrier += 1
        numbers = torch.tensor([call, self._barrier], device="cuda" if on_gpu else "cpu")
        try:
            numbers = self.all_gather("arrive", numbers, self.active(range(self.grid.num_ranks))).amax(0)
        finally:
            self._call = call
        self._call, self._barrier = numbers.tolist()

    def _stage(self, tensor: Tensor) -> Tensor:
        assert self.group is not None
        if tensor.is_cuda and dist.get_backend(self.group) == "gloo":
            return tensor.cpu()
        return tensor

    def _op(self, verb: Any, rank: int, tensor: Tensor, tag: int) -> dist.P2POp:
        assert self.group is not None
        return dist.P2POp(verb, tensor, dist.get_global_rank(self.group, rank), self.group, tag)

    def _launch(self, ops: list[dist.P2POp], failures: list[_Failure]) -> list[tuple[dist.P2POp, dist.Work]]:
        assert self.group is not None
        if any(op.tensor.is_cuda for op in ops):
            # NCCL: one group call; its works cover all operations, and its own watchdog reports lost peers.
            works = dist.batch_isend_irecv(ops)
            return [(ops[min(i, len(ops) - 1)], work) for i, work in enumerate(works)]
        launched = []
        for op in ops:
            try:
                work = op.op(op.tensor, op.peer, self.group, op.tag)
            except RuntimeError as error:
                failures.append(_Failure(dist.get_group_rank(self.group, op.peer), error))
                continue
            launched.append((op, work))
        return launched

    def _wait(self, op: dist.P2POp, work: dist.Work, failures: list[_Failure], wait_stats: Tensor | None) -> None:
        """Waits for one message. After a failure the others are still drained: survivors stay in step."""
        assert self.group is not None
        peer = dist.get_group_rank(self.group, op.peer)
        begin = time.perf_counter()
        try:
            work.wait(timedelta(seconds=max(self.timeout_s, _MIN_TIMEOUT_S)))
        except RuntimeError as error:
            failures.append(_Failure(peer, error))
        if wait_stats is not None:
            wait_stats[peer] += int(1e6 * (time.perf_counter() - begin))

    def _raise(self, step: str, failures: list[_Failure]) -> NoReturn:
        """Raises for the rank that is really to blame."""
        # A timeout makes gloo close every pair of this process, so only the first failure means something then.
        first = failures[0]
        timed_out = "imed out" in str(first.error) or "imeout" in str(first.error)
        peer = self._blame(first.peer, grace_s=_BLAME_GRACE_S if timed_out else 0.0)
        where = f"{self._label}: {step}"
        detail = str(first.error).splitlines()[0]
        if peer != first.peer:
            detail = f"rank {first.peer} gave up on it first"
        if timed_out:
            raise TimeoutError(where, self.grid.rank, peer, detail, timeout_s=self.timeout_s) from first.error
        raise TransportError(where, self.grid.rank, peer, detail) from first.error

    def _blame(self, suspect: int, *, grace_s: float) -> int:
        """Follows what lost ranks have written about whom *they* lost, then writes down the result for others."""
        deadline = time.monotonic() + grace_s
        seen = {self.grid.rank}
        while suspect not in seen:
            seen.add(suspect)
            named = self._read_blame(suspect)
            while named is None and time.monotonic() < deadline:
                time.sleep(0.02)
                named = self._read_blame(suspect)
            if named is None or named in seen:
                break
            suspect = named
        # Without a store to write to, the others name the messenger: less exact, still an error.
        with contextlib.suppress(RuntimeError):
            self._store().set(self._blame_key(self.grid.rank), str(suspect))
        return suspect

    def _read_blame(self, rank: int) -> int | None:
        key = self._blame_key(rank)
        try:
            store = self._store()
            return int(store.get(key)) if store.check([key]) else None
        except RuntimeError as error:
            _LOG.debug("the store that says who is to blame cannot be reached: %s", error)
            return None

    def _blame_key(self, rank: int) -> str:
        assert self.group is not None
        call = self._call or f"barrier {self._barrier}"
        return f"hybrid_ep/{self.group.group_name}/{call}/rank {rank} lost"

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
