"""Checks of the arguments that the interfaces share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_ep.checks import MAX_TOPK, require, require_int
from hybrid_ep.core.checks import (
    packed,
    packed_copy,
    require_expert_indices,
    require_no_grad,
    require_rows,
    require_tensor,
    require_topk,
)
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import map_to_indices, widest_token
from hybrid_ep.engine.calls import Routing, Rows
from hybrid_ep.quantize import CHANNELS_PER_BLOCK, SCALES_PER_WORD

_BF16 = (torch.bfloat16,)
_FLOAT32 = (torch.float32,)
_NVFP4_DTYPES = (torch.uint8, torch.int32)
_NVFP4_SCALE_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


def num_local_experts(grid: RankGrid, num_experts: int) -> int:
    """Checks the number of experts of all ranks; returns that of a rank."""
    return require_int("num_experts", num_experts, minimum=1, multiple_of=grid.num_ranks) // grid.num_ranks


def routing_by_rank(grid: RankGrid, is_token_in_rank: Tensor, num_experts: int) -> Routing:
    """A routing to ranks, ``[T, R]`` bool: it names the first expert of each. Waits for a GPU above 32 ranks."""
    if grid.num_ranks > MAX_TOPK:
        widest = int(widest_token(is_token_in_rank))
        require(widest <= MAX_TOPK, "ranks of one token", widest, f"≤ {MAX_TOPK}")
    ranks, _ = map_to_indices(is_token_in_rank, None)
    first_experts = ranks * (num_experts // grid.num_ranks)
    return Routing(torch.where(ranks >= 0, first_experts, -1), None, num_experts, has_topk=False)


def check_grid(grid: RankGrid, made_at: RankGrid) -> None:
    """Checks that a handle was made at the grid of the buffer."""
    if made_at is not grid and made_at != grid:
        require(False, "handle", f"made at {made_at}", f"one that was made at {grid}")


def check_topk(topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int, device: torch.device | None) -> None:
    """Checks a routing; `device` is where it must be, None = anywhere."""
    require_topk(topk_idx, topk_weights, num_experts, device)
    if topk_idx.is_cpu:
        require_expert_indices(topk_idx, num_experts)


def check_rows(
    name: str, data: Tensor, scales: Tensor | None, *, device: torch.device | None, opaque_scales: bool = False
) -> Rows:
    """Checks token rows, of any strides, and returns them in the engine's form.

    Args:
        name: of the argument, for messages.
        data: ``[T, H]`` bf16, or float8_e4m3fn with `scales`.
        scales: ``[T, H/128]`` float32 or ``[T, ceil(H/512)]`` int32 (packed UE8M0), of any strides; None for bf16.
        device: where they must be; None = anywhere.
        opaque_scales: rows and scales are not interpreted: scales may have any number of columns, rows may be uint8.

    Raises:
        ConfigError: dtype, shape or device does not fit.
    """
    return Rows(*require_rows(name, data, scales, device, opaque_scales))


def check_nvfp4_rows(
    name: str, data: Tensor, scales: Tensor | None, global_scale: Tensor, *, device: torch.device | None
) -> Rows:
    """Checks NVFP4 rows, of any strides, and returns them as engines move them: four scales of blocks are a word.

    Args:
        name: of the argument, for messages.
        data: ``[T, H/2]`` uint8; H a multiple of 64. Or ``[T, H/8]`` int32: the next two are then in words, too.
        scales: ``[T, H/16]`` of one byte each: float8_e4m3fn, or int8 or uint8 that hold bits. Or ``[T, H/64]`` int32.
        global_scale: one float32. Or one for each row, ``[T]`` or ``[T, 1]``, which travels as a last word of scales.
        device: where they must be; None = anywhere.

    Raises:
        ConfigError: dtype, shape or device does not fit.
    """
    require_tensor(name, data, dtypes=_NVFP4_DTYPES, shape=(None, None), device=device)
    in_words = data.dtype == torch.int32
    num_tokens, hidden = data.shape[0], data.shape[1] * (8 if in_words else 2)
    channels = CHANNELS_PER_BLOCK * SCALES_PER_WORD
    if hidden == 0 or hidden % channels:
        require(False, f"hidden of {name}", hidden, f"with NVFP4: multiples of {channels}")
    if device is None:
        device = data.device
    if in_words:
        shape = (num_tokens, hidden // channels)
        scales = require_tensor(f"scales of {name}", scales, dtypes=(torch.int32,), shape=shape, device=device)
        of_rows = (num_tokens, 1)[: global_scale.dim() if isinstance(global_scale, Tensor) else 1]
        require_tensor(f"global scale of {name}", global_scale, dtypes=_FLOAT32, shape=of_rows, device=device)
        words = torch.cat([scales, packed(global_scale).view(torch.int32).view(-1, 1)], 1)
        return Rows(packed(data).view(torch.uint8), words)
    shape = (num_tokens, hidden // CHANNELS_PER_BLOCK)
    scales = require_tensor(f"scales of {name}", scales, dtypes=_NVFP4_SCALE_DTYPES, shape=shape, device=device)
    check_global_scale(f"global scale of {name}", global_scale, device)
    return as_rows(data, as_words(scales))


def check_weights(name: str, weights: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Checks float32 weights or probabilities that come with rows.

    Raises:
        ConfigError: dtype, shape or device does not fit, or a gradient would be lost.
    """
    require_tensor(name, weights, dtypes=_FLOAT32, shape=shape, device=device)
    require_no_grad(name, weights)


def check_global_scale(name: str, global_scale: Tensor, device: torch.device) -> None:
    """Checks the global scale of NVFP4 rows; its value only where the host has it.

    Raises:
        ConfigError: it is not one positive, finite float32 on the device.
    """
    shape = (1,) if isinstance(global_scale, Tensor) and global_scale.dim() else ()
    require_tensor(name, global_scale, dtypes=_FLOAT32, shape=shape, device=device)
    if global_scale.is_cpu:
        value = float(global_scale)
        require(0 < value < math.inf, name, value, "a positive, finite number")


def as_biases(bias: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Returns the biases that combine adds to its result, as a tuple."""
    return () if bias is None else bias if isinstance(bias, tuple) else (bias,)


def check_bias(
    bias: Tensor | tuple[Tensor, ...] | None, num_tokens: int, hidden: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Checks what combine adds to its result: none, one or two ``[T, H]`` bf16.

    Raises:
        ConfigError: dtype, shape, device or number does not fit, or a gradient would be lost.
    """
    biases = as_biases(bias)
    if len(biases) > 2:
        require(False, "number of biases", len(biases), "0, 1 or 2")
    for term in biases:
        require_tensor("bias", term, dtypes=_BF16, shape=(num_tokens, hidden), device=device)
        require_no_grad("bias", term)
    return biases


def rounded_up(counts: Tensor | Sequence[int], alignment: int) -> list[int]:
    """Returns each count as a multiple of `alignment`."""
    exact = counts.tolist() if isinstance(counts, Tensor) else counts
    return [-(-count // alignment) * alignment for count in exact]


def as_words(scales: Tensor) -> Tensor:
    """Scales of one byte each, of NVFP4 rows, four to a word. Copied where rows do not begin at a word."""
    word = torch.int32.itemsize
    if scales.storage_offset() % word or scales.stride(0) % word:
        scales = packed_copy(scales)
    return packed(scales).view(torch.int32)


def as_rows(data: Tensor, scales: Tensor | None) -> Rows:
    """Checked rows in the engine's form: row-major, without gaps."""
    return Rows(packed(data), packed(scales))
