"""The end of buffers, of their groups and of processes: destroyed groups, forked children, threads, late ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer, ClosedError, ConfigError, ElasticBuffer, HybridEPBuffer, TimeoutError, TransportError
from hybrid_ep.agree.board import Board, StoreLostError
from hybrid_ep.engine.torch import exchange, link
from hybrid_ep.nn import MoELayer
from hybrid_ep.testing.cluster import VirtualCluster
from tests.battery import normal
from tests.battery.cases import Case
from tests.battery.low_latency_masks import check_left_out

TIMEOUT_S = 5.0
CASE = Case("life", 2, 8)


@pytest.fixture
def two() -> Iterator[VirtualCluster]:
    with VirtualCluster(2, variables={"HYBRID_EP_TIMEOUT_S": "60"}) as made:
        yield made


def _destroy_group() -> tuple[str, str]:
    inputs = CASE.inputs(dist.get_rank())
    subgroup = dist.new_group([0, 1])
    told = []
    for group in (subgroup, dist.group.WORLD):
        buffer = Buffer(group)
        normal.dispatch(buffer, CASE, inputs)
        dist.barrier()
        dist.destroy_process_group(group)
        with pytest.raises(ClosedError, match="used after its process group was destroyed") as error:
            normal.dispatch(buffer, CASE, inputs)
        told.append(str(error.value))
        buffer.close()
        buffer.close()
    return told[0], told[1]


def test_a_destroyed_group_closes_its_buffers(two: VirtualCluster) -> None:
    for rank, told in enumerate(two.run(_destroy_group)):
        after = f"Buffer of rank {rank} was used after its process group was destroyed"
        assert told == (f"{after}; allowed: a new process group and a buffer of it",) * 2


def _fork() -> tuple[int, str, bool]:
    """A forked child uses the buffer, is told so, and ends; the parent goes on."""
    inputs = CASE.inputs(dist.get_rank())
    with Buffer() as buffer:
        normal.dispatch(buffer, CASE, inputs)
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                normal.dispatch(buffer, CASE, inputs)
            except ClosedError as error:
                os.write(writable, str(error).encode())
            del buffer
            os._exit(7)
        os.close(writable)
        _, status = os.waitpid(child, 0)
        told = os.read(readable, 4096).decode()
        received, _, _, _, handle, _ = normal.dispatch(buffer, CASE, inputs)
        buffer.combine(received, handle)
    return os.waitstatus_to_exitcode(status), told, bool(handle.num_recv)


def _make_and_close(num_buffers: int) -> list[tuple[int, int]]:
    """The threads and the open files of this rank after each `close`."""
    case, held = Case("life", 2, 4), []
    for _ in range(num_buffers):
        with Buffer(engine="torch") as buffer:
            normal.dispatch(buffer, case, case.inputs(dist.get_rank()))
        held.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return held


def test_a_closed_buffer_holds_no_threads_and_no_sockets(two: VirtualCluster) -> None:
    for held in two.run(_make_and_close, 6):
        threads, files = zip(*held, strict=True)
        assert max(threads) - min(threads) <= 1, held  # that of an access to the store may still end
        assert len(set(files)) == 1, held


def test_a_forked_child_is_told_so(two: VirtualCluster) -> None:
    for rank, (code, told, goes_on) in enumerate(two.run(_fork)):
        assert code == 7
        assert told.startswith(f"Buffer of rank {rank} was made in process")
        assert "allowed: a process group and a buffer made in the child" in told
        assert goes_on


_NEVER_CLOSED = """
import sys
import torch
import torch.distributed as dist
import hybrid_ep

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, is_master=False)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
buffer = hybrid_ep.HybridEPBuffer(None, 16, 4, num_local_experts=1)
x, topk_idx = torch.ones(4, 16).bfloat16(), torch.tensor([[0, 1]] * 4)
rows, *_ = buffer.dispatch_with_permute(hidden=x, topk_idx=topk_idx, num_of_experts=2)
dist.barrier()
print(len(rows), flush=True)
"""


_IN_A_CALL = """
import threading

def call():
    while True:
        buffer.dispatch_with_permute(hidden=x, topk_idx=topk_idx, num_of_experts=2)
        has_called.set()

has_called = threading.Event()
threading.Thread(target=call, daemon=True).start()
has_called.wait()
"""


@pytest.mark.parametrize("program", [_NEVER_CLOSED, _NEVER_CLOSED + _IN_A_CALL], ids=["idle", "another thread calls"])
def test_a_program_ends_that_has_never_closed_its_buffer(program: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", program, str(store.port)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            printed, errors = rank.communicate(timeout=90)
            assert (rank.returncode, printed) == (0, "8\n"), errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_connecting_ends_where_gloo_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does when a peer dies while it connects: several times, each for the whole limit."""
    is_given_up = threading.Event()
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda *_: is_given_up.wait(60))
    with pytest.raises(RuntimeError, match="gloo has not connected within 1 s"):
        link._connected(dist.HashStore(), 0, 2, 1.0)
    is_given_up.set()


def _two_threads() -> tuple[str, bool]:
    """A second thread calls while the first waits for another rank."""
    inputs = CASE.inputs(dist.get_rank())
    told = ""
    with Buffer() as buffer:
        if dist.get_rank() == 0:
            first = threading.Thread(target=normal.dispatch, args=(buffer, CASE, inputs))
            first.start()
            time.sleep(0.5)
            with pytest.raises(ConfigError) as error:
                normal.dispatch(buffer, CASE, inputs)
            told = str(error.value)
            dist.barrier()
            first.join()
        else:
            dist.barrier()
            normal.dispatch(buffer, CASE, inputs)
        received, *_ = normal.dispatch(buffer, CASE, inputs)
    return told, received.shape[0] > 0


def test_a_buffer_serves_one_thread_at_a_time(two: VirtualCluster) -> None:
    (told, goes_on), (_, goes_on_there) = two.run(_two_threads)
    assert told.startswith("dispatch is called while another thread is in a call of the same buffer; allowed: one at a")
    assert goes_on
    assert goes_on_there


def test_a_buffer_is_shared_by_copies_and_not_pickled() -> None:
    with Buffer(None) as buffer:
        layer = MoELayer(buffer, hidden=32, ffn_hidden=8, num_experts=2, topk=1)
        assert copy.deepcopy(layer).buffer is buffer
        assert copy.copy(buffer) is buffer
        with pytest.raises(ConfigError, match="Buffer cannot be pickled; allowed: making one in each process"):
            pickle.dumps(layer)


def test_a_handle_of_an_elastic_buffer_is_copied_and_not_pickled() -> None:
    with ElasticBuffer(None, num_max_tokens_per_rank=8, hidden=128) as buffer:
        x, topk_idx = torch.ones(4, 128).bfloat16(), torch.tensor([[0, 1]] * 4)
        topk_idx[0] = topk_idx[1]  # torch counts writes, and starts anew with a copy
        received, _, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, num_experts=4)
        for copied in (copy.copy(handle), copy.deepcopy(handle)):
            assert torch.equal(buffer.combine(received, copied)[0], x)
        with pytest.raises(ConfigError, match="EPHandle cannot be pickled; allowed: the process that dispatched"):
            pickle.dumps(handle)


def test_handles_are_copied_and_not_pickled() -> None:
    """A copy of a handle combines what the handle does. A pickled one would name memory that may be gone."""
    x, topk_idx = torch.ones(4, 128).bfloat16(), torch.tensor([[0, 1]] * 4)
    weights = torch.ones(4, 2)
    with Buffer(None, low_latency_mode=True) as buffer, HybridEPBuffer(None, 128, 4, 2) as hybrid:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        received, _, _, _, normal_handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **layout)
        blocks, _, latency_handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 2, use_fp8=False)
        rows, *_, permute_handle = hybrid.dispatch_with_permute(
            hidden=x, topk_idx=topk_idx, topk_weights=weights, num_of_experts=2
        )
        handle_of_rows = hybrid.dispatch(hidden=x, topk_idx=topk_idx, topk_weights=weights, num_of_experts=2)[3]
        handles = (normal_handle, latency_handle, permute_handle, handle_of_rows, permute_handle.permute)
        names = ("BufferHandle", "LowLatencyHandle", "PermutedHandle", "HybridHandle", "PermuteHandle")
        for handle, name in zip(handles, names, strict=True):
            for protocol in (0, pickle.HIGHEST_PROTOCOL):
                refusal = f"^{name} cannot be pickled; allowed: the process that dispatched$"
                with pytest.raises(ConfigError, match=refusal):
                    pickle.dumps(handle, protocol)
        for again in (copy.copy, copy.deepcopy):
            assert torch.equal(hybrid.combine(hidden=x, handle=again(handle_of_rows))[0], x)
            assert torch.equal(buffer.combine(received, again(normal_handle))[0], x)
            assert torch.equal(buffer.low_latency_combine(blocks, topk_idx, weights, again(latency_handle))[0], 2 * x)
            assert torch.equal(hybrid.combine_with_unpermute(hidden=rows, handle=again(permute_handle))[0], 2 * x)


def _sync_late(timeout_s: float) -> tuple[str, float]:
    """Rank 1 does not come to the sum of the gradients."""
    with Buffer(timeout_s=timeout_s) as buffer:
        layer = MoELayer(buffer, hidden=32, ffn_hidden=8, num_experts=2, topk=1)
        layer.router.grad = torch.ones_like(layer.router) * (1 + dist.get_rank())
        layer.sync_router_gradients()
        assert bool((layer.router.grad == 1.5).all())
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["rank 0 has waited"], timedelta(seconds=60))
            return "", 0.0
        began = time.monotonic()
        with pytest.raises(TimeoutError) as error:
            layer.sync_router_gradients()
        took = time.monotonic() - began
        store.set("rank 0 has waited", "")
        return str(error.value), took


def test_router_gradients_wait_for_the_timeout_and_name_the_rank(two: VirtualCluster) -> None:
    (told, took), _ = two.run(_sync_late, 4.0)
    assert told.startswith("sum over ranks: header: rank 0 waited 4 s for rank 1")
    assert 3 < took < 20  # not the 60 s of the group


FOUR = Case("shrink", 4, 16)
VICTIM = 2


def _go_on_without(case: Case, victim: int, how: str) -> tuple[int | None, list[int], str]:
    """Survivors go on together; the victim, where it comes back, is told that they have."""
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    with Buffer(low_latency_mode=True, enable_shrink=True) as buffer:
        send = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        buffer.low_latency_dispatch(*send, use_fp8=False)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        with pytest.raises(TransportError) as lost:
            buffer.low_latency_dispatch(*send, use_fp8=False)
        status = torch.zeros(case.num_ranks, dtype=torch.int32)
        if rank == victim:  # continued
            with pytest.raises(TransportError) as again:
                buffer.low_latency_dispatch(*send, use_fp8=False)
        else:
            buffer.low_latency_query_mask_buffer(status)
            for _ in range(3):
                check_left_out(buffer, case, victim)
            again = lost
        if how == "comes back":
            _meet_all(buffer, case)
            _, count, *_ = buffer.low_latency_dispatch(*send, use_fp8=False)
            assert int(count.sum()) > 0
            assert not buffer.lost  # `recover` would not wait for them
    return lost.value.peer, status.tolist(), str(again.value)


def _meet_all(buffer: Buffer, case: Case) -> None:
    """Takes every rank back in, as soon as it comes."""
    for _ in range(8):
        buffer.low_latency_clean_mask_buffer()
        try:
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        except TimeoutError:
            continue
        return


def _wait_until_stopped(pid: int) -> None:
    """A SIGCONT that comes before the SIGSTOP has no effect."""
    status = Path(f"/proc/{pid}/status")
    give_up = time.monotonic() + 60
    while "\nState:\tT" not in status.read_text():
        assert time.monotonic() < give_up, f"process {pid} did not stop itself within 60 s"
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["dies", "stops", "comes back"])
def test_survivors_agree_and_go_on_together(how: str) -> None:
    survivors = [rank for rank in range(4) if rank != VICTIM]
    with VirtualCluster(4, variables={"HYBRID_EP_TIMEOUT_S": str(TIMEOUT_S)}) as cluster:
        pid = cluster.process_id(VICTIM)
        cluster.start(_go_on_without, FOUR, VICTIM, how)
        if how == "comes back":
            _wait_until_stopped(pid)
            time.sleep(2.5 * TIMEOUT_S)
            os.kill(pid, signal.SIGCONT)
            *_, late = cluster.collect([VICTIM], limit_s=60)[0]
            assert "the other ranks went on without this one" in late
        told = cluster.collect(survivors, limit_s=60)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for peer, status, _ in told:
        assert peer == VICTIM
        assert status == [int(rank == VICTIM) for rank in range(4)]


def _stay_away(case: Case, victim: int) -> tuple[list[str], list[int]]:
    """As over NCCL: messages go through the user's group, which cannot be connected again."""
    exchange.uses_gloo = link.uses_gloo = lambda group: False
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    told = []
    with Buffer(low_latency_mode=True, enable_shrink=True) as buffer:
        send = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        buffer.low_latency_dispatch(*send, use_fp8=False)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for call in (
            lambda: buffer.low_latency_dispatch(*send, use_fp8=False),
            lambda: buffer.low_latency_dispatch(*send, use_fp8=False),
            lambda: buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts),
        ):
            with pytest.raises(TransportError) as error:
                call()
            told.append(str(error.value))
        status = torch.zeros(case.num_ranks, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
    return told, status.tolist()


def test_nobody_goes_on_where_connections_cannot_be_made_again() -> None:
    survivors = [rank for rank in range(4) if rank != VICTIM]
    with VirtualCluster(4, variables={"HYBRID_EP_TIMEOUT_S": str(TIMEOUT_S)}) as cluster:
        cluster.start(_stay_away, FOUR, VICTIM)
        for told, status in cluster.collect(survivors, limit_s=60):
            assert all(f"lost rank {VICTIM}" in text or f"for rank {VICTIM}" in text for text in told), told
            for text in told[1:]:
                assert "lost in an earlier call" in text
                assert "allowed then: a new process group, and a buffer of it" in text
            assert status == [0, 0, 0, 0]


def _lose_with(case: Case, victim: int, breaks: str, **options: str | bool) -> list[str]:
    """Loses a rank where survivors cannot agree on who is left; returns what calls of a survivor raise."""
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    if breaks == "NCCL":
        exchange.uses_gloo = link.uses_gloo = lambda group: False
    told = []
    with Buffer(low_latency_mode=True, **options) as buffer:  # type: ignore[arg-type]
        send = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        buffer.low_latency_dispatch(*send, use_fp8=False)
        if breaks == "store":

            def lose(*given: object, **named: object) -> None:
                raise StoreLostError("it does not answer")

            exchange.rendezvous = lose  # type: ignore[assignment]
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        calls = [lambda: buffer.low_latency_dispatch(*send, use_fp8=False)] * 2
        if breaks == "nothing":
            calls[1:1] = [lambda: buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)] * 2
        for call in calls:
            try:
                call()
                told.append("nothing")
            except TransportError as error:
                told.append(str(error))
    return told


def _what_survivors_are_told(breaks: str, **options: str | bool) -> None:
    survivors = [rank for rank in range(4) if rank != VICTIM]
    with VirtualCluster(4, variables={"HYBRID_EP_TIMEOUT_S": str(TIMEOUT_S)}) as cluster:
        cluster.start(functools.partial(_lose_with, **options), FOUR, VICTIM, breaks)
        for told in cluster.collect(survivors, limit_s=60):
            assert all(f"lost rank {VICTIM}" in text or f"for rank {VICTIM}" in text for text in told), told


@pytest.mark.parametrize("breaks", ["NCCL", "store"])
def test_no_survivor_goes_on_alone_where_they_cannot_agree(breaks: str) -> None:
    """Each would mask all others, and return sums without their rows."""
    _what_survivors_are_told(breaks, enable_shrink=True, lost_ranks="mask")


def test_a_lost_rank_is_not_left_out_of_a_buffer_that_may_not_shrink() -> None:
    """However often the survivors meet."""
    _what_survivors_are_told("nothing")


def _meet_too_late() -> None:
    """Rank 2 looks for a meeting that is decided before it is there."""
    meet = exchange.rendezvous

    def meet_late(board: Board, *given: Any, **named: Any) -> Any:
        exchange.rendezvous = meet
        while board.read("outcome") is None:
            time.sleep(0.01)
        return meet(board, *given, **named)

    x, topk_idx = torch.ones(4, 128).bfloat16(), torch.tensor([[0, 1]] * 4)
    with Buffer(low_latency_mode=True, enable_shrink=True, timeout_s=4.0) as buffer:
        if dist.get_rank() == 2:
            exchange.rendezvous = meet_late
        for _ in range(4):
            buffer.low_latency_clean_mask_buffer()
            with contextlib.suppress(TimeoutError):
                buffer.low_latency_dispatch(x, topk_idx, 8, 6, use_fp8=False)
                break
        assert not buffer.engine.masked().any()


def test_a_rank_that_just_misses_a_meeting_comes_to_the_next() -> None:
    with VirtualCluster(3) as cluster:
        cluster.run(_meet_too_late, limit_s=60)
