"""LogFMT-10: its error bound, the values that it returns exactly, and its results for values that it cannot hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_ep import ConfigError
from hybrid_ep.core.logfmt import MAX_CODE, cast_from_logfmt, cast_to_logfmt


def there_and_back(x: Tensor) -> Tensor:
    codes, headers = cast_to_logfmt(x)
    assert (codes.shape, headers.shape) == (x.shape, (*x.shape[:-1], x.shape[-1] // 128, 2))
    assert bool(((codes >= 0) & (codes < 1 << 10)).all())
    return cast_from_logfmt(codes, headers)


@given(st.integers(0, 2**31), st.sampled_from([0, 4, 20, 60]), st.integers(-40, 40))
@settings(max_examples=50, deadline=None)
def test_channels_are_within_the_bound(seed: int, spread: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** (exponent + spread * (torch.rand(3, 256, generator=generator) - 0.5))
    x = (torch.randn(3, 256, generator=generator) * sizes).to(torch.bfloat16)
    x[:, ::19] = 0
    back = there_and_back(x).double().view(3, 2, 128)
    x64 = x.double().view(3, 2, 128)
    size = x64.abs()
    largest = size.amax(-1, keepdim=True)
    smallest = torch.where(size == 0, torch.inf, size).amin(-1, keepdim=True)
    ratio = 2 ** ((largest / smallest).log2().clamp_max(32) / (MAX_CODE - 1))
    slack = 2.0**-15
    bound = torch.where(
        size < largest * 2.0**-32, largest * 2.0**-33 * (1 + slack), size * ((ratio - 1) / (ratio + 1) + slack)
    )
    assert bool(((back - x64).abs() <= bound).all())
    assert bool((bound <= 0.0218 * size + largest * 2.0**-32).all())
    assert bool((back * x64 >= 0).all())


def test_rounding_has_no_bias() -> None:
    """Codes nearest in the logarithm would make channels smaller on average, by a seventh of a step's square."""
    x = (2.0 ** (30 * torch.rand(2000, 128, generator=torch.Generator().manual_seed(0)))).to(torch.bfloat16)
    error = (there_and_back(x).double() - x.double()).sum() / x.double().sum()
    assert abs(float(error)) < 2e-4


def test_zeros_single_values_and_signs() -> None:
    assert not bool(there_and_back(torch.zeros(2, 128, dtype=torch.bfloat16)).any())
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    x[0, 3], x[0, 130:] = -2.0, 4.0
    assert torch.equal(there_and_back(x), x.float())
    assert not bool(there_and_back(torch.full((1, 128), 1e-39, dtype=torch.bfloat16)).any())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_what_is_not_finite_is_nan(value: float) -> None:
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    x[0, 7], x[0, 9] = value, 0
    back = there_and_back(x)
    assert bool(back[0, :128].isnan().all())
    assert torch.equal(back[0, 128:], x[0, 128:].float())


def test_hidden_must_be_divisible() -> None:
    with pytest.raises(ConfigError, match="hidden is 192; allowed with use_logfmt: multiples of 128"):
        cast_to_logfmt(torch.zeros(1, 192, dtype=torch.bfloat16))
