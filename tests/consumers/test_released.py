"""Released consumers against hybrid_ep as `deep_ep`: `make test-consumers` downloads them first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import RunRanks
from tests.consumers import released


def _require(package: str) -> None:
    if not (released.ROOT / package).is_dir():
        pytest.skip(f"{package} is not unpacked; make test-consumers does it")


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_megatron_core(run_ranks: RunRanks, backend: str) -> None:
    _require("megatron-core")
    run_ranks(2, released.check_megatron, backend)


@pytest.mark.parametrize("package", ["deepspeed", "lmdeploy"])
def test_deepspeed_and_lmdeploy(run_ranks: RunRanks, package: str) -> None:
    _require(package)
    run_ranks(2, getattr(released, f"check_{package}"))


@pytest.mark.parametrize("is_bounded", [False, True], ids=["exact", "bounded"])
def test_nemo(run_ranks: RunRanks, is_bounded: bool) -> None:
    _require("nemo-automodel")
    run_ranks(2, released.check_nemo, is_bounded)


@pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])
def test_sglang(run_ranks: RunRanks, is_decode: bool) -> None:
    _require("sglang")
    run_ranks(2, released.check_sglang, is_decode)


@pytest.mark.parametrize("is_async", [False, True], ids=["at_once", "async"])
def test_sglang_normal(run_ranks: RunRanks, is_async: bool) -> None:
    _require("sglang")
    run_ranks(2, released.check_sglang_normal, is_async)


@pytest.mark.parametrize("is_blackwell", [False, True], ids=["comp_signal", "src_signals"])
def test_sglang_overlap(run_ranks: RunRanks, is_blackwell: bool) -> None:
    _require("sglang")
    run_ranks(2, released.check_sglang_overlap, is_blackwell)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_torchtitan(run_ranks: RunRanks, backend: str, is_training: bool) -> None:
    _require("torchtitan")
    run_ranks(2, released.check_torchtitan, backend, is_training)


@pytest.mark.parametrize("is_async", [False, True], ids=["at_once", "async"])
@pytest.mark.parametrize("check", [released.check_vllm_prefill, released.check_vllm_decode])
def test_vllm(run_ranks: RunRanks, check: Callable[..., None], is_async: bool) -> None:
    _require("vllm")
    run_ranks(2, check, is_async)


@pytest.mark.parametrize("is_async", [False, True], ids=["at_once", "async"])
@pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])
def test_vllm_v2(run_ranks: RunRanks, is_decode: bool, is_async: bool) -> None:
    _require("vllm")
    run_ranks(2, released.check_vllm_v2, is_decode, is_async)


@pytest.mark.parametrize(
    ("merges_rows", "bound"), [(False, None), (True, None), (False, 16)], ids=["pairs", "merged", "bounded"]
)
@pytest.mark.parametrize("shares_batch", [False, True], ids=["own_batches", "slices"])
def test_transformers(run_ranks: RunRanks, shares_batch: bool, merges_rows: bool, bound: int | None) -> None:
    _require("transformers")
    run_ranks(2, released.check_transformers, shares_batch, merges_rows, bound)
