"""FP8 and NVFP4 helpers: bounds of the error, exact powers of two, packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep import ConfigError
from hybrid_ep.quantize import (
    E4M3_MAX,
    Fp8Format,
    Nvfp4Format,
    block_scales_of,
    cast_from_fp8,
    cast_from_nvfp4,
    cast_to_fp8,
    cast_to_nvfp4,
    global_scale_of,
    pack_ue8m0,
    unpack_ue8m0,
)

FORMATS = [Fp8Format(), Fp8Format(round_scale=True), Fp8Format(round_scale=True, ue8m0=True)]


@pytest.mark.parametrize("fmt", FORMATS)
@given(num_blocks=st.integers(1, 9), exponent=st.integers(-12, 12), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_round_trip_is_within_the_format(fmt: Fp8Format, num_blocks: int, exponent: int, seed: int) -> None:
    x = torch.randn(3, num_blocks * 128, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    x = x.to(torch.bfloat16)
    data, scales = cast_to_fp8(x, fmt)
    assert data.dtype == torch.float8_e4m3fn
    back = cast_from_fp8(data, scales, torch.float32)
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of the value, and 2^-10 of the scale below the smallest normal.
    scale = scales if scales.dtype == torch.float32 else unpack_ue8m0(scales, num_blocks)
    subnormal = scale.repeat_interleave(128, 1) * 2.0**-10
    assert bool(((back - x.float()).abs() <= x.float().abs() * 2.0**-4 + subnormal).all())


@pytest.mark.parametrize("fmt", FORMATS[1:])
def test_rounded_scales_are_powers_of_two_that_do_not_overflow(fmt: Fp8Format) -> None:
    x = torch.randn(64, 512) * torch.logspace(-3, 5, 64).unsqueeze(1)
    data, scales = cast_to_fp8(x, fmt)
    if fmt.ue8m0:
        assert scales.dtype == torch.int32
        assert scales.shape == (64, 1)
        scales = unpack_ue8m0(scales, 4)
    assert bool((torch.frexp(scales).mantissa == 0.5).all())
    amax = x.view(64, 4, 128).abs().amax(-1)
    assert bool((amax / scales <= E4M3_MAX).all())
    assert bool((amax / scales > E4M3_MAX / 2 - 1).all())
    assert bool(data.float().isfinite().all())


def test_zeros_stay_zeros() -> None:
    data, scales = cast_to_fp8(torch.zeros(2, 256, dtype=torch.bfloat16))
    assert not bool(cast_from_fp8(data, scales).any())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", [Fp8Format(), Fp8Format(round_scale=True), Fp8Format(round_scale=True, ue8m0=True)])
def test_values_that_are_not_finite_spoil_their_block(fmt: Fp8Format, value: float) -> None:
    x = torch.ones(2, 256)
    x[1, 130] = value
    back = cast_from_fp8(*cast_to_fp8(x, fmt))
    assert bool(back[1, 128:].isnan().all())
    assert bool((back[1, :128] == 1).all())
    assert bool((back[0] == 1).all())


@given(st.integers(1, 13))
def test_packing_is_reversible(num_scales: int) -> None:
    scales = 2.0 ** torch.randint(-20, 20, (5, num_scales)).float()
    packed = pack_ue8m0(scales)
    assert packed.shape == (5, -(-num_scales // 4))
    assert torch.equal(unpack_ue8m0(packed, num_scales), scales)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_packed_scales_that_are_column_major(num_rows: int) -> None:
    """As low-latency calls return them; here of one word in a row."""
    packed = pack_ue8m0(torch.full((num_rows, 2), 4.0)).as_strided((num_rows, 1), (1, 6))
    assert unpack_ue8m0(packed, 2).tolist() == [[4.0, 4.0]] * num_rows


def test_lowest_channel_lies_in_the_lowest_byte() -> None:
    packed = pack_ue8m0(torch.tensor([[1.0, 2.0, 4.0, 8.0]]))
    assert packed.view(torch.uint8).tolist() == [[127, 128, 129, 130]]


@pytest.mark.parametrize("hidden", [0, 1, 64, 129, 200])
def test_hidden_must_be_divisible(hidden: int) -> None:
    with pytest.raises(ConfigError, match=rf"{hidden}.*multiples of 128"):
        cast_to_fp8(torch.zeros(1, hidden))


def test_bad_formats_and_scales() -> None:
    with pytest.raises(ConfigError, match="round_scale"):
        Fp8Format(ue8m0=True)
    data, scales = cast_to_fp8(torch.ones(2, 256))
    with pytest.raises(ConfigError, match=r"scales.shape is \[2, 3\]; allowed: \[2, 2\]"):
        cast_from_fp8(data, torch.ones(2, 3))
    assert scales.shape == (2, 2)


@pytest.mark.parametrize("ue8m0", [False, True])
@given(st.integers(0, 2**31), st.sampled_from([0.0, 2.0, 6.0]), st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_nvfp4_is_within_its_bound(ue8m0: bool, seed: int, spread: float, share: float) -> None:
    """Blocks of very different sizes, and global scales smaller than the largest that may be taken."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (spread * torch.rand(4, 4, generator=generator))
    x = torch.randn(4, 64, generator=generator) * sizes.repeat_interleave(16, 1)
    data, scales, scale = cast_to_nvfp4(x, share * global_scale_of(x), Nvfp4Format(ue8m0))
    assert (data.shape, scales.shape, scale.shape) == ((4, 32), (4, 4), (1,))
    assert scales.dtype == (torch.int8 if ue8m0 else torch.float8_e4m3fn)
    back = cast_from_nvfp4(data, scales, scale, torch.float32)
    amax = x.view(4, 4, 16).abs().amax(-1, keepdim=True)
    bound = amax / 3 if ue8m0 else amax / 6 * 17 / 16 + 6 * 2**-10 / scale
    assert bool(((back - x).view(4, 4, 16).abs() <= bound * (1 + 1e-5)).all())
    assert bool((back * x >= 0).all())


@pytest.mark.parametrize("ue8m0", [False, True])
def test_nvfp4_of_values_that_are_not_finite(ue8m0: bool) -> None:
    """A NaN spoils its block and no other; what is too large is cut."""
    x = torch.ones(1, 64)
    x[0, 3], x[0, 20], x[0, 40] = torch.nan, torch.inf, -1e6
    back = cast_from_nvfp4(*cast_to_nvfp4(x, torch.tensor(1.0), Nvfp4Format(ue8m0)), torch.float32).view(4, 16)
    assert bool(back[0].isnan().all())
    assert not bool(back[1:].isnan().any())
    assert back[1, 4] == (torch.inf if ue8m0 else 6 * 448)
    assert bool(back[2, 8] < -2000)
    assert bool((back[3] - 1).abs().max() <= 1 / 6)
    tiny = torch.full((1, 16), 1e-40)
    assert not bool(cast_from_nvfp4(*cast_to_nvfp4(tiny, torch.tensor(16.0), Nvfp4Format(ue8m0))).any())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_leave_the_global_scale(value: float) -> None:
    x = torch.full((1, 32), 1e-3)
    x[0, 3] = value
    back = cast_from_nvfp4(*cast_to_nvfp4(x))
    assert bool((back[0, 16:] - 1e-3).abs().max() < 1e-4)


def test_the_global_scale_of_tiny_values_is_finite() -> None:
    x = torch.zeros(1, 32)
    x[0, :16] = 1e-37
    back = cast_from_nvfp4(*cast_to_nvfp4(x), torch.float32)
    assert bool((back[0, :16] - 1e-37).abs().max() < 1e-38)
    assert not bool(back[0, 16:].any())


def test_ue8m0_scales_of_blocks_are_rounded_up() -> None:
    x = torch.tensor([6.0, 6.01, 3.0, 0.0]).repeat_interleave(16).unsqueeze(0)
    _, scales, _ = cast_to_nvfp4(x, torch.tensor(1.0), Nvfp4Format(ue8m0=True))
    assert scales.view(torch.uint8).tolist() == [[127, 128, 126, 0]]


def test_packed_scales_in_the_order_of_rows() -> None:
    """Row r of 128 stands at [r % 32, r // 32], four blocks side by side (source: CUTLASS, block-scaled layouts)."""
    packed = torch.zeros(32, 4, 2, 4, 3, 2, dtype=torch.int8)
    packed[5, 1, 1, 2, 2, 1] = 7
    scales = block_scales_of(packed)
    assert scales.shape == (2, 256, 12)
    assert scales.nonzero().tolist() == [[1, 128 + 32 + 5, 4 * 2 + 2]]


def test_nvfp4_values_and_their_place() -> None:
    """What e2m1 can tell comes back bit for bit; the lower channel lies in the lower half; ties go to the even one."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat((values, -values)).unsqueeze(0)
    data, scales, scale = cast_to_nvfp4(x, torch.tensor(1.0))
    assert data.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]]
    assert scales.float().tolist() == [[1.0]]
    assert torch.equal(cast_from_nvfp4(data, scales, scale, torch.float32), x)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 8])
    back = cast_from_nvfp4(*cast_to_nvfp4(ties, torch.tensor(1.0)), torch.float32)
    assert back[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def test_nvfp4_with_a_global_scale_of_each_row() -> None:
    x = torch.randn(5, 32)
    made = [cast_to_nvfp4(row) for row in x]
    data, scales, scale = (torch.stack([part[i] for part in made]) for i in range(3))
    together = cast_from_nvfp4(data, scales, scale.flatten(), torch.float32)
    for row, (one, one_scales, one_scale) in enumerate(made):
        assert torch.equal(together[row], cast_from_nvfp4(one, one_scales, one_scale, torch.float32))
    assert cast_to_nvfp4(torch.zeros(2, 32))[2].item() == 1
    assert not bool(cast_from_nvfp4(*cast_to_nvfp4(torch.zeros(2, 32))).any())
    assert cast_to_nvfp4(torch.zeros(0, 32))[0].shape == (0, 16)


def test_nvfp4_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="hidden is 40; allowed with NVFP4: multiples of 16"):
        cast_to_nvfp4(torch.zeros(1, 40))
    with pytest.raises(ConfigError, match="global_scale has 2 values; allowed: one"):
        cast_to_nvfp4(torch.zeros(1, 32), torch.ones(2))
    data, scales, scale = cast_to_nvfp4(torch.ones(1, 32))
    with pytest.raises(ConfigError, match=r"scales.shape is \[1, 1\]; allowed: \[1, 2\], for these rows"):
        cast_from_nvfp4(data, scales[:, :1], scale)


ROWS = torch.ones(2, 128)
FP8, FP8_SCALES = cast_to_fp8(ROWS)
FP4, FP4_SCALES, GLOBAL_SCALE = cast_to_nvfp4(ROWS)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "to FP8: no tensor": (lambda: cast_to_fp8([1.0]), "x is list; allowed: a torch.Tensor"),
    "to FP8: integers": (lambda: cast_to_fp8(ROWS.int()), "x.dtype is torch.int32; allowed: a floating-point dtype"),
    "to FP8: a scalar": (lambda: cast_to_fp8(torch.tensor(1.0)), r"x.shape is \[\]; allowed: \[..., columns\]"),
    "to FP8: format": (lambda: cast_to_fp8(ROWS, Nvfp4Format()), "fmt is Nvfp4Format; allowed: Fp8Format or None"),
    "from FP8: rows": (lambda: cast_from_fp8(ROWS, FP8_SCALES), "data.dtype is torch.float32; allowed: torch.float8"),
    "from FP8: scales": (
        lambda: cast_from_fp8(FP8, FP8_SCALES[:1]),
        r"scales.shape is \[1, 1\]; allowed: \[2, 1\], for these rows",
    ),
    "from FP8: scales of float64": (lambda: cast_from_fp8(FP8, FP8_SCALES.double()), "scales.dtype is torch.float64"),
    "from FP8: packed scales": (
        lambda: cast_from_fp8(FP8, torch.ones(2, 2, dtype=torch.int32)),
        r"scales.shape is \[2, 2\]; allowed: \[2, 1\]",
    ),
    "pack: integers": (lambda: pack_ue8m0(torch.ones(2, 1, dtype=torch.int32)), "scales.dtype is torch.int32"),
    "unpack: floats": (lambda: unpack_ue8m0(ROWS, 1), "packed.dtype is torch.float32; allowed: torch.int32"),
    "unpack: more than there are": (
        lambda: unpack_ue8m0(torch.ones(2, 1, dtype=torch.int32), 5),
        "num_scales is 5; allowed: an integer from 0 to 4",
    ),
    "global scale: integers": (lambda: global_scale_of(ROWS.int()), "x.dtype is torch.int32"),
    "to NVFP4: no tensor": (lambda: cast_to_nvfp4(None), "x is NoneType; allowed: a torch.Tensor"),
    "to NVFP4: global scale": (lambda: cast_to_nvfp4(ROWS, 1.0), "global_scale is float; allowed: a torch.Tensor of"),
    "from NVFP4: rows": (lambda: cast_from_nvfp4(FP8, FP4_SCALES, GLOBAL_SCALE), "data.dtype is torch.float8_e4m3fn"),
    "from NVFP4: scales": (
        lambda: cast_from_nvfp4(FP4, FP4_SCALES[:1], GLOBAL_SCALE),
        r"scales.shape is \[1, 8\]; allowed: \[2, 8\], for these rows",
    ),
    "from NVFP4: global scales": (
        lambda: cast_from_nvfp4(FP4, FP4_SCALES, torch.ones(3)),
        r"global_scale.shape is \[3\]; allowed: \[1\] or \[2\]",
    ),
    "scales of received rows": (
        lambda: block_scales_of(torch.zeros(32, 4, 1, 3, 2, 3, dtype=torch.int8)),
        r"packed.shape is \[32, 4, 1, 3, 2, 3\]; allowed: \[32, 4, tiles, 4, H/64, LE\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        call()
