"""Copies of experts to spare slots by the kernels of one domain, and memory for spare slots that peers can write."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_ep import _cuda
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.engine.calls import ExpertCopies
from hybrid_ep.engine.cuda.arena import Arena
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.errors import ConfigError


class ExpertCopier:
    """The calls of one engine.

    Args:
        roll_call: of the ranks of the domain.
        device: this rank's GPU.
        communicator: launches the kernels, and gets the addresses of the memory.
        arena: stages experts for other memory.
    """

    def __init__(
        self, roll_call: RollCall, device: torch.device, communicator: _cuda.Communicator, arena: Arena
    ) -> None:
        self._roll_call, self._device, self._communicator, self._arena = roll_call, device, communicator, arena
        self._spare: list[tuple[SymmetricMemory, Tensor]] = []  # and the addresses by rank, which kernels read

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory for spare slots."""
        return sum(memory.local.nbytes for memory, _ in self._spare)

    def allocate(self, num_bytes: int) -> Tensor:
        """As `Engine.allocate_spare`."""
        if is_capturing(self._device.index):
            raise ConfigError(
                f"{num_bytes} bytes of spare slots are to be allocated in a capture; allowed: calling once with the "
                "same sizes before it"
            )
        memory = SymmetricMemory.allocate(max(num_bytes, 1), self._roll_call, self._device)
        addresses = torch.tensor(memory.addresses, dtype=torch.int64, device=self._device)
        torch.cuda.synchronize(self._device)  # calls may be on any stream
        self._spare.append((memory, addresses))
        self._communicator.add_peer_memory(memory.local.data_ptr(), num_bytes, addresses.data_ptr())
        return memory.local[:num_bytes]

    def copy(self, copies: ExpertCopies, stream: int, compare: Callable[[Callable[[], None]], None]) -> None:
        """Launches a copy.

        Args:
            copies: with at most `_cuda.max_replicas` spare slots of all ranks.
            stream: of the launch.
            compare: makes the launch that it is given, and raises where ranks make different calls; called before
                the arena grows.
        """
        spare, experts, mapping, num_sms = copies
        num_slots = mapping.shape[1]
        tensors = [
            (ours.data_ptr(), theirs.data_ptr(), num_bytes)
            for ours, theirs, num_bytes in zip(experts, spare, copies.item_bytes, strict=True)
        ]
        launch = functools.partial(
            self._communicator.copy_experts,
            tensors=tensors,
            mapping=mapping.data_ptr(),
            num_slots=num_slots,
            num_local=experts[0].shape[0],
            num_sms=num_sms or 0,
            stream=stream,
        )
        num_bytes = self._communicator.staging_bytes(tensors, num_slots)
        self._arena.ensure(num_bytes, lambda: compare(lambda: launch(only_compares=True)))
        self._arena.slots.note_use(stream)
        launch(only_compares=False)
