"""Low-latency calls of the cuda engine: every case of the battery, bit for bit, and what they promise beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hybrid_ep.cluster import RankError, VirtualCluster
from tests.battery import low_latency as battery
from tests.battery.cases import LOW_LATENCY_CASES, Case
from tests.battery.cases import select as select_cases
from tests.multi_gpu import low_latency
from tests.rank_pool import RankPool

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]
FITTING = sorted(select_cases(LOW_LATENCY_CASES, num_ranks=max(NUM_GPUS, 1)), key=lambda case: case.num_ranks)
every_case = pytest.mark.parametrize("case", FITTING, ids=lambda case: case.id)
needs_peer = pytest.mark.skipif(NUM_GPUS < 2, reason="a rank cannot lose itself")

RunGpus = Callable[..., object]


@pytest.fixture(scope="module")
def run_gpus() -> Iterator[RunGpus]:
    """Returns `run(num_ranks, function, *args)` on GPUs, with the cuda engine forced."""
    variables = {"HYBRID_EP_ENGINE": "cuda", "HYBRID_EP_TIMEOUT_S": "10"}
    pool = RankPool(device="cuda", variables=variables)
    yield pool.run
    pool.close()


@pytest.mark.parametrize("format_name", battery.FORMATS)
@every_case
def test_case(run_gpus: RunGpus, case: Case, format_name: str) -> None:
    run_gpus(case.num_ranks, battery.check_low_latency, case, format_name, "cuda")


@every_case
def test_overlapping_batches(run_gpus: RunGpus, case: Case) -> None:
    run_gpus(case.num_ranks, battery.check_overlapping_batches, case, "cuda")


def test_cleaned_buffers_forget(run_gpus: RunGpus) -> None:
    run_gpus(2, battery.check_cleaned, Case("cleaned", 2, 12), "cuda")


@every_case
def test_mixed_hooks(run_gpus: RunGpus, case: Case) -> None:
    run_gpus(case.num_ranks, battery.check_mixed_hooks, case, "cuda")


@pytest.mark.parametrize(
    "check",
    [
        low_latency.check_sizes,
        low_latency.check_two_batches,
        low_latency.check_three_on_their_way,
        low_latency.check_bad_expert,
    ],
)
def test_behaviour(run_gpus: RunGpus, check: Callable[..., None]) -> None:
    run_gpus(NUM_GPUS, check)


def test_replays(run_gpus: RunGpus) -> None:
    run_gpus(NUM_GPUS, low_latency.check_replays, 10_000)


@needs_peer
def test_masks_by_hand(run_gpus: RunGpus) -> None:
    run_gpus(NUM_GPUS, low_latency.check_masks_by_hand)


@needs_peer
def test_killed_rank() -> None:
    """Every survivor names the rank that died, and the calls after that succeed without it."""
    lost, survivors = NUM_GPUS - 1, list(range(NUM_GPUS - 1))
    with VirtualCluster(NUM_GPUS, device="cuda") as cluster:
        cluster.start(low_latency.lose_a_rank, lost, 2.0)
        with pytest.raises(RankError) as ended:
            cluster.collect([lost], limit_s=60)
        assert list(ended.value.errors) == [lost]
        assert cluster.collect(survivors, limit_s=60) == [lost] * len(survivors)


@needs_peer
def test_a_rank_that_gave_another_up_is_not_given_up() -> None:
    """A combine in which a rank is lost ends for all, each names it, and the calls after that succeed without it."""
    with VirtualCluster(3, device="cuda", ranks_share_gpus=True) as cluster:
        first, second, _ = cluster.run(low_latency.lose_a_rank_between_its_flags, 4.0, limit_s=60)
    assert first.startswith("low_latency_combine: partial rows: rank 0")
    assert second.startswith("low_latency_combine: weights: rank 1")
