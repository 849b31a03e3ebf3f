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
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.streams import current_raw_stream, is_capturing
from hybrid_ep.engine.cuda.route import Route
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory, kept
from hybrid_ep.errors import ConfigError

__all__ = ["Arena", "DispatchOutput", "SlotLease"]

_INITIAL_SLOTS = 2
_INITIAL_SLOT_BYTES = 64 << 20
_GROWTH = 1.25  # a slot that was too small becomes this much larger than what it must hold
_SLOT_ALIGN_BYTES = 2 << 20  # the page size of device memory
_IN_GRAPH = -1  # csrc/runtime/communicator.h: kInGraph


class DispatchOutput(NamedTuple):
    """The tensors that a dispatch wrote to a slot and to the memory of its route; None for those that it has not.

    Attributes:
        rows: ``[n, H]``.
        experts: ``[n, K]`` int64 local experts. Experts, weights and scales are here only if rows are by source.
        weights: ``[n, K]`` float32.
        scales: ``[n, …]``.
        rank_prefix: ``[R, R]`` int32. Rank prefix, counts and overflow are here only if the call made its route.
        counts: ``[LE]`` int64, padding included; expert-major only.
        overflow: ``[1]`` int32; expert-major only.
    """

    rows: Tensor
    experts: Tensor | None
    weights: Tensor | None
    scales: Tensor | None
    rank_prefix: Tensor | None
    counts: Tensor | None
    overflow: Tensor | None

    def copied(self) -> DispatchOutput:
        """Returns the output with the tensors of the slot copied to memory of torch's own allocator."""
        experts, weights, scales = (None if tensor is None else tensor.clone() for tensor in self[1:4])
        return self._replace(rows=self.rows.clone(), experts=experts, weights=weights, scales=scales)


class SlotLease:
    """A slot for the rows of a dispatch. The end of a ``with`` block frees it, unless results hold it.

    Attributes:
        slot_idx: of the slot; 0 where none was free.
        is_captured: whether the dispatch becomes part of a CUDA graph.
        slots_wanted: what the dispatch publishes about the pool (`Communicator.dispatch`).
    """

    __slots__ = ("_pool", "is_captured", "slot_idx", "slots_wanted")

    def __init__(self, pool: _cuda.SlotPool, stream: int) -> None:
        self._pool: _cuda.SlotPool | None = pool
        self.slot_idx, self.is_captured = pool.take(stream)
        self.slots_wanted = _IN_GRAPH

    def output(self, plan: _cuda.DispatchPlan, num_rows: int, route: Route) -> DispatchOutput:
        """Returns what a dispatch of this plan wrote; the tensors hold the slot from now on.

        Tensors of slot 0 are valid until the next call only.
        """
        assert self._pool is not None
        output = DispatchOutput(*self._pool.tensors(self.slot_idx, plan, num_rows, route.chunk.memory, route.address))
        self._pool = None
        return output

    def output_between(self, plan: _cuda.DispatchShape, num_rows: int) -> DispatchOutput:
        """Returns the output of a dispatch between domains: the tensors of the slot, without those of the route."""
        assert self._pool is not None
        output = DispatchOutput(*self._pool.tensors_between(self.slot_idx, plan, num_rows))
        self._pool = None
        return output

    def give_back(self) -> None:
        """Frees the slot. May be called again."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.release(self.slot_idx)

    def __enter__(self) -> SlotLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


class Arena:
    """The slots of one engine; they grow when a call needs more.

    Attributes:
        pool: which slots are free.
        is_short: whether the next call publishes that a result was copied; `lease` does.

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
        self.is_short = False
        self._is_full = False  # no memory for more slots; equal at all ranks
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
        return self.pool.num_free

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

    def lease(self, stream: int) -> SlotLease:
        """Returns a slot for the next dispatch on the stream. Collective where the ranks have agreed on more slots.

        Raises:
            TimeoutError: a rank did not come to make the pool larger.
        """
        agreed = self._communicator.slots_agreed(stream)
        if agreed > self._num_slots and not self._is_full:
            try:
                self._replace(self._slot_bytes, agreed)
            except ConfigError:
                # Some GPU has no memory left, as every rank knows: results are copied, and no rank tries again.
                self._is_full = True
        lease = SlotLease(self.pool, stream)
        self.is_short |= lease.slot_idx == 0
        if not lease.is_captured:
            kept.clear()
            lease.slots_wanted = self._more_slots if self.is_short and not self._is_full else 0
            self.is_short = False
        return lease

    def note_use(self, stream: int) -> None:
        """Must be called by other users of slot 0. A captured use keeps the memory for good."""
        self.pool.note_use(stream)

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """See `Engine.record_stream`. Memory of an earlier pool serves no other call."""
        tensor.record_stream(stream)
        assert isinstance(stream, torch.cuda.Stream)
        self.pool.record_stream(tensor.data_ptr(), stream.cuda_stream)

    def _replace(self, slot_bytes: int, num_slots: int) -> None:
        # A peer may still be writing here, and freeing a mapping does not wait for it: so a barrier comes first.
        torch.cuda.synchronize(self._device)
        memory, was_captured = self._memory, self.pool.was_captured
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
        self._more_slots = wanted if wanted > num_slots else 0
        self.pool = _cuda.SlotPool(
            base=self._memory.local.data_ptr(),
            slot_bytes=self._slot_bytes,
            num_slots=num_slots + 1,
            device=self._device.index,
            memory=self._memory,
            current_stream=current_raw_stream,
        )
        self._communicator.set_arena(self._memory.addresses, self._slot_bytes, self._number)
