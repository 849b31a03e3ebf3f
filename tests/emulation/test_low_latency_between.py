"""Low-latency calls between domains by the cuda engine, on emulated warps: every bit is the torch engine's."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.battery.cases import Case
from tests.emulation.conftest import UNREAD, RunEmulated
from tests.emulation.engine import run
from tests.rank_pool import needs_fabric, variables_over

# Every other number of ranks starts new ones, so that cases of as many follow each other.
CASES = [
    Case("2x1", 2, 40, num_ranks_per_domain=1),
    Case("2x1_hidden_7168", 2, 33, hidden=7168, num_experts=36, topk=8, num_ranks_per_domain=1),
    Case("4x1_groups", 4, 33, routing="groups", num_ranks_per_domain=1),
    Case("2x2", 4, 36, num_ranks_per_domain=2),
    Case("2x2_holes", 4, 40, routing="holes", num_ranks_per_domain=2),
    Case("2x2_hot", 4, 40, routing="hot", num_ranks_per_domain=2),
    Case("2x2_empty", 4, 9, routing="empty", num_ranks_per_domain=2),
    Case("2x2_zero_tokens", 4, 0, num_ranks_per_domain=2),
    Case("2x2_nothing_crosses", 4, 21, routing="local", num_ranks_per_domain=2),
    Case("2x2_top_32", 4, 11, topk=32, num_experts=64, num_ranks_per_domain=2),
    Case("3x2_duplicates", 6, 34, num_experts=12, routing="duplicates", num_ranks_per_domain=2),
    Case("2x4_ragged", 8, (5, 0, 17, 1, 34, 2, 0, 9), num_experts=32, num_ranks_per_domain=4),
]
_BY_ID = {case.id: case for case in CASES}
# Each case over one link, and over libfabric, each with one format of rows; each format with a link, and both formats
# of scales with each.
_RUNS = [
    ("2x1", "bf16", "loopback"),
    ("2x1_hidden_7168", "fp8", "loopback"),
    pytest.param("4x1_groups", "nvfp4", "libfabric/tcp", marks=needs_fabric),
    ("2x2_holes", "fp8_ue8m0", "tcp"),
    pytest.param("2x2_hot", "fp8_rounded", "libfabric/shm", marks=needs_fabric),
    ("2x2_empty", "fp8", "nvshmem"),
    ("2x2_zero_tokens", "nvfp4", "nvshmem"),
    ("2x2_nothing_crosses", "nvfp4_ue8m0", "nvshmem"),
    ("2x2_top_32", "bf16", "tcp"),
    ("3x2_duplicates", "fp8_ue8m0", "nvshmem"),
    ("2x4_ragged", "bf16", "nvshmem"),
    pytest.param("2x1", "fp8", "libfabric/tcp", marks=needs_fabric),
    pytest.param("2x1_hidden_7168", "nvfp4_ue8m0", "libfabric/shm", marks=needs_fabric),
    pytest.param("2x2_holes", "bf16", "libfabric/shm", marks=needs_fabric),
    pytest.param("2x2_empty", "nvfp4", "libfabric/tcp", marks=needs_fabric),
    pytest.param("2x2_zero_tokens", "bf16", "libfabric/shm", marks=needs_fabric),
    pytest.param("2x2_nothing_crosses", "fp8", "libfabric/tcp", marks=needs_fabric),
    pytest.param("2x2_top_32", "fp8_rounded", "libfabric/shm", marks=needs_fabric),
    pytest.param("3x2_duplicates", "fp8_ue8m0", "libfabric/tcp", marks=needs_fabric),
    pytest.param("2x4_ragged", "nvfp4", "libfabric/shm", marks=needs_fabric),
]
TIMEOUT_S = 12.0  # above the longest call of ranks that share two cores
LIMIT_S = 100.0
# Ranks that are left out by hand.
MASKED = [
    ("2x1", "loopback", "bf16", (1,)),
    ("2x2_hot", "tcp", "fp8_rounded", (0,)),
    ("4x1_groups", "nvshmem", "nvfp4_ue8m0", (2,)),
    ("3x2_duplicates", "loopback", "fp8", (1, 4)),  # a rank of each of two domains
    ("3x2_duplicates", "nvshmem", "nvfp4", (0, 1)),  # a whole domain
]


@pytest.fixture(scope="module")
def run_by_kernels(run_emulated: RunEmulated) -> RunEmulated:
    """Returns `run(num_ranks, check, *args, seed)`: runs a check whose low-latency calls the kernels serve."""

    def run_check(num_ranks: int, check: str, *args: Any, seed: int = 0) -> None:
        run_emulated(num_ranks, "emulation.domains.check_by_kernels", check, *args, seed=seed)

    return run_check


@pytest.mark.parametrize(("case_id", "format_name", "transport"), _RUNS)
def test_rows(run_by_kernels: RunEmulated, case_id: str, format_name: str, transport: str) -> None:
    case = _BY_ID[case_id]
    over, check = ("emulation.domains.check_over", transport), "battery.low_latency.check_low_latency"
    run_by_kernels(case.num_ranks, *over, check, case, format_name)
    run_by_kernels(case.num_ranks, *over, "battery.low_latency.check_mixed_hooks", case)


def test_logfmt(run_by_kernels: RunEmulated) -> None:
    run_by_kernels(4, "battery.low_latency.check_logfmt", _BY_ID["2x2_holes"])


@pytest.mark.parametrize(("maps", "case_id"), [("check_mapped", "2x2_holes"), ("check_some_mapped", "4x1_groups")])
def test_over_nvshmem_to_mapped_peers(run_by_kernels: RunEmulated, maps: str, case_id: str) -> None:
    check, case = "battery.low_latency.check_low_latency", _BY_ID[case_id]
    run_by_kernels(case.num_ranks, f"emulation.over_nvshmem.{maps}", check, case, "fp8")


@pytest.mark.parametrize(("case_id", "seed"), [("2x2_holes", 0), ("3x2_duplicates", 1)])
def test_chunks_that_overtake_each_other(run_by_kernels: RunEmulated, case_id: str, seed: int) -> None:
    case, slow = _BY_ID[case_id], "emulation.faulty_links.check_on_slow_link"
    check = "battery.low_latency.check_low_latency"
    run_by_kernels(case.num_ranks, slow, check, seed, case, "fp8_ue8m0", seed=seed)
    check = "battery.low_latency.check_overlapping_batches"
    run_by_kernels(case.num_ranks, slow, check, seed, case, seed=seed)


def test_batches_overlap(run_by_kernels: RunEmulated) -> None:
    run_by_kernels(4, "battery.low_latency.check_overlapping_batches", _BY_ID["2x2_holes"])


@pytest.mark.parametrize("check", ["check_events", "check_faults", "check_hooks_between", "check_two_buffers"])
def test_streams_and_faults(run_by_kernels: RunEmulated, check: str) -> None:
    in_domains = "emulation.domains.check_in_domains"
    run_by_kernels(2, in_domains, 1, f"emulation.streams_and_faults.{check}")


@pytest.mark.parametrize("transport", ["loopback", "tcp", "nvshmem"])
def test_dispatches_ahead(run_by_kernels: RunEmulated, transport: str) -> None:
    check, case = "battery.low_latency.check_dispatches_ahead", Case("ahead", 2, 12, num_ranks_per_domain=1)
    run_by_kernels(2, "emulation.domains.check_over", transport, check, case)


@pytest.mark.parametrize("transport", ["loopback", "tcp", "nvshmem"])
def test_cleaned_buffers_forget(run_by_kernels: RunEmulated, transport: str) -> None:
    case = Case("cleaned", 4, 12, num_ranks_per_domain=2)
    run_by_kernels(4, "emulation.domains.check_over", transport, "battery.low_latency.check_cleaned", case)


def test_many_cleanings(run_by_kernels: RunEmulated) -> None:
    run_by_kernels(2, "battery.low_latency.check_cleaned_often", Case("cleaned", 2, 12, num_ranks_per_domain=1))


@pytest.mark.parametrize(
    "check",
    ["low_latency.check_unreceived", "low_latency_masks.check_late_rank", "low_latency.check_too_many_rows"],
)
def test_misuse_and_delay(run_by_kernels: RunEmulated, check: str) -> None:
    run_by_kernels(4, "emulation.domains.check_in_domains", 2, f"battery.{check}")


@pytest.mark.parametrize("transport", ["loopback", pytest.param("tcp", marks=pytest.mark.slow), "nvshmem"])
def test_a_rank_that_comes_too_late_is_named(run_by_kernels: RunEmulated, transport: str) -> None:
    in_domains, check = "emulation.domains.check_in_domains", "emulation.domains.check_late_rank_is_named"
    run_by_kernels(4, "emulation.domains.check_over", transport, in_domains, 2, check, 8.0)


@pytest.mark.parametrize(
    "check",
    [
        "check_low_latency_calls_that_grow_memory",
        "check_other_low_latency_calls",
        "check_other_global_scales",
        "check_other_logfmt",
        "check_combine_along_other_low_latency_handles",
        "check_too_many_low_latency_tokens",
    ],
)
def test_ranks_that_differ(run_by_kernels: RunEmulated, check: str) -> None:
    run_by_kernels(4, "emulation.domains.check_in_domains", 2, f"battery.other_calls.{check}")


# More of them: test_kernels.py, and all of them on the torch engine.
@pytest.mark.parametrize(
    ("check", "size"),
    [("check_refused_combines", 1), ("check_refused_first_dispatch", 2), ("check_handle_of_a_larger_buffer", 1)],
)
def test_what_one_rank_refuses_all_are_told(run_by_kernels: RunEmulated, check: str, size: int) -> None:
    run_by_kernels(2 * size, "emulation.domains.check_in_domains", size, f"battery.refused_low_latency.{check}")


@pytest.mark.parametrize(("kind", "use_logfmt"), [("comp_signal", True), ("src_signals", False)])
def test_combine_beside_experts(run_by_kernels: RunEmulated, kind: str, use_logfmt: bool) -> None:
    run_by_kernels(2, "emulation.domains.check_in_domains", 1, "battery.signals.check_signals", kind, use_logfmt)


def test_a_refused_launch_leaves_no_call_open(run_by_kernels: RunEmulated) -> None:
    in_domains, check = "emulation.domains.check_in_domains", "emulation.domains.check_refused_launch"
    run_by_kernels(2, "emulation.domains.check_over", "tcp", in_domains, 1, check)


def test_missing_signal(run_by_kernels: RunEmulated) -> None:
    run_by_kernels(2, "emulation.domains.check_in_domains", 1, "emulation.domains.check_missing_signal", 8.0)


@pytest.mark.parametrize("transport", ["loopback", "nvshmem"])
def test_numbers_of_calls_begin_again(run_by_kernels: RunEmulated, transport: str) -> None:
    check = "emulation.late_epochs.check_low_latency_between_past_the_last_number"
    run_by_kernels(4, "emulation.domains.check_over", transport, check)


@pytest.mark.parametrize(
    ("transport", "seed"), [("loopback", 0), ("tcp", 1), pytest.param("loopback", 2, marks=pytest.mark.slow)]
)
def test_survivors_name_the_lost_rank(emulated_module: Path, transport: str, seed: int) -> None:
    """A rank is killed inside a call of 2 × 2 ranks: all name it in their time."""
    lost = seed % 4
    with _team(emulated_module, transport, seed) as (cluster, run_here):
        cluster.start(run_here, "emulation.domains.lose_a_rank")
        time.sleep(0.5 + 0.3 * seed)
        os.kill(cluster.process_id(lost), signal.SIGKILL)
        assert _named_by_survivors(cluster, lost) == [lost] * 3


@pytest.mark.parametrize(("transport", "lost"), [("loopback", 2), pytest.param("tcp", 1, marks=pytest.mark.slow)])
def test_survivors_name_a_rank_that_has_not_forwarded(emulated_module: Path, transport: str, lost: int) -> None:
    """And not the rank that it has stalled."""
    with _team(emulated_module, transport, 0) as (cluster, run_here):
        cluster.start(run_here, "multi_gpu.lost_ranks.lose_one_that_has_not_forwarded", lost)
        assert _named_by_survivors(cluster, lost) == [lost] * 3


@contextlib.contextmanager
def _team(
    module: Path,
    transport: str,
    seed: int,
    *,
    grid: tuple[int, int] = (2, 2),
    shrink: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[VirtualCluster, Callable[..., Any]]]:
    """Domains of ranks that have made calls over a transport, and what runs a function of tests/ on them."""
    num_domains, size = grid
    num_ranks = num_domains * size
    variables = {
        "HYBRID_EP_NUM_RANKS_PER_DOMAIN": str(size),
        "HYBRID_EP_LOW_LATENCY_BETWEEN": "cuda",
        **variables_over(transport),
    }
    run_here = functools.partial(run, str(module), seed)
    with VirtualCluster(num_ranks, variables=variables) as cluster:
        join = "multi_gpu.lost_ranks.join", list(range(num_ranks)), True, shrink, timeout_s
        cluster.run(run_here, *join, limit_s=LIMIT_S)
        yield cluster, run_here


def _named_by_survivors(cluster: VirtualCluster, lost: int, *, grid: tuple[int, int] = (2, 2)) -> list[int]:
    """What the ranks but one return; that one is killed."""
    with pytest.raises(RankError):
        cluster.collect([lost], limit_s=LIMIT_S)
    survivors = [rank for rank in range(grid[0] * grid[1]) if rank != lost]
    named: list[int] = cluster.collect(survivors, limit_s=LIMIT_S)
    return named


@pytest.mark.parametrize("format_name", ["bf16", "fp8"])
def test_the_torch_engine_serves_where_it_is_asked_for(run_emulated: RunEmulated, format_name: str) -> None:
    check = "battery.low_latency.check_low_latency"
    run_emulated(4, "emulation.domains.check_torch_asked_for", check, _BY_ID["2x2"], format_name)


def test_the_torch_engine_serves_rows_that_the_kernels_do_not_move(run_emulated: RunEmulated) -> None:
    case = Case("hidden_12", 4, 36, hidden=12, num_ranks_per_domain=2)
    check = "battery.low_latency.check_low_latency"
    run_emulated(4, "emulation.domains.check_by_torch", check, case, "bf16")


@pytest.mark.parametrize(("case_id", "transport", "format_name", "lost"), MASKED)
def test_masks(
    run_by_kernels: RunEmulated, case_id: str, transport: str, format_name: str, lost: tuple[int, ...]
) -> None:
    case, check = _BY_ID[case_id], "battery.low_latency_masks.check_masked"
    over = "emulation.domains.check_over", transport
    run_by_kernels(case.num_ranks, UNREAD, *over, check, case, format_name, lost)


def test_masks_where_chunks_overtake_each_other(run_by_kernels: RunEmulated) -> None:
    case, check = _BY_ID["2x2_holes"], "battery.low_latency_masks.check_masked"
    slow = "emulation.faulty_links.check_on_slow_link"
    run_by_kernels(case.num_ranks, slow, check, 1, case, "bf16", (3,), seed=1)


def test_masks_of_the_torch_engine(run_emulated: RunEmulated) -> None:
    """By the same check: the engines give the same bits."""
    case, check = _BY_ID["2x2_holes"], "battery.low_latency_masks.check_masked"
    run_emulated(4, "emulation.domains.check_torch_asked_for", check, case, "nvfp4", (2,))


def test_masks_of_rows_that_the_kernels_do_not_move(run_emulated: RunEmulated) -> None:
    case, check = Case("hidden_12", 4, 36, hidden=12, num_ranks_per_domain=2), "battery.low_latency_masks.check_masked"
    run_emulated(4, "emulation.domains.check_by_torch", check, case, "bf16", (2,))


@pytest.mark.parametrize(("num_ranks", "size"), [pytest.param(3, 1, marks=pytest.mark.slow), (4, 2)])
def test_a_late_rank_comes_back(run_by_kernels: RunEmulated, num_ranks: int, size: int) -> None:
    check = "battery.low_latency_masks.check_late_rank_comes_back"
    run_by_kernels(num_ranks, "emulation.domains.check_in_domains", size, check, 8.0)


@pytest.mark.parametrize("transport", ["loopback", pytest.param("tcp", marks=pytest.mark.slow)])
def test_masks_that_differ_for_a_call(run_by_kernels: RunEmulated, transport: str) -> None:
    in_domains, check = "emulation.domains.check_in_domains", "battery.low_latency_masks.check_masks_that_differ"
    run_by_kernels(4, "emulation.domains.check_over", transport, in_domains, 2, check, 8.0)


@pytest.mark.parametrize(
    "check",
    [
        "check_given_up_on_the_device",
        "check_named_at_close",
        "check_pending_loss",
        "check_told_at_close",
        "check_told_once",
    ],
)
def test_ranks_that_do_not_come(run_by_kernels: RunEmulated, check: str) -> None:
    run_by_kernels(2, "emulation.domains.check_in_domains", 1, f"multi_gpu.low_latency_losses.{check}", 8.0)


def test_ranks_that_differ_in_whether_they_shrink(run_emulated: RunEmulated) -> None:
    run_emulated(4, "emulation.domains.check_other_shrink")


@pytest.mark.parametrize(
    ("num_domains", "size", "transport", "step", "lost"),
    [
        (2, 2, "loopback", "some", 3),
        pytest.param(2, 2, "tcp", "some", 0, marks=pytest.mark.slow),
        (2, 2, "loopback", "dispatch", 2),
        pytest.param(2, 2, "tcp", "receive", 1, marks=pytest.mark.slow),
        (2, 2, "loopback", "combine", 0),
        pytest.param(3, 2, "loopback", "dispatch", 5, marks=pytest.mark.slow),
        pytest.param(2, 1, "tcp", "combine", 1, marks=pytest.mark.slow),
    ],
)
def test_survivors_go_on_without_a_rank_that_was_killed_after(
    emulated_module: Path, num_domains: int, size: int, transport: str, step: str, lost: int
) -> None:
    grid = num_domains, size
    with _team(emulated_module, transport, 0, grid=grid, shrink=True) as (cluster, run_here):
        cluster.start(run_here, UNREAD, "multi_gpu.lost_ranks.lose_one_after", step, lost)
        assert _named_by_survivors(cluster, lost, grid=grid) == [lost] * (num_domains * size - 1)


@pytest.mark.parametrize("transport", ["loopback", pytest.param("tcp", marks=pytest.mark.slow)])
def test_ranks_a_call_ahead_do_not_leave_out_those_that_wait(emulated_module: Path, transport: str) -> None:
    """Their hosts learn of the loss when the kernels have given up living ranks, too."""
    with _team(emulated_module, transport, 0, shrink=True, timeout_s=8.0) as (cluster, run_here):
        cluster.start(run_here, UNREAD, "multi_gpu.lost_ranks.lose_one_after", "some", 3, True)
        assert _named_by_survivors(cluster, 3) == [3] * 3


def test_ranks_wait_for_one_that_finds_the_loss_a_call_later(emulated_module: Path) -> None:
    """The dispatch of the lost rank has reached a rank that pauses before its combine."""
    with _team(emulated_module, "loopback", 0, shrink=True) as (cluster, run_here):
        pause_s = 0.9 * TIMEOUT_S
        cluster.start(run_here, UNREAD, "multi_gpu.lost_ranks.lose_one_after", "some", 3, False, pause_s)
        assert _named_by_survivors(cluster, 3) == [3] * 3


@pytest.mark.parametrize(
    ("transport", "seed"),
    [
        pytest.param("loopback", 0, marks=pytest.mark.slow),
        ("tcp", 1),
        pytest.param("libfabric/tcp", 2, marks=needs_fabric),
        pytest.param("loopback", 2, marks=pytest.mark.slow),
        pytest.param("tcp", 3, marks=pytest.mark.slow),
    ],
)
def test_survivors_go_on_without_a_rank_that_was_killed_at_some_time(
    emulated_module: Path, transport: str, seed: int
) -> None:
    lost = seed % 4
    with _team(emulated_module, transport, seed, shrink=True) as (cluster, run_here):
        cluster.start(run_here, UNREAD, "multi_gpu.lost_ranks.go_on_after_loss")
        time.sleep(0.5 + 0.3 * seed)
        os.kill(cluster.process_id(lost), signal.SIGKILL)
        assert _named_by_survivors(cluster, lost) == [lost] * 3


def test_a_rank_that_was_late_does_not_go_on_alone(emulated_module: Path) -> None:
    """The others go on without it, and all meet again."""
    late = 1
    with _team(emulated_module, "loopback", 1, shrink=True) as (cluster, run_here):
        cluster.start(run_here, UNREAD, "multi_gpu.lost_ranks.go_on_together", late)
        time.sleep(1.0)
        os.kill(cluster.process_id(late), signal.SIGSTOP)
        time.sleep(1.5 * TIMEOUT_S)
        os.kill(cluster.process_id(late), signal.SIGCONT)
        results = cluster.collect(limit_s=2 * LIMIT_S)
        for rank in {0, 2, 3}:
            told, status = results[rank]
            assert len(told) == 1
            assert f"rank {rank} waited {TIMEOUT_S:g} s for rank {late}" in told[0]
            assert status == [0, 1, 0, 0]
        assert "the other ranks went on without this one, which was late" in results[late][0][-1]
        cluster.run(run_here, "multi_gpu.lost_ranks.meet_again", limit_s=LIMIT_S)


def test_ranks_that_choose_differently_are_told_so(run_emulated: RunEmulated) -> None:
    run_emulated(2, "emulation.domains.check_other_choice")


def test_peer_that_some_ctas_gave_up(run_by_kernels: RunEmulated) -> None:
    run_by_kernels(2, "emulation.deadlines.check_peer_that_some_ctas_gave_up")
