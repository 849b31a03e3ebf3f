"""A rank that dies, and a rank that never comes: every survivor names that rank in time, and can go on without it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, TimeoutError, TransportError
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.torch.engine import TorchEngine
from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.battery import low_latency, normal
from tests.battery.cases import Case
from tests.battery.low_latency_masks import check_left_out

TIMEOUT_S = 3.0
CASE = Case("survivors", 4, 16)
VICTIM = 2


@pytest.fixture
def cluster() -> Iterator[VirtualCluster]:
    with VirtualCluster(CASE.num_ranks, variables={"HYBRID_EP_TIMEOUT_S": str(TIMEOUT_S)}) as made:
        yield made


def _lose(case: Case, how: str) -> tuple[str, int | None, float]:
    """Dispatches once with everybody, then once more without the victim. Returns what the survivor was told, and
    when.
    """
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    with normal.make_buffer(case) as buffer:
        normal.dispatch(buffer, case, inputs)
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        begin = time.monotonic()
        try:
            normal.dispatch(buffer, case, inputs)
        except TransportError as error:
            return type(error).__name__, error.peer, time.monotonic() - begin
    return "nothing", None, 0.0


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("num_ranks_per_domain", [None, 2], ids=["one_domain", "two_domains"])
def test_every_survivor_names_the_lost_rank(
    cluster: VirtualCluster, how: str, num_ranks_per_domain: int | None
) -> None:
    case = Case("lost", 4, 16, num_ranks_per_domain=num_ranks_per_domain)
    pid = cluster.process_id(VICTIM)
    survivors = [rank for rank in range(case.num_ranks) if rank != VICTIM]
    try:
        cluster.start(_lose, case, how)
        told = cluster.collect(survivors, limit_s=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for name, peer, waited in told:
        assert name in {TimeoutError.__name__, TransportError.__name__}
        assert peer == VICTIM
        # Two waits at most: its own, and that for a survivor which is itself about to say whom it lost.
        assert waited < 2 * TIMEOUT_S + 2


_STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def _lose_with_a_stopped_store(port: int, process_id: int) -> tuple[list[str], list[int]]:
    """The process of the store stops, and then rank 2 does not come to a dispatch."""
    case, rank = Case("stopped", 3, 16, num_experts=12), dist.get_rank()
    if rank == 3:
        return [], []
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    told, inputs = [], case.inputs(rank)
    buffer = normal.make_buffer(case)
    normal.dispatch(buffer, case, inputs)
    dist.barrier()
    if rank == 0:
        os.kill(process_id, signal.SIGSTOP)
    dist.barrier()
    if rank == VICTIM:
        time.sleep(3 * TIMEOUT_S)
        return [], []
    for _ in range(2):
        with pytest.raises(TransportError) as error:
            normal.dispatch(buffer, case, inputs)
        told.append(str(error.value))
    return told, sorted(buffer.lost)


def test_an_error_says_that_the_store_did_not_answer(cluster: VirtualCluster) -> None:
    with subprocess.Popen([sys.executable, "-c", _STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            cluster.start(_lose_with_a_stopped_store, int(holder.stdout.readline()), holder.pid)
            answers = cluster.collect([0, 1], limit_s=60)
        finally:
            holder.kill()
    for told, lost in answers:
        for text in told:
            assert "the store did not answer; rank 2 stopped answering this rank (" in text
        assert lost == [VICTIM]


def _low_latency_without(case: Case, victim: int) -> tuple[int | None, list[int]]:
    """The victim dies before a low-latency call; the survivors' next call succeeds without it."""
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    with Buffer(low_latency_mode=True, enable_shrink=True) as buffer:
        send = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        buffer.low_latency_dispatch(*send, use_fp8=False)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        blamed = None
        try:
            buffer.low_latency_dispatch(*send, use_fp8=False)
        except TransportError as error:
            blamed = error.peer
        status = torch.zeros(case.num_ranks, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        check_left_out(buffer, case, victim)
    return blamed, status.tolist()


def test_a_dead_rank_is_masked_and_the_others_go_on(cluster: VirtualCluster) -> None:
    survivors = [rank for rank in range(CASE.num_ranks) if rank != VICTIM]
    cluster.start(_low_latency_without, CASE, VICTIM)
    with pytest.raises(RankError) as ended:
        cluster.collect([VICTIM], limit_s=60)
    assert list(ended.value.errors) == [VICTIM]
    for blamed, status in cluster.collect(survivors, limit_s=60):
        assert blamed == VICTIM
        assert status == [int(rank == VICTIM) for rank in range(CASE.num_ranks)]


def _lose_one_after_the_other(case: Case) -> tuple[list[int | None], bool]:
    """Two ranks die, each before a rendezvous; each rendezvous names its own, and the rest goes on."""
    rank, blamed, inputs = dist.get_rank(), [], case.inputs(dist.get_rank())
    with Buffer(low_latency_mode=True, enable_shrink=True) as buffer:
        send = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        first = buffer.low_latency_dispatch(*send, use_fp8=False)[2]
        for victim in (VICTIM, VICTIM + 1):
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(TransportError) as lost:
                buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
            blamed.append(lost.value.peer)  # and masked
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        second = buffer.low_latency_dispatch(*send, use_fp8=False)[2]
    return blamed, second.state.number > first.state.number


def test_meetings_name_the_rank_that_each_has_lost() -> None:
    """A rank that has died is noticed at once: no call waits out its time, which is long, for survivors may be slow."""
    with VirtualCluster(CASE.num_ranks, variables={"HYBRID_EP_TIMEOUT_S": "60"}) as cluster:
        cluster.start(_lose_one_after_the_other, CASE)
        for blamed, call_is_new in cluster.collect([0, 1], limit_s=120):
            assert blamed == [VICTIM, VICTIM + 1]
            assert call_is_new


def _meet_after_loss(timeout_s: float, lag_s: float) -> list[int]:
    """Two ranks lose another, and the last finds that out later than `timeout_s`; returns the masks."""
    rank, victim = dist.get_rank(), 1
    engine = TorchEngine(dist.group.WORLD, RankGrid(rank, 3, 3), timeout_s, lag_s=lag_s)
    engine.allow_masks(only_masks_lost=False)
    for meeting in range(2):
        engine.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            time.sleep(1.5 * timeout_s)
        if meeting == 0:  # rank 0 sees at once that a connection is closed
            with pytest.raises(TransportError) as lost:
                engine.barrier()
            assert lost.value.peer == victim
            engine.leave_out(victim)
        else:
            engine.meet(after_loss=True)
    masks: list[int] = engine.masked().tolist()
    return masks


def test_ranks_wait_for_one_that_finds_a_loss_a_call_later() -> None:
    with VirtualCluster(3) as cluster:
        cluster.start(_meet_after_loss, 4.0, 8.0)
        assert cluster.collect([0, 2], limit_s=60) == [[0, 1, 0]] * 2


def _come_too_late(timeout_s: float, lag_s: float) -> str:
    """A rank does not come after a loss either; returns what the other is told."""
    engine = TorchEngine(dist.group.WORLD, RankGrid(dist.get_rank(), 2, 2), timeout_s, lag_s=lag_s)
    if dist.get_rank() == 1:
        time.sleep(2 * (timeout_s + lag_s))
        return ""
    with pytest.raises(TimeoutError) as lost:
        engine.meet(after_loss=True)
    return str(lost.value)


def test_the_wait_after_a_loss_ends() -> None:
    with VirtualCluster(2) as cluster:
        told = cluster.run(_come_too_late, 2.0, 1.0, limit_s=60)[0]
    assert told.startswith("barrier: header: rank 0 waited 3 s for rank 1: ")


def _wait_in_vain(timeout_s: float) -> None:
    """Rank 1 does not come, and does not end before rank 0 is told."""
    case = Case("alone", 2, 4)
    with normal.make_buffer(case, timeout_s=timeout_s) as buffer:
        if dist.get_rank() == 1:
            time.sleep(600)
        with pytest.raises(TimeoutError, match=r"waited 0\.0002 s for rank 1"):
            normal.dispatch(buffer, case, case.inputs(0))


def test_a_time_below_a_millisecond_is_not_forever() -> None:
    with VirtualCluster(2) as cluster:
        cluster.start(_wait_in_vain, 2e-4)
        cluster.collect([0], limit_s=60)


def _mask_by_hand(case: Case, victim: int) -> list[int]:
    """All agree to leave a rank out, which does not take part; then they take it back in."""
    rank = dist.get_rank()
    with Buffer(low_latency_mode=True, enable_shrink=True) as buffer:
        if rank != victim:
            buffer.low_latency_update_mask_buffer(victim, True)
            check_left_out(buffer, case, victim)
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        status = torch.ones(case.num_ranks, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        inputs = case.inputs(rank)
        _, count, *_ = buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
        )
        assert count.tolist() == [len(rows) for rows in low_latency.expert_copies(case, rank)]
    return status.tolist()


def test_masks_by_hand(cluster: VirtualCluster) -> None:
    for status in cluster.run(_mask_by_hand, CASE, VICTIM):
        assert status == [0] * CASE.num_ranks
