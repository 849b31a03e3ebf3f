"""Checks of calls that one rank gets wrong: all raise the same error at once, and the buffer goes on.

Each runs on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.balance import LoadMonitor
from hybrid_ep.balance.grouped import dispatch_online
from hybrid_ep.balance.online import map_online, plan_online
from hybrid_ep.nn.ops import number_of
from tests.battery import elastic, hybrid, normal
from tests.battery.cases import Case
from tests.battery.normal import equal, on
from tests.battery.refused_calls import TIMEOUT_S, errors_of, told_to_all

_BF16, _FP32 = torch.bfloat16, torch.float32
_Wrongs = dict[str, dict[str, Any]]  # how errors begin, and the arguments that are wrong


def _case(name: str, **changes: Any) -> Case:
    num_ranks = dist.get_world_size()
    return Case(name, num_ranks, 12, **({"hidden": 128, "num_experts": 4 * num_ranks} | changes))


def _options() -> dict[str, Any]:
    return {"timeout_s": TIMEOUT_S}


def _refuse(call: Callable[..., Any], right: dict[str, Any], wrongs: _Wrongs, device: str) -> None:
    """The last rank makes a call with each of the wrong arguments, the others with the right ones."""
    for name, wrong in wrongs.items():
        told = told_to_all(partial(call, **right | wrong), partial(call, **right), device)
        assert told.startswith(name), told


def _refuse_alone(call: Callable[..., Any], right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """The last rank makes a call with wrong arguments, which only it is told."""
    if dist.get_rank() < dist.get_world_size() - 1:
        call(**right)
        return
    with pytest.raises(hybrid_ep.ConfigError, match=r"^num_sms is -1; allowed: "):
        call(**right | wrong)


class _Calls:
    """A Buffer, the arguments of its calls, and what they return."""

    def __init__(self, device: str, name: str, **changes: Any) -> None:
        self.case = _case(name, **changes)
        self.inputs = on(device, self.case.inputs(dist.get_rank()))
        self.buffer = normal.make_buffer(self.case, **_options())
        layout = self.buffer.get_dispatch_layout(self.inputs.topk_idx, self.case.num_experts)
        self.arguments: dict[str, Any] = {
            "x": self.inputs.x,
            "num_tokens_per_rank": layout[0],
            "is_token_in_rank": layout[3],
            "num_tokens_per_expert": layout[2],
            "topk_idx": self.inputs.topk_idx,
            "topk_weights": self.inputs.topk_weights,
        }

    def round_trip(self) -> tuple[Any, Tensor, Any]:
        """Rows, what a combine of them returns, and the handle."""
        received, _, _, _, handle, _ = self.buffer.dispatch(**self.arguments)
        return received.clone(), self.buffer.combine(received, handle)[0].clone(), handle


def check_refused_dispatches(device: str = "cpu") -> None:
    """Arguments of `Buffer.dispatch`, with and without a host sync, on either stream, with and without top-k."""
    calls = _Calls(device, "refused_dispatches")
    x, topk_idx, topk_weights = calls.inputs
    with calls.buffer as buffer:
        want, want_combined, _ = calls.round_trip()
        wrongs: _Wrongs = {
            "x.dtype is torch.float32": {"x": x.float()},
            "x is a tuple of 1": {"x": (x,)},
            "hidden of x is 100": {"x": (x[:, :100].to(torch.float8_e4m3fn), x[:, :1].float())},
            "x.requires_grad is True": {"x": x.clone().requires_grad_()},
            "rows of topk_idx is 11": {"topk_idx": topk_idx[:-1], "topk_weights": topk_weights[:-1]},
            "topk_weights.dtype is torch.float64": {"topk_weights": topk_weights.double()},
            "num_tokens_per_rank, is_token_in_rank and num": {"num_tokens_per_expert": None},
            "expert_alignment is 0": {"expert_alignment": 0},
            "num_worst_tokens is -1": {"num_worst_tokens": -1},
            "config is int": {"config": 3},
            "previous_event is str": {"previous_event": "now"},
            "async_finish is 2": {"async_finish": 2},
        }
        _refuse(buffer.dispatch, calls.arguments, wrongs, device)
        some = {name: wrongs[name] for name in ("x.dtype is torch.float32", "expert_alignment is 0")}
        bound = calls.case.num_ranks * calls.case.max_tokens
        without_topk = {"topk_idx": None, "topk_weights": None}
        for options in ({"num_worst_tokens": bound}, {"async_finish": True}, without_topk):
            _refuse(buffer.dispatch, calls.arguments | options, some, device)
        rows, combined, _ = calls.round_trip()
        equal(rows, want.cpu(), "after refused dispatches")
        equal(combined, want_combined.cpu(), "after refused dispatches")


def check_refused_dispatches_along_handles(device: str = "cpu") -> None:
    calls = _Calls(device, "refused_along")
    x, topk_idx, _ = calls.inputs
    with calls.buffer as buffer:
        want, _, handle = calls.round_trip()
        wrongs: _Wrongs = {
            "x.dtype is torch.float32": {"x": x.float()},
            "rows of x is 11": {"x": x[:-1]},
            "handle is tuple": {"handle": (1, 2)},
            f"handle is {len(handle)} tensors of no dispatch, or copies": {"handle": [one.clone() for one in handle]},
            "topk_idx or topk_weights is given": {"topk_idx": topk_idx},
            "num_worst_tokens is 1": {"num_worst_tokens": 1},
            "is_token_in_rank.shape is ": {"is_token_in_rank": calls.arguments["is_token_in_rank"][:-1]},
        }
        _refuse(buffer.dispatch, {"x": x, "handle": handle}, wrongs, device)
        _refuse(buffer.dispatch, {"x": x, "handle": handle, "async_finish": True}, wrongs, device)
        equal(buffer.dispatch(x, handle)[0], want.cpu(), "along the handle")
        rows, _, _ = calls.round_trip()
        equal(rows, want.cpu(), "after refused dispatches along a handle")


def check_refused_combines(device: str = "cpu") -> None:
    calls = _Calls(device, "refused_combines")
    x = calls.inputs.x
    with calls.buffer as buffer:
        rows, want, handle = calls.round_trip()
        weights = torch.ones(len(rows), calls.case.topk, device=device)
        right = {"x": rows, "handle": handle, "topk_weights": weights, "bias": x}
        wrongs: _Wrongs = {
            "x.dtype is torch.float32": {"x": rows.float()},
            "rows of x is ": {"x": torch.cat([rows, rows])},
            "topk_weights.shape is ": {"topk_weights": weights[:, :-1]},
            "bias.shape is ": {"bias": x[:-1]},
            "number of biases is 3": {"bias": (x, x, x)},
            "handle is NoneType": {"handle": None},
            "config is int": {"config": 3},
            "previous_event is str": {"previous_event": "now"},
        }
        _refuse(buffer.combine, right, wrongs, device)
        _refuse(buffer.combine, right | {"async_finish": True}, wrongs, device)
        equal(buffer.combine(rows, handle)[0], want.cpu(), "after refused combines")
        equal(calls.round_trip()[1], want.cpu(), "after refused combines")


def check_refused_first_dispatch(device: str = "cpu") -> None:
    """The first call of a buffer is one that a rank refuses; so is the first combine, which needs more memory."""
    calls = _Calls(device, "refused_first")
    with calls.buffer as buffer:
        _refuse(buffer.dispatch, calls.arguments, {"x.dtype is torch.float32": {"x": calls.inputs.x.float()}}, device)
        rows, want, handle = calls.round_trip()
        wide = rows.repeat(1, 8)
        _refuse(buffer.combine, {"x": wide, "handle": handle}, {"x.dtype is ": {"x": wide.float()}}, device)
        equal(buffer.combine(rows, handle)[0], want.cpu(), "after a refused combine")


def check_refused_at_every_rank(device: str = "cpu") -> None:
    """Calls that every rank gets wrong alike, and all but one: each is told of its own, and all go on."""
    rank = dist.get_rank()
    calls = _Calls(device, "refused_at_all")
    x = calls.inputs.x
    with calls.buffer as buffer:
        rows, want, handle = calls.round_trip()
        for num_right in (0, 1):
            is_right = rank < num_right
            made = [
                partial(buffer.dispatch, **calls.arguments | ({} if is_right else {"x": x.float()})),
                partial(buffer.combine, rows if is_right else rows.float(), handle),
                partial(buffer.dispatch, x if is_right else x.float(), handle),
            ]
            right = [partial(buffer.dispatch, x, handle), partial(buffer.combine, rows, handle)]
            told = errors_of([*made, *right], device)
            ends = [f"x.dtype is torch.float32 at rank {rank}; allowed: torch.bfloat16"] * 3
            assert is_right or told == ends, told
            assert all(text.startswith("x.dtype is torch.float32 at rank ") for text in told), told
            assert len(told) == 3, told
        equal(calls.round_trip()[1], want.cpu(), "after refused calls")


def check_refused_rows_of_kernels(device: str = "cpu") -> None:
    """Rows that only the engine knows it cannot move, at one rank. Only for the cuda engine."""
    calls = _Calls(device, "refused_rows")
    with calls.buffer as buffer:
        rows, want, handle = calls.round_trip()
        odd, wrong = calls.inputs.x[:, :100], "a row of 100 × torch.bfloat16 has 200 bytes"
        _refuse(buffer.dispatch, calls.arguments, {wrong: {"x": odd}}, device)
        _refuse(buffer.dispatch, {"x": calls.inputs.x, "handle": handle}, {wrong: {"x": odd}}, device)
        _refuse(buffer.combine, {"x": rows, "handle": handle}, {wrong: {"x": rows[:, :100]}}, device)
        equal(calls.round_trip()[1], want.cpu(), "after rows of other bytes")


def check_refused_while_captured() -> None:
    """A rank that captures a CUDA graph tells nobody, and takes no part in the call. Only for the cuda engine."""
    calls = _Calls("cpu", "refused_captured")
    with calls.buffer as buffer:
        rows, want, handle = calls.round_trip()
        with mock.patch.object(sys.modules["hybrid_ep.engine.cuda.base"], "is_capturing", return_value=True):
            for call in (
                partial(buffer.dispatch, **calls.arguments | {"x": calls.inputs.x.float()}),
                partial(buffer.combine, rows.float(), handle),
            ):
                if dist.get_rank() == 0:
                    with pytest.raises(hybrid_ep.ConfigError, match=r"^x.dtype is torch.float32; allowed: "):
                        call()
        equal(calls.round_trip()[1], want.cpu(), "after a capture")


def check_refused_hybrid_calls(device: str = "cpu") -> None:
    """`HybridEPBuffer.dispatch` and `combine` by top-k indices."""
    case = _case("refused_hybrid")
    x, topk_idx, topk_weights = on(device, case.inputs(dist.get_rank()))
    with hybrid.make_buffer(case, **_options()) as buffer:
        right = {
            "hidden": x,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "num_of_experts": case.num_experts,
        }
        hidden, probs, _, handle = buffer.dispatch(**right)
        rows, probs = hidden.clone(), None if probs is None else probs.clone()
        want = buffer.combine(rows, probs, handle)[0].clone()
        wrongs: _Wrongs = {
            "hidden.dtype is torch.float32": {"hidden": x.float()},
            "topk_weights.shape is ": {"topk_weights": topk_weights[:, :-1]},
            "neither of topk_idx and routing_map is given": {"topk_idx": None, "topk_weights": None},
            "num_dispatched_tokens is -1": {"num_dispatched_tokens": -1},
        }
        bound = case.num_ranks * case.max_tokens
        _refuse(buffer.dispatch, right, wrongs, device)
        _refuse(buffer.dispatch, right | {"num_dispatched_tokens": bound}, wrongs, device)
        along: _Wrongs = {
            "hidden.dtype is torch.float32": {"hidden": x.float()},
            "handle is int": {"handle": 1},
            "num_dispatched_tokens is 1": {"num_dispatched_tokens": 1},
        }
        for options in ({}, {"topk_idx": topk_idx, "topk_weights": topk_weights}):
            _refuse(buffer.dispatch, {"hidden": x, "handle": handle} | options, along, device)
        of_combine: _Wrongs = {
            "hidden.dtype is torch.float32": {"hidden": rows.float()},
            "rows of hidden is ": {"hidden": torch.cat([rows, rows])},
            "probs.dtype is ": {"probs": probs.double() if probs is not None else None},
            "handle is NoneType": {"handle": None},
        }
        _refuse(buffer.combine, {"hidden": rows, "probs": probs, "handle": handle}, of_combine, device)
        equal(buffer.combine(rows, probs, handle)[0], want.cpu(), "after refused calls")


def check_refused_maps(device: str = "cpu") -> None:
    """A dense map of more than 32 experts. Calls that do not wait for the device are not refused as one there."""
    num_ranks = dist.get_world_size()
    case = _case("refused_maps", topk=40, num_experts=80 * num_ranks)  # so many that a combine takes two calls
    x = on(device, case.inputs(dist.get_rank())).x
    routing, _ = hybrid.routings(case, device)[0]
    with hybrid.make_buffer(case, **_options()) as buffer:
        right = {"hidden": x, **routing}
        hidden, probs, _, handle = buffer.dispatch(**right)
        rows, probs = hidden.clone(), None if probs is None else probs.clone()
        want = buffer.combine(rows, probs, handle)[0].clone()
        wrongs: _Wrongs = {
            "hidden.dtype is torch.float32": {"hidden": x.float()},
            "probs.dtype is torch.float64": {"probs": routing["probs"].double()},
        }
        _refuse(buffer.dispatch, right, wrongs, device)
        if buffer.engine.name == "torch":
            bound = num_ranks * case.max_tokens
            _refuse(buffer.dispatch, right | {"num_dispatched_tokens": bound}, wrongs, device)
            _refuse(buffer.dispatch, {"hidden": x, "handle": handle, "probs": routing["probs"]}, wrongs, device)
            of_combine: _Wrongs = {
                "hidden.dtype is torch.float32": {"hidden": rows.float()},
                "probs.dtype is ": {"probs": probs.double() if probs is not None else None},
            }
            _refuse(buffer.combine, {"hidden": rows, "probs": probs, "handle": handle}, of_combine, device)
        equal(buffer.combine(rows, probs, handle)[0], want.cpu(), "after refused maps")


def check_refused_permuted_calls(device: str = "cpu") -> None:
    """`dispatch_with_permute`, blocking, not blocking and along a handle, and `combine_with_unpermute`."""
    case = _case("refused_permuted")
    x, topk_idx, topk_weights = on(device, case.inputs(dist.get_rank()))
    with hybrid.make_buffer(case, **_options()) as buffer:
        right = {
            "hidden": x,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "num_of_experts": case.num_experts,
        }
        hidden, probs, _, _, handle = buffer.dispatch_with_permute(**right)
        rows, probs = hidden.clone(), None if probs is None else probs.clone()
        want = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)[0].clone()
        wrongs: _Wrongs = {
            "hidden.dtype is torch.float32": {"hidden": x.float()},
            "topk_weights.shape is ": {"topk_weights": topk_weights[:, :-1]},
            "pad_multiple is -1": {"pad_multiple": -1},
            "non_blocking is 2": {"non_blocking": 2},
            "use_fp8 is True": {"use_fp8": True},
        }
        bound = case.num_ranks * case.max_tokens * case.topk
        _refuse(buffer.dispatch_with_permute, right, wrongs, device)
        _refuse(
            buffer.dispatch_with_permute, right | {"num_permuted_tokens": bound, "non_blocking": True}, wrongs, device
        )
        along: _Wrongs = {
            "hidden.dtype is torch.float32": {"hidden": x.float()},
            "handle is tuple": {"handle": ()},
            "pad_multiple is 4": {"pad_multiple": 4},
        }
        for options in ({}, {"topk_idx": topk_idx, "topk_weights": topk_weights}):
            _refuse(buffer.dispatch_with_permute, {"hidden": x, "handle": handle} | options, along, device)
        of_combine: _Wrongs = {
            "hidden.dtype is torch.float32": {"hidden": rows.float()},
            "rows of hidden is ": {"hidden": torch.cat([rows, rows[:1]])},
            "probs.dtype is ": {"probs": probs.double() if probs is not None else None},
            "handle is NoneType": {"handle": None},
            "pad_multiple is 4": {"pad_multiple": 4},
        }
        given = {"hidden": rows, "probs": probs, "handle": handle}
        _refuse(buffer.combine_with_unpermute, given, of_combine, device)
        equal(buffer.combine_with_unpermute(**given)[0], want.cpu(), "after refused calls")


def check_refused_elastic_calls(device: str = "cpu") -> None:
    """`ElasticBuffer` and `EPBuffer`: with and without a host sync, by source and by expert, and along handles."""
    case = _case("refused_elastic")
    x, topk_idx, topk_weights = on(device, case.inputs(dist.get_rank()))
    for kind in (hybrid_ep.ElasticBuffer, hybrid_ep.EPBuffer):
        with elastic.make_buffer(case, kind, **_options()) as buffer:
            right = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "num_experts": case.num_experts}
            wrongs: _Wrongs = {
                "x.dtype is torch.float32": {"x": x.float()},
                "topk_idx is None": {"topk_idx": None},
                "expert_alignment is 0": {"expert_alignment": 0},
                "num_sms is -1": {"num_sms": -1},
                "async_with_compute_stream is 2": {"async_with_compute_stream": 2},
            }
            if kind is hybrid_ep.EPBuffer:
                wrongs["do_handle_copy is True"] = {"do_handle_copy": True}
            for options in ({}, {"do_cpu_sync": False}, {"do_expand": True, "do_cpu_sync": False}):
                _refuse(buffer.dispatch, right | options, wrongs, device)
                received, _, _, handle, _ = buffer.dispatch(**right, **options)
                rows = received.clone()
                want = buffer.combine(rows, handle)[0].clone()
                expands = {"do_expand": bool(options.get("do_expand"))}
                along: _Wrongs = {
                    "x.dtype is torch.float32": {"x": x.float()},
                    "handle is int": {"handle": 3},
                    "num_experts is 1": {"num_experts": 1},
                }
                for given in ({}, {"topk_weights": topk_weights}):
                    _refuse(buffer.dispatch, {"x": x, "handle": handle} | expands | given, along, device)
                of_combine: _Wrongs = {
                    "x.dtype is torch.float32": {"x": rows.float()},
                    "rows of x is ": {"x": torch.cat([rows, rows])},
                    "handle is NoneType": {"handle": None},
                    "num_qps is -1": {"num_qps": -1},
                }
                _refuse(buffer.combine, {"x": rows, "handle": handle}, of_combine, device)
                equal(buffer.combine(rows, handle)[0], want.cpu(), "after refused calls")


def check_refused_moves_of_experts(device: str = "cpu") -> None:
    """`lb_prefetch_weights` and `lb_reduce_grads`: one replica of the first expert at each rank."""
    calls = _Calls(device, "refused_moves")
    rank, num_local = dist.get_rank(), 4
    buffer = calls.buffer
    with buffer:
        experts = torch.full((num_local, 8, 16), float(rank), device=device)
        spare, grads = torch.zeros(1, 8, 16, device=device), torch.ones(1, 8, 16, device=device)
        mapping = torch.zeros(buffer.grid.num_ranks_per_domain, 1, dtype=torch.int64, device=device)
        _, want, _ = calls.round_trip()
        wrongs: _Wrongs = {
            "strides of expert_weights": {"expert_weights": experts.transpose(1, 2)},
            "redundancy_mapping.dtype is torch.float32": {"redundancy_mapping": mapping.float()},
            "num_sms is -1": {"num_sms": -1},
        }
        given = {"redundant_expert_weights": spare, "expert_weights": experts, "redundancy_mapping": mapping}
        _refuse(buffer.lb_prefetch_weights, given, wrongs, device)
        buffer.lb_prefetch_weights(**given)
        equal(spare, torch.full((1, 8, 16), float(buffer.grid.domain.start)), "copied weights")
        wrongs = {
            "strides of expert_grads": {"expert_grads": experts.transpose(1, 2)},
            "num_sms is -1": {"num_sms": -1},
            "dtype of gradients is ": {"expert_grads": experts.to(_BF16), "redundant_expert_grads": grads.to(_BF16)},
        }
        sums = torch.zeros_like(experts)
        given = {"redundant_expert_grads": grads, "expert_grads": sums, "redundancy_mapping": mapping}
        _refuse(buffer.lb_reduce_grads, given, wrongs, device)
        sums.zero_()
        buffer.lb_reduce_grads(**given)
        total = float(buffer.grid.num_ranks_per_domain) if rank in buffer.grid.domain[:1] else 0.0
        equal(sums[0], torch.full((8, 16), total), "sums of gradients")
        # Without replicas, too: other ranks may have some.
        without_replicas = given | {"redundancy_mapping": torch.full_like(mapping, -1)}
        _refuse(buffer.lb_reduce_grads, without_replicas, {"num_sms is -1": {"num_sms": -1}}, device)
        # Without tensors no rank waits for another, and the error is that rank's alone.
        mapping_alone = {"redundancy_mapping": torch.full_like(mapping, -1)}
        without_weights = {"redundant_expert_weights": [], "expert_weights": []} | mapping_alone
        without_grads = {"redundant_expert_grads": [], "expert_grads": []} | mapping_alone
        _refuse_alone(buffer.lb_prefetch_weights, without_weights, {"num_sms": -1})
        _refuse_alone(buffer.lb_reduce_grads, without_grads, {"num_sms": -1})
        equal(calls.round_trip()[1], want.cpu(), "after refused moves of experts")
        buffer.lb_prefetch_weights(spare, experts, mapping)
        equal(calls.round_trip()[1], want.cpu(), "after moves of experts")


def check_refused_online_dispatch(device: str = "cpu") -> None:
    """`balance.grouped.dispatch_online`, whose checks are beside those of the buffer."""
    case = _case("refused_online", num_experts=2 * dist.get_world_size())
    rank, num_ranks = dist.get_rank(), case.num_ranks
    x, topk_idx, topk_weights = on(device, case.inputs(rank))
    chosen = [case.inputs(r).topk_idx.flatten() for r in range(num_ranks)]
    counts = torch.stack([one[one >= 0].bincount(minlength=case.num_experts) for one in chosen]).to(device)
    plan = plan_online(counts, num_ranks_per_domain=num_ranks, num_spare=2)
    slots = map_online(plan, counts, topk_idx, rank)
    with hybrid.make_buffer(case, **_options()) as buffer:
        right = {
            "x": x,
            "slots": slots,
            "topk_weights": topk_weights,
            "plan": plan,
            "num_rows": 2 * case.max_tokens * case.topk,
        }
        plan_of_one = plan_online(counts.sum(0, keepdim=True), num_ranks_per_domain=1, num_spare=2)
        wrongs: _Wrongs = {
            "ranks of plan is 1": {"plan": plan_of_one},
            "hidden.dtype is torch.float32": {"x": x.float()},
        }
        _refuse(partial(dispatch_online, buffer), right, wrongs, device)
        rows = dispatch_online(buffer, **right)
        assert len(rows.rows) == right["num_rows"]


def check_refused_operators(device: str = "cpu") -> None:
    """The operators of torch by which modules dispatch rows by expert, and combine them."""
    calls = _Calls(device, "refused_operators")
    case, (x, topk_idx, topk_weights) = calls.case, calls.inputs
    dispatch, combine = torch.ops.hybrid_ep.dispatch_grouped, torch.ops.hybrid_ep.combine
    with calls.buffer as buffer:
        number, num_rows = number_of(buffer), case.num_ranks * case.max_tokens * case.topk
        right = {"topk_idx": topk_idx, "topk_weights": topk_weights, "num_experts": case.num_experts}
        right |= {"x": x, "buffer": number, "num_rows": num_rows}
        wrongs: _Wrongs = {
            "x.dtype is torch.float32": {"x": x.float()},
            "rows of topk_idx is 11": {"topk_idx": topk_idx[:-1], "topk_weights": topk_weights[:-1]},
        }
        _refuse(dispatch, right, wrongs, device)
        rows, weights, _, handle = dispatch(**right)
        rows = rows.clone()
        given = {"x": rows, "weights": weights, "handle": handle, "buffer": number}
        given |= {"num_tokens": case.max_tokens, "num_topk": case.topk}
        want = combine(**given)[0].clone()
        wrongs = {"x.dtype is torch.float32": {"x": rows.float()}, "rows of x is ": {"x": rows[:-1]}}
        _refuse(combine, given, wrongs, device)
        equal(combine(**given)[0], want.cpu(), "after refused operators")


def check_refused_sum_of_loads() -> None:
    """`LoadMonitor.loads`, which needs no buffer."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    monitor = LoadMonitor(1, 2 * num_ranks, rank=rank, num_ranks=num_ranks, window=1)
    _refuse(monitor.loads, {"timeout_s": TIMEOUT_S}, {"timeout_s is -1": {"timeout_s": -1}}, "cpu")
    assert monitor.loads().sum() == 0


# What one rank refuses, and every rank must be told, on every engine.
CHECKS = (
    check_refused_at_every_rank,
    check_refused_combines,
    check_refused_dispatches,
    check_refused_dispatches_along_handles,
    check_refused_elastic_calls,
    check_refused_first_dispatch,
    check_refused_hybrid_calls,
    check_refused_maps,
    check_refused_moves_of_experts,
    check_refused_online_dispatch,
    check_refused_operators,
    check_refused_permuted_calls,
)
