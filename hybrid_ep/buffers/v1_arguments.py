"""Checks of the arguments of `Buffer`: of its normal calls, then of its low-latency calls."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybrid_ep.buffers.arguments import (
    check_bias,
    check_global_scale,
    check_grid,
    check_nvfp4_rows,
    check_rows,
    check_topk,
    check_weights,
    num_local_experts,
    routing_by_rank,
)
from hybrid_ep.checks import CHANNELS_PER_SCALE, require, require_bools, require_int
from hybrid_ep.core.checks import packed, require_no_grad, require_tensor
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import compute_layout
from hybrid_ep.engine.calls import (
    CombineRequest,
    DispatchHandle,
    ExpertSignals,
    LowLatencyHandle,
    Routing,
    Rows,
)
from hybrid_ep.errors import ConfigError
from hybrid_ep.quantize import CHANNELS_PER_BLOCK, SCALES_PER_WORD, Fp8Format, Nvfp4Format, RowFormat

Tokens = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


# The parts of the argument `x`: rows, scales, and the global scale of NVFP4.
Parts = tuple[Tensor, Tensor | None, Tensor | None]

# Engines return NVFP4 rows as [LE, M×R, H/2], and their scales as [LE, tiles, W, 32, 4, 4].
_ROWS_ORDER, _SCALES_ORDER = (1, 2, 0), (3, 4, 1, 5, 2, 0)
_SMS_OF_EXPERT_SIGNALS = 32  # SGLang leaves so many to combine on Blackwell, and does not say so in the call


def rows_along(sent: Parts, sizes: tuple[int, int], handle: DispatchHandle, device: torch.device | None) -> Rows:
    """Checks rows, expert alignment and bound."""
    check_sizes(*sizes)
    rows = checked(sent, device)
    if rows.data.shape[0] != handle.num_tokens:
        require(False, "rows of x", rows.data.shape[0], f"{handle.num_tokens}, as with this handle")
    return rows


def received_rows(
    x: Tensor,
    topk_weights: Tensor | None,
    biases: tuple[Tensor, ...],
    num_sms: int | None,
    handle: DispatchHandle,
    device: torch.device | None,
) -> CombineRequest:
    """Checks the arguments of a combine."""
    num_rows = handle.num_recv
    check_rows("x", x, None, device=device)
    if x.shape[0] != num_rows:
        require(False, "rows of x", x.shape[0], f"{num_rows}, as received with this handle")
    if topk_weights is not None:
        check_weights("topk_weights", topk_weights, (num_rows, handle.num_topk), x.device)
    if biases:
        check_bias(biases, handle.num_tokens, x.shape[1], x.device)
        biases = tuple([packed(term) for term in biases])
    return CombineRequest(packed(x), packed(topk_weights), biases, num_sms)


def check_routing(
    grid: RankGrid,
    rows: Rows,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    is_token_in_rank: Tensor | None,
    num_tokens_per_rank: Tensor | None,
    num_tokens_per_expert: Tensor | None,
) -> Routing:
    """Checks the routing, and brings it into the engine's form."""
    num_tokens, device = rows.data.shape[0], rows.data.device
    int32 = (torch.int32,)
    if num_tokens_per_expert is None or is_token_in_rank is None or num_tokens_per_rank is None:
        raise ConfigError(
            "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert are not all given; allowed without a "
            "handle: the three results of get_dispatch_layout"
        )
    require_tensor("num_tokens_per_expert", num_tokens_per_expert, dtypes=int32, shape=(None,), device=device)
    require_tensor("num_tokens_per_rank", num_tokens_per_rank, dtypes=int32, shape=(grid.num_ranks,))
    in_rank_shape = (num_tokens, grid.num_ranks)
    require_tensor("is_token_in_rank", is_token_in_rank, dtypes=(torch.bool,), shape=in_rank_shape, device=device)
    num_experts = num_tokens_per_expert.shape[0]
    num_local_experts(grid, num_experts)
    if topk_idx is None:
        require(topk_weights is None, "topk_weights", "given", "None without topk_idx")
        return routing_by_rank(grid, is_token_in_rank, num_experts)
    check_topk(topk_idx, topk_weights, num_experts, device)
    if topk_idx.shape[0] != num_tokens:
        require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as x has")
    if topk_idx.is_cpu:
        layout = compute_layout(packed(topk_idx), num_experts, grid.num_ranks, grid.num_ranks_per_domain)
        same = torch.equal(layout.is_token_in_rank, is_token_in_rank)
        require(same, "is_token_in_rank", "not that of topk_idx", "the result of get_dispatch_layout(topk_idx, …)")
    return Routing(packed(topk_idx), packed(topk_weights), num_experts)


def check_layout_along(
    grid: RankGrid,
    handle: DispatchHandle,
    is_token_in_rank: Tensor | None,
    num_tokens_per_rank: Tensor | None,
    num_tokens_per_expert: Tensor | None,
) -> None:
    """Checks that a layout given along a handle can be the handle's; no value is read from a GPU."""
    for name, tensor, dtype, shape in (
        ("is_token_in_rank", is_token_in_rank, torch.bool, (handle.num_tokens, grid.num_ranks)),
        ("num_tokens_per_rank", num_tokens_per_rank, torch.int32, (grid.num_ranks,)),
        ("num_tokens_per_expert", num_tokens_per_expert, torch.int32, (handle.num_experts,)),
    ):
        if tensor is not None:
            require_tensor(name, tensor, dtypes=(dtype,), shape=shape)
    if num_tokens_per_rank is not None and num_tokens_per_rank.is_cpu and handle.rank_prefix_matrix.is_cpu:
        up_to = handle.rank_prefix_matrix
        sent = (up_to[grid.rank] - up_to[grid.rank - 1] if grid.rank else up_to[0]).tolist()
        given = num_tokens_per_rank.tolist()
        require(given == sent, "num_tokens_per_rank", given, f"{sent}, as with this handle")


def check_sizes(expert_alignment: int, num_worst_tokens: int) -> None:
    require_int("expert_alignment", expert_alignment, minimum=1)
    require_int("num_worst_tokens", num_worst_tokens, minimum=0)


def parts_of(x: Tokens) -> Parts:
    if not isinstance(x, tuple):
        return x, None, None
    allowed = "a tensor, a tensor and its scales, or NVFP4 rows, their scales and the global scale"
    require(len(x) in (2, 3), "x", f"a tuple of {len(x)}", allowed)
    return x if len(x) == 3 else (*x, None)


def checked(sent: Parts, device: torch.device | None) -> Rows:
    """Rows in the engine's form."""
    data, scales, global_scale = sent
    if global_scale is None:
        return check_rows("x", data, scales, device=device)
    return check_nvfp4_rows("x", data, scales, global_scale, device=device)


def as_given(received: tuple[Tensor, Tensor | None], sent: Parts) -> Tokens:
    """Received rows in the form in which `x` was given."""
    data, scales = received
    if scales is None:
        return data
    sent_data, sent_scales, global_scale = sent
    if sent_scales is None or global_scale is None:
        return data, scales
    if sent_data.dtype == torch.int32:  # and a global scale for each row, as the last word of its scales
        of_rows = scales[:, -1].view(torch.float32).view(-1, *global_scale.shape[1:])
        return data.view(torch.int32), scales[:, :-1], of_rows
    return data, scales.view(sent_scales.dtype), global_scale


def check_dispatched(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    max_tokens: int,
    num_experts: int,
    fmt: RowFormat | None,
    device: torch.device | None,
) -> None:
    require_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, None), device=device)
    require_no_grad("x", x)
    num_tokens, hidden = x.shape
    if isinstance(fmt, Fp8Format) and hidden % CHANNELS_PER_SCALE:
        require(False, "hidden of x", hidden, f"with FP8: multiples of {CHANNELS_PER_SCALE}")
    if isinstance(fmt, Nvfp4Format):
        channels = CHANNELS_PER_BLOCK * SCALES_PER_WORD
        ok = hidden > 0 and hidden % channels == 0
        require(ok, "hidden of x", hidden, f"with NVFP4: multiples of {channels}")
    check_topk(topk_idx, topk_weights, num_experts, x.device)
    if topk_idx.shape[0] != num_tokens:
        require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as x has")
    if num_tokens > max_tokens:
        require(False, "rows of x", num_tokens, f"≤ num_max_dispatch_tokens_per_rank = {max_tokens}")


def check_given_scale(global_scale: Tensor | None, device: torch.device) -> None:
    require(global_scale is not None, "x_global_scale", None, "one float32 with use_nvfp4")
    assert global_scale is not None
    check_global_scale("x_global_scale", global_scale, device)


def check_combined(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: LowLatencyHandle,
    out: Tensor | None,
    device: torch.device | None,
) -> None:
    most, hidden, num_experts = handle.num_max_tokens_per_rank, handle.hidden, handle.num_experts
    device = device or handle.memory.device
    num_ranks = handle.grid.num_ranks
    shape = (num_experts // num_ranks, most * num_ranks, hidden)
    require_tensor("x", x, dtypes=(torch.bfloat16,), shape=shape, device=device)
    require_no_grad("x", x)
    require(isinstance(topk_weights, Tensor), "topk_weights", type(topk_weights).__name__, "a torch.Tensor")
    check_topk(topk_idx, topk_weights, num_experts, device)
    num_tokens = topk_idx.shape[0]
    if num_tokens > most:
        require(False, "rows of topk_idx", num_tokens, f"≤ num_max_dispatch_tokens_per_rank = {most}")
    if out is not None:
        require_tensor("out", out, dtypes=(torch.bfloat16,), shape=(num_tokens, hidden), device=device, contiguous=True)
        require_no_grad("out", out)


def check_return(async_finish: bool, return_recv_hook: bool) -> None:
    require_bools(("async_finish", "return_recv_hook"), (async_finish, return_recv_hook))
    if async_finish and return_recv_hook:
        require(False, "async_finish and return_recv_hook", "both True", "one of them")


def check_low_latency_handle(grid: RankGrid, handle: LowLatencyHandle) -> None:
    allowed = "a handle that low_latency_dispatch returned"
    require(isinstance(handle, LowLatencyHandle), "handle", type(handle).__name__, allowed)
    check_grid(grid, handle.grid)


def check_stats(stats: Tensor | None, name: str, dtype: torch.dtype, size: int, device: torch.device) -> None:
    if stats is not None:
        require_tensor(name, stats, dtypes=(dtype,), shape=(size,), device=device, contiguous=True)


@functools.cache
def row_format(
    use_fp8: bool, round_scale: bool, use_ue8m0: bool, use_nvfp4: bool, use_ue8m0_for_sf: bool
) -> RowFormat | None:
    if use_nvfp4:
        return Nvfp4Format(ue8m0=use_ue8m0_for_sf)
    return Fp8Format(round_scale=round_scale, ue8m0=use_ue8m0) if use_fp8 else None


def nvfp4_as_returned(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns NVFP4 rows as callers get them: ``[M×R, H/2, LE]``, and scales ``[32, 4, tiles, 4, W, LE]``."""
    return rows.permute(_ROWS_ORDER), scales.permute(_SCALES_ORDER)


def signals_of(
    handle: LowLatencyHandle,
    device: torch.device,
    src_signals: Tensor | None,
    src_signal_expect_value: int,
    comp_signal: Tensor | None,
    block_m: int,
    threshold: int,
    num_sms: int,
) -> ExpertSignals:
    """The signals of experts that rows are written, in one form for either kind of experts."""
    if (src_signals is None) == (comp_signal is None):
        given = "neither" if src_signals is None else "both"
        require(False, "src_signals and comp_signal", given, "one of them with overlap")
    num_local = handle.num_experts // handle.grid.num_ranks
    num_rows = handle.num_max_tokens_per_rank * handle.grid.num_ranks
    require_int("num_sms", num_sms, minimum=1)
    if src_signals is not None:
        dtypes = (torch.uint32, torch.int32)
        require_tensor("src_signals", src_signals, dtypes=dtypes, shape=(num_local,), device=device, contiguous=True)
        require_int("src_signal_expect_value", src_signal_expect_value, minimum=1)
        return ExpertSignals(src_signals, src_signal_expect_value, 1, num_rows, max(num_sms, _SMS_OF_EXPERT_SIGNALS))
    assert comp_signal is not None
    require_tensor("comp_signal", comp_signal, dtypes=(torch.int32,), shape=(None,), device=device, contiguous=True)
    require_int("block_m", block_m, minimum=1)
    require_int("threshold", threshold, minimum=1)
    num_blocks = -(-num_rows // block_m)
    least = num_local * num_blocks
    require(
        len(comp_signal) >= least, "elements of comp_signal", len(comp_signal), f"≥ {least} with {block_m} rows each"
    )
    return ExpertSignals(comp_signal, threshold, num_blocks, block_m, num_sms)
