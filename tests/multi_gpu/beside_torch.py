"""Checks of the nvshmem transport in a process that also uses torch's NVSHMEM backend."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.multi_gpu.behaviour import draw, make_buffer, round_trip


def check_beside_torch(torch_first: bool) -> None:
    """Both work, whichever comes first."""
    symm_mem.set_backend("NVSHMEM")
    if torch_first:
        _use_torch()
    with make_buffer() as buffer:
        round_trip(buffer, draw(1), "first")
        _use_torch()
        round_trip(buffer, draw(2), "second")
    _use_torch()


def _use_torch() -> None:
    """Rank 0 of two puts its memory at rank 1, with torch's own kernel."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    memory = symm_mem.empty(1024, dtype=torch.float32, device="cuda").fill_(float(rank))
    symm_mem.rendezvous(memory, group.group_name)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        torch.ops.symm_mem.nvshmem_put(memory, 1)
    torch.cuda.synchronize()
    dist.barrier()
    assert torch.equal(memory.cpu(), torch.zeros(1024))
