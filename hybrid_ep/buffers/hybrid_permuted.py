"""The calls of `HybridEPBuffer` that permute: rows are sorted by local expert, one copy for each expert of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.hybrid_arguments import MAX_PAD, HybridArguments, as_given, check_made_with
from hybrid_ep.buffers.hybrid_handles import PermutedHandle
from hybrid_ep.checks import MAX_TOPK, require, require_bool, require_int
from hybrid_ep.core.checks import packed
from hybrid_ep.core.layout import weights_to_probs, widest_token
from hybrid_ep.engine.calls import CombineRequest, DispatchRequest, Rows

__all__ = ["PermutedCalls"]

# Of the handle: what combines and dispatches with it must have alike.
_READ_BY_COMBINE = "grid", "num_of_tokens_per_rank", "num_topk", "num_experts", "pad_multiple", "num_parts"
_READ_BY_DISPATCH = *_READ_BY_COMBINE, "num_permuted"


class PermutedCalls(HybridArguments):
    """Mixed into `HybridEPBuffer`."""

    _num_sms_dispatch: int | None
    _num_sms_combine: int | None
    _num_sms_permute: int | None
    _num_sms_unpermute: int | None

    @collective("dispatch_with_permute")
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: PermutedHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermutedHandle]:
        """Dispatches and groups the rows by local expert, one copy for each expert of a token. Collective.

        Args:
            hidden: ``[T, H]`` bf16, or e4m3 (float8_e4m3fn or uint8) with `scaling_factor`.
            topk_idx: ``[T, K]`` int64, global expert index or −1; or give `routing_map`.
            topk_weights: ``[T, K]`` float32, with `topk_idx`.
            num_of_experts_per_rank: LE; None = that of `num_of_experts`, else of the map, else of the buffer.
            num_of_experts: E, a multiple of the ranks; None = that of `num_of_experts_per_rank`, else of the map, else
                of the buffer.
            use_fp8: whether `hidden` is e4m3; None = not checked.
            routing_map: ``[T, E]`` bool. A token with more than 32 experts travels as several rows, each for the next
                32 of them in ascending order: it may reach a rank more than once, and combine rounds the sum of each.
            probs: ``[T, E]`` float32, with `routing_map`.
            scaling_factor: ``[T, H/128]`` float32; ignored with bf16.
            num_permuted_tokens: rows of the result, as a number or a tensor of one (which is read on the host). Rows
                beyond it are dropped, and count as zero in a combine. With `non_blocking` the host does not wait, and
                ``handle[-1]`` is 1 at every rank if any rank drops rows; otherwise it waits and raises. If fewer
                arrive, rows after the last expert's are undefined, and their probs are 0. Ranks compare the buffer's
                `max_num_of_tokens_per_rank`, which a call with more tokens raises at its own rank. With `handle`,
                checked against it.
            pad_multiple: every expert's block is padded with zero rows to a multiple of it, at most 65536; None or 0
                = 1. With `handle`, checked.
            handle: of an earlier dispatch, whose routes are used. `topk_weights` or `probs` may differ from its own. If
                a routing is given again, it must be the handle's; that is compared on a CPU only.
            non_blocking: counts stay on the device; needs `num_permuted_tokens` or `handle`, with which no call waits.
            fuse_permute_dispatch: accepted for compatibility, and without effect.
            use_host_meta: False = `non_blocking`, True = not; None = as `non_blocking` says.
            num_dispatched_tokens: accepted for compatibility; not needed.

        Returns:
            hidden ``[P, H]`` by local expert, then source rank and token; probs ``[P]`` float32 (None without weights);
            scaling_factor ``[P, H/128]`` (None for bf16); tokens_per_expert ``[LE]`` int64, padding included (on the
            host; with `non_blocking` on the device; with `handle` where the handle has them, or on the device if
            `non_blocking` asks for it); the handle, whose last entry is the overflow flag ``[1]`` int32.

        Raises:
            ConfigError: an argument does not fit at any rank, or ranks differ.
            OverflowError: more rows than `num_permuted_tokens` at any rank, without `non_blocking`.
            TimeoutError, TransportError: a rank was lost; `error.peer` is that rank. Where the host does not wait,
                from a later call.

        Example:
            >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]])
            >>> with hybrid_ep.HybridEPBuffer(None, 128, 2, num_local_experts=2) as buffer:
            ...     rows, _, _, counts, handle = buffer.dispatch_with_permute(
            ...         hidden=x, topk_idx=topk_idx, num_permuted_tokens=8, pad_multiple=4, non_blocking=True)
            >>> rows[:, 0].tolist(), counts.tolist(), handle[-1].item()
            ([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [4, 4], 0)
        """
        engine = self.engine
        require_bool("non_blocking", non_blocking)
        if use_host_meta is not None:
            non_blocking = not require_bool("use_host_meta", use_host_meta)
        require(not non_blocking or num_permuted_tokens is not None or handle is not None, "num_permuted_tokens", None,
                "a number of rows, with non_blocking=True")  # fmt: skip
        bound: int | None = None
        if num_permuted_tokens is not None:
            is_one = isinstance(num_permuted_tokens, Tensor) and num_permuted_tokens.numel() == 1
            given = num_permuted_tokens.item() if is_one else num_permuted_tokens  # type: ignore[union-attr]
            bound = require_int("num_permuted_tokens", given, minimum=0)
        pad = 1
        if pad_multiple is not None:
            pad = require_int("pad_multiple", pad_multiple, minimum=0, maximum=MAX_PAD) or 1
        if use_fp8 is not None and isinstance(hidden, Tensor):
            is_fp8 = hidden.dtype != torch.bfloat16
            require(use_fp8 == is_fp8, "use_fp8", use_fp8, f"{is_fp8}, as hidden is")
        if handle is not None:
            require(isinstance(handle, PermutedHandle), "handle", type(handle).__name__, "one of dispatch_with_permute")
            check_made_with(
                ("num_permuted_tokens", bound, handle.num_permuted),
                ("pad_multiple", pad_multiple or None, handle.pad_multiple),
                ("num_of_experts", num_of_experts, handle.num_experts),
                ("num_of_experts_per_rank", num_of_experts_per_rank, handle.num_experts // self.group_size),
            )
            weights = self._weights_along(
                handle.topk_idx, handle.num_experts, topk_idx, topk_weights, probs, routing_map, handle.num_parts
            )
            return self._permuted_along(handle, hidden, scaling_factor, weights, non_blocking)
        if num_of_experts is None and num_of_experts_per_rank is not None:
            per_rank = require_int("num_of_experts_per_rank", num_of_experts_per_rank, minimum=1)
            num_of_experts = per_rank * self.group_size
        rows, as_bytes, routing = self._rows_and_routing(
            hidden,
            scaling_factor,
            topk_idx,
            topk_weights,
            num_of_experts,
            probs,
            routing_map,
            no_sync=non_blocking,
            in_parts=True,
        )
        num_tokens = rows.data.shape[0]
        num_parts = routing.topk_idx.shape[0] // num_tokens if num_tokens else 1
        rows = _in_parts(rows, num_parts)
        if bound is not None:
            # Slots hold a record of each token that may arrive, however few rows of copies the bound allows. So ranks
            # agree on the most tokens. On a CPU a rank's parts depend on its tokens.
            most_parts = num_parts
            if routing_map is not None and routing_map.is_cpu and routing.num_experts > MAX_TOPK:
                most_parts = -(-routing.num_experts // MAX_TOPK)
            routing = routing._replace(max_tokens=self._max_tokens * most_parts)
        if num_of_experts_per_rank is not None:
            num_local = routing.num_experts // self.group_size
            require(
                num_of_experts_per_rank == num_local,
                "num_of_experts_per_rank",
                num_of_experts_per_rank,
                f"{num_local}, as {routing.num_experts} experts on {self.group_size} ranks are",
            )
        request = DispatchRequest(
            rows,
            routing,
            bound,
            self._num_sms_dispatch,
            pad_multiple=pad,
            num_expert_sms=self._num_sms_permute,
            drops_rows=non_blocking,
        )
        result = engine.dispatch(request)
        permute = result.permute
        assert permute is not None
        tokens_per_expert = permute.num_tokens_per_expert.to(torch.int64)
        if non_blocking and routing_map is not None and routing.num_experts > num_parts * MAX_TOPK:
            # Reports a token with more experts than `max_experts_per_token` by the overflow flag.
            permute.overflow.bitwise_or_(widest_token(routing_map) > num_parts * MAX_TOPK)
        if not non_blocking:
            tokens_per_expert = tokens_per_expert.to("cpu")
            if bound is not None:
                engine.raise_pending()  # the copy has waited for the dispatch
        known = routing.topk_idx
        if known is topk_idx:
            known = engine.sent_topk_idx(result.handle, known)
        made = PermutedHandle(known, permute, tokens_per_expert, self._sizes(pad), num_parts)
        return as_given(result.rows.data, as_bytes), result.topk_weights, result.rows.scales, tokens_per_expert, made

    def _permuted_along(
        self,
        handle: PermutedHandle,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        weights: Tensor | None,
        non_blocking: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermutedHandle]:
        """Dispatches along the routes of a handle. `weights`: in the columns of `handle.topk_idx`."""
        engine, permute, num_parts = self.engine, handle.permute, handle.num_parts
        rows, as_bytes = self._rows(hidden, scaling_factor)
        self._check_handle(permute.dispatch, rows, num_parts)
        rows = _in_parts(rows, num_parts)
        counts = handle.tokens_per_expert
        if non_blocking:
            counts = counts.to(hidden.device, non_blocking=True)
        request = engine.request_along(
            rows,
            permute,
            None if weights is None else handle.topk_idx,
            weights,
            num_sms=self._num_sms_dispatch,
            num_expert_sms=self._num_sms_permute,
        )
        result = engine.dispatch(request)
        return as_given(result.rows.data, as_bytes), result.topk_weights, result.rows.scales, counts, handle

    @collective("combine")
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: PermutedHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Brings permuted rows back and sums the rows of each token, without weighting. Collective.

        Args:
            hidden: ``[P, H]`` bf16, in the order of `dispatch_with_permute`.
            probs: ``[P]`` float32.
            handle: of the dispatch; required.
            pad_multiple: checked against the handle.
            fuse_unpermute_combine: accepted for compatibility, and without effect.
            num_dispatched_tokens: accepted for compatibility; not needed.

        Returns:
            hidden ``[T, H]`` bf16; probs ``[T, E]`` float32 (None without probs).

        Raises:
            ConfigError: an argument does not fit the handle at any rank, or ranks differ.
            TimeoutError, TransportError: a rank was lost; on the cuda engine from a later call.
        """
        engine = self.engine
        require(isinstance(handle, PermutedHandle), "handle", type(handle).__name__, "one of dispatch_with_permute")
        assert handle is not None
        permute = handle.permute
        self._check_geometry(permute.dispatch.grid)
        self._check_combined(hidden, probs, (permute.num_permuted,))
        if pad_multiple and pad_multiple != permute.pad_multiple:
            require(False, "pad_multiple", pad_multiple, f"{permute.pad_multiple}, as dispatched")
        request = CombineRequest(packed(hidden), packed(probs), (), self._num_sms_combine, self._num_sms_unpermute)
        combined = engine.combine(request, permute)
        data, num_parts, dense = combined.data, handle.num_parts, None
        if combined.weights is not None:
            dense = weights_to_probs(handle.topk_idx, combined.weights, permute.dispatch.num_experts)
        if num_parts == 1:
            return data, dense
        data = _sum_of_parts(data.float(), num_parts).to(data.dtype)
        return data, None if dense is None else _sum_of_parts(dense, num_parts)


def _in_parts(rows: Rows, num_parts: int) -> Rows:
    """Repeats each row, the copies one after the other."""
    if num_parts == 1:
        return rows
    data = rows.data.view(torch.uint8).repeat_interleave(num_parts, 0).view(rows.data.dtype)
    return Rows(data, None if rows.scales is None else rows.scales.repeat_interleave(num_parts, 0))


def _sum_of_parts(rows: Tensor, num_parts: int) -> Tensor:
    """``[T×S, N]`` → ``[T, N]``, added in order."""
    first, *others = rows.view(-1, num_parts, rows.shape[1]).unbind(1)
    total = first
    for part in others:
        total = total + part
    return total
