"""Recovery and joining, one thing at a time; `recovery_trials` does it at random."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from hybrid_ep import Buffer, HybridEPBuffer, TopologyError, TransportError
from hybrid_ep.agree.board import Board
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.elastic import join, recover, waiting
from hybrid_ep.elastic.group import make_group
from hybrid_ep.errors import ConfigError, TimeoutError
from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.multi_process.recovery_trials import Job, factor_of, step
from tests.multi_process.torchrun import run_ranks

NUM_RANKS, VICTIM = 4, 2
TIMEOUT_S = 3.0
# Expert 4 is on the victim alone; 5 is also on rank 3.
PLACEMENT = ExpertPlacement(((0, 1, 7, 2, 3, 0, 4, 5, 1, 6, 7, 5),), 8, NUM_RANKS, NUM_RANKS)


@pytest.fixture
def cluster() -> Iterator[VirtualCluster]:
    with VirtualCluster(NUM_RANKS) as made:
        yield made


_jobs: list[Job] = []  # of this rank's process


def _lose(victim: int, **options: Any) -> Job:
    """Makes a step with everybody; then the victim dies, and the others are told."""
    job = Job(Buffer(timeout_s=TIMEOUT_S, **options), PLACEMENT)
    assert step(job, 0) == ""
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError):
        step(job, 1)
    return job


def _load(layer: int, expert: int) -> float:
    if expert == 4:
        raise OSError("no such file")
    return factor_of(expert)


def _load_all(layer: int, expert: int) -> float:
    return factor_of(expert)


def _lose_and_go_on() -> tuple[Any, ...]:
    """Goes on without the victim and without its expert."""
    _jobs[:] = [_lose(VICTIM)]
    job = _jobs[0]
    job.take(recover(job.buffer, job.placement))
    assert step(job, 2) == ""
    return job.ranks, job.placement.unserved


def _let_in() -> tuple[Any, ...]:
    """Goes on with a new rank, which has the expert."""
    job, begin = _jobs[0], time.monotonic()
    while not waiting(job.buffer):
        assert time.monotonic() - begin < 60
        time.sleep(0.05)
    recovered = recover(job.buffer, job.placement, _load_all)
    job.take(recovered)
    assert waiting(job.buffer) == 0
    assert step(job, 3) == ""
    return job.ranks, job.placement.unserved, recovered.report.lost


def _come(port: int) -> tuple[Any, ...]:
    recovered = join(TCPStore("127.0.0.1", port, None, is_master=False), _load_all)
    buffer, placement, report = recovered
    job = Job(buffer, placement)
    assert job.factors == [report.loaded[0, slot] for slot in range(placement.num_slots)]
    _jobs[:] = [job]
    assert step(job, 3) == ""
    return report.ranks, report.lost


def _lose_once_more(victim: int) -> tuple[int, ...]:
    """The job in which a rank has come loses another one."""
    job = _jobs[0]
    if job.buffer.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError):
        step(job, 4)
    job.take(recover(job.buffer, job.placement, _load_all))
    assert step(job, 5) == ""
    return tuple(job.placement.experts[0])


def test_a_rank_is_lost_and_another_comes(cluster: VirtualCluster) -> None:
    survivors = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
    cluster.start(_lose_and_go_on)
    with pytest.raises(RankError):
        cluster.collect([VICTIM], limit_s=60)
    assert cluster.collect(survivors, limit_s=60) == [((0, 1, 3), ((4,),))] * 3
    cluster.replace(VICTIM)
    cluster.start(_let_in, ranks=survivors)
    cluster.start(_come, cluster.port, ranks=[VICTIM])
    assert cluster.collect(survivors, limit_s=60) == [((0, 1, 3, -1), (), ())] * 3
    (came,) = cluster.collect([VICTIM], limit_s=60)
    assert came == ((0, 1, 2, None), ())
    # Ranks are now 0, 1, 3 and the new one; rank 1 of them dies.
    cluster.start(_lose_once_more, 1)
    placements = cluster.collect([0, VICTIM, 3], limit_s=60)
    assert len(set(placements)) == 1


def _name_what_cannot_be_loaded() -> tuple[Any, ...]:
    job = _lose(VICTIM)
    recovered = recover(job.buffer, job.placement, _load)
    job.take(recovered)
    assert step(job, 2) == ""
    return recovered.report.unserved, recovered.report.failed


def test_an_expert_that_cannot_be_loaded_is_named(cluster: VirtualCluster) -> None:
    cluster.start(_name_what_cannot_be_loaded)
    told = cluster.collect([rank for rank in range(NUM_RANKS) if rank != VICTIM], limit_s=60)
    for unserved, failed in told:
        assert unserved == ((0, 4),)
        ((where, why),) = failed.items()
        assert where == (0, 4)
        assert why.endswith("OSError: no such file")
    assert len({tuple(failed.items()) for _, failed in told}) == 1


def _disagree() -> str:
    """Ranks that do not want the same are told the same, and can go on once they do."""
    job = _lose(VICTIM)
    with pytest.raises(ConfigError) as refused:
        recover(job.buffer, job.placement, max_slots=3 + (dist.get_rank() == 3))
    job.take(recover(job.buffer, job.placement))
    assert step(job, 2) == ""
    return str(refused.value)


def test_ranks_that_disagree_are_told_the_same(cluster: VirtualCluster) -> None:
    cluster.start(_disagree)
    told = cluster.collect([rank for rank in range(NUM_RANKS) if rank != VICTIM], limit_s=60)
    assert set(told) == {"max_slots differs between ranks 0 and 3; allowed: the same on every rank"}


def _grow_apart() -> int:
    """Ranks have sent different numbers of tokens, more than they said at first."""
    num_tokens = 4 + 20 * dist.get_rank()
    x, topk_idx = torch.ones(num_tokens, 128).bfloat16(), torch.zeros(num_tokens, 1, dtype=torch.int64)
    buffer = HybridEPBuffer(None, 128, 4, 2, timeout_s=TIMEOUT_S)
    buffer.dispatch_with_permute(hidden=x, topk_idx=topk_idx, num_of_experts=8)
    placement = ExpertPlacement.contiguous(1, 8, NUM_RANKS)
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError):
        buffer.dispatch_with_permute(hidden=x, topk_idx=topk_idx, num_of_experts=8)
    return recover(buffer, placement).buffer.group_size


def test_ranks_with_different_numbers_of_tokens_recover(cluster: VirtualCluster) -> None:
    cluster.start(_grow_apart)
    survivors = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
    assert cluster.collect(survivors, limit_s=60) == [3] * 3


def _lose_two_with_two_buffers() -> list[tuple[int, ...]]:
    """Both buffers of a group go on after a loss, each with a group of its own, and again after another."""
    jobs = [Job(Buffer(timeout_s=TIMEOUT_S), PLACEMENT) for _ in range(2)]
    for number, victim in enumerate((VICTIM, 3)):
        assert [step(job, number) for job in jobs] == ["", ""]
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for job in jobs:
            with pytest.raises(TransportError):
                step(job, number)
        for job in jobs:
            job.take(recover(job.buffer, job.placement, _load_all))
    assert [step(job, 2) for job in jobs] == ["", ""]
    return [job.ranks for job in jobs]


def test_two_buffers_of_a_group_recover_twice(cluster: VirtualCluster) -> None:
    cluster.start(_lose_two_with_two_buffers)
    assert cluster.collect([0, 1], limit_s=90) == [[(0, 1), (0, 1)]] * 2


def _store_of(port: int, name: str) -> PrefixStore:
    return PrefixStore(name, TCPStore("127.0.0.1", port, None, is_master=False))


def _recover_in_a_new_group(port: int, name: str, rank: int, lost: tuple[int, ...]) -> tuple[int, ...]:
    """Leaves the process group for a new one of all ranks, in which those that are not `lost` recover."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=_store_of(port, name), rank=rank, world_size=NUM_RANKS)
    job = Job(Buffer(timeout_s=TIMEOUT_S), PLACEMENT)
    assert step(job, 0) == ""
    if rank not in lost:
        job.take(recover(job.buffer, job.placement, _load_all, lost=lost))
        assert step(job, 1) == ""
    return job.ranks


def _recover_in_new_groups(cluster: VirtualCluster, name: str, lost: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    for rank in range(NUM_RANKS):
        cluster.start(_recover_in_a_new_group, cluster.port, name, rank, lost, ranks=[rank])
    return cluster.collect(limit_s=60)


def test_processes_that_have_recovered_make_a_group_with_a_new_one(cluster: VirtualCluster) -> None:
    cluster.start(_lose_and_go_on)
    with pytest.raises(RankError):
        cluster.collect([VICTIM], limit_s=60)
    cluster.collect([rank for rank in range(NUM_RANKS) if rank != VICTIM], limit_s=60)
    cluster.replace(VICTIM)
    assert _recover_in_new_groups(cluster, "second") == [(0, 1, 2, 3)] * NUM_RANKS


def _forget_connections(port: int, name: str) -> None:
    """Removes what torch has left in a store: gloo would take old addresses for new ones."""
    store = _store_of(port, name)
    for key in store.underlying_store.list_keys():
        if "hybrid_ep" not in key:
            store.underlying_store.delete_key(key)


def test_a_store_serves_one_group_after_the_other(cluster: VirtualCluster) -> None:
    assert _recover_in_new_groups(cluster, "again", lost=(3,))[0] == (0, 1, 2)
    cluster.run(_forget_connections, cluster.port, "again", ranks=[0], limit_s=60)
    assert _recover_in_new_groups(cluster, "again") == [(0, 1, 2, 3)] * NUM_RANKS


def _divide() -> tuple[str, int]:
    """What is left of two domains cannot be domains of 2; it can be domains of 1."""
    placement = ExpertPlacement(PLACEMENT.experts, 8, NUM_RANKS, 2)
    job = Job(Buffer(timeout_s=TIMEOUT_S, num_ranks_per_domain=2), placement)
    assert step(job, 0) == ""  # all have connected
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError):
        step(job, 1)
    with pytest.raises(TopologyError) as refused:
        recover(job.buffer, job.placement, num_ranks_per_domain=2)
    recovered = recover(job.buffer, job.placement)
    job.take(recovered)
    assert step(job, 2) == ""
    return str(refused.value), recovered.buffer.grid.num_domains


def test_domains_that_do_not_fit_are_refused(cluster: VirtualCluster) -> None:
    cluster.start(_divide)
    for told in cluster.collect([rank for rank in range(NUM_RANKS) if rank != VICTIM], limit_s=60):
        assert told == (
            "num_ranks_per_domain is 2, with domains of [2, 1] ranks left; allowed: [1], which divide each",
            3,
        )


def _go_on_by_masks() -> list[str]:
    """Low-latency calls go on with the same buffer: the lost rank is masked, and the placement leaves it out."""
    job = Job(Buffer(timeout_s=TIMEOUT_S, low_latency_mode=True, enable_shrink=True), PLACEMENT)
    buffer = job.buffer
    assert step(job, 0) == ""
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError) as lost:
        step(job, 1)
    assert lost.value.peer is not None
    job.placement = job.placement.without([lost.value.peer])
    wrong = [step(job, number) for number in (2, 3)]
    assert job.buffer is buffer
    assert job.placement.unserved == ((4,),)
    return wrong


def test_low_latency_goes_on_by_masks(cluster: VirtualCluster) -> None:
    cluster.start(_go_on_by_masks)
    survivors = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
    assert cluster.collect(survivors, limit_s=60) == [["", ""]] * len(survivors)


def _lose_another_while_connecting(sent: signal.Signals) -> tuple[int, ...]:
    """Rank 3 dies; then rank 2 is lost while it connects, and gloo holds rank 1 for five times the limit."""
    job = _lose(3)
    connect = c10d.ProcessGroupGloo

    def connect_as_rank(*given: Any, timeout: timedelta) -> Any:
        c10d.ProcessGroupGloo = connect  # type: ignore[misc]  # the next attempt is a usual one
        if job.buffer.rank == 2:
            os.kill(os.getpid(), sent)
        if job.buffer.rank == 1:
            time.sleep(5 * timeout.total_seconds())
        return connect(*given, timeout=timeout)

    c10d.ProcessGroupGloo = connect_as_rank  # type: ignore[assignment,misc]
    job.take(recover(job.buffer, job.placement, _load_all))
    assert step(job, 2) == ""
    return job.ranks


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda sent: sent.name)
def test_another_is_lost_while_they_connect(cluster: VirtualCluster, sent: signal.Signals) -> None:
    """Where a peer is lost, gloo tries again, and may hold one survivor for longer than another."""
    cluster.start(_lose_another_while_connecting, sent)
    try:
        assert cluster.collect([0, 1], limit_s=60) == [(0, 1)] * 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(cluster.process_id(2), signal.SIGKILL)


def _recover_apart() -> tuple[str, tuple[int, ...]]:
    """Ranks 1 and 2 do not reach each other, though both reach the store. Then rank 2 gives up."""
    job = _lose(3)
    connect = c10d.ProcessGroupGloo

    def connect_apart(*given: Any, timeout: timedelta) -> Any:
        if given[2] == 3:
            raise RuntimeError("Connection refused")
        c10d.ProcessGroupGloo = connect  # type: ignore[misc]
        return connect(*given, timeout=timeout)

    if job.buffer.rank in (1, 2):
        c10d.ProcessGroupGloo = connect_apart  # type: ignore[assignment,misc]
    with pytest.raises(TransportError) as apart:
        recover(job.buffer, job.placement, _load_all, timeout_s=1.0)
    if job.buffer.rank != 2:
        job.take(recover(job.buffer, job.placement, _load_all, lost=(2, 3)))
        assert step(job, 2) == ""
    return str(apart.value), job.ranks


def test_ranks_that_a_partition_separates_are_told_so(cluster: VirtualCluster) -> None:
    cluster.start(_recover_apart)
    for told, ranks in cluster.collect([0, 1], limit_s=120):
        assert "Connection refused; all of these ranks reach the store, and some cannot reach each other" in told
        assert ranks == (0, 1)


def _recover_late(lag_s: float) -> tuple[int, ...]:
    """Rank 1 notices the loss by the timeout of a call that it begins when the others already recover."""
    job = _lose(3)
    job.buffer.lag_s = lag_s
    if job.buffer.rank == 1:
        time.sleep(TIMEOUT_S + 1 + lag_s)
    job.take(recover(job.buffer, job.placement, _load_all))
    return job.ranks


@pytest.mark.parametrize("lag_s", [0.0, 2.5])
def test_a_survivor_that_notices_at_its_timeout_is_awaited(cluster: VirtualCluster, lag_s: float) -> None:
    cluster.start(_recover_late, lag_s)
    assert cluster.collect([0, 1, 2], limit_s=60) == [(0, 1, 2)] * 3


def _make_no_buffer() -> str:
    """One survivor can make no buffer; the other ones are told why."""
    job = _lose(3)
    if job.buffer.rank == 1:

        def refuse(*given: Any) -> Any:
            raise ConfigError("no memory is left")

        Buffer.over = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(TransportError) as failed:
        recover(job.buffer, job.placement)
    return failed.value.detail


def test_why_no_buffer_could_be_made_is_told(cluster: VirtualCluster) -> None:
    cluster.start(_make_no_buffer)
    wanted = "5 attempts have failed, the last at rank 1 of the new group: no memory is left"
    assert cluster.collect([0, 1, 2], limit_s=90) == [wanted] * 3


def _connect_too_late() -> bool:
    """A group that gloo connects after its limit is given up; returns whether torch has forgotten it."""
    connect, name = c10d.ProcessGroupGloo, "hybrid_ep.elastic/late"

    def connect_late(*given: Any, timeout: timedelta) -> Any:
        time.sleep(2)
        return connect(*given, timeout=timeout)

    c10d.ProcessGroupGloo = connect_late  # type: ignore[assignment,misc]
    board = Board(dist.distributed_c10d._get_default_store(), "late")
    with pytest.raises(RuntimeError, match=r"the group has not connected within 0\.5 s"):
        make_group(board, name, [0], 0, parent=dist.group.WORLD, backend="gloo", timeout_s=0.5)
    c10d.ProcessGroupGloo = connect  # type: ignore[misc]
    (thread,) = (one for one in threading.enumerate() if one.name == "hybrid_ep connects")
    thread.join(30)
    assert not thread.is_alive()
    return name not in c10d._world.pg_names.values()


def test_a_group_that_is_connected_too_late_is_given_up() -> None:
    with VirtualCluster(1) as cluster:
        assert cluster.run(_connect_too_late, limit_s=90) == [True]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"timeout_s": 0}, "^timeout_s is 0; allowed: a number of seconds > 0"),
    ({"load_timeout_s": "long"}, "^load_timeout_s is 'long'; allowed: a number of seconds > 0"),
    ({"num_ranks_per_domain": 0}, "^num_ranks_per_domain is 0; allowed: an integer ≥ 1"),
    ({"max_slots": "all"}, "^max_slots is 'all'; allowed: an integer ≥ 1"),
    ({"lost": 1}, "^lost is 1; allowed: ranks of 0 … 1"),
    ({"lost": [7]}, r"^lost is \[7\]; allowed: ranks of 0 … 1"),
]


def _refuse() -> None:
    with pytest.raises(ConfigError, match="the buffer has 1 rank; allowed: ≥ 2"):
        recover(Buffer(dist.new_group([dist.get_rank()], use_local_synchronization=True)), PLACEMENT)
    buffer = Buffer()
    with pytest.raises(ConfigError, match="placement is NoneType; allowed: an ExpertPlacement"):
        recover(buffer, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ranks of placement is 3; allowed: 2"):
        recover(buffer, ExpertPlacement.contiguous(1, 3, 3))
    fits = ExpertPlacement.contiguous(1, 2, 2)
    with pytest.raises(ConfigError, match="load_expert is 3; allowed: a function or None"):
        recover(buffer, fits, 3)  # type: ignore[arg-type]
    for options, message in BAD_OPTIONS:
        with pytest.raises(ConfigError, match=message):
            recover(buffer, fits, **options)
    with pytest.raises(ConfigError, match="buffer is NoneType; allowed: Buffer or HybridEPBuffer"):
        recover(None, fits)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="buffer is str; allowed: Buffer or HybridEPBuffer"):
        waiting("buffer")  # type: ignore[arg-type]
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(ConfigError, match="load_expert is None; allowed: a function"):
        join(store, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"store is str; allowed: a torch\.distributed\.Store"):
        join("tcp://host:1", _load)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="job is 3; allowed: a str"):
        join(store, _load, job=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s is '600'; allowed: a number of seconds > 0"):
        join(store, _load, timeout_s="600")  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="no rank has admitted it"):
        join(store, _load, job="another", timeout_s=0.2)
    assert waiting(buffer) == 0


def test_arguments_that_do_not_fit_are_refused() -> None:
    with VirtualCluster(2) as cluster:
        cluster.run(_refuse, limit_s=60)


def test_torchrun_starts_a_job_again(tmp_path: Path) -> None:
    """docs/elastic.md: with stores of their own, attempts do not find each other's addresses."""
    path = tmp_path / "placement.json"
    job = ["-m", "tests.multi_process.restarted_job", str(path)]
    told = run_ranks(job, 3, tmp_path / "logs", max_restarts=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    experts = ExpertPlacement.load(path).experts[0]
    assert told == [f"rank {rank} is right with placement {experts}\n" for rank in range(3)]
