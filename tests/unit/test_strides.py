"""Tensors that a call reads may have any strides: transposed, sliced, expanded as gradients of a sum are."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybrid_ep import Buffer, ConfigError, ElasticBuffer, HybridEPBuffer
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.balance.online import OnlinePlan, map_online, plan_online
from hybrid_ep.core import kernels
from hybrid_ep.engine.torch.engine import TorchEngine

T, H, K, E = 6, 256, 2, 8
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(T, H, generator=GENERATOR).bfloat16()
WEIGHTS, TOPK = torch.rand(T, E, generator=GENERATOR).topk(K)


def column_major(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def every_second(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


def expanded(tensor: Tensor) -> Tensor:
    """One row for all, which is what the tests of this file then compare with."""
    return tensor[:1].expand_as(tensor)


every_stride = pytest.mark.parametrize("strided", [column_major, every_second, expanded])


def normal(x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[Any]:
    with Buffer(engine="torch") as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, E)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        rows, idx, sent, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx, topk_weights=weights)
        assert handle is not None
        cached = buffer.dispatch(x, handle)[0]
        combined, home, _ = buffer.combine(x, handle, topk_weights=weights, bias=(x, x))
        return [rows, idx, sent, cached, combined, home]


def permuted(x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[Any]:
    with HybridEPBuffer(None, H, T, E, engine="torch") as buffer:
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=topk_idx, topk_weights=weights, num_of_experts=E
        )
        outputs = rows if x.is_contiguous() else column_major(rows)
        return [rows, probs, counts, *buffer.combine_with_unpermute(hidden=outputs, probs=probs, handle=handle)]


def low_latency(x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[Any]:
    with Buffer(low_latency_mode=True, engine="torch") as buffer:
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, T, E, use_fp8=False)
        assert isinstance(rows, Tensor)
        outputs = rows if x.is_contiguous() else rows.transpose(1, 2).contiguous().transpose(1, 2)
        return [counts, buffer.low_latency_combine(outputs, topk_idx, weights, handle)[0]]


def elastic(x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[Any]:
    with ElasticBuffer(None, num_max_tokens_per_rank=T, hidden=H, engine="torch") as buffer:
        results: list[Any] = []
        for options in ({}, {"do_handle_copy": False}, {"do_expand": True}):
            rows, idx, sent, handle, _ = buffer.dispatch(x, topk_idx, weights, num_experts=E, **options)
            cached, _, again, *_ = buffer.dispatch(x, topk_weights=weights, handle=handle, do_expand=handle.do_expand)
            assert isinstance(rows, Tensor)
            assert sent is not None
            outputs, of_rows = (rows, sent) if x.is_contiguous() else (column_major(rows), every_second(sent))
            combined, home, _ = buffer.combine(outputs, handle, topk_weights=of_rows, bias=(x, x))
            results += [rows, sent, cached, again, combined, home, handle.topk_idx, *(() if idx is None else (idx,))]
        return results


CALLS = [normal, permuted, low_latency, elastic]


@every_stride
@pytest.mark.parametrize("call", CALLS)
def test_results_do_not_depend_on_strides(call: Any, strided: Any) -> None:
    tensors = [strided(tensor) for tensor in (X, TOPK, WEIGHTS)]
    want = call(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors))
    for found, expected in zip(call(*tensors), want, strict=True):
        assert torch.equal(found, expected)


def _tensors_in(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _tensors_in(part)


@every_stride
@pytest.mark.parametrize("call", CALLS)
def test_an_engine_gets_packed_tensors(call: Any, strided: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels know a tensor by its address alone, so the torch engine, which reads strides, would not show them."""
    arguments: list[object] = []
    for name in (
        "dispatch",
        "combine",
        "low_latency_dispatch",
        "low_latency_combine",
    ):
        method = getattr(TorchEngine, name)

        def noted(self: Any, *args: Any, _method: Any = method, **kwargs: Any) -> Any:
            arguments.append(args)
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(TorchEngine, name, noted)
    call(*(strided(tensor) for tensor in (X, TOPK, WEIGHTS)))
    tensors = list(_tensors_in(arguments))
    assert tensors
    assert all(tensor.is_contiguous() for tensor in tensors)


class _Addresses:
    """The kernels of placements, which note what lies in the rows at the addresses that they get."""

    map_online_max_experts = 4096

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def plan_fits(self, **_: int) -> bool:
        return True

    def _note(self, sizes: dict[str, int], addresses: dict[str, int]) -> None:
        for name, size in sizes.items():
            self.rows[name] = list((ctypes.c_int64 * size).from_address(addresses[name]))

    def plan_online(self, **given: int) -> None:
        self._note({"counts": given["num_ranks"] * given["num_experts"]}, given)

    def map_online(self, **given: int) -> None:
        num_ranks, num_experts = given["num_ranks"], given["num_experts"]
        sizes = {
            "counts": num_ranks * num_experts,
            "spare": num_ranks * given["num_spare"],
            "quota": num_experts * given["ranks_per_domain"],
            "topk_idx": given["num_copies"],
        }
        self._note(sizes, given)

    def map_topk(self, **given: int) -> None:
        sizes = {
            "topk_idx": given["num_copies"],
            "replicas": given["num_experts"] * given["max_replicas"],
            "num_choices": given["num_experts"],
        }
        self._note(sizes, given)


@every_stride
def test_kernels_of_placements_get_packed_tensors(strided: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    counts = strided(torch.randint(0, 9, (2, E), generator=draw))
    plan = plan_online(counts, num_ranks_per_domain=2, num_spare=3)
    plan = OnlinePlan(strided(plan.spare), strided(plan.quota), plan.loads)
    topk_idx, found = strided(TOPK), _Addresses()
    replicas = ExpertPlacement.contiguous(1, E, 2).on("cpu", 0)
    choices = strided(torch.arange(2 * E).view(E, 2)).unsqueeze(0)
    replicas = dataclasses.replace(replicas, replicas=choices, num_choices=strided(replicas.num_choices))
    with (
        mock.patch.object(kernels, "native", found),
        mock.patch.object(kernels, "run_on", return_value=True),
        mock.patch.object(kernels, "place_of", return_value={}),
    ):
        map_online(plan, counts, topk_idx, 0)
        want = {"counts": counts, "spare": plan.spare, "quota": plan.quota, "topk_idx": topk_idx}
        assert found.rows == {name: tensor.flatten().tolist() for name, tensor in want.items()}
        found.rows = {}
        plan_online(counts, num_ranks_per_domain=2, num_spare=3)
        assert found.rows["counts"] == counts.flatten().tolist()
        replicas.map_topk(0, topk_idx)
        want = {"topk_idx": topk_idx, "replicas": replicas.replicas[0], "num_choices": replicas.num_choices[0]}
        assert {name: found.rows[name] for name in want} == {k: tensor.flatten().tolist() for k, tensor in want.items()}


def test_an_expanded_gradient_is_copied() -> None:
    ones = torch.ones(1, 1, dtype=torch.bfloat16).expand(T, H)
    assert torch.equal(normal(ones, TOPK, WEIGHTS)[4], normal(ones.contiguous(), TOPK, WEIGHTS)[4])


def test_what_a_call_writes_to_must_be_contiguous() -> None:
    with Buffer(low_latency_mode=True, engine="torch") as buffer:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(X, TOPK, T, E, use_fp8=False)
        assert isinstance(rows, Tensor)
        with pytest.raises(ConfigError, match=r"out.stride\(\)"):
            buffer.low_latency_combine(rows, TOPK, WEIGHTS, handle, out=column_major(X))
