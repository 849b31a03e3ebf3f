"""The protocol between domains as the engine has it, on simulated time: streams, slots, credits, dispatch, combine.

It follows csrc/layout/between_layout.h, csrc/kernels/between/chunk_stream.cuh, dispatch_between and combine_between:

- Chunk n of a stream uses slot n % S in lap n / S; a sender waits for the credit of the slot's group before it writes.
- A warp takes a part of a chunk. The warp that is done last sends the chunk. A dispatch takes its last records singly.
- Warps that send take the parts of all peers' chunks in turn, by one counter, and warps that forward by another. A warp
  waits for its chunk, even if other chunks are ready.
- In combine rows are pushed for all domains in turn, chunk by chunk. A warp that sums claims a part of any domain, but
  only one whose slot is free. A warp at home takes tokens in order, and does not wait while it holds rows.
- Warps that have pushed go on to the sums for each domain, and warps with no sum left there go on to the sums at home.
- A rank that is alone in its domain has no rows to push or to sum for it. Its pushing warps send its rows home.

One rank is simulated for each domain, because only peers exchange chunks. The other ranks of a domain are a rate.
Arrivals may come in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_ep.cluster.model.events import Clock, Process

__all__ = ["Plane", "Protocol", "ProtocolError", "Stream"]

_CONTROL_WARPS = 6
_NO_ROW = -1  # of a token from a domain to which it does not go
_OWN_PIECES = 64  # in which a rank's own rows cross NVLink, between those that it forwards


class ProtocolError(Exception):
    """A slot was overwritten, or holds a chunk other than the one that a rank waits for or reads."""


class Plane(NamedTuple):
    """One rank of each domain, all peers of each other: rings, warps of a rank, and times of their steps in µs."""

    num_slots: int  # S, of the ring of a stream
    slots_per_credit: int  # of a group
    per_chunk: int  # records
    per_part: int  # records that a warp takes
    send_warps: int  # of dispatch
    forward_warps: int
    push_warps: int  # of combine
    domain_warps: int
    home_warps: int
    is_alone: bool  # every rank is alone in its domain
    build: float  # of a record by a warp, in dispatch
    forward: float
    part: float  # of a warp that fills chunks in combine: for each part, and for each record of it
    sum: float
    sum_home: float  # of a record by a warp, in combine
    nvlink: Sequence[float]  # by domain: of a record's rows on their way within it
    own: Sequence[float]  # by domain: of all of a rank's own rows on their way within it
    first_rows: Sequence[float]  # by domain: until the rows for one domain are at the rank that sums them
    agree: tuple[float, float]  # what a rank does after each exchange of control chunks; dispatch, combine
    latency: float  # of a message, without its bytes
    jitter: float  # up to so much more, drawn for each message
    record_bytes: tuple[float, float]  # dispatch, combine
    rate: float  # of a rank's port, bytes per µs
    num_open: int = 2  # tokens that a warp at home holds

    def num_chunks(self, num_records: int) -> int:
        return -(-num_records // self.per_chunk)

    def rows_of_chunk(self, num_records: int, chunk: int) -> int:
        return min(self.per_chunk, num_records - chunk * self.per_chunk)


class Stream:
    """The chunks from rank `a` to rank `b`, numbered without end. Methods take numbers from the last control chunk on.

    Attributes:
        num_sent, num_read: chunks of earlier calls and control chunks, as the sender and the reader count them.
    """

    def __init__(self, protocol: Protocol, a: int, b: int) -> None:
        self.protocol, self.plane, self.clock, self.a, self.b = protocol, protocol.plane, protocol.clock, a, b
        num_slots, num_groups = self.plane.num_slots, self.plane.num_slots // self.plane.slots_per_credit
        self.num_sent = self.num_read = 0
        self.written = [0] * num_slots  # rows of the chunk that the sender builds
        self.credits = [0] * num_groups  # laps that the sender knows to be read
        self.arrived = [-1] * num_slots  # number of the last chunk
        self.unread = [0] * num_slots  # rows of it
        self.slots_read = [0] * num_groups  # in this lap

    def is_free(self, chunk: int) -> bool:
        """Whether the sender may write: rank b has read what stood in the slot of a chunk."""
        lap, slot = divmod(self.num_sent + chunk, self.plane.num_slots)
        return self.credits[slot // self.plane.slots_per_credit] >= lap

    def wait_free(self, chunk: int) -> Process:
        while not self.is_free(chunk):
            yield self._credit_event((self.num_sent + chunk) % self.plane.num_slots // self.plane.slots_per_credit)

    def write(self, chunk: int, num_rows: int, rows_of_chunk: int, record_bytes: float) -> None:
        """Notes rows that a warp has written; the chunk is sent with its last row."""
        number = self.num_sent + chunk
        slot = number % self.plane.num_slots
        self.written[slot] += num_rows
        if self.written[slot] == rows_of_chunk:
            self.written[slot] = 0
            num_bytes = rows_of_chunk * record_bytes
            first_byte = self.protocol.leave_port(self.a, num_bytes) + self.plane.latency + self.protocol.jitter()
            self.clock.start(self._arrive(number, rows_of_chunk, num_bytes), first_byte - self.clock.now)

    def _arrive(self, number: int, num_rows: int, num_bytes: float) -> Process:
        """Simulates a chunk from its first byte at the port of rank b on."""
        yield self.protocol.enter_port(self.a, self.b, num_bytes) + self.protocol.jitter() - self.clock.now
        slot = number % self.plane.num_slots
        if self.unread[slot] > 0:
            raise ProtocolError(f"chunk {number} from {self.a} to {self.b} overwrites chunk {self.arrived[slot]}")
        self.arrived[slot], self.unread[slot] = number, num_rows
        self.clock.signal(self._chunk_event(slot))

    def is_here(self, chunk: int) -> bool:
        """Whether rank b can read a chunk."""
        number = self.num_read + chunk
        found = self.arrived[number % self.plane.num_slots]
        if found > number:
            raise ProtocolError(f"rank {self.b} waits for chunk {number} from {self.a}, and chunk {found} is there")
        return found == number

    def wait_here(self, chunk: int) -> Process:
        while not self.is_here(chunk):
            yield self._chunk_event((self.num_read + chunk) % self.plane.num_slots)

    def read(self, chunk: int, num_rows: int) -> None:
        """Notes rows that rank b has read; the credit of a group is returned with the last row of its last slot."""
        if not self.is_here(chunk):
            raise ProtocolError(f"rank {self.b} reads chunk {self.num_read + chunk} from {self.a} before it arrives")
        lap, slot = divmod(self.num_read + chunk, self.plane.num_slots)
        self.unread[slot] -= num_rows
        if self.unread[slot] == 0:
            group = slot // self.plane.slots_per_credit
            self.slots_read[group] += 1
            if self.slots_read[group] == self.plane.slots_per_credit:
                self.slots_read[group] = 0
                credit_us = self.plane.latency + self.protocol.jitter()
                self.clock.start(self.return_credit(group, lap + 1), credit_us)

    def return_credit(self, group: int, lap: int) -> Process:
        """Simulates a credit at its arrival."""
        self.credits[group] = max(self.credits[group], lap)
        self.clock.signal(self._credit_event(group))
        self.clock.signal(any_credit_event(self.a))
        yield from ()

    def _credit_event(self, group: int) -> str:
        return f"rank {self.a}: credit of group {group} from {self.b}"

    def _chunk_event(self, slot: int) -> str:
        return f"rank {self.b}: chunk in slot {slot} from {self.a}"


def any_credit_event(r: int) -> str:
    return f"rank {r}: a credit from any rank"


class _CombineCall(NamedTuple):
    """A combine at rank r: records for each domain, its begin, records that warps have claimed, own ones summed."""

    r: int
    counts: list[int]
    begin: float
    claimed: list[int]
    summed: set[int]


class Protocol:
    """Runs dispatch and combine at the ranks of a plane.

    Args:
        plane: rings, warps and times.
        num_domains: D.
        seed: of delays.
        slowdown: ``[D]``, factors of the ranks' own times; None = 1.
    """

    def __init__(self, plane: Plane, num_domains: int, seed: int, slowdown: NDArray[np.float64] | None = None) -> None:
        self.plane, self.num_domains, self.clock = plane, num_domains, Clock()
        self.slowdown = [1.0] * num_domains if slowdown is None else slowdown.tolist()
        # When a port of each rank has nothing more to pass on: what passes one passes in turn.
        self.out_free, self.in_free, self.nvlink_free = ([0.0] * num_domains for _ in range(3))
        self._random = np.random.default_rng(seed)
        ranks = range(num_domains)
        self.streams = {(a, b): Stream(self, a, b) for a in ranks for b in ranks if a != b}

    def run(
        self, batches: Sequence[Sequence[NDArray[np.bool_]]], starts: NDArray[np.float64] | None = None
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
        times = np.zeros((2 * len(batches), self.num_domains))
        # [from][to]; on the diagonal, tokens that stay in the domain.
        counts = [[goes.sum(0).tolist() for goes in batch] for batch in batches]

        def run_rank(r: int) -> Process:
            for call in range(len(times)):
                if starts is not None:
                    yield float(starts[call, r])
                begin, of_batch = self.clock.now, counts[call // 2]
                to_others, from_others = of_batch[r], [of_rank[r] for of_rank in of_batch]
                if call % 2 == 0:
                    yield from self._dispatch(r, to_others, from_others)
                else:
                    yield from self._combine(r, batches[call // 2][r], from_others, to_others)
                times[call, r] = self.clock.now - begin

        for r in range(self.num_domains):
            self.clock.start(run_rank(r))
        self.clock.run()
        return times

    # Ports.

    def leave_port(self, a: int, num_bytes: float) -> float:
        """Returns when the first byte leaves rank a."""
        begin = max(self.clock.now, self.out_free[a])
        self.out_free[a] = begin + num_bytes / self.plane.rate * self.slowdown[a]
        return begin

    def enter_port(self, a: int, b: int, num_bytes: float) -> float:
        """Returns when the last byte from rank a has entered rank b."""
        slow = max(self.slowdown[a], self.slowdown[b])
        self.in_free[b] = max(self.clock.now, self.in_free[b]) + num_bytes / self.plane.rate * slow
        return self.in_free[b]

    def jitter(self) -> float:
        return self._random.random() * self.plane.jitter

    def _over_nvlink(self, r: int, microseconds: float) -> float:
        """Returns how long to wait until bytes have passed that need so long alone."""
        self.nvlink_free[r] = max(self.nvlink_free[r], self.clock.now) + microseconds
        return self.nvlink_free[r] - self.clock.now

    # Both calls.

    def _peers(self, r: int) -> list[int]:
        return [(r + i) % self.num_domains for i in range(1, self.num_domains)]

    def _exchange(self, r: int, agree: float) -> Process:
        """Sends a control chunk to every peer, and reads theirs, by a few warps."""
        peers = self._peers(r)

        def publish(warp: int) -> Process:
            for b in peers[warp::_CONTROL_WARPS]:
                yield from self.streams[r, b].wait_free(0)
                self.streams[r, b].write(0, 1, 1, 0.0)
                self.streams[r, b].num_sent += 1
            for a in peers[warp::_CONTROL_WARPS]:
                yield from self.streams[a, r].wait_here(0)
                self.streams[a, r].read(0, 1)
                self.streams[a, r].num_read += 1

        yield from self.clock.join([publish(warp) for warp in range(_CONTROL_WARPS)], f"rank {r}: control")
        yield agree * self.slowdown[r]

    def _run_warps(self, r: int, warps: list[Process], to_others: list[int], from_others: list[int]) -> Process:
        """Waits until the warps have moved so many records."""
        yield from self.clock.join(warps, f"rank {r}: end of its warps")
        for d in self._peers(r):
            self.streams[r, d].num_sent += self.plane.num_chunks(to_others[d])
            self.streams[d, r].num_read += self.plane.num_chunks(from_others[d])

    # Dispatch.

    def _dispatch(self, r: int, to_others: list[int], from_others: list[int]) -> Process:
        plane = self.plane
        for _ in ("counts", "verdicts"):
            yield from self._exchange(r, plane.agree[0])
        sending = self._claims(to_others, self.order_of_chunks(r, to_others), plane.send_warps)
        forwarding = self._claims(from_others, self.order_of_chunks(r, from_others), plane.forward_warps)
        warps = [self._send_records(r, to_others, sending) for _ in range(plane.send_warps)]
        warps += [self._forward_records(r, forwarding) for _ in range(plane.forward_warps)]
        warps.append(self._push_own(r))
        yield from self._run_warps(r, warps, to_others, from_others)

    def order_of_chunks(self, r: int, counts: list[int]) -> list[tuple[int, int]]:
        """Returns (peer, chunk) in the order in which warps claim them."""
        peers = self._peers(r)
        return [(d, i) for i in range(max(self.plane.num_chunks(counts[d]) for d in peers)) for d in peers]

    def _claims(
        self, counts: list[int], chunks: list[tuple[int, int]], num_warps: int
    ) -> Iterator[tuple[int, int, int]]:
        """(peer, chunk, records) of what a warp claims: parts, and the last records singly, about one for each warp."""
        first_single = len(chunks) - self.plane.num_chunks(num_warps)
        for place, (d, chunk) in enumerate(chunks):
            left, step = self.plane.rows_of_chunk(counts[d], chunk), self.plane.per_part if place < first_single else 1
            while left > 0:
                yield d, chunk, min(step, left)
                left -= step

    def _send_records(self, r: int, counts: list[int], claims: Iterator[tuple[int, int, int]]) -> Process:
        for d, chunk, num_rows in claims:
            yield from self.streams[r, d].wait_free(chunk)
            yield num_rows * self.plane.build * self.slowdown[r]
            rows_of_chunk = self.plane.rows_of_chunk(counts[d], chunk)
            self.streams[r, d].write(chunk, num_rows, rows_of_chunk, self.plane.record_bytes[0])

    def _forward_records(self, r: int, claims: Iterator[tuple[int, int, int]]) -> Process:
        for d, chunk, num_rows in claims:
            yield from self.streams[d, r].wait_here(chunk)
            nvlink_us = self._over_nvlink(r, num_rows * self.plane.nvlink[r])
            yield max(num_rows * self.plane.forward * self.slowdown[r], nvlink_us)
            self.streams[d, r].read(chunk, num_rows)

    def _push_own(self, r: int) -> Process:
        for _ in range(_OWN_PIECES):
            yield self._over_nvlink(r, self.plane.own[r] / _OWN_PIECES)

    # Combine.

    def _combine(self, r: int, goes: NDArray[np.bool_], to_others: list[int], from_others: list[int]) -> Process:
        """`goes`, ``[T, D]``: the domains that send a row of a token home."""
        plane = self.plane
        yield from self._exchange(r, plane.agree[1])
        if plane.is_alone:
            # Its own rows are read in place.
            goes = goes.copy()
            goes[:, r], to_others[r] = False, 0
        call = _CombineCall(r, to_others, self.clock.now, [0] * self.num_domains, {_NO_ROW})
        # The row of a token that comes from a domain is in that domain's order of this rank's tokens.
        rows = iter(np.where(goes, goes.cumsum(0) - 1, _NO_ROW).tolist())

        def warp(turn: int, delay: float, fills: bool, goes_home: bool) -> Process:
            yield delay
            if fills:
                yield from self._fill_chunks(call, turn)
            if goes_home:
                yield from self._sum_home(call, rows)

        pushed_us = self.num_domains * plane.first_rows[r] * self.slowdown[r]
        warps = [warp(turn, pushed_us, True, not plane.is_alone) for turn in range(plane.push_warps)]
        warps += [warp(turn, 0.0, not plane.is_alone, True) for turn in range(plane.domain_warps)]
        warps += [warp(0, 0.0, False, True) for _ in range(plane.home_warps)]
        yield from self._run_warps(r, warps, to_others, from_others)

    def _fill_chunks(self, call: _CombineCall, turn: int) -> Process:
        """A warp that claims parts, of domain `turn` first, and writes their rows."""
        r, plane, slow, num_domains = call.r, self.plane, self.slowdown[call.r], self.num_domains
        pushed_us = num_domains * plane.first_rows[r] * slow
        while True:
            domains = [(turn + i) % num_domains for i in range(num_domains)]
            left = [d for d in domains if call.claimed[d] < call.counts[d]]
            if not left:
                return
            d = self.choose(r, left, call.claimed)
            if d is None:
                yield any_credit_event(r)
                continue
            first, turn = call.claimed[d], d + 1
            chunk, place = divmod(first, plane.per_chunk)
            rows_of_chunk = plane.rows_of_chunk(call.counts[d], chunk)
            end = first + min(plane.per_part, rows_of_chunk - place)
            call.claimed[d] = end
            if d != r:
                yield from self.streams[r, d].wait_free(chunk)
            # Rows are pushed for all domains in turn, chunk by chunk.
            wait_us = max(0.0, call.begin + end / call.counts[d] * pushed_us - self.clock.now)
            yield wait_us + (plane.part + (end - first) * plane.sum) * slow
            if d != r:
                self.streams[r, d].write(chunk, end - first, rows_of_chunk, plane.record_bytes[1])
            else:
                call.summed.update(range(first, end))
                self.clock.signal(summed_event(r))

    def choose(self, r: int, left: list[int], claimed: list[int]) -> int | None:
        """Returns the first of the domains left for which rank r may write its next row, or None."""
        for d in left:
            if d == r or self.streams[r, d].is_free(claimed[d] // self.plane.per_chunk):
                return d
        return None

    def _sum_home(self, call: _CombineCall, tokens: Iterator[list[int]]) -> Process:
        """A warp that takes tokens, each given by the numbers of its rows from all domains, and sums their rows."""
        r, held = call.r, list[list[tuple[Stream, int]]]()

        def finish() -> Process:
            chunks = held.pop(0)
            yield (1 + len(chunks)) * self.plane.sum_home * self.slowdown[r]
            for stream, chunk in chunks:
                stream.read(chunk, 1)

        for rows in tokens:
            chunks = [
                (self.streams[d, r], i // self.plane.per_chunk) for d, i in enumerate(rows) if d != r and i != _NO_ROW
            ]
            while held and not self.are_here(call, rows[r], chunks):
                yield from finish()
            for stream, chunk in chunks:
                yield from stream.wait_here(chunk)
            while rows[r] not in call.summed:
                yield summed_event(r)
            held.append(chunks)
            if len(held) == self.plane.num_open:
                yield from finish()
        while held:
            yield from finish()

    def are_here(self, call: _CombineCall, own_row: int, chunks: list[tuple[Stream, int]]) -> bool:
        """Whether a warp at home need not wait for the rows of a token."""
        return own_row in call.summed and all(stream.is_here(chunk) for stream, chunk in chunks)


def summed_event(r: int) -> str:
    return f"rank {r}: sums of its own domain"
