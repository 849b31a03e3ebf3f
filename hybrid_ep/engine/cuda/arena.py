"""The receive arena: symmetric memory in equal slots. Results are views of the slots in which their rows arrived.

The rows of a dispatch arrive in a free slot of the pool, and the results are views of that slot: nothing is copied. The
storage of each result holds the slot. When the last view is freed, events are recorded on the streams that have used
it, and the next user of the slot waits for them. If no slot is free, rows arrive in slot 0 and are copied to memory of
torch's allocator. Slot 0 also receives combine's partial rows.

A slot that is taken while a CUDA graph is captured belongs to the graph until the graph is destroyed.

The pool begins with two slots. A rank without a free slot publishes that with its dispatch. All ranks grow their pools
before the same later call (`Communicator.slots_agreed`). Results of the old pool keep its memory while they live.

A call on the communication stream also names the caller's stream as a user of its results. If a result is used on yet
another stream, the caller must keep it until that use has ended: `Tensor.record_stream` does not work on memory that
torch did not allocate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.streams import current_raw_stream, is_capturing
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory, kept
from hybrid_ep.errors import ConfigError

_INITIAL_SLOTS = 2
_INITIAL_SLOT_BYTES = 64 << 20
_GROWTH = 1.25  # a slot that was too small becomes this much larger than what it must hold
_SLOT_ALIGN_BYTES = 2 << 20  # the page size of device memory


class Arena:
    """The slots of one engine; they grow when a call needs more.

    Attributes:
        slots: leases slots to dispatches.

    Args:
        roll_call: of the ranks of the domain.
        device: this rank's GPU.
        communicator: gets the addresses of the slots.
        most_slots: results that may be held at a time without a copy, as this rank wants it.
    """

    def __init__(
        self,
        roll_call: RollCall,
        device: torch.device,
        communicator: _cuda.Communicator,
        most_slots: int,
    ) -> None:
        self._roll_call = roll_call
        self._device = device
        self._communicator = communicator
        self._most_slots = most_slots
        self._captured: list[SymmetricMemory] = []
        self._number = 0  # of the memory, equal at all ranks; a graph keeps its memory, so calls compare it
        self._is_full = False  # no memory for more slots; equal at all ranks
        self.slots = _cuda.Slots(self, communicator, kept)
        self._allocate(_INITIAL_SLOT_BYTES, min(_INITIAL_SLOTS, most_slots))

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    @property
    def num_slots(self) -> int:
        """Results that can be held at a time without a copy."""
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Slots that are free for the next dispatches."""
        return self._pool.num_free

    def holds(self, num_bytes: int) -> bool:
        """Returns whether a slot is at least this large.

        Raises:
            ConfigError: it is not, and a CUDA graph is captured, in which slots cannot grow.
        """
        if num_bytes <= self._slot_bytes:
            return True
        if is_capturing(self._device.index):
            raise ConfigError(
                f"a captured call needs slots of {num_bytes} bytes, and they have {self._slot_bytes}; "
                "allowed: calling once with the same sizes before the capture"
            )
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, including slot 0."""
        return (self._num_slots + 1) * self._slot_bytes

    def ensure(self, num_bytes: int, compare: Callable[[], None] | None = None) -> None:
        """Makes every slot at least this large. Collective where it grows.

        Args:
            num_bytes: the same value at every rank.
            compare: raises where ranks make different calls, some of which may need no growth; called before slots
                grow. None: the ranks have compared their calls.

        Raises:
            TimeoutError: a rank did not come to grow the slots.
            ConfigError: it would have to grow while a CUDA graph is captured.
        """
        if self.holds(num_bytes):
            return
        if compare is not None:
            compare()
        self._replace(int(num_bytes * _GROWTH), self._num_slots)

    def shrink(self) -> None:
        """Gives back what no result holds. Collective.

        Raises:
            TimeoutError: a rank did not come.
            ConfigError: a CUDA graph is captured.
        """
        if is_capturing(self._device.index):
            raise ConfigError("empty_cache is called while a CUDA graph is captured; allowed: before and after it")
        self._replace(_INITIAL_SLOT_BYTES, min(_INITIAL_SLOTS, self._most_slots))
        self._is_full = False

    def grow_pool(self, num_slots: int) -> None:
        """Makes the pool larger, as the ranks have agreed. Collective.

        Raises:
            TimeoutError: a rank did not come to make the pool larger.
        """
        if self._is_full:
            return
        try:
            self._replace(self._slot_bytes, num_slots)
        except ConfigError:
            # Some GPU has no memory left, as every rank knows: results are copied, and no rank tries again.
            self._is_full = True
            self.slots.use(self._pool, 0)

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """See `Engine.record_stream`. Memory of an earlier pool serves no other call."""
        tensor.record_stream(stream)
        assert isinstance(stream, torch.cuda.Stream)
        self._pool.record_stream(tensor.data_ptr(), stream.cuda_stream)

    def _replace(self, slot_bytes: int, num_slots: int) -> None:
        # A peer may still be writing here, and freeing a mapping does not wait for it: so a barrier comes first.
        torch.cuda.synchronize(self._device)
        memory, was_captured = self._memory, self._pool.was_captured
        self._allocate(slot_bytes, num_slots)
        if was_captured:
            self._captured.append(memory)  # graphs have its addresses

    def _allocate(self, slot_bytes: int, num_slots: int) -> None:
        slot_bytes = -(-slot_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES
        # If no memory is left, this raises, and the arena stays as it is.
        self._memory = SymmetricMemory.allocate((num_slots + 1) * slot_bytes, self._roll_call, self._device)
        self._slot_bytes, self._num_slots = slot_bytes, num_slots
        self._number += 1
        wanted = min(max(num_slots + _INITIAL_SLOTS, num_slots * 3 // 2), self._most_slots)
        self._pool = _cuda.SlotMemory(
            base=self._memory.local.data_ptr(),
            slot_bytes=self._slot_bytes,
            num_slots=num_slots + 1,
            device=self._device.index,
            memory=self._memory,
            current_stream=current_raw_stream,
        )
        self.slots.use(self._pool, wanted if wanted > num_slots else 0)
        self._communicator.set_arena(self._memory.addresses, self._slot_bytes, self._number)
