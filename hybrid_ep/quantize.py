"""FP8 for token rows: e4m3 values with one scale for each 128 channels, as float32 or as packed UE8M0 exponents.

A scale is amax / 448 (448 = the largest e4m3 value), so that ``value × scale`` gives the channel back. `round_scale`
rounds it up to a power of two. UE8M0 keeps only the biased exponent of that power, in a byte. Four of them are an
int32, lowest channel in the lowest byte (source: OCP Microscaling Formats v1.0, sections 5.3 and 5.4.1).

NVFP4 keeps a channel as e2m1: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two are in a byte, the lower channel in
the low half. Each block of 16 channels has an e4m3 scale. A tensor has one float32 scale, which brings the scales of
blocks into e4m3's range: ``value × block scale / global scale`` gives a channel back. Let A be the
largest magnitude of a block. The error of a channel is at most ``A/6 × 17/16 + 6 × 2⁻¹⁰ / global scale``: half the
widest gap of e2m1 is 1, and a block scale is rounded by at most 1/16 of itself, or by at most 2⁻¹⁰ if it is subnormal.

With `Nvfp4Format(ue8m0=True)` the scale of a block is a power of two, as its biased exponent in a byte. It is rounded
up, to less than twice A/6. So the error of a channel is at most the larger of ``A/3`` and ``6 × 2⁻¹²⁶ / global scale``.
In either form a block with a NaN has the scale NaN, and comes back as NaN. An infinity comes back as the largest value,
and with UE8M0 as an infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.checks import CHANNELS_PER_SCALE, require, require_int
from hybrid_ep.errors import ConfigError

__all__ = [
    "CHANNELS_PER_BLOCK",
    "CHANNELS_PER_SCALE",
    "E2M1_MAX",
    "E4M3_MAX",
    "SCALES_PER_WORD",
    "Fp8Format",
    "Nvfp4Format",
    "RowFormat",
    "block_scales_of",
    "cast_from_fp8",
    "cast_from_nvfp4",
    "cast_to_fp8",
    "cast_to_nvfp4",
    "global_scale_of",
    "pack_ue8m0",
    "unpack_ue8m0",
]


SCALES_PER_WORD = 4
E4M3_MAX = 448.0
CHANNELS_PER_BLOCK = 16
E2M1_MAX = 6.0
# Halfway between neighbours of e2m1, by where a tie goes: to the neighbour whose mantissa is even.
_TIES_DOWN, _TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_UE8M0_MAX, _UE8M0_NAN = 2.0**127, 255
# Offsets of the scales of packed rows: 128 rows × 4 blocks side by side, row r at r % 32 × 16 + r // 32 × 4.
_ROWS_OF_TILE, _LANES_OF_TILE = 128, 32
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


@dataclass(frozen=True)
class Nvfp4Format:
    """How scales of blocks are made.

    Attributes:
        ue8m0: they are powers of two, kept as biased exponents in int8.

    Example:
        >>> hybrid_ep.quantize.Nvfp4Format()
        Nvfp4Format(ue8m0=False)
    """

    ue8m0: bool = False


RowFormat = Fp8Format | Nvfp4Format


def _check(name: str, tensor: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Returns `tensor` if it is one with at least one dimension and of one of these dtypes; () = any floating point."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is {type(tensor).__name__}; allowed: a torch.Tensor")
    fits = tensor.dtype in dtypes if dtypes else tensor.is_floating_point()
    require(fits, f"{name}.dtype", tensor.dtype, " or ".join(map(str, dtypes)) or "a floating-point dtype")
    require(tensor.dim() > 0, f"{name}.shape", [], "[..., columns]")
    return tensor


def _check_format(fmt: object, kind: type) -> None:
    if fmt is not None:
        require(isinstance(fmt, kind), "fmt", type(fmt).__name__, f"{kind.__name__} or None")


def _check_scales(name: str, scales: Tensor, data: Tensor, num_scales: int) -> None:
    shape = [*data.shape[:-1], num_scales]
    require(list(scales.shape) == shape, f"{name}.shape", list(scales.shape), f"{shape}, for these rows")


def _check_hidden(hidden: int) -> None:
    if hidden % CHANNELS_PER_SCALE or hidden == 0:
        raise ConfigError(f"hidden is {hidden}; allowed with FP8: multiples of {CHANNELS_PER_SCALE}")


def _blocks(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // CHANNELS_PER_SCALE, CHANNELS_PER_SCALE)


def cast_to_fp8(x: Tensor, fmt: Fp8Format | None = None) -> tuple[Tensor, Tensor]:
    """Quantises rows.

    Args:
        x: ``[..., H]`` of a floating-point dtype, as bf16; H a multiple of 128.
        fmt: how scales are made; None = float32 scales that need not be powers of two.

    Returns:
        ``[..., H]`` float8_e4m3fn, and scales ``[..., H/128]`` float32 or ``[..., ceil(H/512)]`` int32 (UE8M0).

    Raises:
        ConfigError: `x` is not floating point, H is not a multiple of 128, or `fmt` is no `Fp8Format`.

    Example:
        >>> data, scales = hybrid_ep.quantize.cast_to_fp8(torch.full((2, 256), 448.0))
        >>> data.dtype, scales.tolist()
        (torch.float8_e4m3fn, [[1.0, 1.0], [1.0, 1.0]])
    """
    _check("x", x, ())
    _check_format(fmt, Fp8Format)
    fmt = fmt or Fp8Format()
    _check_hidden(x.shape[-1])
    blocks = _blocks(x.float())
    amax = blocks.abs().amax(-1).clamp_min(_MIN_AMAX)
    # Divided by a tensor: for a number, torch on a GPU multiplies by its reciprocal, and the last bit differs from the
    # kernels'.
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
        ConfigError: a dtype is another, H is not a multiple of 128, or the shape of `scales` does not fit `data`.

    Example:
        >>> x = torch.full((2, 128), 3.0, dtype=torch.bfloat16)
        >>> bool((hybrid_ep.quantize.cast_from_fp8(*hybrid_ep.quantize.cast_to_fp8(x)) == x).all())
        True
    """
    _check("data", data, (torch.float8_e4m3fn, torch.uint8))
    _check("scales", scales, (torch.float32, torch.int32))
    hidden = data.shape[-1]
    _check_hidden(hidden)
    num_scales = hidden // CHANNELS_PER_SCALE
    if scales.dtype == torch.int32:
        _check_scales("scales", scales, data, -(-num_scales // SCALES_PER_WORD))
        scales = unpack_ue8m0(scales, num_scales)
    _check_scales("scales", scales, data, num_scales)
    values = _blocks(data.view(torch.float8_e4m3fn).float())
    return (values * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _round_up_to_power_of_two(scales: Tensor) -> Tensor:
    """The smallest power of two that is not below each (positive, normal) scale: bit arithmetic, so exact. A NaN
    becomes an infinity.
    """
    bits = scales.nan_to_num(nan=torch.inf, posinf=torch.inf).contiguous().view(torch.int32)
    exponent = (bits + 0x7FFFFF) & 0x7F800000
    return exponent.view(torch.float32)


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Packs power-of-two scales ``[..., S]`` float32 into ``[..., ceil(S/4)]`` int32; missing bytes are 0.

    Only the exponent of a scale is kept: of a scale that is no power of two, the power below it.

    Raises:
        ConfigError: `scales` is not float32.

    Example:
        >>> hybrid_ep.quantize.pack_ue8m0(torch.tensor([[1.0, 2.0]])).tolist()  # 128 << 8 | 127
        [[32895]]
    """
    _check("scales", scales, (torch.float32,))
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padding = -exponents.shape[-1] % SCALES_PER_WORD
    return torch.nn.functional.pad(exponents, (0, padding)).contiguous().view(torch.int32)


def unpack_ue8m0(packed: Tensor, num_scales: int) -> Tensor:
    """Unpacks ``[..., ceil(S/4)]`` int32 into ``[..., S]`` float32 powers of two.

    Args:
        packed: as `pack_ue8m0` makes it.
        num_scales: S.

    Raises:
        ConfigError: `packed` is not int32, or does not hold S scales.

    Example:
        >>> hybrid_ep.quantize.unpack_ue8m0(torch.tensor([[32895]], dtype=torch.int32), 2).tolist()
        [[1.0, 2.0]]
    """
    _check("packed", packed, (torch.int32,))
    require_int("num_scales", num_scales, minimum=0, maximum=SCALES_PER_WORD * packed.shape[-1])
    # clone() and not contiguous(), which keeps the stride of a dimension of one word: a view as bytes refuses it.
    words = packed.clone(memory_format=torch.contiguous_format)
    exponents = words.view(torch.uint8)[..., :num_scales].to(torch.int32)
    return (exponents << 23).view(torch.float32)


def global_scale_of(x: Tensor) -> Tensor:
    """Returns ``[1]`` float32: 448 × 6 / amax, the largest that `cast_to_nvfp4` can take for `x`; 1 for zeros.

    Values that are not finite do not count.

    Args:
        x: of a floating-point dtype and any shape.

    Raises:
        ConfigError: `x` is not floating point.

    Example:
        >>> hybrid_ep.quantize.global_scale_of(torch.full((2, 32), 6.0))
        tensor([448.])
    """
    if not (isinstance(x, Tensor) and x.dim() == 0):
        _check("x", x, ())
    magnitudes = x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    amax = magnitudes.amax().reshape(1) if x.numel() else torch.zeros(1, device=x.device)
    return torch.where(amax > 0, (E4M3_MAX * E2M1_MAX / amax).clamp_max(torch.finfo(torch.float32).max), 1.0)


def cast_to_nvfp4(
    x: Tensor, global_scale: Tensor | None = None, fmt: Nvfp4Format | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises rows.

    Args:
        x: ``[..., H]`` of a floating-point dtype, as bf16; H a multiple of 16.
        global_scale: one positive float32; None = that of `global_scale_of`. With a larger one, large values become
            the largest that a block can hold.
        fmt: how scales of blocks are made; None = e4m3.

    Returns:
        ``[..., H/2]`` uint8 of two e2m1 each, scales ``[..., H/16]`` float8_e4m3fn or int8 (UE8M0), and the global
        scale ``[1]`` float32.

    Raises:
        ConfigError: `x` is not floating point, H is not a multiple of 16, `global_scale` is not one number, or `fmt` is
            no `Nvfp4Format`.

    Example:
        >>> data, scales, global_scale = hybrid_ep.quantize.cast_to_nvfp4(torch.full((2, 32), 6.0))
        >>> data.shape, scales.shape, data.dtype
        (torch.Size([2, 16]), torch.Size([2, 2]), torch.uint8)
    """
    _check("x", x, ())
    _check_format(fmt, Nvfp4Format)
    hidden = x.shape[-1]
    _check_blocks(hidden)
    given = global_scale_of(x) if global_scale is None else _one_scale(global_scale)
    blocks = x.float().reshape(*x.shape[:-1], hidden // CHANNELS_PER_BLOCK, CHANNELS_PER_BLOCK)
    # Divided by a tensor, and below multiplied by the reciprocal: the roundings of the kernels.
    wanted = blocks.abs().amax(-1) * given / torch.full_like(given, E2M1_MAX)
    if fmt is not None and fmt.ue8m0:
        rounded = _round_up_to_power_of_two(wanted.clamp_max(_UE8M0_MAX))
        exponents = torch.where(wanted.isnan(), _UE8M0_NAN, rounded.view(torch.int32) >> 23)
        scales = exponents.to(torch.uint8).view(torch.int8)
    else:
        scales = wanted.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    factor = _as_float(scales)
    inverse = (given / factor).unsqueeze(-1)
    values = torch.where((factor > 0).unsqueeze(-1) & inverse.isfinite(), blocks * inverse, 0.0).flatten(-2)
    magnitudes = values.abs()
    codes = 8 * (values < 0).to(torch.uint8)
    for bound in _TIES_DOWN:
        codes += magnitudes > bound
    for bound in _TIES_UP:
        codes += magnitudes >= bound
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, given


def cast_from_nvfp4(data: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Gives quantised rows back.

    Args:
        data: ``[..., H/2]`` uint8.
        scales: ``[..., H/16]`` float8_e4m3fn (or uint8 holding its bits), or int8 (UE8M0).
        global_scale: one float32, or one for each row: the shape of `data` without its last dimension.
        dtype: of the result.

    Returns:
        ``[..., H]`` of `dtype`; the products are made in float32.

    Raises:
        ConfigError: a dtype is another, H is not a multiple of 16, or the shape of `scales` or `global_scale` does not
            fit `data`.

    Example:
        >>> rows = torch.full((2, 32), 6.0)
        >>> bool((hybrid_ep.quantize.cast_from_nvfp4(*hybrid_ep.quantize.cast_to_nvfp4(rows)) == rows).all())
        True
    """
    _check("data", data, (torch.uint8,))
    _check("scales", scales, (torch.float8_e4m3fn, torch.uint8, torch.int8))
    hidden = 2 * data.shape[-1]
    _check_blocks(hidden)
    num_blocks = hidden // CHANNELS_PER_BLOCK
    _check_scales("scales", scales, data, num_blocks)
    if not (isinstance(global_scale, Tensor) and global_scale.numel() == 1):
        _check("global_scale", global_scale, ())
        shape = list(data.shape[:-1])
        require(list(global_scale.shape) == shape, "global_scale.shape", list(global_scale.shape), f"[1] or {shape}")
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    magnitudes = torch.tensor(_E2M1, device=data.device)[(codes & 7).long()]
    values = torch.where(codes > 7, -magnitudes, magnitudes).unflatten(-1, (num_blocks, CHANNELS_PER_BLOCK))
    per_row = global_scale.float().reshape(()) if global_scale.numel() == 1 else global_scale.float().unsqueeze(-1)
    factor = _as_float(scales) / per_row
    rows: Tensor = (values * factor.unsqueeze(-1)).flatten(-2).to(dtype)
    return rows


def block_scales_of(packed: Tensor) -> Tensor:
    """Gives the scales that `low_latency_dispatch` has received with NVFP4 rows in the order of the rows.

    Args:
        packed: ``[32, 4, ceil(N/128), 4, H/64, LE]`` float8_e4m3fn or int8, as matrix units of Blackwell load scales:
            tiles of 128 rows and 4 blocks, with row r at ``[r % 32, r // 32]``.

    Returns:
        ``[LE, ceil(N/128) × 128, H/16]`` of the same dtype, a copy.

    Raises:
        ConfigError: `packed` has another dtype or shape.

    Example:
        >>> hybrid_ep.quantize.block_scales_of(torch.zeros(32, 4, 1, 4, 2, 3, dtype=torch.int8)).shape
        torch.Size([3, 128, 8])
    """
    _check("packed", packed, (torch.float8_e4m3fn, torch.int8, torch.uint8))
    tile = (_LANES_OF_TILE, _ROWS_OF_TILE // _LANES_OF_TILE, SCALES_PER_WORD)
    fits = packed.dim() == 6 and (*packed.shape[:2], packed.shape[3]) == tile
    require(fits, "packed.shape", list(packed.shape), "[32, 4, tiles, 4, H/64, LE]")
    lanes, quarters, tiles, blocks, words, num_local = packed.shape
    by_row = packed.view(torch.uint8).permute(5, 2, 1, 0, 4, 3)
    return by_row.reshape(num_local, tiles * quarters * lanes, words * blocks).view(packed.dtype)


def _check_blocks(hidden: int) -> None:
    if hidden % CHANNELS_PER_BLOCK or hidden == 0:
        raise ConfigError(f"hidden is {hidden}; allowed with NVFP4: multiples of {CHANNELS_PER_BLOCK}")


def _one_scale(global_scale: Tensor) -> Tensor:
    if not isinstance(global_scale, Tensor):
        raise ConfigError(f"global_scale is {type(global_scale).__name__}; allowed: a torch.Tensor of one number")
    if global_scale.numel() != 1:
        raise ConfigError(f"global_scale has {global_scale.numel()} values; allowed: one")
    return global_scale.float().reshape(1)


def _as_float(scales: Tensor) -> Tensor:
    """Scales of blocks as float32; the largest UE8M0 is NaN."""
    if scales.dtype != torch.int8:
        return scales.view(torch.float8_e4m3fn).float()
    exponents = scales.view(torch.uint8).to(torch.int32)
    return torch.where(exponents == _UE8M0_NAN, torch.nan, (exponents << 23).view(torch.float32))
