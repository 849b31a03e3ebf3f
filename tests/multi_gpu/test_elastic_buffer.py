"""`ElasticBuffer` and `EPBuffer` on the cuda engine: the checks of tests/battery/elastic.py, streams and graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import ConfigError, ElasticBuffer, EPBuffer
from tests.battery import elastic
from tests.battery.cases import CASES, Case
from tests.battery.cases import select as select_cases
from tests.battery.hybrid import permuted_rows
from tests.battery.normal import equal, gather_rows
from tests.conftest import RunRanks

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]

NAMES = ("one_rank", "two_ranks", "hidden_7168", "every_expert", "four_ranks", "holes", "duplicates", "hot_expert")
FITTING = [c for c in select_cases(CASES, num_ranks=max(NUM_GPUS, 1), one_domain=True) if c.id in NAMES]


@pytest.mark.parametrize("check", [elastic.check_other_values, elastic.check_masked_decode])
@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.id)
def test_elastic_buffer(run_gpus: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_gpus(case.num_ranks, check, case, "cuda")


@pytest.mark.parametrize(
    "check",
    [
        elastic.check_scales,
        elastic.check_gradients,
        elastic.check_streams,
        elastic.check_deferred,
        elastic.check_too_many_tokens,
        pytest.param(
            elastic.check_other_handles,
            marks=pytest.mark.skipif(NUM_GPUS == 1, reason="a rank cannot differ from itself"),
        ),
    ],
)
def test_calls_of_consumers(run_gpus: RunRanks, check: Callable[..., None]) -> None:
    run_gpus(NUM_GPUS, check, Case("consumer", NUM_GPUS, 30, num_experts=8 * NUM_GPUS), "cuda")


@pytest.mark.parametrize("check", [elastic.check_compact, elastic.check_expanded])
def test_the_same_under_the_later_name(run_gpus: RunRanks, check: Callable[..., None]) -> None:
    run_gpus(FITTING[-1].num_ranks, check, FITTING[-1], "cuda", EPBuffer)


@pytest.mark.parametrize("by_expert", [False, True])
def test_graph_replay(run_gpus: RunRanks, by_expert: bool) -> None:
    run_gpus(NUM_GPUS, _check_graph, by_expert)


def _check_graph(by_expert: bool) -> None:
    """Captured once, replayed with other tokens and routings: rows, counts and statistics are those of each replay."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    cases = [Case("graph", num_ranks, 40, num_experts=8 * num_ranks, seed=seed) for seed in range(6)]
    static = elastic.on("cuda", cases[0].inputs(rank))
    stats = torch.zeros(8, dtype=torch.int32, device="cuda")
    with elastic.make_buffer(cases[0]) as buffer:

        def step() -> tuple[torch.Tensor, ...]:
            received, _, weights, handle, _ = buffer.dispatch(
                static.x,
                static.topk_idx,
                static.topk_weights,
                stats,
                num_experts=cases[0].num_experts,
                expert_alignment=4,
                do_expand=by_expert,
                do_cpu_sync=False,
            )
            combined, home, _ = buffer.combine(received, handle, weights)
            ends = handle.psum_num_recv_tokens_per_expert, handle.psum_num_recv_tokens_per_scaleup_rank
            return received, combined, home, *ends

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            received, combined, home, ends, by_rank = step()
            with pytest.raises(ConfigError, match="do_cpu_sync=False"):
                buffer.dispatch(static.x, static.topk_idx, num_experts=cases[0].num_experts)
        for case in cases:
            for target, source in zip(static, case.inputs(rank), strict=True):
                target.copy_(source)
            stats.zero_()
            graph.replay()
            torch.cuda.synchronize()
            reference = case.reference()
            sources = [case.inputs(r).x for r in range(num_ranks)]
            counts = reference.tokens_per_expert(rank)
            assert stats.tolist() == counts
            assert by_rank.tolist() == elastic.expected_psum_of_ranks(case, rank)
            rounded = torch.tensor(elastic.rounded(counts, 4)).cumsum(0).tolist()
            if by_expert:
                copies = reference.permuted(rank, 4)
                equal(received[: len(copies)], permuted_rows(copies, sources), "recv_x")
                begins = [0, *rounded]
                assert ends.tolist() == [begin + count for begin, count in zip(begins, counts, strict=False)]
            else:
                rows = reference.received(rank)
                equal(received[: len(rows)], gather_rows(case, rows, sources), "recv_x")
                assert ends.tolist() == rounded
                num_ranks_of = (static.topk_idx // 8).sort(1).values.diff(dim=1).ne(0).sum(1) + 1
                want = (static.x.float() * num_ranks_of.unsqueeze(1)).to(torch.bfloat16)
                equal(combined, want.cpu(), "combined_x")
            equal(home, case.inputs(rank).topk_weights, "combined_topk_weights")


def test_default_numbers_of_sms(run_gpus: RunRanks) -> None:
    run_gpus(NUM_GPUS, _check_num_sms)


def _check_num_sms() -> None:
    with ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8) as buffer:
        assert buffer.get_theoretical_num_sms(64, 8) in (8, 16)
        with pytest.raises(ConfigError, match="before and after"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            buffer.barrier()
        buffer.barrier()
