"""The public signatures are those that the peers' callers rely on: names, order and defaults."""

from __future__ import annotations

import builtins
import inspect
from typing import Any

import pytest
import torch

import hybrid_ep
from hybrid_ep import Buffer, Config, ConfigError, ElasticBuffer, EPBuffer, EventOverlap, HybridEPBuffer

NONE, REQUIRED = None, inspect.Parameter.empty


def of(text: str, **defaults: Any) -> dict[str, Any]:
    """`"a b c"`, and the defaults of those that have one; all others are required."""
    return {name: defaults.get(name, REQUIRED) for name in text.split()}


STREAMS = {"previous_event": NONE, "async_finish": False, "allocate_on_comm_stream": False}
V2_BYTES: dict[str, Any] = {"num_bytes": NONE}
V2_SIZES = {"num_max_tokens_per_rank": 0, "hidden": 0, "num_topk": 0, "use_fp8_dispatch": False}
V2_SETTINGS = {
    "deterministic": False,
    "allow_hybrid_mode": True,
    "allow_multiple_reduction": True,
    "prefer_overlap_with_compute": True,
}
V2_LIMITS = {
    "sl_idx": 3,
    "num_allocated_qps": 0,
    "num_cpu_timeout_secs": 300,
    "num_gpu_timeout_secs": 100,
    "explicitly_destroy": False,
}
V2_SENT = dict.fromkeys(
    (
        "topk_idx",
        "topk_weights",
        "cumulative_local_expert_recv_stats",
        "num_experts",
        "num_max_tokens_per_rank",
        "expert_alignment",
    )
) | {"num_sms": 0, "num_qps": 0}
V2_RETURNED = {"topk_weights": NONE, "bias": NONE, "num_sms": 0, "num_qps": 0}
V2_EVENT: dict[str, Any] = {"previous_event": NONE}
V2_BEFORE_EPILOGUE: dict[str, Any] = {"previous_event_before_epilogue": NONE}
V2_STREAMS = {"async_with_compute_stream": False, "allocate_on_comm_stream": False}
V2_LAYOUT = {
    "do_cpu_sync": NONE,
    "do_expand": False,
    "do_zero_padding": False,
    "use_tma_aligned_col_major_sf": False,
}
SIGNATURES: list[tuple[Any, dict[str, Any]]] = [
    (
        Buffer.__init__,
        {
            "self": REQUIRED,
            "group": NONE,
            "num_nvl_bytes": 0,
            "num_rdma_bytes": 0,
            "low_latency_mode": False,
            "num_qps_per_rank": 24,
            "allow_nvlink_for_low_latency_mode": True,
            "allow_mnnvl": False,
            "use_fabric": False,
            "explicitly_destroy": False,
            "enable_shrink": False,
            "comm": NONE,
            "allow_nvlink_for_normal_mode": True,
            "is_intranode": False,
        },
    ),
    (Buffer.destroy, of("self")),
    (Buffer.is_sm90_compiled, {}),
    (Buffer.set_num_sms, of("new_num_sms")),
    (Buffer.capture, {}),
    (Buffer.get_comm_stream, of("self")),
    (
        Buffer.get_local_buffer_tensor,
        of("self dtype size offset use_rdma_buffer", size=NONE, offset=0, use_rdma_buffer=False),
    ),
    (Buffer.get_dispatch_config, of("num_ranks")),
    (Buffer.get_combine_config, of("num_ranks")),
    (
        Buffer.get_low_latency_rdma_size_hint,
        of("num_max_dispatch_tokens_per_rank hidden num_ranks num_experts"),
    ),
    (Buffer.get_dispatch_layout, of("self topk_idx num_experts") | STREAMS),
    (
        Buffer.dispatch,
        of("self x")
        | dict.fromkeys(
            (
                "handle",
                "num_tokens_per_rank",
                "num_tokens_per_rdma_rank",
                "is_token_in_rank",
                "num_tokens_per_expert",
                "topk_idx",
                "topk_weights",
            )
        )
        | {"expert_alignment": 1, "num_worst_tokens": 0, "config": NONE}
        | STREAMS,
    ),
    (Buffer.combine, of("self x handle") | {"topk_weights": NONE, "bias": NONE, "config": NONE} | STREAMS),
    (
        Buffer.low_latency_dispatch,
        of("self x topk_idx num_max_dispatch_tokens_per_rank num_experts")
        | {
            "cumulative_local_expert_recv_stats": NONE,
            "dispatch_wait_recv_cost_stats": NONE,
            "use_fp8": True,
            "round_scale": False,
            "use_ue8m0": False,
            "async_finish": False,
            "return_recv_hook": False,
        },
    ),
    (
        Buffer.low_latency_combine,
        of("self x topk_idx topk_weights handle")
        | {
            "use_logfmt": False,
            "zero_copy": False,
            "async_finish": False,
            "return_recv_hook": False,
            "out": NONE,
            "combine_wait_recv_cost_stats": NONE,
        },
    ),
    (Buffer.clean_low_latency_buffer, of("self num_max_dispatch_tokens_per_rank hidden num_experts")),
    (Buffer.get_next_low_latency_combine_buffer, of("self handle")),
    (Buffer.low_latency_update_mask_buffer, of("self rank_to_mask mask", mask=False)),
    (Buffer.low_latency_query_mask_buffer, of("self mask_status")),
    (Buffer.low_latency_clean_mask_buffer, of("self")),
    (
        Config.__init__,
        {
            "self": REQUIRED,
            "num_sms": 20,
            "num_max_nvl_chunked_send_tokens": 6,
            "num_max_nvl_chunked_recv_tokens": 256,
            "num_max_rdma_chunked_send_tokens": 6,
            "num_max_rdma_chunked_recv_tokens": 256,
        },
    ),
    (Config.get_nvl_buffer_size_hint, of("self hidden_bytes num_ranks")),
    (Config.get_rdma_buffer_size_hint, of("self hidden_bytes num_ranks")),
    (EventOverlap.__init__, of("self event extra_tensors", event=NONE, extra_tensors=NONE)),
    (EventOverlap.current_stream_wait, of("self release_handle", release_handle=False)),
    (EventOverlap.wait, of("self")),
    (EventOverlap.__call__, of("self release_handle", release_handle=False)),
    (
        HybridEPBuffer.__init__,
        of("self group hidden_dim max_num_of_tokens_per_rank num_local_experts")
        | {
            "use_fp8": False,
            "num_sms_dispatch_api": NONE,
            "num_sms_combine_api": NONE,
            "num_sms_preprocessing_api": NONE,
            "num_blocks_permute": NONE,
            "num_blocks_unpermute": NONE,
            "load_cached_kernels": False,
            "use_shared_buffer": True,
            "enable_custom_allgather": False,
            "num_of_hybrid_ep_ranks_per_nvlink_domain": NONE,
            "use_mnnvl": NONE,
        },
    ),
    (
        HybridEPBuffer.dispatch,
        of("self hidden")
        | dict.fromkeys(
            (
                "scaling_factor",
                "topk_idx",
                "topk_weights",
                "num_of_experts",
                "probs",
                "routing_map",
                "num_dispatched_tokens_tensor",
                "num_dispatched_tokens",
                "handle",
            )
        ),
    ),
    (ElasticBuffer.__init__, of("self group") | V2_BYTES | {"num_cpu_bytes": 0} | V2_SIZES | V2_SETTINGS | V2_LIMITS),
    (
        ElasticBuffer.dispatch,
        of("self x")
        | V2_SENT
        | V2_EVENT
        | V2_BEFORE_EPILOGUE
        | V2_STREAMS
        | {"handle": NONE, "do_handle_copy": True}
        | V2_LAYOUT,
    ),
    (
        ElasticBuffer.combine,
        of("self x handle") | V2_RETURNED | V2_EVENT | V2_BEFORE_EPILOGUE | V2_STREAMS,
    ),
    (
        EPBuffer.__init__,
        of("self group")
        | V2_BYTES
        | V2_SIZES
        | {"lb_allocation_plan_or_num_bytes": 0}
        | V2_SETTINGS
        | V2_LIMITS
        | {"sl_idx": NONE},
    ),
    (
        EPBuffer.dispatch,
        of("self x")
        | V2_SENT
        | V2_EVENT
        | V2_STREAMS
        | {"handle": NONE, "do_handle_copy": False}
        | V2_LAYOUT
        | {"defer_epilogue": False},
    ),
    (EPBuffer.combine, of("self x handle") | V2_RETURNED | V2_EVENT | V2_STREAMS | {"defer_epilogue": False}),
    (
        ElasticBuffer.get_buffer_size_hint,
        of("group num_max_tokens_per_rank hidden")
        | {"num_topk": 0, "use_fp8_dispatch": False, "allow_hybrid_mode": True, "allow_multiple_reduction": True},
    ),
    (ElasticBuffer.barrier, of("self") | {"use_comm_stream": True, "with_cpu_sync": False, "sequential": True}),
    (ElasticBuffer.get_theoretical_num_qps, of("self num_sms")),
    *[
        (
            kind.lb_prefetch_weights,
            of("self redundant_expert_weights expert_weights redundancy_mapping")
            | {"num_sms": 0, "previous_event": NONE},
        )
        for kind in (ElasticBuffer, Buffer)
    ],
    (HybridEPBuffer.combine, of("self hidden probs handle", probs=NONE, handle=NONE)),
    (hybrid_ep.indices_to_map, of("topk_idx topk_weights num_of_tokens num_of_experts")),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_positional_arguments(function: Any, expected: dict[str, Any]) -> None:
    positional = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    }
    assert list(positional.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            HybridEPBuffer.dispatch_with_permute,
            of("hidden")
            | dict.fromkeys(
                (
                    "topk_idx",
                    "topk_weights",
                    "num_of_experts_per_rank",
                    "num_of_experts",
                    "use_fp8",
                    "routing_map",
                    "probs",
                    "scaling_factor",
                    "num_permuted_tokens",
                    "pad_multiple",
                    "handle",
                )
            )
            | {
                "non_blocking": False,
                "fuse_permute_dispatch": False,
                "dense_routing": False,
                "num_dispatched_tokens": NONE,
                "use_host_meta": NONE,
            },
        ),
        (
            HybridEPBuffer.combine_with_unpermute,
            of("hidden")
            | {
                "probs": NONE,
                "handle": NONE,
                "pad_multiple": NONE,
                "fuse_unpermute_combine": False,
                "num_dispatched_tokens": NONE,
            },
        ),
    ],
    ids=["dispatch_with_permute", "combine_with_unpermute"],
)
def test_keyword_only_arguments(function: Any, expected: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    keywords = {n: p.default for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert list(keywords.items()) == list(expected.items())


def test_low_latency_combine_accepts_what_consumers_pass() -> None:
    names = set(inspect.signature(Buffer.low_latency_combine).parameters)
    passed = "overlap src_signals src_signal_expect_value packed_recv_count comp_signal block_m threshold num_sms"
    assert set(passed.split()) <= names


def test_static_methods_and_calls_between_nodes() -> None:
    for name in (
        "is_sm90_compiled",
        "set_num_sms",
        "capture",
        "get_dispatch_config",
        "get_combine_config",
        "get_low_latency_rdma_size_hint",
    ):
        assert isinstance(inspect.getattr_static(Buffer, name), staticmethod), name
    assert inspect.signature(Buffer.internode_dispatch) == inspect.signature(Buffer.dispatch)
    assert inspect.signature(Buffer.internode_combine) == inspect.signature(Buffer.combine)
    assert Buffer.num_sms == 20
    assert hybrid_ep.topk_idx_t is torch.int64


def test_all_names_can_be_imported() -> None:
    for name in hybrid_ep.__all__:
        assert getattr(hybrid_ep, name) is not None
    assert set(hybrid_ep.__all__) <= set(dir(hybrid_ep))
    assert not set(hybrid_ep.__all__) & set(dir(builtins)), "from hybrid_ep import * would hide these"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hybrid_ep.no_such_name


def test_attributes_of_a_buffer() -> None:
    with Buffer(None, 1024, 2048, True) as buffer:
        assert (buffer.rank, buffer.group_size, buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (0, 1, 1024, 2048)
        assert buffer.low_latency_mode is True
        assert buffer.group is None
        assert isinstance(Buffer.capture(), EventOverlap)
        assert isinstance(buffer.get_comm_stream(), torch.Stream | torch.cpu.Stream)
        whole = buffer.get_local_buffer_tensor(torch.float32)
        assert whole.numel() == 256
        assert buffer.get_local_buffer_tensor(torch.int64, torch.Size([2, 3]), 16).shape == (2, 3)
        assert (
            buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().numel() == 0
        )  # the engine has none
        whole.fill_(1)
        assert buffer.get_local_buffer_tensor(torch.float32, (1,), 8).item() == 1
    with HybridEPBuffer(None, 64, 8, 4) as hybrid:
        config = hybrid.configurer.buffer_config
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank) == (64, 8, 4)
        made = hybrid.update_template_config(hidden_dim=128, num_of_tokens_per_rank=9, num_of_stages_dispatch_api=12)
        assert (made.hidden_dim, made.max_num_of_tokens_per_rank, made.num_of_stages_dispatch_api) == (128, 16, 12)
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank) == (128, 16)
        hybrid.update_template_config(hidden_dim=64, num_of_tokens_per_rank=1)  # never shrinks
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank) == (128, 16)
        with pytest.raises(ConfigError, match="num_of_warps is not a setting of HybridEpConfigInstance"):
            hybrid.update_template_config(num_of_warps=4)
        assert (hybrid.num_of_hybrid_ep_ranks_per_nvlink_domain, hybrid.num_of_nodes) == (1, 1)
        assert (hybrid.local_rank, hybrid.node_rank) == (0, 0)
        assert hybrid.runtime is not None


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6, 12, 40, 72, 160])
def test_any_number_of_ranks_has_a_configuration_and_size_hints(num_ranks: int) -> None:
    for config in (Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)):
        assert config.num_sms == Buffer.num_sms
        assert config.get_nvl_buffer_size_hint(14336, num_ranks) >= 14336 * num_ranks
        assert config.get_rdma_buffer_size_hint(14336, num_ranks) >= 14336 * num_ranks
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks, 2 * num_ranks)
    assert hint >= 2 * 128 * 7168 * 2 * num_ranks
    assert hint % 128 == 0


def test_set_num_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers set it once and pass no configuration; one that is passed counts more."""
    monkeypatch.setattr(Buffer, "num_sms", Buffer.num_sms)
    monkeypatch.setattr(Buffer, "_num_sms_without_config", None)
    asked = []
    x, topk_idx = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
    with Buffer(None) as buffer:
        engine = buffer.engine
        for name in ("dispatch", "combine"):
            call = getattr(engine, name)

            def spied(request: Any, *others: Any, call: Any = call) -> Any:
                asked.append(request.num_sms)
                return call(request, *others)

            monkeypatch.setattr(engine, name, spied)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)

        def round_trip(config: Config | None) -> list[int | None]:
            asked.clear()
            received, *_, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                config=config,
            )
            buffer.combine(received, handle, config=config)
            buffer.dispatch(x, handle=handle, config=config)
            return asked

        assert round_trip(None) == [None] * 3
        Buffer.set_num_sms(12)
        assert Buffer.get_dispatch_config(8).num_sms == Buffer.get_combine_config(8).num_sms == Buffer.num_sms == 12
        assert round_trip(None) == [12] * 3
        assert round_trip(Config(7)) == [7] * 3
