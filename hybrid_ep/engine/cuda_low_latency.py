"""Low-latency dispatch and combine of the cuda engine; docs/low_latency.md tells how they work and what they reach.

Each call is two launches: one sends, and `finish` receives. Nothing waits for the device, so both can be captured in a
CUDA graph. What a kernel finds wrong (a rank that does not come, an expert that does not exist) is therefore raised
later, by the first `finish` that sees it; until then kernels leave a lost rank out by themselves. A call that raises
has been launched nevertheless, so ranks that notice at different times stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.base import LowLatencyDispatched, LowLatencyHandle, Rows
from hybrid_ep.engine.cuda_route import address, aligned
from hybrid_ep.engine.symmetric import SymmetricMemory
from hybrid_ep.errors import ClosedError, ConfigError, TimeoutError
from hybrid_ep.geometry import RankGrid
from hybrid_ep.quantize import CHANNELS_PER_SCALE, SCALES_PER_WORD, Fp8Format

__all__ = ["CudaLowLatency"]


class _State(NamedTuple):
    """Kept in a LowLatencyHandle.

    Attributes:
        shape: of the dispatch.
        row_of: ``[R, M, K]`` int32; the packed row (expert × M×R + place) of each source's token and column, or −1.
        num_received: ``[R]`` int32; tokens of each source.
    """

    shape: _cuda.LowLatencyShape
    row_of: Tensor
    num_received: Tensor


@dataclass
class _Buffers:
    """Which buffers of one kind are in use: sent into and not yet received from."""

    next_idx: int = 0
    in_flight: tuple[bool, ...] = (False,) * _cuda.low_latency_buffers

    def take(self, what: str) -> int:
        idx = self.next_idx
        if self.in_flight[idx]:
            allowed = f"at most {len(self.in_flight)} whose hook has not been called"
            raise ConfigError(f"{what} calls on their way are {len(self.in_flight) + 1}; allowed: {allowed}")
        self._mark(idx, True)
        self.next_idx = (idx + 1) % len(self.in_flight)
        return idx

    def give_back(self, idx: int) -> None:
        self._mark(idx, False)

    def _mark(self, idx: int, value: bool) -> None:
        self.in_flight = tuple(value if i == idx else old for i, old in enumerate(self.in_flight))


class CudaLowLatency:
    """The low-latency calls over one region of symmetric memory, which is made by the first call and grows.

    Args:
        group: the ranks of the domain; None for a single one.
        grid: its geometry.
        device: this rank's GPU.
        communicator: holds the fault record and the timeout.
        order: orders the next launch after the engine's earlier ones and returns the stream.
        raise_fault: raises what a kernel has found wrong.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        grid: RankGrid,
        device: torch.device,
        communicator: _cuda.Communicator,
        order: Callable[[], int],
        raise_fault: Callable[[], None],
    ) -> None:
        self._group, self._grid, self._device = group, grid, device
        self._communicator, self._order, self._raise_fault = communicator, order, raise_fault
        self._masked: set[int] = set()
        self._memory: SymmetricMemory | None = None
        self._region: _cuda.LowLatencyRegion | None = None
        self._capacity: _cuda.LowLatencyCapacity | None = None
        self._is_captured = False
        self._captured: list[SymmetricMemory] = []
        self._dispatches, self._combines = _Buffers(), _Buffers()

    def dispatch(
        self,
        data: Tensor,
        topk_idx: Tensor,
        num_max_tokens_per_rank: int,
        num_experts: int,
        fp8: Fp8Format | None,
        wait_stats: Tensor | None,
    ) -> LowLatencyDispatched:
        hidden = data.shape[1]
        row_bytes = hidden * data.dtype.itemsize
        if row_bytes % _cuda.row_align_bytes or not 0 < row_bytes <= _cuda.max_row_bytes:
            raise ConfigError(
                f"hidden is {hidden}; allowed with the cuda engine: multiples of "
                f"{_cuda.row_align_bytes // data.dtype.itemsize} up to {_cuda.max_row_bytes // data.dtype.itemsize}"
            )
        if num_experts > _cuda.max_experts:
            raise ConfigError(f"num_experts is {num_experts}; allowed with the cuda engine: ≤ {_cuda.max_experts}")
        shape = _cuda.LowLatencyShape(
            num_experts=num_experts, num_topk=topk_idx.shape[1], hidden=hidden, max_tokens=num_max_tokens_per_rank
        )
        region = self._ensure(shape)
        num_local = num_experts // self._grid.num_ranks
        capacity = num_max_tokens_per_rank * self._grid.num_ranks
        rows = self._empty_packed(num_local, capacity, hidden, fp8)
        count = torch.empty(num_local, dtype=torch.int32, device=self._device)
        layout_range = torch.empty(num_local, self._grid.num_ranks, dtype=torch.int64, device=self._device)
        src_info = torch.empty(num_local, capacity, dtype=torch.int32, device=self._device)
        row_of = torch.empty(capacity, shape.num_topk, dtype=torch.int32, device=self._device)
        num_received = torch.empty(self._grid.num_ranks, dtype=torch.int32, device=self._device)
        handle = LowLatencyHandle(
            src_info,
            layout_range,
            num_max_tokens_per_rank,
            hidden,
            num_experts,
            self._grid,
            _State(shape, row_of, num_received),
        )
        scale_format = _scale_format(fp8)
        buffer_idx = self._dispatches.take("low_latency_dispatch")
        data = aligned(data)
        region.send_tokens(
            shape=shape,
            format=scale_format,
            buffer_idx=buffer_idx,
            rows=data.data_ptr(),
            topk_idx=topk_idx.data_ptr(),
            row_of=row_of.data_ptr(),
            num_tokens=data.shape[0],
            stream=self._order(),
        )

        def finish() -> None:
            self._dispatches.give_back(buffer_idx)
            region.receive_tokens(
                shape=shape,
                format=scale_format,
                buffer_idx=buffer_idx,
                rows=rows.data.data_ptr(),
                scales=address(rows.scales),
                count=count.data_ptr(),
                src_info=src_info.data_ptr(),
                layout_range=layout_range.data_ptr(),
                row_of=row_of.data_ptr(),
                num_received=num_received.data_ptr(),
                wait_stats=address(wait_stats),
                stream=self._order(),
            )
            self._raise_new_fault()

        return LowLatencyDispatched(rows, count, handle, finish)

    def combine(
        self,
        data: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        out: Tensor,
        min_tokens_to_sum: int,
        wait_stats: Tensor | None,
    ) -> Callable[[], None]:
        state: _State = handle.state
        if topk_idx.shape[1] != state.shape.num_topk:
            raise ConfigError(
                f"top-k (columns of topk_idx) is {topk_idx.shape[1]}; allowed: {state.shape.num_topk}, as dispatched"
            )
        region = self._ensure(state.shape)
        buffer_idx = self._combines.take("low_latency_combine")
        data, weights, target = aligned(data), aligned(topk_weights), aligned(out)
        region.return_rows(
            shape=state.shape,
            buffer_idx=buffer_idx,
            rows=data.data_ptr(),
            row_of=state.row_of.data_ptr(),
            num_received=state.num_received.data_ptr(),
            topk_weights=weights.data_ptr(),
            num_tokens=topk_idx.shape[0],
            min_tokens_to_sum=min_tokens_to_sum,
            wait_stats=address(wait_stats),
            stream=self._order(),
        )

        def finish() -> None:
            self._combines.give_back(buffer_idx)
            region.sum_rows(
                shape=state.shape,
                buffer_idx=buffer_idx,
                topk_idx=topk_idx.data_ptr(),
                topk_weights=weights.data_ptr(),
                out=target.data_ptr(),
                num_tokens=topk_idx.shape[0],
                wait_stats=address(wait_stats),
                stream=self._order(),
            )
            if target is not out:
                out.copy_(target)
            self._raise_new_fault()

        return finish

    def set_masked(self, rank: int, masked: bool) -> None:
        (self._masked.add if masked else self._masked.discard)(rank)
        self.upload_masks()

    def upload_masks(self) -> None:
        """Makes the kernels leave out the ranks that the host has masked, and no others."""
        if self._memory is None:
            return
        masks = torch.tensor([int(r in self._masked) for r in range(self._grid.num_ranks)], dtype=torch.int32)
        begin = _cuda.low_latency_masks_offset
        self._order()
        self._memory.local[begin : begin + masks.nbytes].view(torch.int32).copy_(masks)

    def reset(self) -> None:
        """Forgets all calls, so that ranks which have made different ones can begin together; no call is running."""
        self._dispatches, self._combines = _Buffers(), _Buffers()
        if self._memory is not None:
            self._memory.local[: _cuda.low_latency_control_bytes].zero_()
            self.upload_masks()

    def close(self) -> None:
        """Lets go of the engine, whose memory is thereby freed at once; a hook called later raises ClosedError."""
        self._order = self._raise_fault = _refuse

    def _raise_new_fault(self) -> None:
        """Raises what a kernel has found wrong, but a rank that is left out already.

        The receive of a call may have begun to wait for a rank before its send gave that rank up, and tell it again.
        """
        try:
            self._raise_fault()
        except TimeoutError as error:
            if error.peer not in self._masked:
                raise

    def _ensure(self, shape: _cuda.LowLatencyShape) -> _cuda.LowLatencyRegion:
        """Returns the region, made or made larger where it must be: collective then, masked ranks included."""
        needed = shape.capacity(self._grid.num_ranks)
        if self._capacity is None or not self._capacity.covers(needed):
            self._allocate(needed if self._capacity is None else needed.united_with(self._capacity))
        assert self._region is not None
        self._is_captured |= torch.cuda.is_current_stream_capturing()
        return self._region

    def _allocate(self, capacity: _cuda.LowLatencyCapacity) -> None:
        asked = f"a call needs {capacity.region_bytes} bytes of low-latency memory, more than there are"
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(f"{asked}; allowed in a capture: sizes that were called with before it")
        if self._masked or any(self._dispatches.in_flight + self._combines.in_flight):
            raise ConfigError(
                f"{asked}, while ranks {sorted(self._masked)} are masked or a hook has not been called; allowed: the "
                "first call of a size with all ranks and no other call on its way"
            )
        # A peer may still be writing to what is replaced here.
        torch.cuda.synchronize(self._device)
        if self._group is not None:
            dist.barrier(self._group)
        if self._is_captured and self._memory is not None:
            self._captured.append(self._memory)  # graphs have its addresses
            self._is_captured = False
        self._memory = SymmetricMemory.allocate(capacity.region_bytes, self._group, self._device)
        self._region = _cuda.LowLatencyRegion(
            communicator=self._communicator, memory=self._memory.addresses, capacity=capacity
        )
        self._capacity = capacity
        self._dispatches, self._combines = _Buffers(), _Buffers()

    def _empty_packed(self, num_local: int, capacity: int, hidden: int, fp8: Fp8Format | None) -> Rows:
        """Uninitialised packed rows; scales are strided column-major."""
        if fp8 is None:
            return Rows(torch.empty(num_local, capacity, hidden, dtype=torch.bfloat16, device=self._device))
        data = torch.empty(num_local, capacity, hidden, dtype=torch.float8_e4m3fn, device=self._device)
        num_words, dtype = hidden // CHANNELS_PER_SCALE, torch.float32
        if fp8.ue8m0:
            num_words, dtype = -(-num_words // SCALES_PER_WORD), torch.int32
        return Rows(data, torch.empty(num_local, num_words, capacity, dtype=dtype, device=self._device).transpose(1, 2))


def _scale_format(fp8: Fp8Format | None) -> _cuda.ScaleFormat:
    if fp8 is None:
        return _cuda.ScaleFormat.NONE
    if fp8.ue8m0:
        return _cuda.ScaleFormat.UE8M0
    return _cuda.ScaleFormat.POWER_OF_TWO if fp8.round_scale else _cuda.ScaleFormat.FLOAT


def _refuse() -> NoReturn:
    raise ClosedError("the hook of a low-latency call was called after its buffer was closed")
