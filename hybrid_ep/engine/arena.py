"""The receive arena: symmetric memory cut into equal slots, and results that are the slots they landed in.

A dispatch lands in a free slot of the pool, and its results are tensors over that slot: nothing is copied. Each such
tensor has its own storage that holds the slot; when the last view dies, the slot goes back in stream order (an event on
the stream that is current then). Where no slot is free, and while a CUDA graph is captured, rows land in slot 0 and are
copied to memory of torch's own allocator. Slot 0 also takes combine's partial rows.

A slot's tensor that is used on a stream other than the one that is current when it dies must be kept until that use has
ended: `Tensor.record_stream` does not reach memory that torch did not allocate.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.engine.symmetric import SymmetricMemory
from hybrid_ep.errors import ConfigError
from hybrid_ep.streams import current_raw_stream

__all__ = ["Arena", "Landing"]

_INITIAL_SLOT_BYTES = 64 << 20
_GROWTH = 1.25  # a slot that was too small becomes this much larger than what it must hold
_SLOT_ALIGN_BYTES = 2 << 20  # the page size of device memory
_DLPACK_CODES = {torch.bfloat16: 4, torch.float32: 2, torch.int32: 0, torch.int64: 0, torch.uint8: 1}


class Landing:
    """Where one dispatch lands: a slot of the pool, or slot 0 to be copied out.

    Attributes:
        slot_idx: 0 = to be copied out.
    """

    def __init__(self, pool: _cuda.SlotPool, memory: Tensor, slot_idx: int, stream: int) -> None:
        self._pool = pool
        self._memory = memory
        self._stream = stream
        self.slot_idx = slot_idx

    def result(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, *, copy: bool = False) -> Tensor:
        """Returns what landed at an offset of the slot.

        Args:
            offset: bytes from the begin of the slot.
            shape: of the result, contiguous.
            dtype: of the result.
            copy: copy out even where the slot could be handed out, so that the result does not hold it.
        """
        carrier = torch.uint8 if dtype.itemsize == 1 else dtype
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, device=self._memory.device)
        if self.slot_idx and not copy:
            capsule = self._pool.tensor(self.slot_idx, offset, shape, _DLPACK_CODES[carrier], 8 * carrier.itemsize)
            tensor = torch._C._from_dlpack(capsule)
        else:
            tensor = torch.empty(shape, dtype=carrier, device=self._memory.device)
            source = self._memory.data_ptr() + self.slot_idx * self._pool.slot_bytes + offset
            _cuda.copy(tensor.data_ptr(), source, tensor.nbytes, self._stream)
        return tensor if carrier is dtype else tensor.view(dtype)

    def in_place(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns what landed at an offset, never a copy; of slot 0 it is only valid until the next call."""
        if self.slot_idx or math.prod(shape) == 0:
            return self.result(offset, shape, dtype)
        flat = self._memory[offset : offset + math.prod(shape) * dtype.itemsize]
        return flat.view(dtype).view(shape)

    def release(self) -> None:
        """Ends the dispatch's own hold; the results that were taken keep the slot."""
        if self.slot_idx:
            self._pool.release(self.slot_idx)
            self.slot_idx = 0


class Arena:
    """The slots of one engine; they grow when a call needs more.

    Args:
        group: the ranks of the domain.
        device: this rank's GPU.
        communicator: is told where the slots are.
        num_slots: results that can be out at a time without a copy.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        communicator: _cuda.Communicator,
        num_slots: int,
    ) -> None:
        self._group = group
        self._device = device
        self._communicator = communicator
        self._num_slots = num_slots + 1
        self._captured: list[SymmetricMemory] = []
        self._is_captured = False
        self._allocate(_INITIAL_SLOT_BYTES)

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    @property
    def num_free(self) -> int:
        """Slots that the next dispatches can hand out."""
        return self._pool.num_free

    def ensure(self, num_bytes: int) -> None:
        """Makes every slot at least this large. Collective where it grows: the same value at every rank.

        Raises:
            ConfigError: it would have to grow while a CUDA graph is captured.
        """
        if num_bytes <= self._slot_bytes:
            return
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"a captured call needs slots of {num_bytes} bytes, and they have {self._slot_bytes}; "
                "allowed: calling once with the same sizes before the capture"
            )
        # A peer may still be writing here, and a freed mapping does not wait for it.
        torch.cuda.synchronize(self._device)
        if self._group is not None:
            dist.barrier(self._group)
        if self._is_captured:
            self._captured.append(self._memory)  # graphs have its addresses
            self._is_captured = False
        self._allocate(int(num_bytes * _GROWTH))

    def land(self, stream: int) -> Landing:
        """Returns where the next dispatch lands."""
        capturing = torch.cuda.is_current_stream_capturing()
        self._is_captured |= capturing
        slot_idx = 0 if capturing else self._pool.take(stream)
        return Landing(self._pool, self._memory.local, slot_idx, stream)

    def note_use(self) -> None:
        """Must be called by other users of slot 0: a captured use keeps the memory for good."""
        self._is_captured |= torch.cuda.is_current_stream_capturing()

    def _allocate(self, slot_bytes: int) -> None:
        self._slot_bytes = -(-slot_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES
        self._memory = SymmetricMemory.allocate(self._num_slots * self._slot_bytes, self._group, self._device)
        self._pool = _cuda.SlotPool(
            base=self._memory.local.data_ptr(),
            slot_bytes=self._slot_bytes,
            num_slots=self._num_slots,
            device=self._device.index,
            memory=self._memory,
            current_stream=current_raw_stream,
        )
        self._communicator.set_arena(self._memory.addresses, self._slot_bytes)
