"""Memory that every rank of a domain can write: the one file that touches torch's symmetric memory.

torch covers POSIX handles inside a node and fabric handles across a multi-node NVLink domain, so no handle code of our
own is needed. Only plain peer pointers are used: multicast stays off, so that a crash can do no harm to a switch that
others share.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.core.streams import is_capturing
from hybrid_ep.errors import ConfigError, TopologyError

# torch reads this when it allocates; a value that the user has set is left alone.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_WHERE = "symmetric memory"
_NO_ANSWER = "no answer within"

# Memory whose last user was freed in a capture. torch waits for the GPU when it frees symmetric memory, which a capture
# forbids: the process would end. The next call that is not captured clears the list.
kept: list[object] = []


@dataclass(frozen=True)
class SymmetricMemory:
    """Memory of the same size at every rank of a group, mapped by all ranks.

    Attributes:
        local: ``[num_bytes]`` uint8, this rank's part; zero at first.
        addresses: where this process sees each rank's part, by rank.
        handle: torch's handle, which keeps the mappings alive; None for a single rank.
    """

    local: Tensor
    addresses: list[int]
    handle: Any

    def __del__(self) -> None:
        if self.local.is_cuda and is_capturing(self.local.device.index):
            kept.append((self.local, self.handle))

    @classmethod
    def allocate(cls, num_bytes: int, roll_call: RollCall, device: torch.device) -> SymmetricMemory:
        """Allocates and maps; collective. When it returns, every rank's part is zero and may be written.

        Args:
            num_bytes: equal at all ranks.
            roll_call: of the ranks.
            device: this rank's GPU.

        Raises:
            ConfigError: a rank asks for another number of bytes, or has not as many free.
            TopologyError: the ranks cannot map each other's memory.
            TimeoutError, TransportError: a rank did not come.
        """
        me = roll_call.ranks[roll_call.rank]
        if roll_call.num_ranks == 1:
            try:
                local = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            except RuntimeError as error:
                raise _lacking(num_bytes, me, str(error)) from error
            return cls(local, [local.data_ptr()], None)
        for rank, theirs in roll_call.gather(f"{_WHERE}: bytes", str(num_bytes)).items():
            if int(theirs) != num_bytes:
                raise ConfigError(
                    f"bytes of symmetric memory are {num_bytes} at rank {me} and {theirs} at rank "
                    f"{rank}; allowed: the same on every rank, hence the same sizes in all calls"
                )
        return cls._map(num_bytes, roll_call, device)

    @classmethod
    def _map(cls, num_bytes: int, roll_call: RollCall, device: torch.device) -> SymmetricMemory:
        import torch.distributed._symmetric_memory as symm_mem

        os.environ.setdefault(_NO_MULTICAST, "1")
        group = roll_call.group
        assert group is not None
        obstacle = ""
        try:
            local = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
            local.zero_()
        except RuntimeError as error:
            obstacle = str(error)
        # A rank whose allocation failed says so to all, before any rank waits for it.
        for rank, theirs in roll_call.gather(f"{_WHERE}: allocation", obstacle).items():
            if theirs:
                raise _lacking(num_bytes, rank, theirs)
        addresses: list[int] = []
        handle = None
        try:
            with torch.cuda.device(device), _limited(group, roll_call.timeout_s):
                handle = symm_mem.rendezvous(local, group)
            # A handle is of an allocation, which may hold more than this tensor.
            offset = local.data_ptr() - handle.buffer_ptrs[roll_call.rank]
            addresses = [address + offset for address in handle.buffer_ptrs]
            torch.cuda.synchronize(device)
        except dist.DistStoreError:
            obstacle = f"{_NO_ANSWER} {roll_call.timeout_s:g} s"
        except RuntimeError as error:
            obstacle = str(error)
        told = roll_call.gather(f"{_WHERE}: mapping", obstacle, others_wait_s=roll_call.timeout_s)
        if obstacles := {rank: text for rank, text in told.items() if text}:
            # A rank whose wait has failed knows less than the rank that it waited for, which is named first.
            rank = min(obstacles, key=lambda rank: obstacles[rank].startswith(_NO_ANSWER))
            raise TopologyError(
                f"the {roll_call.num_ranks} ranks of the group cannot map each other's GPU memory: rank {rank}: "
                f"{obstacles[rank]}; allowed: ranks of one NVLink domain, or HYBRID_EP_ENGINE=torch"
            )
        return cls(local, addresses, handle)


def map_peers_of(roll_call: RollCall, device: torch.device) -> Callable[[int], list[int]]:
    """Returns an allocator of memory that this rank and its peers on one host map (loopback); it keeps the memory."""
    memory: list[SymmetricMemory] = []

    def map_peers(num_bytes: int) -> list[int]:
        memory.append(SymmetricMemory.allocate(num_bytes, roll_call, device))
        return memory[-1].addresses

    return map_peers


def _lacking(num_bytes: int, rank: int, obstacle: str) -> ConfigError:
    return ConfigError(
        f"bytes of symmetric memory are {num_bytes}, which rank {rank} does not have: {obstacle}; allowed: "
        "what is free on every GPU"
    )


@contextlib.contextmanager
def _limited(group: dist.ProcessGroup, timeout_s: float) -> Iterator[None]:
    """Limits waits at the store of a group, through which torch exchanges handles.

    There torch waits for a lost rank as long as the store says, for minutes. It holds Python's lock meanwhile, so no
    other thread could end the wait.
    """
    store = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        store.set_timeout(before)
