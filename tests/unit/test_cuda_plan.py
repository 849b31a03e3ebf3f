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
from hybrid_ep.engine.cuda.plan import (
    CombineShape,
    DispatchShape,
    plan_combine,
    plan_dispatch,
    plan_dispatch_between,
)

RANK, NUM_RANKS, T, H, K, E = 1, 4, 100, 64, 8, 32
SHAPE = DispatchShape(
    shape=torch.Size((T, H)),
    dtype=torch.bfloat16,
    scales=None,
    num_topk=K,
    num_experts=E,
    has_topk=True,
    has_weights=True,
    expert_range=(8, 16),
    pad_multiple=0,
    bound=50,
    common_bound=None,
    num_sms=None,
    max_tokens=None,
)


def plan(**changes: Any) -> Any:
    return plan_dispatch(RANK, NUM_RANKS, SHAPE._replace(**changes)).native


def test_calls_of_one_shape_share_a_plan() -> None:
    assert plan() is plan()
    for changes in ({"bound": 51}, {"has_weights": False}, {"num_sms": 3}, {"pad_multiple": 1}):
        assert plan(**changes) is not plan()


def test_bytes_of_a_row() -> None:
    assert plan().record_bytes == 2 * H + 8 * K + 4 * K
    assert plan(has_weights=False).record_bytes == 2 * H + 8 * K
    assert plan(pad_multiple=1).record_bytes == 2 * H + 4 * K + 4 * K
    assert plan(dtype=torch.float8_e4m3fn, scales=(3, torch.int32)).record_bytes == H + 4 * 3 + 8 * K + 4 * K
    assert plan(expert_range=None, has_weights=False).record_bytes == 2 * H
    # Between domains rows land by source, and are permuted later.
    between = plan_dispatch_between(RANK, NUM_RANKS, SHAPE._replace(pad_multiple=1)).native
    assert between.record_bytes == 2 * H + 8 * K + 4 * K
    combined = plan_combine(CombineShape(T, H, torch.bfloat16, K, 64, num_weights=K))
    assert combined.record_bytes == 2 * H + 4 * K
    assert combined.slot_bytes_for(10) - combined.slot_bytes_for(9) == combined.record_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4096}, "num_experts is 4096; allowed with the cuda engine: ≤ 2048"),
        ({"shape": torch.Size((T, 12))}, "a row of 12 × torch.bfloat16 has 24 bytes; allowed: multiples of 16"),
    ],
)
def test_what_the_kernels_cannot_do(changes: dict[str, Any], message: str) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            plan(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": torch.Size((1 << 17, H))}, "tokens of rank 1 are 131072; allowed with the cuda engine: ≤ 65536"),
        ({"max_tokens": 99}, "rows of x is 100 at rank 1; allowed: ≤ num_max_tokens_per_rank = 99"),
        (
            {"bound": 51, "common_bound": 50},
            "num_dispatched_tokens of rank 1 is 51; allowed: ≤ 50, what all ranks can send",
        ),
    ],
)
def test_what_one_rank_gets_wrong_is_told_in_the_call(changes: dict[str, Any], message: str) -> None:
    given = SHAPE._replace(common_bound=50)
    right, wrong = (plan_dispatch(RANK, NUM_RANKS, shape) for shape in (given, given._replace(**changes)))
    assert (right.refusal, right.native.is_refused, right.num_tokens) == (None, False, T)
    assert (wrong.refusal, wrong.native.is_refused) == (message, True)
    assert wrong.num_tokens == (T if "bound" in changes else 0)


def test_the_checks_and_the_kernels_take_the_same_top_k() -> None:
    assert _cuda.max_topk == MAX_TOPK


def test_native_plans_refuse_what_no_control_block_has_room_for() -> None:
    """The last check before a size becomes an address; Python has looked before."""
    for changes, value in [({"num_topk": 33}, 33), ({"num_experts": 2049}, 2049), ({"bound": -1}, -1)]:
        with pytest.raises(ValueError, match=f"is {value}; allowed"):
            _cuda.DispatchShape(SHAPE._replace(**changes), RANK, NUM_RANKS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is 73; allowed"):
        _cuda.DispatchPlan(SHAPE._replace(num_experts=2044), RANK, 73)


def test_native_plans_know_every_dtype() -> None:
    widths = [(dtype, dtype.itemsize) for dtype in DTYPES]
    assert [plan(dtype=dtype, expert_range=None, has_weights=False).record_bytes // H for dtype, _ in widths] == [
        width for _, width in widths
    ]


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
