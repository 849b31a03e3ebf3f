"""Buffers over sub-groups, over an mpi4py communicator, and over nothing at all."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, ConfigError, HybridEPBuffer, TransportError
from tests.conftest import RunRanks


def _round_trip(buffer: Buffer) -> bool:
    """Every token to every rank of the buffer and back: the sum is the number of ranks."""
    size = buffer.group_size
    x = torch.randn(5, 16).to(torch.bfloat16)
    topk = torch.arange(size).repeat(5, 1)
    per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, size)
    recv, *_, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_domain,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk,
    )
    assert recv.shape == (5 * size, 16)
    return torch.equal(buffer.combine(recv, handle)[0], (x.float() * size).to(torch.bfloat16))


def _in_subgroups() -> bool:
    """Two groups at once, with ranks that are not their global ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[rank % 2]
    with Buffer(mine) as buffer, Buffer() as everybody:
        assert (buffer.rank, buffer.group_size) == (dist.get_rank(mine), 2)
        return _round_trip(buffer) and _round_trip(everybody) and _round_trip(buffer)


def test_subgroups(run_ranks: RunRanks) -> None:
    assert all(run_ranks(4, _in_subgroups))


def test_a_single_rank_needs_no_process_group() -> None:
    with Buffer() as buffer, HybridEPBuffer(None, 16, 5, 4) as hybrid:
        assert _round_trip(buffer)
        topk = torch.tensor([[0, 3]] * 5)
        x = torch.randn(5, 16).to(torch.bfloat16)
        permuted, _, _, counts, handle = hybrid.dispatch_with_permute(hidden=x, topk_idx=topk)
        assert counts.tolist() == [5, 0, 0, 5]
        home, _ = hybrid.combine_with_unpermute(hidden=permuted, handle=handle)
        assert torch.equal(home.float(), 2 * x.float())


class _Wrapper(dist.ProcessGroup):
    """A group that is destroyed and made again under one object, as programs of reinforcement learning have."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.inner = ranks, dist.new_group(ranks)
        super().__init__(self.inner.rank(), self.inner.size())

    def rank(self) -> int:
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()

    def allgather(self, *tensors: Any, **options: Any) -> Any:
        return self.inner.allgather(*tensors, **options)

    def destroy(self) -> None:
        dist.destroy_process_group(self.inner)
        del self.inner


def _on_a_wrapper() -> str:
    """A buffer lives on when its group is destroyed and made again; a second one is made on the new group."""
    group = _Wrapper([1, 0])
    with Buffer(group) as buffer:
        assert (buffer.group, buffer.rank, buffer.group_size) == (group, group.rank(), 2)
        assert _round_trip(buffer)
        group.destroy()
        assert _round_trip(buffer)
        group.inner = dist.new_group(group.ranks)
        with HybridEPBuffer(group, 16, 5, 1) as second:
            assert second.registered_group is buffer.registered_group
        assert _round_trip(buffer)
    lonely, told = _Wrapper([0, 1]), ""
    if dist.get_rank() == 0:
        with pytest.raises(TransportError) as error:
            Buffer(lonely, timeout_s=1)
        told = str(error.value)
    dist.barrier()
    return told


def test_a_group_that_is_wrapped(run_ranks: RunRanks) -> None:
    told, _ = run_ranks(2, _on_a_wrapper)
    assert "gathering among the 2 ranks of a group" in told
    assert "within 1 s" in told


def _without_registry(rank: int, port: int, results: Any) -> None:
    """A group that torch's registry does not know, in a process that has no other."""
    store = dist.PrefixStore("stateless", dist.TCPStore("127.0.0.1", port, 2, is_master=False))
    group = dist.ProcessGroup(store, rank, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with Buffer(group) as buffer, Buffer(group, num_ranks_per_domain=1) as second:
        results[rank] = _round_trip(buffer) and _round_trip(second)
    assert not dist.is_initialized()


def test_a_group_outside_of_the_registry() -> None:
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    with context.Manager() as manager:
        results = manager.dict()
        processes = [context.Process(target=_without_registry, args=(rank, store.port, results)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        assert dict(results) == {0: True, 1: True}


class _Communicator:
    """The three methods of an mpi4py communicator that are used, between processes of this machine."""

    def __init__(self, rank: int, size: int, shared: Any, barrier: Barrier) -> None:
        self._rank, self._size, self._shared, self._barrier = rank, size, shared, barrier
        self._round = 0

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._size

    def allgather(self, value: Any) -> list[Any]:
        self._round += 1
        self._shared[self._round, self._rank] = value
        self._barrier.wait(60)
        return [self._shared[self._round, rank] for rank in range(self._size)]


def _over_communicator(rank: int, size: int, shared: Any, barrier: Barrier, results: Any) -> None:
    torch.set_num_threads(1)
    comm = _Communicator(rank, size, shared, barrier)
    with Buffer(comm=comm) as buffer:
        assert (buffer.rank, buffer.group_size) == (rank, size)
        results[rank] = _round_trip(buffer)
    with pytest.raises(ConfigError, match="group and comm are both given"):
        Buffer(dist.group.WORLD, comm=comm)
    with pytest.raises(ConfigError, match="comm has rank 0 of 1; allowed beside this process group"):
        Buffer(comm=_Communicator(0, 1, shared, barrier))


def test_a_communicator_instead_of_a_group() -> None:
    context = multiprocessing.get_context("forkserver")
    with context.Manager() as manager:
        shared, results, barrier = manager.dict(), manager.dict(), context.Barrier(3)
        processes = [
            context.Process(target=_over_communicator, args=(rank, 3, shared, barrier, results)) for rank in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert dict(results) == {0: True, 1: True, 2: True}
