"""The protocol between domains as the engine has it, on simulated time: streams, slots, credits, dispatch, combine.

It follows csrc/layout/between_layout.h, csrc/kernels/between/chunk_stream.cuh, dispatch_between and combine_between:

- Chunk n of a stream uses slot n % S in lap n / S; a sender waits for the credit of the slot's group before it writes.
- A warp takes a part of a chunk. The warp that is done last sends the chunk. A dispatch takes its last records singly.
- Warps that send take the parts of all peers' chunks in turn, by one counter, and warps that forward by another. A warp
  waits for its chunk, even if other chunks are ready.
- In combine rows are pushed for all domains in turn, chunk by chunk. A warp that sums claims a part of any domain, but
  only one whose slot is free. A warp at home takes tokens in order, and does not wait while it holds rows.
- Warps that have pushed go on to the sums for each domain, and warps with no sum left there go on to the sums at home.
- A rank that is alone in its domain has no rows to push or to sum for it. It sends its rows home.

One rank is simulated for each domain, because only peers exchange chunks. The other ranks of a domain are a rate.
Arrivals may come in any order. `ProtocolError` reports that a slot was overwritten, or that a chunk is not the one that
was waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_ep.cluster.model.events import Clock, Gate, Process

__all__ = ["FAULTS", "Protocol", "ProtocolError", "Ring", "Times", "random_batches"]

_DISPATCH_CONTROL, _COMBINE_CONTROL = 2, 1  # chunks of a call ahead of its records
_CONTROL_WARPS = 6


# Mistakes that a simulation can make on purpose, so that a test sees that it notices them.
FAULTS = {
    "loses_credits": "no credit is returned",
    "ignores_credits": "senders do not wait for them",
    "forwards_by_domain": "a rank forwards all chunks of a domain before it looks at the next one's",
    "holds_and_waits": "a warp at home waits while it holds rows",
    "claims_without_slot": "warps of combine claim parts whose slot is not free, the last domain's first, and wait",
    "sends_in_order": "a rank that is alone in its domain sends parts in one order, and waits for their slots",
}


class ProtocolError(Exception):
    """The protocol was broken: data would be lost or taken for other data."""


class Ring(NamedTuple):
    """Shape of a stream's ring.

    Attributes:
        num_slots, slots_per_credit: S, and slots of a group.
        per_chunk, per_part: records of a chunk, and of the part of it that a warp takes.
        num_send_warps, num_forward_warps: of a rank, in dispatch.
        num_push_warps, num_domain_warps, num_home_warps: of a rank, in combine.
        is_alone: every rank is alone in its domain.
        num_open: tokens that a warp at home holds.
    """

    num_slots: int
    slots_per_credit: int
    per_chunk: int
    per_part: int
    num_send_warps: int
    num_forward_warps: int
    num_push_warps: int
    num_domain_warps: int
    num_home_warps: int
    is_alone: bool = False
    num_open: int = 2


class Times(NamedTuple):
    """The times of steps in µs, and rates in bytes per µs.

    Attributes:
        build, forward: of a record by a warp, in dispatch.
        push: of a record by a warp that is alone in its domain, in combine.
        part: of a warp that sums for domains, for each part of a chunk.
        sum, sum_home: of a record by a warp, in combine.
        nvlink, own: by domain: of a record's rows on their way within it, and of all of a rank's own rows there.
        first_rows: by domain: of a combine, until the rows for one domain are at the rank that sums them.
        agree: what a rank does after each exchange of control chunks, in dispatch and in combine.
        latency, jitter: of a message, without its bytes; up to so much more, drawn for each.
        record_bytes, rate: of dispatch and of combine; of the port.
    """

    build: float
    forward: float
    push: float
    part: float
    sum: float
    sum_home: float
    nvlink: Sequence[float]
    own: Sequence[float]
    first_rows: Sequence[float]
    agree: tuple[float, float]
    latency: float
    jitter: float
    record_bytes: tuple[float, float]
    rate: float


@dataclass
class _Stream:
    """The chunks from one peer to another, numbered without end."""

    credits: list[int]  # laps that the sender knows to be read, by group
    flags: list[int]  # number + 1 of the chunk in each slot
    unread: list[bool]
    rows_written: list[int]
    slots_read: list[int]
    rows_read: list[int]
    credit_gates: list[Gate]
    flag_gates: list[Gate]
    sent_before: int = 0
    read_before: int = 0


@dataclass
class _Batch:
    """All ranks' destinations: ``indices[r][t, d]`` is the index of rank r's token t among those to domain d."""

    goes: list[NDArray[np.bool_]]
    indices: list[NDArray[np.int64]] = field(init=False)
    counts: NDArray[np.int64] = field(init=False)  # [from, to]; on the diagonal, tokens that stay in the domain

    def __post_init__(self) -> None:
        self.indices = [np.where(goes, goes.cumsum(0) - 1, -1) for goes in self.goes]
        self.counts = np.stack([goes.sum(0) for goes in self.goes])


class _OwnSums(NamedTuple):
    """The parts of a rank's own tokens that are summed in its own domain, and a gate that is opened for each."""

    done: set[int]
    gate: Gate


class Protocol:
    """Ranks of one plane: one of each domain, all peers of each other.

    Args:
        ring: shape of the streams.
        times: of steps.
        num_domains: D.
        seed: of delays.
        slowdown: ``[D]``, factors of the ranks' own times; None = 1.
        faults: of `FAULTS`, done on purpose.
    """

    def __init__(
        self,
        ring: Ring,
        times: Times,
        num_domains: int,
        seed: int,
        slowdown: NDArray[np.float64] | None = None,
        faults: frozenset[str] = frozenset(),
    ) -> None:
        self.ring, self.times, self.num_domains = ring, times, num_domains
        self.faults = faults
        self.clock = Clock()
        self.slowdown = np.ones(num_domains) if slowdown is None else slowdown
        # When the port of each rank has nothing more to send, and to take in: what passes one passes in turn.
        self.out_free, self.in_free = [0.0] * num_domains, [0.0] * num_domains
        self.nvlink_free = [0.0] * num_domains
        self.any_credit = [Gate(f"rank {r}: a credit from any rank") for r in range(num_domains)]
        self._random = np.random.default_rng(seed)
        self._jitters: Iterator[float] = iter(())
        num_groups = ring.num_slots // ring.slots_per_credit
        self.streams = {
            (a, b): _Stream(
                [0] * num_groups,
                [0] * ring.num_slots,
                [False] * ring.num_slots,
                [0] * ring.num_slots,
                [0] * num_groups,
                [0] * ring.num_slots,
                [Gate(f"rank {a}: credit of group {g} from {b}") for g in range(num_groups)],
                [Gate(f"rank {b}: chunk in slot {s} from {a}") for s in range(ring.num_slots)],
            )
            for a in range(num_domains)
            for b in range(num_domains)
            if a != b
        }

    def run(
        self, batches: list[list[NDArray[np.bool_]]], starts: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Runs a dispatch and a combine for each batch; a rank begins a call when it has ended the one before.

        Args:
            batches: for each pair of calls ``[T, D]`` of every rank: whether a token goes to a domain.
            starts: ``[2 × batches, D]`` delays before each call; None = 0.

        Returns:
            ``[2 × batches, D]`` the time of each call at each rank.

        Raises:
            DeadlockError: ranks wait forever.
            ProtocolError: a slot was overwritten, or a chunk is not the one waited for.
        """
        calls = [_Batch(goes) for goes in batches]
        times = np.zeros((2 * len(calls), self.num_domains))
        for r in range(self.num_domains):
            self.clock.start(self._rank(r, calls, times, starts))
        self.clock.run()
        return times

    def _rank(
        self, r: int, calls: list[_Batch], times: NDArray[np.float64], starts: NDArray[np.float64] | None
    ) -> Process:
        for i, batch in enumerate(calls):
            for kind, call in enumerate((self._dispatch, self._combine)):
                if starts is not None:
                    yield float(starts[2 * i + kind, r])
                begin = self.clock.now
                yield from call(r, batch)
                times[2 * i + kind, r] = self.clock.now - begin

    # Streams.

    def _wait_free(self, a: int, b: int, chunk: int) -> Process:
        """Waits until rank b has read what stood in the slot of chunk `chunk` of this call."""
        stream, ring = self.streams[a, b], self.ring
        lap, slot = divmod(stream.sent_before + chunk, ring.num_slots)
        group = slot // ring.slots_per_credit
        while stream.credits[group] < lap and "ignores_credits" not in self.faults:
            yield stream.credit_gates[group]

    def _is_free(self, a: int, b: int, chunk: int) -> bool:
        stream, ring = self.streams[a, b], self.ring
        lap, slot = divmod(stream.sent_before + chunk, ring.num_slots)
        return stream.credits[slot // ring.slots_per_credit] >= lap or "ignores_credits" in self.faults

    def _send(self, a: int, b: int, chunk: int, num_bytes: float) -> None:
        number = self.streams[a, b].sent_before + chunk
        begin = max(self.clock.now, self.out_free[a])
        self.out_free[a] = begin + num_bytes / self.times.rate * self.slowdown[a]
        first_byte = begin + self.times.latency + self._jitter()
        self.clock.start(self._arrive(a, b, number, num_bytes), first_byte - self.clock.now)

    def _write_rows(self, a: int, b: int, chunk: int, num_written: int, num_rows: int, record_bytes: float) -> None:
        """Rank a has written rows of a chunk to b: with the last row the chunk is sent."""
        stream = self.streams[a, b]
        slot = (stream.sent_before + chunk) % self.ring.num_slots
        stream.rows_written[slot] += num_written
        if stream.rows_written[slot] < num_rows:
            return
        stream.rows_written[slot] = 0
        self._send(a, b, chunk, num_rows * record_bytes)

    def _arrive(self, a: int, b: int, number: int, num_bytes: float) -> Process:
        """Simulates a chunk from its first byte at the port of rank b on."""
        stream = self.streams[a, b]
        slowdown = max(self.slowdown[a], self.slowdown[b])
        self.in_free[b] = max(self.clock.now, self.in_free[b]) + num_bytes / self.times.rate * slowdown
        yield self.in_free[b] + self._jitter() - self.clock.now
        slot = number % self.ring.num_slots
        if stream.unread[slot]:
            raise ProtocolError(f"chunk {number} from {a} to {b} overwrites chunk {stream.flags[slot] - 1}")
        stream.unread[slot], stream.flags[slot] = True, number + 1
        self.clock.open(stream.flag_gates[slot])

    def _is_here(self, a: int, b: int, chunk: int) -> bool:
        stream = self.streams[a, b]
        number = stream.read_before + chunk
        return stream.flags[number % self.ring.num_slots] == number + 1

    def _wait_chunk(self, a: int, b: int, chunk: int) -> Process:
        stream = self.streams[a, b]
        number = stream.read_before + chunk
        slot = number % self.ring.num_slots
        while stream.flags[slot] != number + 1:
            if stream.flags[slot] > number + 1:
                raise ProtocolError(
                    f"rank {b} waits for chunk {number} from {a}, and chunk {stream.flags[slot] - 1} is there"
                )
            yield stream.flag_gates[slot]

    def _read_rows(self, a: int, b: int, chunk: int, num_read: int, num_rows: int) -> None:
        """Rank b has read rows of a chunk from a: at the last row of the last slot of a group it returns the credit."""
        stream, ring = self.streams[a, b], self.ring
        number = stream.read_before + chunk
        lap, slot = divmod(number, ring.num_slots)
        if stream.flags[slot] != number + 1:
            raise ProtocolError(f"rank {b} has read chunk {stream.flags[slot] - 1} from {a} for chunk {number}")
        stream.rows_read[slot] += num_read
        if stream.rows_read[slot] < num_rows:
            return
        stream.rows_read[slot], stream.unread[slot] = 0, False
        group = slot // ring.slots_per_credit
        stream.slots_read[group] += 1
        if stream.slots_read[group] < ring.slots_per_credit or "loses_credits" in self.faults:
            return
        stream.slots_read[group] = 0
        self.clock.start(self._credit(a, b, group, lap + 1), self.times.latency + self._jitter())

    def _credit(self, a: int, b: int, group: int, lap: int) -> Process:
        stream = self.streams[a, b]
        stream.credits[group] = max(stream.credits[group], lap)
        self.clock.open(stream.credit_gates[group])
        self.clock.open(self.any_credit[a])
        yield from ()

    def _jitter(self) -> float:
        if self.times.jitter == 0:
            return 0.0
        jitter = next(self._jitters, None)
        if jitter is None:
            self._jitters = iter((self._random.random(256) * self.times.jitter).tolist())
            jitter = next(self._jitters)
        return jitter

    # Both calls.

    def _peers(self, r: int) -> list[int]:
        return [(r + i) % self.num_domains for i in range(1, self.num_domains)]

    def _all(self, processes: list[Process], name: str) -> Process:
        """Waits until all processes have ended, which run at once."""
        gate, left = Gate(name), [len(processes)]

        def run(process: Process) -> Process:
            yield from process
            left[0] -= 1
            if left[0] == 0:
                self.clock.open(gate)

        for process in processes:
            self.clock.start(run(process))
        while left[0]:
            yield gate

    def _exchange(self, r: int, chunk: int, agree: float) -> Process:
        """Sends control chunk `chunk` to every peer, and reads theirs, by a few warps."""
        peers = self._peers(r)

        def publish(warp: int) -> Process:
            for b in peers[warp::_CONTROL_WARPS]:
                yield from self._wait_free(r, b, chunk)
                self._send(r, b, chunk, 0.0)
            for a in peers[warp::_CONTROL_WARPS]:
                yield from self._wait_chunk(a, r, chunk)
                self._read_rows(a, r, chunk, 1, 1)

        yield from self._all([publish(warp) for warp in range(_CONTROL_WARPS)], f"rank {r}: control")
        yield agree * self.slowdown[r]

    def _num_chunks(self, num_records: int) -> int:
        return -(-num_records // self.ring.per_chunk)

    def _move_on(self, r: int, num_control: int, sent: NDArray[np.int64], read: NDArray[np.int64]) -> None:
        for d in self._peers(r):
            self.streams[r, d].sent_before += num_control + self._num_chunks(int(sent[d]))
            self.streams[d, r].read_before += num_control + self._num_chunks(int(read[d]))

    def _over_nvlink(self, r: int, microseconds: float) -> float:
        """How long to wait until bytes have passed that need so long alone."""
        self.nvlink_free[r] = max(self.nvlink_free[r], self.clock.now) + microseconds
        return self.nvlink_free[r] - self.clock.now

    # Dispatch.

    def _dispatch(self, r: int, batch: _Batch) -> Process:
        for chunk in range(_DISPATCH_CONTROL):
            yield from self._exchange(r, chunk, self.times.agree[0])
        sent, read = batch.counts[r], batch.counts[:, r]
        sending = self._items(r, sent, self.ring.num_send_warps)
        forwarding = self._items(r, read, self.ring.num_forward_warps, "forwards_by_domain" in self.faults)
        how = _DISPATCH_CONTROL, self.times.build, self.times.record_bytes[0]
        warps = [self._send_records(r, sent, sending, *how) for _ in range(self.ring.num_send_warps)]
        warps += [self._forward_records(r, read, forwarding) for _ in range(self.ring.num_forward_warps)]
        warps.append(self._push_own(r))
        yield from self._all(warps, f"rank {r}: end of its warps")
        self._move_on(r, _DISPATCH_CONTROL, sent, read)

    def _items(
        self, r: int, counts: NDArray[np.int64], num_warps: int, by_domain: bool = False
    ) -> Iterator[tuple[int, int, int]]:
        """(peer, chunk, records) of what a warp claims: the parts of chunk 0 of each peer in turn, then of chunk 1.

        The last records, one for each of `num_warps` or a few more, are claimed one by one.
        """
        peers = self._peers(r)
        numbers = range(max(self._num_chunks(int(counts[d])) for d in peers))
        chunks = [(d, i) for d in peers for i in numbers] if by_domain else [(d, i) for i in numbers for d in peers]
        first_single = len(chunks) - self._num_chunks(num_warps)
        for number, (d, i) in enumerate(chunks):
            num_records = self._records_of(int(counts[d]), i)
            step = self.ring.per_part if number < first_single else 1
            for begin in range(0, num_records, step):
                yield d, i, min(step, num_records - begin)

    @property
    def _parts_per_chunk(self) -> int:
        return -(-self.ring.per_chunk // self.ring.per_part)

    def _part_of(self, index: int) -> int:
        chunk, in_chunk = divmod(index, self.ring.per_chunk)
        return chunk * self._parts_per_chunk + in_chunk // self.ring.per_part

    def _rows_of_part(self, num_records: int, part: int) -> int:
        chunk, in_chunk = divmod(part, self._parts_per_chunk)
        begin = in_chunk * self.ring.per_part
        return max(0, min(self.ring.per_part, self._records_of(num_records, chunk) - begin))

    def _records_of(self, count: int, index: int) -> int:
        return min(self.ring.per_chunk, count - index * self.ring.per_chunk)

    def _send_records(
        self,
        r: int,
        counts: NDArray[np.int64],
        items: Iterator[tuple[int, int, int]],
        first: int,
        us: float,
        record: float,
    ) -> Process:
        """A warp that sends records, which need `us` each and have `record` bytes; chunk `first` is the first one."""
        slow = self.slowdown[r]
        for d, index, num_rows in items:
            yield from self._wait_free(r, d, first + index)
            yield num_rows * us * slow
            self._write_rows(r, d, first + index, num_rows, self._records_of(int(counts[d]), index), record)

    def _forward_records(self, r: int, counts: NDArray[np.int64], items: Iterator[tuple[int, int, int]]) -> Process:
        times, slow = self.times, self.slowdown[r]
        for d, index, num_rows in items:
            yield from self._wait_chunk(d, r, _DISPATCH_CONTROL + index)
            yield max(num_rows * times.forward * slow, self._over_nvlink(r, num_rows * times.nvlink[r]))
            self._read_rows(d, r, _DISPATCH_CONTROL + index, num_rows, self._records_of(int(counts[d]), index))

    def _push_own(self, r: int) -> Process:
        pieces = 64
        for _ in range(pieces):
            yield self._over_nvlink(r, self.times.own[r] / pieces)

    # Combine.

    def _combine(self, r: int, batch: _Batch) -> Process:
        yield from self._exchange(r, 0, self.times.agree[1])
        ring, times, slow = self.ring, self.times, float(self.slowdown[r])
        held, awaited, begin = batch.counts[:, r].copy(), batch.counts[r], self.clock.now
        own = _OwnSums(set(), Gate(f"rank {r}: sums of its own domain"))
        tokens, indices, next_parts = iter(range(len(batch.goes[r]))), batch.indices[r], [0] * self.num_domains
        pushed_us = self.num_domains * times.first_rows[r] * slow

        def push(share: float, num_rows: int) -> float:
            return num_rows * times.push * slow

        def sum_pushed(share: float, num_rows: int) -> float:
            # Rows are pushed for all domains in turn, chunk by chunk.
            wait_us = max(0.0, begin + share * pushed_us - self.clock.now)
            return wait_us + (times.part + num_rows * times.sum) * slow

        def sum_all(turn: int, delay: float) -> Process:
            yield delay
            yield from self._fill_chunks(r, turn, next_parts, held, own, sum_pushed)
            yield from self._sum_home(r, tokens, indices, awaited, own)

        if ring.is_alone:
            held[r] = 0  # its own rows are read in place
            items, how = self._items(r, held, 0), (_COMBINE_CONTROL, times.push, times.record_bytes[1])
            warps = [
                self._send_records(r, held, items, *how)
                if "sends_in_order" in self.faults
                else self._fill_chunks(r, warp, next_parts, held, own, push)
                for warp in range(ring.num_push_warps)
            ]
            warps += [self._sum_home(r, tokens, indices, awaited, own) for _ in range(ring.num_domain_warps)]
        else:
            warps = [sum_all(warp, pushed_us) for warp in range(ring.num_push_warps)]
            warps += [sum_all(warp, 0.0) for warp in range(ring.num_domain_warps)]
        warps += [self._sum_home(r, tokens, indices, awaited, own) for _ in range(ring.num_home_warps)]
        yield from self._all(warps, f"rank {r}: end of its warps")
        self._move_on(r, _COMBINE_CONTROL, held, awaited)

    def _fill_chunks(
        self,
        r: int,
        turn: int,
        next_parts: list[int],
        held: NDArray[np.int64],
        own: _OwnSums,
        part_us: Callable[[float, int], float],
    ) -> Process:
        """A warp that makes the rows of parts. `part_us` takes the share of its domain's rows up to the part's end."""
        per_chunk = self._parts_per_chunk
        while True:
            # The domains that have parts left, from the warp's turn on; by mistake the last one first.
            domains = [(turn + i) % self.num_domains for i in range(self.num_domains)]
            if "claims_without_slot" in self.faults:
                domains = [(r - 1 - i) % self.num_domains for i in range(self.num_domains)]
            left = [d for d in domains if self._rows_of_part(int(held[d]), next_parts[d]) > 0]
            if not left:
                return
            free = [d for d in left if d == r or self._is_free(r, d, _COMBINE_CONTROL + next_parts[d] // per_chunk)]
            if not free and "claims_without_slot" not in self.faults:
                yield self.any_credit[r]
                continue
            d = left[0] if "claims_without_slot" in self.faults else free[0]
            part, turn = next_parts[d], d + 1
            index, num_rows = part // per_chunk, self._rows_of_part(int(held[d]), part)
            next_parts[d] += 1
            if d != r:
                yield from self._wait_free(r, d, _COMBINE_CONTROL + index)
            end = index * self.ring.per_chunk + part % per_chunk * self.ring.per_part + num_rows
            yield part_us(end / int(held[d]), num_rows)
            if d == r:
                own.done.add(part)
                self.clock.open(own.gate)
            else:
                num_records = self._records_of(int(held[d]), index)
                self._write_rows(r, d, _COMBINE_CONTROL + index, num_rows, num_records, self.times.record_bytes[1])

    def _sum_home(
        self,
        r: int,
        tokens: Iterator[int],
        indices: NDArray[np.int64],
        awaited: NDArray[np.int64],
        own: _OwnSums,
    ) -> Process:
        ring, times, slow = self.ring, self.times, self.slowdown[r]
        opened: list[list[tuple[int, int]]] = []

        def finish() -> Process:
            parts = opened.pop(0)
            yield (1 + len(parts)) * times.sum_home * slow
            for d, index in parts:
                chunk = index // ring.per_chunk
                num_rows = self._records_of(int(awaited[d]), chunk)
                self._read_rows(d, r, _COMBINE_CONTROL + chunk, 1, num_rows)

        for token in tokens:
            goes = np.flatnonzero(indices[token] >= 0).tolist()
            parts = [(d, int(indices[token, d])) for d in goes if d != r]
            # A rank that is alone reads its own rows in place.
            has_sum = indices[token, r] >= 0 and not ring.is_alone
            own_part = self._part_of(int(indices[token, r])) if has_sum else None

            def is_here(parts: list[tuple[int, int]] = parts, own_part: int | None = own_part) -> bool:
                return (own_part is None or own_part in own.done) and all(
                    self._is_here(d, r, _COMBINE_CONTROL + index // ring.per_chunk) for d, index in parts
                )

            while opened and not is_here() and "holds_and_waits" not in self.faults:
                yield from finish()
            for d, index in parts:
                yield from self._wait_chunk(d, r, _COMBINE_CONTROL + index // ring.per_chunk)
            while own_part is not None and own_part not in own.done:
                yield own.gate
            opened.append(parts)
            if len(opened) >= ring.num_open:
                yield from finish()
        while opened:
            yield from finish()


def random_batches(
    random: np.random.Generator, num_batches: int, num_tokens: Callable[[], int], shares: NDArray[np.float64]
) -> list[list[NDArray[np.bool_]]]:
    """Draws tokens for every rank: each goes to domain d with probability ``shares[d]``."""
    return [
        [random.random((num_tokens(), len(shares))) < shares for _ in range(len(shares))] for _ in range(num_batches)
    ]
