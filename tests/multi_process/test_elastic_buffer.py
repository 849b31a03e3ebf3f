"""`ElasticBuffer` and `EPBuffer` on the torch engine: the calls of their users, bit for bit, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import BufferAllocator, ClosedError, ConfigError, ElasticBuffer, EPBuffer, EPHandle, EventOverlap
from tests.battery import elastic
from tests.battery.cases import CASES, Case
from tests.conftest import RunRanks

NAMES = ("two_ranks", "zero_tokens_on_one_rank", "holes", "two_domains", "top_1", "duplicates")
SOME = [case for case in CASES if case.id in NAMES]
some_cases = pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)


@some_cases
@pytest.mark.parametrize("check", [elastic.check_compact, elastic.check_expanded, elastic.check_masked_decode])
def test_elastic_buffer(run_ranks: RunRanks, case: Case, check: Callable[..., None]) -> None:
    run_ranks(case.num_ranks, check, case)


@pytest.mark.parametrize(
    "check",
    [
        elastic.check_scales,
        elastic.check_gradients,
        elastic.check_streams,
        elastic.check_too_many_tokens,
        elastic.check_other_most_tokens,
        elastic.check_other_handles,
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_calls_of_consumers(run_ranks: RunRanks, num_ranks: int, check: Callable[..., None]) -> None:
    run_ranks(num_ranks, check, Case("consumer", num_ranks, 30))


@pytest.mark.parametrize("check", [elastic.check_compact, elastic.check_expanded])
def test_the_same_under_the_later_name(run_ranks: RunRanks, check: Callable[..., None]) -> None:
    run_ranks(2, check, SOME[0], "cpu", EPBuffer)


def test_deferred_epilogues(run_ranks: RunRanks) -> None:
    run_ranks(2, elastic.check_deferred, SOME[0])


def _balance() -> None:
    """The plan's tensors get their memory with the buffer, and move."""
    rank = dist.get_rank()
    plan = BufferAllocator()
    spare = plan.allocate((1, 3, 50), torch.bfloat16)
    grads = plan.allocate([1, 3, 50], torch.float32)
    assert spare.is_meta
    assert plan.num_bytes == 384 + 640
    mapping = torch.tensor([[3], [-1]], dtype=torch.int32)  # rank 0 holds a replica of rank 1's second expert
    with EPBuffer(dist.group.WORLD, lb_allocation_plan_or_num_bytes=plan, num_ranks_per_domain=2) as buffer:
        assert buffer.num_lb_bytes == plan.num_bytes
        assert spare.device.type == "cpu"
        weights = torch.full((2, 3, 50), 10.0 * rank, dtype=torch.bfloat16)
        weights[1] += 1
        event = buffer.lb_prefetch_weights(spare, weights, mapping, previous_event=buffer.capture())
        event.current_stream_wait()
        assert bool((spare == (11 if rank == 0 else 0)).all())
        grads.fill_(5 + rank)
        home = torch.ones(2, 3, 50)
        buffer.lb_reduce_grads(grads, home, mapping).wait()
        assert home[:, 0, 0].tolist() == ([1, 1] if rank == 0 else [1, 6])
        assert buffer.lb_get_theoretical_num_sms() > 0
    with pytest.raises(ConfigError, match="a plan of tensors is materialized; allowed: one buffer for each plan"):
        EPBuffer(dist.group.WORLD, lb_allocation_plan_or_num_bytes=plan)
    with pytest.raises(ConfigError, match="materialized; allowed: calls of allocate before the buffer is made"):
        plan.allocate((1,), torch.float32)


def test_weights_of_experts_move(run_ranks: RunRanks) -> None:
    run_ranks(2, _balance)


T, H, K, E = 6, 256, 2, 8
X = torch.ones(T, H, dtype=torch.bfloat16)
TOPK, WEIGHTS = torch.arange(T * K).view(T, K) % E, torch.rand(T, K)
SENT = {"x": X, "topk_idx": TOPK, "topk_weights": WEIGHTS, "num_experts": E}
E4M3 = X.to(torch.float8_e4m3fn)


@pytest.fixture(params=[ElasticBuffer, EPBuffer])
def buffer(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param(None, num_max_tokens_per_rank=T, hidden=H, num_topk=K) as made:
        yield made


BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "no routing": ({"topk_idx": None}, "topk_idx is None; allowed without a handle"),
    "no number of experts": ({"num_experts": None}, "num_experts is None; allowed without a handle"),
    "fewer rows of routing": ({"topk_idx": TOPK[:2], "topk_weights": None}, "rows of topk_idx is 2; allowed: 6"),
    "too many tokens": (
        {"num_max_tokens_per_rank": 5},
        "rows of x is 6 at rank 0; allowed: ≤ num_max_tokens_per_rank = 5",
    ),
    "no alignment": ({"expert_alignment": 0}, "expert_alignment is 0; allowed: an integer ≥ 1"),
    "an expert that is not there": ({"topk_idx": TOPK + 7}, "topk_idx is 14; allowed: −1 … 7"),
    "weights in half": ({"topk_weights": WEIGHTS.half()}, "topk_weights.dtype is torch.float16"),
    "pads without experts": ({"do_zero_padding": True}, "do_zero_padding is True; allowed: False without do_expand"),
    "half a sync": ({"do_cpu_sync": 0.5}, "do_cpu_sync is 0.5; allowed: True or False"),
    "a flag of two": ({"do_expand": 2}, "do_expand is 2; allowed: True or False"),
    "fewer than no SMs": ({"num_sms": -1}, "num_sms is -1; allowed: an integer ≥ 0"),
    "fewer than no queue pairs": ({"num_qps": -1}, "num_qps is -1; allowed: an integer ≥ 0"),
    "an event of another kind": ({"previous_event": 3}, "previous_event is int; allowed: EventHandle, EventOverlap"),
    "stats of all experts": (
        {"cumulative_local_expert_recv_stats": torch.zeros(E + 1, dtype=torch.int32)},
        r"cumulative_local_expert_recv_stats.shape is \[9\]; allowed: \[8\]",
    ),
    "bytes without scales": ({"x": E4M3}, "x.dtype is torch.float8_e4m3fn; allowed: torch.bfloat16"),
    "three parts": ({"x": (E4M3, WEIGHTS, WEIGHTS)}, "x is a tuple of 3; allowed: a tensor, or a tensor and its"),
    "no scales": ({"x": (E4M3, torch.ones(T, 0))}, "columns of scales of x is 0; allowed: ≥ 1"),
    "scales in half": ({"x": (E4M3, torch.ones(T, 2).half())}, "scales of x.dtype is torch.float16"),
    "rows that want a gradient": ({"x": X.clone().requires_grad_()}, "x.requires_grad is True"),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_bad_dispatches(buffer: Any, name: str) -> None:
    arguments, message = BAD_DISPATCHES[name]
    with pytest.raises(ConfigError, match=message):
        buffer.dispatch(**(SENT | arguments))
    buffer.dispatch(**SENT)  # it stays usable


ALONG: dict[str, tuple[dict[str, Any], str]] = {
    "a routing": ({"topk_idx": TOPK}, "topk_idx is given; allowed: None with a handle"),
    "a sync": ({"do_cpu_sync": True}, "do_cpu_sync is True; allowed: None or False with a handle"),
    "other experts": ({"num_experts": 16}, "num_experts is 16; allowed: 8, as with this handle"),
    "another bound": ({"num_max_tokens_per_rank": 9}, "num_max_tokens_per_rank is 9; allowed: 6, as with this handle"),
    "another alignment": ({"expert_alignment": 4}, "expert_alignment is 4; allowed: 1, as with this handle"),
    "another layout": ({"do_expand": True}, "do_expand is True; allowed: False, as with this handle"),
    "fewer rows": ({"x": X[:2]}, "rows of x is 2; allowed: 6, as with this handle"),
    "fewer weights": ({"topk_weights": WEIGHTS[:2]}, r"topk_weights.shape is \[2, 2\]; allowed: \[6, 2\]"),
    "a tuple": ({"handle": (1, 2)}, "handle is tuple; allowed: a handle that dispatch returned"),
}


@pytest.mark.parametrize("name", ALONG)
def test_what_contradicts_a_handle(buffer: Any, name: str) -> None:
    arguments, message = ALONG[name]
    *_, handle, _ = buffer.dispatch(**SENT)
    with pytest.raises(ConfigError, match=message):
        buffer.dispatch(**({"x": X, "handle": handle} | arguments))


def test_bad_combines(buffer: Any) -> None:
    received, _, weights, handle, _ = buffer.dispatch(**SENT)
    by_expert, _, probs, expanded, _ = buffer.dispatch(**SENT, do_expand=True)
    for arguments, message in (
        ({"x": received[:2]}, "rows of x is 2; allowed: 6, as received with this handle"),
        ({"x": received, "topk_weights": weights[:, 0]}, r"topk_weights.shape is \[6\]; allowed: \[6, 2\]"),
        ({"x": received, "bias": X[:2]}, r"bias.shape is \[2, 256\]; allowed: \[6, 256\]"),
        ({"x": received, "bias": (X, X, X)}, "number of biases is 3; allowed: 0, 1 or 2"),
        ({"x": received.float()}, "x.dtype is torch.float32; allowed: torch.bfloat16"),
        ({"x": received, "async_with_compute_stream": 3}, "async_with_compute_stream is 3; allowed: True or False"),
    ):
        with pytest.raises(ConfigError, match=message):
            buffer.combine(handle=handle, **arguments)
    with pytest.raises(ConfigError, match="rows of x is 6; allowed: 12, as received with this handle"):
        buffer.combine(received, expanded)
    with pytest.raises(ConfigError, match=r"topk_weights.shape is \[12, 1\]; allowed: \[12\]"):
        buffer.combine(by_expert, expanded, probs.unsqueeze(1))


def test_a_routing_that_was_written_to(buffer: Any) -> None:
    """Rows go along the route as it was; weights would need the routing again."""
    topk = TOPK.clone()
    *_, handle, _ = buffer.dispatch(X, topk, WEIGHTS, num_experts=E, do_handle_copy=False)
    topk.fill_(0)
    buffer.dispatch(X, handle=handle)
    with pytest.raises(ConfigError, match="topk_idx was written to since the dispatch"):
        buffer.dispatch(X, topk_weights=WEIGHTS, handle=handle)
    if isinstance(buffer, EPBuffer):
        with pytest.raises(ConfigError, match="do_handle_copy is True; allowed: False"):
            buffer.dispatch(**SENT, do_handle_copy=True)
        for call, given in ((buffer.dispatch, SENT), (buffer.combine, {"x": X, "handle": handle})):
            with pytest.raises(ConfigError, match="async_with_compute_stream is False; allowed: True with defer_ep"):
                call(**given, defer_epilogue=True)
    else:
        copied = TOPK.clone()
        *_, handle, _ = buffer.dispatch(X, copied, WEIGHTS, num_experts=E)
        copied.fill_(0)
        buffer.dispatch(X, topk_weights=WEIGHTS, handle=handle)
        assert torch.equal(handle.topk_idx, TOPK)


def test_a_handle_whose_buffer_is_gone() -> None:
    made = ElasticBuffer(None, num_max_tokens_per_rank=T)
    *_, handle, event = made.dispatch(**SENT)
    assert isinstance(handle, EPHandle)
    assert isinstance(event, EventOverlap)
    made.destroy()
    with pytest.raises(ClosedError, match="was used after it was closed"):
        _ = handle.recv_src_metadata
    with pytest.raises(ClosedError, match="was used after it was closed"):
        made.combine(X, handle)
    del made
    with pytest.raises(ClosedError, match="recv_src_metadata was read after its buffer was dropped"):
        _ = handle.recv_src_metadata


@pytest.mark.parametrize(
    "name",
    [
        "engram_write", "engram_fetch", "get_engram_storage_size_hint", "pp_set_config", "pp_send", "pp_recv",
        "get_pp_buffer_size_hint", "create_agrs_session", "destroy_agrs_session", "agrs_new_session",
        "agrs_set_config", "agrs_get_inplace_tensor", "all_gather", "get_agrs_num_max_session_bytes",
        "get_agrs_buffer_size_hint",
    ],
)  # fmt: skip
def test_what_is_not_supported(buffer: Any, name: str) -> None:
    allowed = "dispatch, combine, barrier and lb_"
    with pytest.raises(NotImplementedError, match=f"{name} is not supported; allowed: {allowed}"):
        getattr(buffer, name)(1, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_cpu_bytes": 1 << 21}, NotImplementedError, "num_cpu_bytes=2097152 is not supported"),
        ({"num_bytes": -1}, ConfigError, "num_bytes is -1"),
        ({"sl_idx": 16}, ConfigError, "sl_idx is 16; allowed: an integer from 0 to 15"),
        ({"deterministic": 3}, ConfigError, "deterministic is 3; allowed: True or False"),
        ({"num_gpu_timeout_secs": 0}, ConfigError, "num_gpu_timeout_secs is 0; allowed: an integer ≥ 1"),
        ({"num_topk": 33}, ConfigError, "num_topk is 33; allowed: an integer from 0 to 32"),
    ],
)
def test_bad_constructors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ElasticBuffer(None, **arguments)


def test_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of the two counts; the variable only where the caller has left the default."""
    seen: list[float | None] = []

    def make_engine(*args: Any, timeout_s: float | None, **kwargs: Any) -> Any:
        seen.append(timeout_s)
        raise ConfigError("no engine")

    monkeypatch.setattr("hybrid_ep.buffers.base.make_engine", make_engine)
    monkeypatch.delenv("HYBRID_EP_TIMEOUT_S", raising=False)
    limits = [{}, {"num_gpu_timeout_secs": 7}, {"num_cpu_timeout_secs": 5}, {"timeout_s": 3.0}]
    for variable in (False, True):
        if variable:
            monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "20")
        for arguments in limits:
            with pytest.raises(ConfigError, match="no engine"):
                ElasticBuffer(None, **arguments)
    assert seen == [100.0, 7.0, 5.0, 3.0, None, 7.0, None, 3.0]


def test_size_hints() -> None:
    hint = ElasticBuffer.get_buffer_size_hint
    assert hint is EPBuffer.get_buffer_size_hint
    assert hint(None, 0, 7168) == 0
    assert hint(None, 1, 128) == 2 << 20
    assert hint(None, 4096, 7168, num_topk=8) == 58 << 20
    assert hint(None, 40960, 7168) > hint(None, 40960, 7168, num_topk=8)
    assert hint(None, 40960, 7168, use_fp8_dispatch=True) == 566 << 20, "a combine takes more"
    with ElasticBuffer(None, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8) as buffer:
        assert buffer.num_bytes == 58 << 20
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == buffer.get_logical_domain_size() == (1, 1)
        assert (buffer.rank_idx, buffer.num_ranks, buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, 1, 0, 0)
        assert buffer.get_theoretical_num_qps(16) == 2


@pytest.mark.parametrize("kind", [ElasticBuffer, EPBuffer])
def test_a_buffer_like_another_one(kind: type[Any]) -> None:
    """As recovery makes it, from what JSON can hold."""
    with kind(None, num_max_tokens_per_rank=T, hidden=H, use_fp8_dispatch=1, num_gpu_timeout_secs=7) as buffer:
        options = json.loads(json.dumps(buffer.options()))
        with kind.over(None, 1, options) as again:
            assert again.options() == options
            assert (again.num_bytes, again.num_max_tokens_per_rank, again.timeout_s) == (buffer.num_bytes, T, 7.0)
