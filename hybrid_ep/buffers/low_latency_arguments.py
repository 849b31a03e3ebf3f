"""Checks the arguments of the low-latency calls of `Buffer`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hybrid_ep.buffers.base import BaseBuffer, check_global_scale
from hybrid_ep.checks import CHANNELS_PER_SCALE, require, require_bools, require_int
from hybrid_ep.core.checks import require_no_grad, require_tensor
from hybrid_ep.engine.calls import ExpertSignals, LowLatencyHandle
from hybrid_ep.quantize import CHANNELS_PER_BLOCK, SCALES_PER_WORD, Fp8Format, Nvfp4Format, RowFormat

__all__ = ["LowLatencyArguments", "nvfp4_as_returned", "row_format", "signals_of"]

# Engines return NVFP4 rows as [LE, M×R, H/2], and their scales as [LE, tiles, W, 32, 4, 4].
_ROWS_ORDER, _SCALES_ORDER = (1, 2, 0), (3, 4, 1, 5, 2, 0)
_SMS_OF_EXPERT_SIGNALS = 32  # SGLang leaves so many to combine on Blackwell, and does not say so in the call


class LowLatencyArguments(BaseBuffer):
    """The checks of a Buffer's low-latency calls."""

    def _check_dispatched(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        max_tokens: int,
        num_experts: int,
        fmt: RowFormat | None,
    ) -> None:
        require_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, None), device=self.engine.device)
        require_no_grad("x", x)
        num_tokens, hidden = x.shape
        if isinstance(fmt, Fp8Format) and hidden % CHANNELS_PER_SCALE:
            require(False, "hidden of x", hidden, f"with FP8: multiples of {CHANNELS_PER_SCALE}")
        if isinstance(fmt, Nvfp4Format):
            channels = CHANNELS_PER_BLOCK * SCALES_PER_WORD
            ok = hidden > 0 and hidden % channels == 0
            require(ok, "hidden of x", hidden, f"with NVFP4: multiples of {channels}")
        self._check_topk(topk_idx, topk_weights, num_experts, x.device)
        if topk_idx.shape[0] != num_tokens:
            require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as x has")
        if num_tokens > max_tokens:
            require(False, "rows of x", num_tokens, f"≤ num_max_dispatch_tokens_per_rank = {max_tokens}")

    @staticmethod
    def _check_global_scale(global_scale: Tensor | None, use_nvfp4: bool, device: torch.device) -> None:
        if not use_nvfp4:
            if global_scale is not None:
                require(False, "x_global_scale", "given", "None without use_nvfp4")
            return
        require(global_scale is not None, "x_global_scale", None, "one float32 with use_nvfp4")
        assert global_scale is not None
        check_global_scale("x_global_scale", global_scale, device)

    def _check_combined(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: LowLatencyHandle, out: Tensor | None
    ) -> None:
        most, hidden, num_experts = handle.num_max_tokens_per_rank, handle.hidden, handle.num_experts
        device = self.engine.device or handle.memory.device
        shape = (num_experts // self.group_size, most * self.group_size, hidden)
        require_tensor("x", x, dtypes=(torch.bfloat16,), shape=shape, device=device)
        require_no_grad("x", x)
        require(isinstance(topk_weights, Tensor), "topk_weights", type(topk_weights).__name__, "a torch.Tensor")
        self._check_topk(topk_idx, topk_weights, num_experts, device)
        num_tokens = topk_idx.shape[0]
        if num_tokens > most:
            require(False, "rows of topk_idx", num_tokens, f"≤ num_max_dispatch_tokens_per_rank = {most}")
        if out is not None:
            require_tensor(
                "out", out, dtypes=(torch.bfloat16,), shape=(num_tokens, hidden), device=device, contiguous=True
            )
            require_no_grad("out", out)

    @staticmethod
    def _check_return(async_finish: bool, return_recv_hook: bool) -> None:
        require_bools(("async_finish", "return_recv_hook"), (async_finish, return_recv_hook))
        if async_finish and return_recv_hook:
            require(False, "async_finish and return_recv_hook", "both True", "one of them")

    def _check_low_latency_handle(self, handle: LowLatencyHandle) -> None:
        allowed = "a handle that low_latency_dispatch returned"
        require(isinstance(handle, LowLatencyHandle), "handle", type(handle).__name__, allowed)
        self._check_geometry(handle.grid)

    @staticmethod
    def _check_stats(stats: Tensor | None, name: str, dtype: torch.dtype, size: int, device: torch.device) -> None:
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
    """What an engine returns, as callers get it: ``[M×R, H/2, LE]`` rows, ``[32, 4, tiles, 4, W, LE]`` scales."""
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
