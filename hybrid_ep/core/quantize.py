"""FP8 for token rows: e4m3 values with one scale for each 128 channels, as float32 or as packed UE8M0 exponents.

A scale is amax / 448 (448 = the largest e4m3 value), so that ``value × scale`` gives the channel back. `round_scale`
rounds it up to a power of two. UE8M0 keeps only the biased exponent of that power, in a byte. Four of them are an
int32, lowest channel in the lowest byte (source: OCP Microscaling Formats v1.0, sections 5.3 and 5.4.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.errors import ConfigError

__all__ = [
    "CHANNELS_PER_SCALE",
    "E4M3_MAX",
    "SCALES_PER_WORD",
    "Fp8Format",
    "cast_from_fp8",
    "cast_to_fp8",
    "pack_ue8m0",
    "unpack_ue8m0",
]

CHANNELS_PER_SCALE = 128
SCALES_PER_WORD = 4
E4M3_MAX = 448.0
_MIN_AMAX = 1e-4  # keeps the scale of an all-zero block finite and its values zero


@dataclass(frozen=True)
class Fp8Format:
    """How scales are made.

    Attributes:
        round_scale: scales are powers of two.
        ue8m0: scales are packed exponents (implies powers of two).

    Example:
        >>> hybrid_ep.quantize.Fp8Format(round_scale=True, ue8m0=True)
        Fp8Format(round_scale=True, ue8m0=True)
    """

    round_scale: bool = False
    ue8m0: bool = False

    def __post_init__(self) -> None:
        if self.ue8m0 and not self.round_scale:
            raise ConfigError("use_ue8m0 is True while round_scale is False; allowed: use_ue8m0 with round_scale=True")


def _check_hidden(hidden: int) -> None:
    if hidden % CHANNELS_PER_SCALE or hidden == 0:
        raise ConfigError(f"hidden is {hidden}; allowed with FP8: multiples of {CHANNELS_PER_SCALE}")


def _blocks(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // CHANNELS_PER_SCALE, CHANNELS_PER_SCALE)


def cast_to_fp8(x: Tensor, fmt: Fp8Format | None = None) -> tuple[Tensor, Tensor]:
    """Quantises rows.

    Args:
        x: ``[..., H]`` bf16 or float32; H a multiple of 128.
        fmt: how scales are made; None = plain float32 scales.

    Returns:
        ``[..., H]`` float8_e4m3fn, and scales ``[..., H/128]`` float32 or ``[..., ceil(H/512)]`` int32 (UE8M0).

    Raises:
        ConfigError: H is not a multiple of 128.

    Example:
        >>> data, scales = hybrid_ep.quantize.cast_to_fp8(torch.full((2, 256), 448.0))
        >>> data.dtype, scales.tolist()
        (torch.float8_e4m3fn, [[1.0, 1.0], [1.0, 1.0]])
    """
    fmt = fmt or Fp8Format()
    _check_hidden(x.shape[-1])
    blocks = _blocks(x.float())
    amax = blocks.abs().amax(-1).clamp_min(_MIN_AMAX)
    # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which is another last bit than the kernels'.
    scales = amax / torch.full_like(amax, E4M3_MAX)
    if fmt.round_scale:
        scales = _round_up_to_power_of_two(scales)
    # Multiplying by 448/amax, not dividing by the scale, is what the kernels do; a power of two is exact either way.
    inverse = 1 / scales if fmt.round_scale else E4M3_MAX / amax
    data = (blocks * inverse.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return data, pack_ue8m0(scales) if fmt.ue8m0 else scales


def cast_from_fp8(data: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Gives quantised rows back.

    Args:
        data: ``[..., H]`` float8_e4m3fn (or uint8 holding its bits).
        scales: ``[..., H/128]`` float32 or ``[..., ceil(H/512)]`` int32 (UE8M0).
        dtype: of the result.

    Returns:
        ``[..., H]`` of `dtype`; the products are made in float32.

    Raises:
        ConfigError: H is not a multiple of 128, or the number of scales does not fit it.

    Example:
        >>> x = torch.full((2, 128), 3.0, dtype=torch.bfloat16)
        >>> bool((hybrid_ep.quantize.cast_from_fp8(*hybrid_ep.quantize.cast_to_fp8(x)) == x).all())
        True
    """
    hidden = data.shape[-1]
    _check_hidden(hidden)
    num_scales = hidden // CHANNELS_PER_SCALE
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales, num_scales)
    if scales.shape[-1] != num_scales:
        raise ConfigError(f"scales has {scales.shape[-1]} columns; allowed for hidden {hidden}: {num_scales}")
    values = _blocks(data.view(torch.float8_e4m3fn).float())
    return (values * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _round_up_to_power_of_two(scales: Tensor) -> Tensor:
    """The smallest power of two that is not below each (positive, normal) scale: bit arithmetic, so exact."""
    bits = scales.contiguous().view(torch.int32)
    exponent = (bits + 0x7FFFFF) & 0x7F800000
    return exponent.view(torch.float32)


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Packs power-of-two scales ``[..., S]`` float32 into ``[..., ceil(S/4)]`` int32; missing bytes are 0.

    Example:
        >>> hybrid_ep.quantize.pack_ue8m0(torch.tensor([[1.0, 2.0]])).tolist()  # 128 << 8 | 127
        [[32895]]
    """
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padding = -exponents.shape[-1] % SCALES_PER_WORD
    return torch.nn.functional.pad(exponents, (0, padding)).contiguous().view(torch.int32)


def unpack_ue8m0(packed: Tensor, num_scales: int) -> Tensor:
    """Unpacks ``[..., ceil(S/4)]`` int32 into ``[..., S]`` float32 powers of two.

    Example:
        >>> hybrid_ep.quantize.unpack_ue8m0(torch.tensor([[32895]], dtype=torch.int32), 2).tolist()
        [[1.0, 2.0]]
    """
    exponents = packed.contiguous().view(torch.uint8)[..., :num_scales].to(torch.int32)
    return (exponents << 23).view(torch.float32)
