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
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybrid_ep.cluster.model.events import Clock, Process

_CONTROL_WARPS = 6
_NO_ROW = -1  # of a token from a domain to which it does not go
_OWN_PIECES = 64  # in which a rank's own rows cross NVLink, between those that it forwards

Claim: TypeAlias = tuple[int, int, int]  # of a warp: a peer, the number of a chunk, and how many of its records


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
    """The chunks from rank `a` to rank `b`, numbered without end.

    Methods count chunks from `num_sent` or `num_read` on: those of earlier calls, and of control, as each side knows.
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
        lap, slot = divmod(self.num_read + chunk, self.plane.num_slots)
        group = slot // self.plane.slots_per_credit
        self.unread[slot] -= num_rows
        self.slots_read[group] += self.unread[slot] == 0
        if self.slots_read[group] == self.plane.slots_per_credit:
            self.slots_read[group] = 0
            self.clock.start(self.return_credit(group, lap + 1), self.plane.latency + self.protocol.jitter())

    def return_credit(self, group: int, lap: int) -> Process:
        """Simulates a credit at its arrival."""
        self.credits[group] = max(self.credits[group], lap)
        self.clock.signal(self._credit_event(group))
        self.clock.signal(f"rank {self.a}: any credit")
        yield from ()

    def _credit_event(self, group: int) -> str:
        return f"rank {self.a}: credit of group {group} from {self.b}"

    def _chunk_event(self, slot: int) -> str:
        return f"rank {self.b}: chunk in slot {slot} from {self.a}"


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

        def run_rank(r: int) -> Process:
            for call in range(len(times)):
                if starts is not None:
                    yield float(starts[call, r])
                begin, goes = self.clock.now, batches[call // 2]
                yield from (self._combine if call % 2 else self._dispatch)(r, goes)
                times[call, r] = self.clock.now - begin

        for r in range(self.num_domains):
            self.clock.start(run_rank(r))
        self.clock.run()
        return times

    def jitter(self) -> float:
        return self._random.random() * self.plane.jitter

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

    def _over_nvlink(self, r: int, microseconds: float) -> float:
        """Returns how long to wait until bytes have passed that need so long alone."""
        self.nvlink_free[r] = max(self.nvlink_free[r], self.clock.now) + microseconds
        return self.nvlink_free[r] - self.clock.now

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

    def _run_warps(self, r: int, warps: list[Process], sent: list[int], read: list[int]) -> Process:
        """Waits until the warps have moved so many records of each peer."""
        yield from self.clock.join(warps, f"rank {r}: end of its warps")
        for d in self._peers(r):
            self.streams[r, d].num_sent += self.plane.num_chunks(sent[d])
            self.streams[d, r].num_read += self.plane.num_chunks(read[d])

    def _dispatch(self, r: int, goes: Sequence[NDArray[np.bool_]]) -> Process:
        plane, slow = self.plane, self.slowdown[r]
        for _ in ("counts", "verdicts"):
            yield from self._exchange(r, plane.agree[0])
        sent, read = goes[r].sum(0).tolist(), [int(of_rank[:, r].sum()) for of_rank in goes]
        sending = self._claims(sent, self.order_of_chunks(r, sent), plane.send_warps)
        forwarding = self._claims(read, self.order_of_chunks(r, read), plane.forward_warps)

        def send() -> Process:
            for d, chunk, num_rows in sending:
                yield from self.streams[r, d].wait_free(chunk)
                yield num_rows * plane.build * slow
                self.streams[r, d].write(chunk, num_rows, plane.rows_of_chunk(sent[d], chunk), plane.record_bytes[0])

        def forward() -> Process:
            for d, chunk, num_rows in forwarding:
                yield from self.streams[d, r].wait_here(chunk)
                yield max(num_rows * plane.forward * slow, self._over_nvlink(r, num_rows * plane.nvlink[r]))
                self.streams[d, r].read(chunk, num_rows)

        def push_own() -> Process:
            for _ in range(_OWN_PIECES):
                yield self._over_nvlink(r, plane.own[r] / _OWN_PIECES)

        warps = [send() for _ in range(plane.send_warps)] + [forward() for _ in range(plane.forward_warps)]
        yield from self._run_warps(r, [*warps, push_own()], sent, read)

    def order_of_chunks(self, r: int, counts: list[int]) -> list[tuple[int, int]]:
        """Returns (peer, chunk) in the order in which warps of a dispatch claim them."""
        peers = self._peers(r)
        return [(d, i) for i in range(max(self.plane.num_chunks(counts[d]) for d in peers)) for d in peers]

    def _claims(self, counts: list[int], chunks: list[tuple[int, int]], num_warps: int) -> Iterator[Claim]:
        """Parts of the chunks, and the last records singly, about one for each warp."""
        first_single = len(chunks) - self.plane.num_chunks(num_warps)
        for place, (d, chunk) in enumerate(chunks):
            left, step = self.plane.rows_of_chunk(counts[d], chunk), self.plane.per_part if place < first_single else 1
            while left > 0:
                yield d, chunk, min(step, left)
                left -= step

    def _combine(self, r: int, goes: Sequence[NDArray[np.bool_]]) -> Process:
        plane, slow, num_domains = self.plane, self.slowdown[r], self.num_domains
        yield from self._exchange(r, plane.agree[1])
        sent, own = [int(of_rank[:, r].sum()) for of_rank in goes], goes[r].copy()
        if plane.is_alone:
            own[:, r], sent[r] = False, 0  # its own rows are read in place
        begin, pushed_us = self.clock.now, num_domains * plane.first_rows[r] * slow
        claimed, summed, is_summed = [0] * num_domains, {_NO_ROW}, f"rank {r}: sums of its own domain"
        # The row of a token from a domain has the token's place among those that go there.
        tokens = iter(np.where(own, own.cumsum(0) - 1, _NO_ROW).tolist())

        def fill_chunks(turn: int) -> Process:
            """Claims parts, of domain `turn` first, and writes their rows."""
            while left := [d for d in range(num_domains) if claimed[d] < sent[d]]:
                left.sort(key=lambda d: (d - turn) % num_domains)
                d = self.choose(r, left, claimed)
                if d is None:
                    yield f"rank {r}: any credit"
                    continue
                first, turn = claimed[d], d + 1
                chunk, place = divmod(first, plane.per_chunk)
                rows_of_chunk = plane.rows_of_chunk(sent[d], chunk)
                claimed[d] = end = first + min(plane.per_part, rows_of_chunk - place)
                if d != r:
                    yield from self.streams[r, d].wait_free(chunk)
                # Rows are pushed for all domains in turn, chunk by chunk.
                wait_us = max(0.0, begin + end / sent[d] * pushed_us - self.clock.now)
                yield wait_us + (plane.part + (end - first) * plane.sum) * slow
                if d != r:
                    self.streams[r, d].write(chunk, end - first, rows_of_chunk, plane.record_bytes[1])
                else:
                    summed.update(range(first, end))
                    self.clock.signal(is_summed)

        def sum_home() -> Process:
            """Takes tokens, and sums their rows; it does not wait for rows while it holds others."""
            held: list[list[tuple[Stream, int]]] = []

            def finish() -> Process:
                chunks = held.pop(0)
                yield (1 + len(chunks)) * plane.sum_home * slow
                for stream, chunk in chunks:
                    stream.read(chunk, 1)

            for rows in tokens:
                remote = ((d, row) for d, row in enumerate(rows) if d != r and row != _NO_ROW)
                chunks = [(self.streams[d, r], row // plane.per_chunk) for d, row in remote]
                while held and not (rows[r] in summed and self.are_here(chunks)):
                    yield from finish()
                for stream, chunk in chunks:
                    yield from stream.wait_here(chunk)
                while rows[r] not in summed:
                    yield is_summed
                held.append(chunks)
                if len(held) == plane.num_open:
                    yield from finish()
            while held:
                yield from finish()

        def warp(delay: float, turn: int, fills: bool, goes_home: bool) -> Process:
            yield delay
            if fills:
                yield from fill_chunks(turn)
            if goes_home:
                yield from sum_home()

        warps = [warp(pushed_us, turn, True, not plane.is_alone) for turn in range(plane.push_warps)]
        warps += [warp(0.0, turn, not plane.is_alone, True) for turn in range(plane.domain_warps)]
        warps += [warp(0.0, 0, False, True) for _ in range(plane.home_warps)]
        yield from self._run_warps(r, warps, sent, goes[r].sum(0).tolist())

    def choose(self, r: int, left: list[int], claimed: list[int]) -> int | None:
        """Returns the first of the domains left for which rank r may write its next row, or None."""
        free = (d for d in left if d == r or self.streams[r, d].is_free(claimed[d] // self.plane.per_chunk))
        return next(free, None)

    def are_here(self, chunks: list[tuple[Stream, int]]) -> bool:
        """Whether a warp at home, which holds rows, can read further chunks without waiting."""
        return all(stream.is_here(chunk) for stream, chunk in chunks)
