"""Dispatch and combine as operators of torch, so that compiled, exported and checkpointed code keeps them whole.

    hybrid_ep::dispatch         x, topk_idx, topk_weights → rows, their experts, weights and counts, and a handle
    hybrid_ep::dispatch_grouped x, topk_idx, topk_weights → rows by expert, their weights, where groups end, a handle
    hybrid_ep::combine          rows, weights, handle → the sums of each token
    hybrid_ep::redispatch       x, handle → rows along the same routes

An operator takes only tensors and numbers. So a buffer is passed as its number among the buffers that modules of this
process were given, and a handle as a tensor that holds its number. The handle lives as long as the storage of that
tensor. So autograd, which keeps the tensor, also keeps the route.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_ep.buffers.arguments import check_grid, check_rows, check_topk
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.buffers.v1_handle import BufferHandle
from hybrid_ep.checks import require
from hybrid_ep.core.checks import packed, require_tensor
from hybrid_ep.engine.calls import (
    Combined,
    CombineRequest,
    DispatchRequest,
    PermuteHandle,
    Routing,
    Rows,
)
from hybrid_ep.errors import ClosedError

_BUFFERS: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
_buffer_numbers = itertools.count()


class _Held(bytearray):
    """The memory of a handle's tensor, and the handle."""

    handle: BufferHandle | PermuteHandle


_HELD: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
_handle_numbers = itertools.count()


def number_of(buffer: Buffer) -> int:
    """Returns the number by which operators find a buffer. Buffers that modules of this process get count from 0."""
    for number, known in _BUFFERS.items():
        if known is buffer:
            return number
    number = next(_buffer_numbers)
    _BUFFERS[number] = buffer
    return number


def hold(handle: BufferHandle | PermuteHandle) -> Tensor:
    """Returns ``[1]`` int64 on the CPU: the number of a handle, which lives as long as the tensor."""
    number = next(_handle_numbers)
    held = _Held(number.to_bytes(8, "little"))
    held.handle = handle
    _HELD[number] = held
    return torch.frombuffer(held, dtype=torch.int64)


def handle_of(token: Tensor) -> BufferHandle | PermuteHandle:
    """Returns the handle whose number a tensor of `hold` has.

    Raises:
        ConfigError: it is no such tensor, or a copy of one that is gone.
    """
    require_tensor("handle", token, dtypes=(torch.int64,), shape=(1,), device=torch.device("cpu"))
    held = _HELD.get(int(token))
    if held is None:
        require(False, "handle", f"number {int(token)}, which is gone", "the tensor that dispatch returned, no copy")
    assert held is not None
    return held.handle


def _keep(ctx: Any, token: Tensor, *saved: Tensor) -> None:
    """Saves a handle's tensor and others for the backward pass.

    Saved-tensor hooks may replace a tensor by a copy, as offloading of activations does. So the handle is kept beside
    it. Compilers trace with tensors that hold no number.
    """
    ctx.save_for_backward(token, *saved)
    ctx.held = _HELD.get(int(token)) if type(token) is Tensor else None


def _buffer(number: int) -> Buffer:
    found = _BUFFERS.get(number)
    if found is None:
        raise ClosedError(f"buffer {number} of this process is gone; allowed: one that lives as long as its modules")
    return found


def _dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: int, num_experts: int, bound: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mover = _buffer(buffer)
    per_rank, per_domain, per_expert, in_rank, _ = mover.get_dispatch_layout(topk_idx, num_experts)
    recv_x, recv_idx, recv_weights, counts, handle, _ = mover.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_domain,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_worst_tokens=bound,
    )
    assert isinstance(recv_x, Tensor)
    assert recv_idx is not None
    assert recv_weights is not None
    assert counts is not None
    assert handle is not None
    return recv_x, recv_idx, recv_weights, torch.tensor(counts, dtype=torch.int64, device="cpu"), hold(handle)


def _dispatch_grouped(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: int, num_experts: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _permuted(_buffer(buffer), x, topk_idx, topk_weights, num_experts, num_rows)


@collective("dispatch_with_permute")
def _permuted(
    mover: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    engine = mover.engine
    check_rows("x", x, None, device=engine.device)
    check_topk(topk_idx, topk_weights, num_experts, x.device)
    require(topk_idx.shape[0] == x.shape[0], "rows of topk_idx", topk_idx.shape[0], f"{x.shape[0]}, as x has")
    routing = Routing(packed(topk_idx), packed(topk_weights), num_experts)
    num_sms = Buffer._num_sms_without_config
    received = engine.dispatch(DispatchRequest(Rows(packed(x)), routing, num_rows, num_sms, pad_multiple=1))
    probs, permute = received.topk_weights, received.permute
    assert probs is not None
    assert permute is not None
    ends = permute.num_tokens_per_expert.to(x.device).cumsum(0, dtype=torch.int32)
    return received.rows.data, probs, ends, hold(permute)


def _combine(
    x: Tensor, weights: Tensor | None, handle: Tensor, buffer: int, num_tokens: int, num_topk: int
) -> tuple[Tensor, Tensor]:
    mover, held = _buffer(buffer), handle_of(handle)
    if isinstance(held, PermuteHandle):
        combined, summed = _unpermuted(mover, x, weights, held)
    else:
        combined, summed, _ = mover.combine(x, held, topk_weights=weights)
    return combined, x.new_empty(num_tokens, 0, dtype=torch.float32) if summed is None else summed


@collective("combine")
def _unpermuted(mover: Buffer, x: Tensor, weights: Tensor | None, held: PermuteHandle) -> Combined:
    engine = mover.engine
    check_rows("x", x, None, device=engine.device)
    check_grid(mover.grid, held.dispatch.grid)
    require(x.shape[0] == held.num_permuted, "rows of x", x.shape[0], f"{held.num_permuted}, as received")
    request = CombineRequest(packed(x), packed(weights), num_sms=Buffer._num_sms_without_config)
    return engine.combine(request, held)


def _redispatch(x: Tensor, handle: Tensor, buffer: int, num_recv: int) -> Tensor:
    mover, held = _buffer(buffer), handle_of(handle)
    if isinstance(held, PermuteHandle):
        engine = mover.engine
        request = engine.request_along(Rows(packed(x)), held, num_sms=Buffer._num_sms_without_config)
        return engine.dispatch(request).rows.data
    received, *_ = mover.dispatch(x, handle=held)
    assert isinstance(received, Tensor)
    return received


def _fake_dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: int, num_experts: int, bound: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_recv = bound or torch.library.get_ctx().new_dynamic_size()
    num_local = 0 if bound else num_experts // _buffer(buffer).group_size
    num_topk = topk_idx.shape[1]
    return (
        x.new_empty(num_recv, x.shape[1]),
        topk_idx.new_empty(num_recv, num_topk),
        topk_weights.new_empty(num_recv, num_topk),
        torch.empty(num_local, dtype=torch.int64, device="cpu"),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


def _fake_dispatch_grouped(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: int, num_experts: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(num_rows, x.shape[1]),
        topk_weights.new_empty(num_rows),
        x.new_empty(num_experts // _buffer(buffer).group_size, dtype=torch.int32),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


def _fake_combine(
    x: Tensor, weights: Tensor | None, handle: Tensor, buffer: int, num_tokens: int, num_topk: int
) -> tuple[Tensor, Tensor]:
    width = 0 if weights is None else num_topk
    return x.new_empty(num_tokens, x.shape[1]), x.new_empty(num_tokens, width, dtype=torch.float32)


def _fake_redispatch(x: Tensor, handle: Tensor, buffer: int, num_recv: int) -> Tensor:
    return x.new_empty(num_recv, x.shape[1])


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, topk_idx, _, ctx.buffer, _, _ = inputs
    _, recv_idx, _, _, handle = output
    ctx.num_tokens, ctx.num_topk = topk_idx.shape
    _keep(ctx, handle, recv_idx)


@once_differentiable
def _dispatch_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, _, grad_weights = grads[:3]
    handle, recv_idx = ctx.saved_tensors
    # A weight that is reported as 0 because its expert lives elsewhere does not depend on its source.
    grad_weights = torch.where(recv_idx >= 0, grad_weights, 0.0)
    x, weights = torch.ops.hybrid_ep.combine(grad_x, grad_weights, handle, ctx.buffer, ctx.num_tokens, ctx.num_topk)
    return x, None, weights, None, None, None


def _keep_dispatch_grouped(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, topk_idx, _, ctx.buffer, _, _ = inputs
    ctx.num_tokens, ctx.num_topk = topk_idx.shape
    _keep(ctx, output[3])


@once_differentiable
def _dispatch_grouped_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    x, weights = torch.ops.hybrid_ep.combine(grads[0], grads[1], handle, ctx.buffer, ctx.num_tokens, ctx.num_topk)
    return x, None, weights, None, None, None


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, handle, ctx.buffer, _, _ = inputs
    ctx.num_recv = x.shape[0]
    _keep(ctx, handle)


@once_differentiable
def _combine_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    received = torch.ops.hybrid_ep.redispatch(grads[0], handle, ctx.buffer, ctx.num_recv)
    return received, None, None, None, None, None


def _define() -> None:
    for name, schema, real, fake in (
        (
            "dispatch",
            "(Tensor x, Tensor topk_idx, Tensor topk_weights, int buffer, int num_experts, SymInt bound) -> "
            "(Tensor, Tensor, Tensor, Tensor, Tensor)",
            _dispatch,
            _fake_dispatch,
        ),
        (
            "dispatch_grouped",
            "(Tensor x, Tensor topk_idx, Tensor topk_weights, int buffer, int num_experts, SymInt num_rows) -> "
            "(Tensor, Tensor, Tensor, Tensor)",
            _dispatch_grouped,
            _fake_dispatch_grouped,
        ),
        (
            "combine",
            "(Tensor x, Tensor? weights, Tensor handle, int buffer, SymInt num_tokens, SymInt num_topk) -> "
            "(Tensor, Tensor)",
            _combine,
            _fake_combine,
        ),
        (
            "redispatch",
            "(Tensor x, Tensor handle, int buffer, SymInt num_recv) -> Tensor",
            _redispatch,
            _fake_redispatch,
        ),
    ):
        operator = torch.library.custom_op(f"hybrid_ep::{name}", real, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if name == "dispatch":
            operator.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)
        elif name == "dispatch_grouped":
            operator.register_autograd(_dispatch_grouped_backward, setup_context=_keep_dispatch_grouped)
        elif name == "combine":
            operator.register_autograd(_combine_backward, setup_context=_keep_combine)


_define()
