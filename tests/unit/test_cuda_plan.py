"""Plans and sizes of the cuda engine are arithmetic: they can be seen wherever its module is built, GPU or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_ep import Buffer, ConfigError, CudaError
from hybrid_ep.agree.fields import DTYPES
from hybrid_ep.checks import MAX_TOPK
from hybrid_ep.engine.calls import MIN_TOKENS_TO_SUM, NO_SUMS

pytest.importorskip("hybrid_ep._cuda")
from hybrid_ep import _cuda
from hybrid_ep.agree.fields import dtype_code
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.calls import DispatchRequest, Routing, Rows
from hybrid_ep.engine.cuda.plan import plan_between

RANK, NUM_RANKS, T, H, K, E = 1, 4, 100, 64, 8, 32
SIZES: dict[str, Any] = {
    "rank": RANK,
    "num_ranks": NUM_RANKS,
    "num_tokens": T,
    "hidden": H,
    "dtype": dtype_code(torch.bfloat16),
    "num_topk": K,
    "num_experts": E,
    "has_weights": True,
    "expert_range": (8, 16),
    "bound": 50,
}


def plan(**changes: Any) -> _cuda.DispatchPlan:
    return _cuda.DispatchPlan(**SIZES | changes)


def test_bytes_of_a_row() -> None:
    assert plan().record_bytes == 2 * H + 8 * K + 4 * K
    assert plan(has_weights=False).record_bytes == 2 * H + 8 * K
    assert plan(pad_multiple=1).record_bytes == 2 * H + 4 * K + 4 * K
    scales = {"num_scales": 3, "scale_dtype": dtype_code(torch.int32)}
    assert plan(dtype=dtype_code(torch.float8_e4m3fn), **scales).record_bytes == H + 4 * 3 + 8 * K + 4 * K
    assert plan(expert_range=None, has_weights=False).record_bytes == 2 * H
    # Between domains rows land by source, and are permuted later.
    between = _cuda.DispatchShape(**SIZES | {"pad_multiple": 1})
    assert between.record_bytes == 2 * H + 8 * K + 4 * K
    combined = _cuda.CombinePlan(num_tokens=T, hidden=H, num_topk=K, num_experts=64, num_weights=K)
    assert combined.record_bytes == 2 * H + 4 * K
    assert combined.slot_bytes_for(10) - combined.slot_bytes_for(9) == combined.record_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4096}, "num_experts is 4096; allowed with the cuda engine: ≤ 2048"),
        ({"hidden": 12}, "a row of 12 × torch.bfloat16 has 24 bytes; allowed: multiples of 16 up to 32768"),
        ({"hidden": 32784, "dtype": 1}, "a row of 32784 × torch.float8_e4m3fn has 32784 bytes; allowed: multiples"),
    ],
)
def test_what_the_kernels_cannot_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**changes)
    if "hidden" not in changes or "dtype" not in changes:  # rows of a combine are bf16
        sizes = {"num_tokens": T, "hidden": H, "num_topk": K, "num_experts": E} | changes
        with pytest.raises(ConfigError, match=message):
            _cuda.CombinePlan(**sizes)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "bound", "message"),
    [
        (1 << 17, None, 50, "tokens of rank 1 are 131072; allowed with the cuda engine: ≤ 65536"),
        (T, 99, 50, "rows of x is 100 at rank 1; allowed: ≤ num_max_tokens_per_rank = 99"),
        (T, None, 51, "num_dispatched_tokens of rank 1 is 51; allowed: ≤ 50, what all ranks can send"),
        (T, None, 50, None),
    ],
)
def test_what_one_rank_gets_wrong_is_told_in_the_call(
    num_tokens: int, max_tokens: int | None, bound: int, message: str | None
) -> None:
    topk_idx = torch.zeros(num_tokens, K, dtype=torch.int64)
    rows = Rows(torch.zeros(num_tokens, 8, dtype=torch.bfloat16))
    routing = Routing(topk_idx, None, E, max_tokens=max_tokens)
    request = DispatchRequest(rows, routing, bound, common_bound=50)
    planned = plan_between(request, routing, RankGrid(RANK, NUM_RANKS, 2))
    assert planned.refusal == message
    assert (planned.native.refusal is None) == (message is None)
    assert planned.native.num_tokens == (T if bound == 51 or message is None else 0)


def test_the_checks_and_the_kernels_take_the_same_top_k() -> None:
    assert _cuda.max_topk == MAX_TOPK


def test_native_plans_refuse_what_no_control_block_has_room_for() -> None:
    """The last check before a size becomes an address; Python has looked before."""
    for changes, value in [({"num_topk": 33}, 33), ({"bound": -1}, -1)]:
        with pytest.raises(ValueError, match=f"is {value}; allowed"):
            _cuda.DispatchShape(**SIZES | changes)
    with pytest.raises(ValueError, match="is 73; allowed"):
        plan(num_experts=2044, num_ranks=73)


def test_native_plans_know_every_dtype() -> None:
    plans = [plan(dtype=dtype_code(dtype), expert_range=None, has_weights=False) for dtype in DTYPES]
    assert [each.record_bytes // H for each in plans] == [dtype.itemsize for dtype in DTYPES]


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_ranks", "num_experts"),
    [(1, 8, 1, 1), (128, 128, 32, 32), (128, 7168, 8, 8), (64, 512, 72, 72), (1024, 16384, 4, 64), (7, 640, 3, 15)],
)
def test_the_size_hint_of_low_latency_calls_suffices(
    num_tokens: int, hidden: int, num_ranks: int, num_experts: int
) -> None:
    from hybrid_ep import _cuda

    hint = Buffer.get_low_latency_rdma_size_hint(num_tokens, hidden, num_ranks, num_experts)
    for num_topk in range(1, min(32, num_experts) + 1):
        plan = _cuda.LowLatencyPlan(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            max_tokens=num_tokens,
            format=_cuda.ScaleFormat.NONE,
        )
        assert plan.capacity.region_bytes <= hint


def test_low_latency_kernels_send_weights_where_ranks_may_sum() -> None:
    from hybrid_ep import _cuda

    assert _cuda.low_latency_min_tokens_to_sum == MIN_TOKENS_TO_SUM
    assert _cuda.low_latency_no_sums == NO_SUMS


@pytest.mark.parametrize(("num_ranks", "num_experts", "num_topk", "max_tokens"), [(1, 1, 1, 1), (3, 15, 3, 7)])
def test_what_a_low_latency_dispatch_leaves_beside_its_rows(
    num_ranks: int, num_experts: int, num_topk: int, max_tokens: int
) -> None:
    from hybrid_ep import _cuda

    plan = _cuda.LowLatencyPlan(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=128,
        max_tokens=max_tokens,
        format=_cuda.ScaleFormat.FLOAT,
    )
    num_local, num_sources = num_experts // num_ranks, num_ranks * max_tokens
    layout, counts, src_info = 2 * num_local * num_ranks, num_local, num_local * num_sources
    rows_of, received, too_many, number = num_sources * num_topk, num_ranks, 1, 2
    assert plan.num_ints - (layout + counts + src_info + rows_of + received + too_many + number) in (0, 1)
    assert plan.num_ints % 2 == 0


def test_what_the_cuda_runtime_refuses_has_a_type() -> None:
    """Whether there is a driver here or not, there is no GPU of this number."""
    with pytest.raises(CudaError, match=r"^cuda"):
        _cuda.can_run(4096)
