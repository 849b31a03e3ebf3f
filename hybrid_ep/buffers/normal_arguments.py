"""Checks the rows and the routing that callers of `Buffer` pass, and brings them into the engine's form."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.buffers.base import (
    BaseBuffer,
    check_bias,
    check_nvfp4_rows,
    check_rows,
    check_weights,
)
from hybrid_ep.checks import require, require_int
from hybrid_ep.core.checks import packed, require_tensor
from hybrid_ep.core.layout import compute_layout
from hybrid_ep.engine.calls import (
    CombineRequest,
    DispatchHandle,
    Routing,
    Rows,
)
from hybrid_ep.errors import ConfigError

__all__ = ["NormalArguments", "Parts", "Tokens", "as_given", "check_sizes", "checked", "parts_of"]

Tokens = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


# The parts of the argument `x`: rows, scales, and the global scale of NVFP4.
Parts = tuple[Tensor, Tensor | None, Tensor | None]


class NormalArguments(BaseBuffer):
    """The checks of a Buffer's normal calls."""

    def _rows_along(self, sent: Parts, sizes: tuple[int, int], handle: DispatchHandle) -> Rows:
        """Checks rows, expert alignment and bound."""
        check_sizes(*sizes)
        rows = checked(sent, self.engine.device)
        if rows.data.shape[0] != handle.num_tokens:
            require(False, "rows of x", rows.data.shape[0], f"{handle.num_tokens}, as with this handle")
        return rows

    def _received(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        biases: tuple[Tensor, ...],
        num_sms: int | None,
        handle: DispatchHandle,
    ) -> CombineRequest:
        """Checks the arguments of a combine."""
        num_rows = handle.num_recv
        check_rows("x", x, None, device=self.engine.device)
        if x.shape[0] != num_rows:
            require(False, "rows of x", x.shape[0], f"{num_rows}, as received with this handle")
        if topk_weights is not None:
            check_weights("topk_weights", topk_weights, (num_rows, handle.num_topk), x.device)
        if biases:
            check_bias(biases, handle.num_tokens, x.shape[1], x.device)
            biases = tuple([packed(term) for term in biases])
        return CombineRequest(packed(x), packed(topk_weights), biases, num_sms)

    def _routing(
        self,
        rows: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        is_token_in_rank: Tensor | None,
        num_tokens_per_rank: Tensor | None,
        num_tokens_per_expert: Tensor | None,
    ) -> Routing:
        """Checks the routing, and brings it into the engine's form."""
        num_tokens, device = rows.data.shape[0], rows.data.device
        int32 = (torch.int32,)
        if num_tokens_per_expert is None or is_token_in_rank is None or num_tokens_per_rank is None:
            raise ConfigError(
                "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert are not all given; allowed without a "
                "handle: the three results of get_dispatch_layout"
            )
        require_tensor("num_tokens_per_expert", num_tokens_per_expert, dtypes=int32, shape=(None,), device=device)
        require_tensor("num_tokens_per_rank", num_tokens_per_rank, dtypes=int32, shape=(self.group_size,))
        in_rank_shape = (num_tokens, self.group_size)
        require_tensor("is_token_in_rank", is_token_in_rank, dtypes=(torch.bool,), shape=in_rank_shape, device=device)
        num_experts = num_tokens_per_expert.shape[0]
        self._num_local_experts(num_experts)
        if topk_idx is None:
            require(topk_weights is None, "topk_weights", "given", "None without topk_idx")
            return self._routing_by_rank(is_token_in_rank, num_experts)
        self._check_topk(topk_idx, topk_weights, num_experts, device)
        if topk_idx.shape[0] != num_tokens:
            require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as x has")
        if topk_idx.is_cpu:
            layout = compute_layout(packed(topk_idx), num_experts, self.group_size, self.grid.num_ranks_per_domain)
            same = torch.equal(layout.is_token_in_rank, is_token_in_rank)
            require(same, "is_token_in_rank", "not that of topk_idx", "the result of get_dispatch_layout(topk_idx, …)")
        return Routing(packed(topk_idx), packed(topk_weights), num_experts)

    def _check_handle(self, handle: DispatchHandle) -> None:
        if type(handle) is DispatchHandle and handle.grid is self.grid:  # as in most calls
            return
        require(isinstance(handle, DispatchHandle), "handle", type(handle).__name__, "a handle that dispatch returned")
        self._check_geometry(handle.grid)

    def _check_layout_along(
        self,
        handle: DispatchHandle,
        is_token_in_rank: Tensor | None,
        num_tokens_per_rank: Tensor | None,
        num_tokens_per_expert: Tensor | None,
    ) -> None:
        """Checks that a layout given along a handle can be the handle's; no value is read from a GPU."""
        for name, tensor, dtype, shape in (
            ("is_token_in_rank", is_token_in_rank, torch.bool, (handle.num_tokens, self.group_size)),
            ("num_tokens_per_rank", num_tokens_per_rank, torch.int32, (self.group_size,)),
            ("num_tokens_per_expert", num_tokens_per_expert, torch.int32, (handle.num_experts,)),
        ):
            if tensor is not None:
                require_tensor(name, tensor, dtypes=(dtype,), shape=shape)
        if num_tokens_per_rank is not None and num_tokens_per_rank.is_cpu and handle.rank_prefix_matrix.is_cpu:
            up_to = handle.rank_prefix_matrix
            sent = (up_to[self.rank] - up_to[self.rank - 1] if self.rank else up_to[0]).tolist()
            given = num_tokens_per_rank.tolist()
            require(given == sent, "num_tokens_per_rank", given, f"{sent}, as with this handle")


def check_sizes(expert_alignment: int, num_worst_tokens: int) -> None:
    require_int("expert_alignment", expert_alignment, minimum=1)
    require_int("num_worst_tokens", num_worst_tokens, minimum=0)


def parts_of(x: Tokens) -> Parts:
    if not isinstance(x, tuple):
        return x, None, None
    allowed = "a tensor, a tensor and its scales, or NVFP4 rows, their scales and the global scale"
    require(len(x) in (2, 3), "x", f"a tuple of {len(x)}", allowed)
    return x if len(x) == 3 else (*x, None)


def checked(sent: Parts, device: torch.device | None) -> Rows:
    """Rows in the engine's form."""
    data, scales, global_scale = sent
    if global_scale is None:
        return check_rows("x", data, scales, device=device)
    return check_nvfp4_rows("x", data, scales, global_scale, device=device)


def as_given(received: tuple[Tensor, Tensor | None], sent: Parts) -> Tokens:
    """Received rows in the form in which `x` was given."""
    data, scales = received
    if scales is None:
        return data
    _, sent_scales, global_scale = sent
    if sent_scales is None or global_scale is None:
        return data, scales
    return data, scales.view(sent_scales.dtype), global_scale
