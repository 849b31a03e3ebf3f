"""`MoEDispatch` and `MoECombine`: the backward of dispatch is combine, and the backward of combine is dispatch.

tokens = dispatch(x, topk_idx, topk_weights)          # gradients flow to x and topk_weights
y = combine(experts(tokens), tokens.handle)           # gradients flow to the experts

`MoEGroupedDispatch` gives rows by expert and of a fixed number, for a grouped matrix product; `MoECombine` takes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.buffers.v1_handle import BufferHandle
from hybrid_ep.checks import require, require_int
from hybrid_ep.core.checks import require_traceable
from hybrid_ep.nn.ops import hold, number_of

__all__ = ["DispatchedTokens", "GroupedTokens", "MoECombine", "MoEDispatch", "MoEGroupedDispatch", "Route"]


def require_buffer(buffer: Buffer) -> Buffer:
    """Returns `buffer` if it is one."""
    require(isinstance(buffer, Buffer), "buffer", type(buffer).__name__, "a hybrid_ep.Buffer")
    return buffer


def _check_tokens(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    require_traceable("x", x, dtypes=(torch.bfloat16,), shape=(None, None))
    require_traceable("topk_idx", topk_idx, dtypes=(torch.int64,), shape=(None, None))
    require_traceable("topk_weights", topk_weights, dtypes=(torch.float32,), shape=(None, None))


class Route(NamedTuple):
    """The route of a dispatch, which `MoECombine` follows back.

    Attributes:
        handle: ``[1]`` int64 on the CPU, the number of the engine's handle. The handle lives as long as this tensor; a
            copy of the tensor does not keep it.
        num_tokens: T.
        num_topk: K.
    """

    handle: Tensor
    num_tokens: int
    num_topk: int


class DispatchedTokens(NamedTuple):
    """The rows that a rank receives.

    Attributes:
        x: ``[N, H]`` bf16, by source rank, then source token. With a bound, rows after the last are undefined.
        topk_idx: ``[N, K]`` int64, local expert or −1; −1 after the last row.
        topk_weights: ``[N, K]`` float32, 0 where `topk_idx` is −1.
        num_tokens_per_expert: LE counts; empty with a bound.
        handle: for `MoECombine`.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    num_tokens_per_expert: list[int]
    handle: Route


class GroupedTokens(NamedTuple):
    """The rows that a rank receives, sorted by expert.

    Attributes:
        x: ``[P, H]`` bf16: a row for each expert of a token that is here, by local expert, then source rank, then
            source token. Undefined after the last.
        weights: ``[P]`` float32, of each row; undefined after the last.
        ends: ``[LE]`` int32 on the device of `x`: where the rows of each local expert end.
        handle: for `MoECombine`.
    """

    x: Tensor
    weights: Tensor
    ends: Tensor
    handle: Route


class MoEDispatch(nn.Module):
    """Dispatch with a backward pass. Collective, forwards and backwards: every rank of the buffer must take part.

    It is the operator ``torch.ops.hybrid_ep.dispatch``: `torch.compile` and `torch.export` keep it whole, and
    selective activation checkpointing can name it. Its gradients have no gradients of their own.

    Args:
        buffer: moves the tokens.
        num_experts: E, a multiple of the ranks.
        num_worst_tokens: > 0: the result has that many rows on every rank, as compiling without a graph break needs.

    Raises:
        ConfigError: an argument does not fit.

    Example:
        >>> x = torch.ones(2, 16, dtype=torch.bfloat16, requires_grad=True)
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     tokens = hybrid_ep.nn.MoEDispatch(buffer, num_experts=4)(x, torch.tensor([[0], [3]]), torch.ones(2, 1))
        ...     tokens.x.sum().backward()
        >>> tokens.num_tokens_per_expert, x.grad[:, 0].tolist()
        ([1, 0, 0, 1], [1.0, 1.0])
    """

    def __init__(self, buffer: Buffer, num_experts: int, num_worst_tokens: int = 0) -> None:
        super().__init__()
        self.buffer = require_buffer(buffer)
        self.num_experts = require_int("num_experts", num_experts, minimum=1, multiple_of=buffer.group_size)
        self.num_worst_tokens = require_int("num_worst_tokens", num_worst_tokens, minimum=0)
        self._number = number_of(buffer)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> DispatchedTokens:
        """Sends tokens to the ranks of their experts.

        Args:
            x: ``[T, H]`` bf16.
            topk_idx: ``[T, K]`` int64, global expert index or −1.
            topk_weights: ``[T, K]`` float32.

        Raises:
            ConfigError, OverflowError, TimeoutError, TransportError: as `Buffer.dispatch`.
        """
        _check_tokens(x, topk_idx, topk_weights)
        bound = self.num_worst_tokens
        rows, experts, weights, counts, handle = torch.ops.hybrid_ep.dispatch(
            x, topk_idx, topk_weights, self._number, self.num_experts, bound
        )
        route = Route(handle, topk_idx.shape[0], topk_idx.shape[1])
        return DispatchedTokens(rows, experts, weights, [] if bound else counts.tolist(), route)


class MoEGroupedDispatch(nn.Module):
    """Dispatch with a backward pass to a fixed number of rows, grouped by expert.

    Collective, forwards and backwards. On the cuda engine the host waits for nothing. It is the operator
    ``torch.ops.hybrid_ep.dispatch_grouped``; its gradients have no gradients of their own.

    Args:
        buffer: moves the tokens.
        num_experts: E, a multiple of the ranks.
        num_rows: P, rows of the result; at least one for each expert of each token that is on this rank.

    Raises:
        ConfigError: an argument does not fit.

    Example:
        >>> x, topk_idx = torch.ones(2, 16, dtype=torch.bfloat16), torch.tensor([[0, 3], [3, 1]])
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     dispatch = hybrid_ep.nn.MoEGroupedDispatch(buffer, num_experts=4, num_rows=6)
        ...     tokens = dispatch(x, topk_idx, torch.ones(2, 2))
        ...     y = hybrid_ep.nn.MoECombine(buffer)(tokens.x, tokens.handle)
        >>> tokens.x[:, 0].tolist(), tokens.ends.tolist(), y[:, 0].tolist()
        ([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1, 2, 2, 4], [2.0, 2.0])
    """

    def __init__(self, buffer: Buffer, num_experts: int, num_rows: int) -> None:
        super().__init__()
        self.buffer = require_buffer(buffer)
        self.num_experts = require_int("num_experts", num_experts, minimum=1, multiple_of=buffer.group_size)
        self.num_rows = require_int("num_rows", num_rows, minimum=1)
        self._number = number_of(buffer)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> GroupedTokens:
        """Sends tokens to the ranks of their experts; arguments as in `MoEDispatch`.

        Raises:
            ConfigError, TimeoutError, TransportError: as `Buffer.dispatch`.
            OverflowError: more than `num_rows` rows arrived at any rank; on the cuda engine inside a domain from a
                later call of the buffer.
        """
        _check_tokens(x, topk_idx, topk_weights)
        rows, weights, ends, handle = torch.ops.hybrid_ep.dispatch_grouped(
            x, topk_idx, topk_weights, self._number, self.num_experts, self.num_rows
        )
        return GroupedTokens(rows, weights, ends, Route(handle, topk_idx.shape[0], topk_idx.shape[1]))


class MoECombine(nn.Module):
    """Combine with a backward pass. Collective, forwards and backwards.

    It is the operator ``torch.ops.hybrid_ep.combine``; its gradients have no gradients of their own.

    Args:
        buffer: moves the tokens.

    Raises:
        ConfigError: it is not a `Buffer`.

    Example:
        >>> x = torch.ones(2, 16, dtype=torch.bfloat16)
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     tokens = hybrid_ep.nn.MoEDispatch(buffer, num_experts=4)(x, torch.tensor([[0], [3]]), torch.ones(2, 1))
        ...     y = hybrid_ep.nn.MoECombine(buffer)(3 * tokens.x, tokens.handle)
        >>> y[:, 0].tolist()
        [3.0, 3.0]
    """

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self.buffer = require_buffer(buffer)
        self._number = number_of(buffer)

    def forward(self, x: Tensor, handle: Route | BufferHandle) -> Tensor:
        """Brings the experts' rows back to their source tokens and sums them, without weighting.

        Args:
            x: ``[N, H]`` bf16, or ``[P, H]`` of a grouped dispatch, in the order in which they were received.
            handle: of `MoEDispatch`, of `MoEGroupedDispatch`, or of `Buffer.dispatch`.

        Returns:
            ``[T, H]`` bf16.

        Raises:
            ConfigError, TimeoutError, TransportError: as `Buffer.combine`.
        """
        if isinstance(handle, BufferHandle):
            handle = Route(hold(handle), handle.num_tokens, handle.num_topk)
        require(isinstance(handle, Route), "handle", type(handle).__name__, "a handle that dispatch returned")
        require_traceable("x", x, dtypes=(torch.bfloat16,), shape=(None, None))
        combined, _ = torch.ops.hybrid_ep.combine(x, None, handle.handle, self._number, handle.num_tokens, 0)
        result: Tensor = combined
        return result
