"""Recovery on GPUs: a rank is killed, and the others go on with a new group and buffer, over both engines."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, HybridEPBuffer, TransportError
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.elastic import recover
from hybrid_ep.testing.cluster import VirtualCluster
from tests.multi_process.recovery_trials import Job, factor_of, step

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]
TIMEOUT_S = 10.0
LIMIT_S = 120.0


def _placement(num_ranks: int) -> ExpertPlacement:
    """Two experts of each rank, and a replica of one of the next rank's."""
    layer = [e for r in range(num_ranks) for e in (2 * r, 2 * r + 1, (2 * r + 2) % (2 * num_ranks))]
    return ExpertPlacement((tuple(layer),), 2 * num_ranks, num_ranks, num_ranks)


def _lose(victim: int, calls: str) -> tuple[int, int, list[str], float]:
    """Steps until a rank is killed; returns who was named, the ranks that are left, what was wrong, and seconds."""
    num_ranks = dist.get_world_size()
    buffer: Buffer | HybridEPBuffer
    if calls == "permute":
        buffer = HybridEPBuffer(
            None, 128, 8, 3, num_of_hybrid_ep_ranks_per_nvlink_domain=num_ranks, timeout_s=TIMEOUT_S
        )
    else:
        is_low = calls == "low latency"
        buffer = Buffer(low_latency_mode=is_low, num_ranks_per_domain=num_ranks, timeout_s=TIMEOUT_S)
    job = Job(buffer, _placement(num_ranks))
    wrong, number, begin = [step(job, 0, device="cuda")], 0, time.monotonic()
    named = -1
    while time.monotonic() - begin < LIMIT_S / 2:
        number += 1
        if number == 20 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            wrong.append(step(job, number, device="cuda"))
        except TransportError as error:
            named = -1 if error.peer is None else error.peer
            break
    recovered = recover(job.buffer, job.placement, lambda _, expert: factor_of(expert))
    job.take(recovered)
    wrong += [step(job, number, device="cuda") for number in range(1000, 1003)]
    assert job.placement.unserved == ()
    return named, job.buffer.group_size, [text for text in wrong if text], recovered.report.seconds


@pytest.mark.parametrize("calls", ["normal", "permute", "low latency"])
@pytest.mark.parametrize("engine", ["torch", "cuda"])
def test_ranks_that_share_gpus_go_on(engine: str, calls: str) -> None:
    num_ranks, victim = 4, 1
    with VirtualCluster(
        num_ranks, device="cuda", ranks_share_gpus=True, variables={"HYBRID_EP_ENGINE": engine}
    ) as cluster:
        cluster.start(_lose, victim, calls)
        survivors = [rank for rank in range(num_ranks) if rank != victim]
        for named, num_left, wrong, seconds in cluster.collect(survivors, limit_s=LIMIT_S):
            print(f"{engine}, {calls}: recovered in {seconds:.2f} s")
            assert (named, num_left, wrong) == (victim, num_ranks - 1, [])


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"2 GPUs are needed, {NUM_GPUS} are visible")
def test_an_nccl_group_that_lost_a_rank_is_aborted() -> None:
    """The survivor of two has a group of its own; nothing waits for the communicator of both."""
    with VirtualCluster(2, device="cuda", variables={"HYBRID_EP_ENGINE": "cuda"}) as cluster:
        cluster.start(_lose, 1, "normal")
        ((named, num_left, wrong, seconds),) = cluster.collect([0], limit_s=LIMIT_S)
        print(f"NCCL: recovered in {seconds:.2f} s")
        assert (named, num_left, wrong) == (1, 1, [])
