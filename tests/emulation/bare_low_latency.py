"""Low-latency calls between domains on emulated warps, without torch: ranks of `bare_ranks.run_ranks`.

`LowLatencyEnd` makes what `LowLatencyBetween` makes. Rows are bf16, or e4m3 with a power of two as the scale of each
128 channels, so that every received bit is known.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import struct
import time
from typing import Any

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.errors import TimeoutError
from hybrid_ep.transport import Ring
from tests.emulation.bare_ranks import End, Memory, Shape, Shared, bf16, values_of

LOST_RANK = 3  # of MaskingEnd
_LOST_BEFORE = 3  # number of the round
_DRAIN_S = 20.0

_CHANNELS_PER_SCALE = 128
_SPARE_TOKENS = 4  # by which the most tokens of a rank exceed those that it sends
_NO_ADDRESS = 0


class Fp8Shape(Shape):
    """Tokens whose e4m3 rows and scales are exact."""

    def scales(self, rank: int, token: int, seed: int) -> list[float]:
        """Of the channels of a row."""
        return [2.0 ** ((rank + token + seed + block) % 3) for block in range(self.hidden // _CHANNELS_PER_SCALE)]

    def quantised(self, rank: int, token: int, seed: int) -> list[int]:
        """Values as e4m3 holds them: the largest of each block is 448."""
        values = [(rank * 11 + token * 7 + i * 3 + seed) % 16 for i in range(self.hidden)]
        values[::_CHANNELS_PER_SCALE] = [448] * (self.hidden // _CHANNELS_PER_SCALE)
        return values

    def row(self, rank: int, token: int, seed: int) -> bytes:
        scales, values = self.scales(rank, token, seed), self.quantised(rank, token, seed)
        return bf16([value * scales[i // _CHANNELS_PER_SCALE] for i, value in enumerate(values)])


class LowLatencyEnd(End):
    """An end of low-latency calls of bf16 rows."""

    format_name = "NONE"
    value_bytes = 2

    def __init__(self, native: Any, rank: int, shape: Shape, shared: Shared, transport: str, timeout_s: float) -> None:
        self.max_tokens = shape.num_tokens + _SPARE_TOKENS
        self.lost: set[int] = set()  # ranks that calls leave out
        self.plan = native.LowLatencyPlan(
            num_ranks=shape.num_ranks,
            num_experts=shape.num_experts,
            num_topk=shape.num_topk,
            hidden=shape.hidden,
            max_tokens=self.max_tokens,
            format=getattr(native.ScaleFormat, self.format_name),
        )
        super().__init__(native, rank, shape, shared, transport, timeout_s)
        capacity = self.plan.capacity
        assert capacity.region_bytes + native.low_latency_between_bytes <= len(shared.memory[rank].map)
        self.region = native.LowLatencyBetweenRegion(
            communicator=self.communicator,
            rank=rank,
            num_domains=shape.num_domains,
            group_size=self.link_grid().num_ranks_per_domain,
            memory=[shared.memory[r].address for r in self.grid.domain],
            capacity=capacity,
            takes_masks=True,
            proxy=self.link.proxy,
        )

    def rings(self) -> list[Ring]:
        chunks = self.plan.peer_chunk_bytes(self.link_grid().num_ranks_per_domain)
        return [Ring(-(-num_bytes // 128) * 128, self.native.low_latency_buffers, 1) for num_bytes in chunks]

    def rank_of(self, peer: int) -> int:
        return peer

    def check_round(self, seed: int) -> None:
        """Dispatch, experts that return the token's integers plus their own number, combine; every bit is compared."""
        shape, native, rank, plan = self.shape, self.native, self.grid.rank, self.plan
        num_local, capacity = shape.num_experts // shape.num_ranks, self.max_tokens * shape.num_ranks
        rows, topk_idx, weights = self.inputs(seed)
        results = Memory(4 * plan.num_ints_between)
        packed = Memory(num_local * capacity * shape.hidden * self.value_bytes)
        scales = Memory(num_local * capacity * shape.hidden // _CHANNELS_PER_SCALE * 4)
        buffer_idx = seed % native.low_latency_buffers
        call = native.LowLatencyDispatch(
            buffer_idx=buffer_idx,
            rows=rows.address,
            topk_idx=topk_idx.address,
            num_tokens=shape.num_tokens,
            received_rows=packed.address,
            received_scales=_NO_ADDRESS if self.format_name == "NONE" else scales.address,
            results=results.address,
        )
        for halves in (native.Halves.SEND, native.Halves.RECEIVE):
            self.region.dispatch(plan, call, halves, stream=0)
        self.raise_fault()
        experts = Memory(2 * num_local * capacity * shape.hidden)
        for expert in range(num_local):
            first = expert * capacity
            for i, (source, token) in enumerate(self._check_order(expert, results, seed)):
                place = f"row {i} of expert {expert} of rank {rank}, token {token} of rank {source}"
                self.check_row(packed, scales, first + i, capacity, (source, token, seed), place)
                values = [value + rank * num_local + expert for value in _integers(shape, source, token, seed)]
                begin = 2 * shape.hidden * (first + i)
                experts.map[begin : begin + 2 * shape.hidden] = bf16(values)
        out = Memory(2 * shape.hidden * shape.num_tokens)
        call = native.LowLatencyCombine(
            buffer_idx=buffer_idx,
            results=results.address,
            topk_idx=topk_idx.address,
            topk_weights=weights.address,
            num_tokens=shape.num_tokens,
            rows=experts.address,
            out=out.address,
        )
        for halves in (native.Halves.SEND, native.Halves.RECEIVE):
            self.region.combine(plan, call, halves, stream=0)
        self.raise_fault()
        for token in range(shape.num_tokens):
            columns = [
                (shape.weight(rank, k), expert)
                for k, expert in enumerate(shape.topk_idx(rank, token, seed))
                if expert >= 0 and expert // num_local not in self.lost
            ]
            want = [
                _rounded(sum(weight * (value + expert) for weight, expert in columns))
                for value in _integers(shape, rank, token, seed)
            ]
            found = values_of(out.map[2 * shape.hidden * token : 2 * shape.hidden * (token + 1)])
            assert found == want, f"sum of token {token} of rank {rank}: {found}, expected {want}"

    def check_row(
        self, packed: Memory, scales: Memory, row: int, capacity: int, sent: tuple[int, int, int], place: str
    ) -> None:
        """Compares a packed row with the token `sent`: its rank, number and seed."""
        row_bytes = 2 * self.shape.hidden
        assert packed.map[row * row_bytes : (row + 1) * row_bytes] == self.shape.row(*sent), place

    def _check_order(self, expert: int, results: Memory, seed: int) -> list[tuple[int, int]]:
        """Compares what a dispatch tells of an expert's rows; returns the source and token of each row."""
        shape, num_ranks = self.shape, self.shape.num_ranks
        num_local, capacity = shape.num_experts // num_ranks, self.max_tokens * num_ranks
        number = self.grid.rank * num_local + expert
        tokens = [
            [
                token
                for token in range(shape.num_tokens)
                if source not in self.lost and number in shape.topk_idx(source, token, seed)
            ]
            for source in range(num_ranks)
        ]
        begins = list(itertools.accumulate(map(len, tokens), initial=0))
        ranges = [word for those, begin in zip(tokens, begins, strict=False) for word in (len(those), begin)]
        # As csrc/runtime/low_latency.h lays them out.
        counts_begin = 2 * num_local * num_ranks
        src_begin = counts_begin + num_local
        told = memoryview(results.map).cast("i")
        assert list(told[2 * num_ranks * expert :][: 2 * num_ranks]) == ranges, f"ranges of expert {number}"
        assert told[counts_begin + expert] == begins[-1], f"count of expert {number}"
        sources = told[src_begin + capacity * expert :][: begins[-1]]
        want = [(source, token) for source, those in enumerate(tokens) for token in those]
        assert list(sources) == [token for _, token in want], f"tokens of expert {number}"
        return want


class MaskingEnd(LowLatencyEnd):
    """An end of calls that go on without a lost rank: the link joins it to every rank of other domains.

    `LOST_RANK` kills itself between two rounds. The others tell whom they have lost in the next round (``named``), and
    how long that round took (``seconds``).
    """

    def __init__(self, native: Any, rank: int, shape: Shape, shared: Shared, transport: str, timeout_s: float) -> None:
        super().__init__(native, rank, shape, shared, transport, timeout_s)
        self._memory = shared.memory[rank]

    def link_grid(self) -> RankGrid:
        return RankGrid(self.grid.rank, self.grid.num_ranks, 1)

    def link_options(self) -> dict[str, Any]:
        return {"num_near": self.grid.num_ranks_per_domain, "keeps_other_peers": True}

    def check_round(self, seed: int) -> None:
        if seed == _LOST_BEFORE and self.grid.rank == LOST_RANK:
            assert self.link.drain(_DRAIN_S)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            super().check_round(seed)
        except TimeoutError as error:
            if self.lost or error.peer is None:
                raise
            self.lost.add(error.peer)
            self.told |= {"named": error.peer, "seconds": time.monotonic() - begun}
            self._mask()

    def _mask(self) -> None:
        """As the engine does, no other rank stays masked."""
        begin = self.native.low_latency_masks_offset
        words = memoryview(self._memory.map)[begin : begin + 4 * self.shape.num_ranks].cast("i")
        for rank in range(self.shape.num_ranks):
            words[rank] = rank in self.lost


class Fp8End(LowLatencyEnd):
    """An end of low-latency calls of e4m3 rows with float32 scales."""

    format_name = "FLOAT"
    value_bytes = 1
    shape: Fp8Shape

    def check_row(
        self, packed: Memory, scales: Memory, row: int, capacity: int, sent: tuple[int, int, int], place: str
    ) -> None:
        hidden = self.shape.hidden
        want = bytes(_e4m3(value) for value in self.shape.quantised(*sent))
        assert packed.map[row * hidden : (row + 1) * hidden] == want, place
        num_scales, expert, i = hidden // _CHANNELS_PER_SCALE, row // capacity, row % capacity
        found = [
            struct.unpack_from("f", scales.map, 4 * ((expert * num_scales + block) * capacity + i))[0]
            for block in range(num_scales)
        ]
        assert found == self.shape.scales(*sent), f"scales of {place}"


def low_latency_shape(end: type[LowLatencyEnd], num_domains: int, ranks_per_domain: int) -> Shape:
    """The shape of an end's calls: rows of two scales."""
    make = Fp8Shape if end is Fp8End else Shape
    return make(num_domains, ranks_per_domain, hidden=2 * _CHANNELS_PER_SCALE)


def _integers(shape: Shape, rank: int, token: int, seed: int) -> list[int]:
    """What experts take for the token, whatever the format of its row."""
    return [(rank * 5 + token * 3 + i + seed) % 16 for i in range(shape.hidden)]


def _e4m3(value: int) -> int:
    """A non-negative value that e4m3 holds exactly."""
    if value == 0:
        return 0
    mantissa, exponent = math.frexp(value)
    return (exponent - 1 + 7) << 3 | int(16 * mantissa) - 8


def _rounded(value: float) -> float:
    """To bf16, to the nearest, ties to even."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded: float = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]
    return rounded
