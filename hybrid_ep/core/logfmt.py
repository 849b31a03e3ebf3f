"""LogFMT-10 for rows of combine: a sign and one of 511 magnitudes, even steps apart in the logarithm, or zero.

Each block of 128 channels has a header of two float32: ``low``, the logarithm (base 2) of its smallest nonzero
magnitude, and ``step``. Code 0 is zero. Code k is ``2 ** (low + (k - 1) × step)``, and the largest magnitude has code
511 (source: DeepSeek-AI, "Insights into DeepSeek-V3", section 3.2, LogFMT-nBit). A block whose magnitudes are further
than 2³² apart has low = log2(largest) − 32. A channel takes the code whose value is nearest to it, and not to its
logarithm, so that rounding has no bias.

Let A be the largest and a the smallest nonzero magnitude of a block, D = min(log2(A / a), 32) and r = 2 ** (D / 510).
The error of a channel x is at most ``|x| × ((r - 1) / (r + 1) + 2⁻¹⁵)``, which is never more than 2.18 %. Below
A × 2⁻³² it is at most A × 2⁻³³ × (1 + 2⁻¹⁵). Magnitudes below 2⁻¹²⁶ become zero. A block with a NaN or an infinity
comes back as NaN.

Logarithm and power are polynomials whose every step is rounded to float32, so that each engine has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.errors import ConfigError

CHANNELS_PER_HEADER = 128
MAX_CODE = 511
_MAX_RANGE = 32.0
# log2(1 + f) = f × Σ c_i f^i and 2^f = 1 + f × Σ c_i f^i for 0 ≤ f < 1: interpolated at Chebyshev nodes, the highest
# power first; at most 1.5e-6 and 6e-7 off.
_LOG2 = ("0x1.4fb6c0p-6", "-0x1.897cc6p-4", "0x1.b9867cp-3", "-0x1.5b63c6p-2", "0x1.e92bbep-2", "-0x1.713c3ep-1",
         "0x1.715458p+0")  # fmt: skip
_EXP2 = ("0x1.d52664p-10", "0x1.2d5c5ep-7", "0x1.c7f4aep-5", "0x1.ebf194p-3", "0x1.62e43ep-1")
# Halfway between two codes, in steps from the lower one, is 0.5 + step × ln(2)/8 in the logarithm, but for step³.
_HALFWAY_PER_STEP = float.fromhex("0x1.62e430p-4")


def cast_to_logfmt(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows.

    Args:
        x: ``[..., H]`` bf16; H a multiple of 128.

    Returns:
        ``[..., H]`` int16, ``sign << 9 | code``, and headers ``[..., H/128, 2]`` float32.

    Raises:
        ConfigError: H is not a multiple of 128.
    """
    hidden = x.shape[-1]
    if hidden % CHANNELS_PER_HEADER:
        raise ConfigError(f"hidden is {hidden}; allowed with use_logfmt: multiples of {CHANNELS_PER_HEADER}")
    blocks = x.unflatten(-1, (-1, CHANNELS_PER_HEADER))
    bits = blocks.contiguous().view(torch.int16).to(torch.int32)
    magnitudes, is_negative = bits & 0x7FFF, bits < 0
    is_zero = magnitudes < 0x80
    largest = torch.where(is_zero, 0, magnitudes).amax(-1, keepdim=True)
    smallest = torch.where(is_zero, 0x7FFF, magnitudes).amin(-1, keepdim=True)
    has_values, is_finite = largest > 0, largest < 0x7F80
    top = _log2(largest)
    low = torch.maximum(_log2(smallest), top - _MAX_RANGE)
    low = torch.where(has_values, low, 0.0)
    spread = torch.where(has_values, top - low, 0.0)
    step = spread / torch.full_like(spread, MAX_CODE - 1)
    inverse = torch.where(spread > 0, torch.full_like(spread, MAX_CODE - 1) / spread, 0.0)
    above = _log2(magnitudes) - low
    nearest = (above * inverse + (0.5 - step * _HALFWAY_PER_STEP)).floor().clamp(0, MAX_CODE - 1)
    codes = torch.where(is_zero | (above < -1), 0, nearest.to(torch.int32) + 1)
    codes = torch.where(is_finite, codes, 1) | is_negative << 9
    headers = torch.cat((low, torch.where(is_finite, step, torch.nan)), -1)
    return codes.flatten(-2).to(torch.int16), headers


def cast_from_logfmt(codes: Tensor, headers: Tensor) -> Tensor:
    """Gives quantised rows back.

    Args:
        codes: ``[..., H]`` int16.
        headers: ``[..., H/128, 2]`` float32.

    Returns:
        ``[..., H]`` float32.
    """
    blocks = codes.to(torch.int32).unflatten(-1, (-1, CHANNELS_PER_HEADER))
    code = blocks & MAX_CODE
    low, step = headers.unsqueeze(-1).unbind(-2)
    exponent = low + (code - 1).float() * step
    whole = exponent.floor()
    power = (whole.nan_to_num().to(torch.int32) + 127 << 23).view(torch.float32)
    fraction = exponent - whole
    value = torch.where(code == 0, 0.0, (1 + fraction * _polynomial(_EXP2, fraction)) * power)
    return torch.where(blocks > MAX_CODE, -value, value).flatten(-2)


def _log2(magnitudes: Tensor) -> Tensor:
    """The logarithm (base 2) of normal bf16 magnitudes, given as bits; float32."""
    fraction = (magnitudes & 0x7F).float() * 2.0**-7
    return ((magnitudes >> 7) - 127).float() + fraction * _polynomial(_LOG2, fraction)


def _polynomial(coefficients: tuple[str, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, float.fromhex(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = value * x + float.fromhex(coefficient)
    return value
