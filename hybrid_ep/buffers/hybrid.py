"""`HybridEPBuffer`: dispatch and combine with the interface of Hybrid-EP.

Callers pass top-k indices or a dense map. A map becomes top-k indices here, and decides only the form of the results.
Calls that permute sort rows by local expert, one copy for each expert of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.buffers.arguments import check_grid, check_rows, check_topk, check_weights, routing_by_rank
from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.hybrid_arguments import (
    as_e4m3,
    as_given,
    as_indices,
    check_combined,
    check_handle,
    check_made_with,
    probs_along,
    weights_along,
)
from hybrid_ep.buffers.hybrid_config import BufferConfig, Configurer, HybridEpConfigInstance
from hybrid_ep.buffers.hybrid_handles import HybridHandle, PermutedHandle
from hybrid_ep.buffers.hybrid_maps import combine_with_probs, send_along
from hybrid_ep.checks import MAX_TOPK, require, require_bool, require_bools, require_int
from hybrid_ep.core.checks import packed, packed_copy, require_plain, require_tensor
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import (
    columns_of_experts,
    experts_of_columns,
    indices_to_map,
    map_to_indices,
    probs_in_columns,
    weights_to_probs,
    widest_token,
)
from hybrid_ep.engine.calls import CombineRequest, Dispatched, DispatchRequest, Routing, Rows
from hybrid_ep.errors import ConfigError

__all__ = ["HybridEPBuffer", "indices_to_map"]

MAX_PAD = 1 << 16  # so that rows with padding can be counted in 32 bits
_TOKENS_MULTIPLE = 16  # as Hybrid-EP grows


class HybridEPBuffer(BaseBuffer):
    """Dispatch and combine with Hybrid-EP's interface.

    Every call runs on the current stream. The rules of `Buffer` hold for collective calls, for overwriting arguments
    and for the life of results.

    On the cuda engine the host waits for the GPU in these calls: `dispatch` without `handle` and number of rows;
    `dispatch_with_permute` without `handle` and `non_blocking`; a call whose number of rows is a tensor on the GPU;
    `dispatch_with_permute` with a map of more than 32 experts, unless `non_blocking`; `dispatch` with such a map on
    more than 32 ranks. On the torch engine the host may wait in every call.

    Args:
        group: the process group; None = the default group, or a single rank where there is none.
        hidden_dim: H, the largest that is sent, ≥ 1. This and the next grow with the calls.
        max_num_of_tokens_per_rank: the most tokens that a rank sends at once, ≥ 1.
        num_local_experts: LE, experts of each rank, ≥ 1, in every call that does not say how many experts there are.
        use_fp8: accepted for compatibility; the `hidden` of each call says whether its tokens are e4m3.
        num_sms_dispatch_api: SMs of dispatch; None = the engine's choice.
        num_sms_combine_api: SMs of combine; None = the engine's choice.
        num_blocks_permute: SMs that make a row's copies for further experts; None = all.
        num_blocks_unpermute: SMs, in addition to those of combine, that sum the rows of one token; None = the engine's
            choice, about three times as many as combine takes on 2 ranks, and as many on 8.
        num_sms_preprocessing_api: accepted for compatibility; nothing here depends on it.
        load_cached_kernels: accepted for compatibility; nothing here depends on it.
        use_shared_buffer: accepted for compatibility; nothing here depends on it.
        enable_custom_allgather: accepted for compatibility; nothing here depends on it.
        num_of_hybrid_ep_ranks_per_nvlink_domain: size of a domain; None = `HYBRID_EP_NUM_RANKS_PER_DOMAIN`, or
            else the ranks of a host (with ``engine="cuda"`` all ranks).
        use_mnnvl: accepted for compatibility; multi-node NVLink domains are used where they are there.
        max_experts_per_token: most experts of a token in a routing map on a GPU with `non_blocking`, where the host
            cannot look. Above 32 every token travels as several rows. Other calls look at the map.
        engine: ``auto``, ``torch`` or ``cuda``; None = ``HYBRID_EP_ENGINE``.
        timeout_s: seconds to wait for a rank; None = ``HYBRID_EP_TIMEOUT_S``.

    Attributes:
        configurer: `configurer.buffer_config` holds the sizes above.
        num_of_hybrid_ep_ranks_per_nvlink_domain: ranks of a domain.
        num_of_nodes: domains.
        local_rank: index of this rank in its domain.
        node_rank: index of this rank's domain.

    Raises:
        ConfigError, TopologyError, TimeoutError, TransportError, ClosedError, CudaError: as `Buffer`.

    Example:
        >>> x, topk_idx = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 3], [1, -1]])
        >>> with hybrid_ep.HybridEPBuffer(None, 128, 3, num_local_experts=4) as buffer:
        ...     rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        ...         hidden=x, topk_idx=topk_idx, topk_weights=torch.full((3, 2), 0.5), num_of_experts=4)
        ...     combined_x, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        >>> rows.shape, counts.tolist(), combined_x[:, 0].tolist()
        (torch.Size([5, 128]), [1, 3, 0, 1], [2.0, 2.0, 1.0])
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        *,
        max_experts_per_token: int = MAX_TOPK,
        engine: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._max_experts_per_token = require_int("max_experts_per_token", max_experts_per_token, minimum=1)
        self.configurer = Configurer(
            BufferConfig(
                require_int("hidden_dim", hidden_dim, minimum=1),
                require_int("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, minimum=1),
                require_int("num_local_experts", num_local_experts, minimum=1),
            )
        )
        self._first_sizes = dataclasses.replace(self.configurer.buffer_config)
        self._num_sms_dispatch = _num_sms("num_sms_dispatch_api", num_sms_dispatch_api)
        self._num_sms_combine = _num_sms("num_sms_combine_api", num_sms_combine_api)
        self._num_sms_permute = _num_sms("num_blocks_permute", num_blocks_permute)
        self._num_sms_unpermute = _num_sms("num_blocks_unpermute", num_blocks_unpermute)
        super().__init__(
            group, engine=engine, num_ranks_per_domain=num_of_hybrid_ep_ranks_per_nvlink_domain, timeout_s=timeout_s
        )
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.grid.num_ranks_per_domain
        self.num_of_nodes = self.grid.num_domains
        self.node_rank, self.local_rank = divmod(self.rank, self.grid.num_ranks_per_domain)

    def options(self) -> dict[str, Any]:
        config = self._first_sizes  # they have grown with the calls of this rank, and differ between ranks
        return super().options() | {
            "hidden_dim": config.hidden_dim,
            "max_num_of_tokens_per_rank": config.max_num_of_tokens_per_rank,
            "num_local_experts": config.num_of_experts_per_rank,
            "num_sms_dispatch_api": self._num_sms_dispatch,
            "num_sms_combine_api": self._num_sms_combine,
            "num_blocks_permute": self._num_sms_permute,
            "num_blocks_unpermute": self._num_sms_unpermute,
            "max_experts_per_token": self._max_experts_per_token,
        }

    @classmethod
    def over(cls, group: dist.ProcessGroup, num_ranks_per_domain: int, options: dict[str, Any]) -> HybridEPBuffer:
        return cls(group, num_of_hybrid_ep_ranks_per_nvlink_domain=num_ranks_per_domain, **options)

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """Makes the buffer large enough for calls of these sizes; it never shrinks. Local.

        Calls do this by themselves. Where the ranks give bounds of received rows, call it alike on every rank. A buffer
        that `recover` makes begins with the sizes of the constructor.

        Args:
            hidden_dim: H, the largest that is sent.
            num_of_tokens_per_rank: the most tokens that a rank sends at once; rounded up to a multiple of 16.
            num_local_experts: LE, the largest of a call; without a number, a call has that of the constructor.
            pad_multiple: for the returned sizes, at most 65536; calls take their own.
            use_fp8: accepted for compatibility, as by the calls.
            fuse_permute_dispatch: accepted for compatibility, as by the calls.
            kwargs: settings of `HybridEpConfigInstance`; accepted for compatibility.

        Returns:
            The sizes in force.

        Raises:
            ConfigError: a size is not an integer in its range, or a setting does not exist.
        """
        self._grow(hidden_dim, num_of_tokens_per_rank, num_local_experts)
        pad = 0 if pad_multiple is None else require_int("pad_multiple", pad_multiple, minimum=0, maximum=MAX_PAD)
        made = dataclasses.replace(self._sizes(pad))
        made.set(**kwargs)
        return made

    def empty_jit_cache(self) -> None:
        """Does nothing: kernels are compiled ahead of time, so there is no cache."""

    @collective("dispatch")
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: HybridHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, HybridHandle]:
        """Sends each token to every rank that owns one of its experts. Collective.

        Args:
            hidden: ``[T, H]`` bf16, or e4m3 (float8_e4m3fn or uint8) with `scaling_factor`.
            scaling_factor: ``[T, H/128]`` float32; ignored with bf16.
            topk_idx: ``[T, K]`` int64, int32 or int16, global expert index or −1; or give `routing_map`, which has
                precedence.
            topk_weights: ``[T, K]`` float32, with `topk_idx`.
            num_of_experts: E, a multiple of the ranks; None = LE × ranks of the buffer.
            probs: ``[T, E]`` float32, in place of `topk_weights`. If top-k indices name an expert twice, the first
                column has it.
            routing_map: ``[T, E]`` bool. A token may have any number of experts, on at most 32 ranks.
            num_dispatched_tokens_tensor: ``[1]`` int; the rows that will arrive, if the caller knows. Read on the host;
                with `handle`, which knows them, left alone.
            num_dispatched_tokens: the same as a number: the result has that many rows. Either on every rank, or none
                on any. With `handle`, checked.
            handle: of an earlier dispatch, whose routes are used. `topk_weights` or `probs` may differ from its own. If
                a routing is given again, it must be the handle's; that is compared on a CPU only.

        Returns:
            hidden ``[N, H]`` of the dtype of `hidden`, by source rank, then token; probs ``[N, experts of the domain]``
            float32 (None without weights); scaling_factor ``[N, H/128]`` float32 (None for bf16); the handle.

        Raises:
            ConfigError: an argument does not fit, a token of a map goes to more than 32 ranks, or ranks differ in what
                they must have alike.
            OverflowError: more rows than `num_dispatched_tokens`, at any rank; on the cuda engine from a later call.
            TimeoutError, TransportError: a rank was lost; `error.peer` is that rank. Where the host does not wait,
                from a later call.

        Example:
            >>> x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]])
            >>> with hybrid_ep.HybridEPBuffer(None, 128, 2, num_local_experts=4) as buffer:
            ...     rows, probs, _, handle = buffer.dispatch(
            ...         x, topk_idx=topk_idx, topk_weights=torch.full((2, 2), 0.5), num_of_experts=4)
            ...     combined_x, summed = buffer.combine(3 * rows, probs, handle)
            >>> probs.tolist(), combined_x[:, 0].tolist(), summed.tolist() == probs.tolist()
            ([[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]], [3.0, 3.0], True)
        """
        engine, num_sms = self.engine, self._num_sms_dispatch
        topk_idx = as_indices(topk_idx, topk_weights, probs, routing_map)
        if handle is not None:
            rows, as_bytes = self._rows(hidden, scaling_factor)
            require(isinstance(handle, HybridHandle), "handle", type(handle).__name__, "a handle of dispatch")
            check_handle(self.grid, handle.dispatch, rows)
            num_experts = handle.dispatch.num_experts
            check_made_with(
                ("num_of_experts", num_of_experts, num_experts),
                ("num_dispatched_tokens", num_dispatched_tokens, handle.dispatch.num_recv),
            )
            along = probs_along if handle.is_map else weights_along
            weights = along(handle.routing, num_experts, topk_idx, topk_weights, probs, routing_map)
            return self._along(handle, rows, as_bytes, weights)
        rows, as_bytes, routing = self._rows_and_routing(
            hidden, scaling_factor, topk_idx, topk_weights, num_of_experts, probs, routing_map
        )
        bound = num_dispatched_tokens
        if bound is None and num_dispatched_tokens_tensor is not None:
            name, dtypes = "num_dispatched_tokens_tensor", (torch.int32, torch.int64)
            require_tensor(name, num_dispatched_tokens_tensor, dtypes=dtypes, shape=(1,))
            bound = int(num_dispatched_tokens_tensor.item())
        if bound is not None:
            require_int("num_dispatched_tokens", bound, minimum=0)
        experts = self._experts_of_domain(routing.num_experts)
        if bound is not None:
            routing = routing._replace(max_tokens=self._max_tokens)
        wanted = DispatchRequest(rows, routing, bound, num_sms, experts, self._max_tokens * self.group_size)
        result = engine.dispatch(wanted)
        if routing.has_topk:
            known = engine.sent_topk_idx(result.handle, routing.topk_idx)
            assert result.topk_idx is not None
            # A copy, because a handle must not hold the slot.
            received_experts, received_probs = result.topk_idx.clone(), _probs_of(result, experts)
        else:
            assert routing_map is not None
            known = packed_copy(routing_map)
            sent_probs = None if probs is None else torch.where(known, probs, 0.0)
            received_map, received_probs = send_along(engine, result.handle, experts, known, sent_probs, num_sms)
            assert received_map is not None
            received_experts = received_map
        made = HybridHandle(known, received_experts, result.handle, self._sizes(0))
        return as_given(result.rows.data, as_bytes), received_probs, result.rows.scales, made

    def _along(
        self, handle: HybridHandle, rows: Rows, as_bytes: bool, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, HybridHandle]:
        """Dispatches along the routes of a handle.

        Args:
            handle: of the dispatch.
            rows: as the engine takes them.
            as_bytes: whether they are returned as uint8.
            weights: in the columns of `handle.routing`.
        """
        engine, num_sms = self.engine, self._num_sms_dispatch
        experts, probs = self._experts_of_domain(handle.num_experts), None
        topk_idx, sent = (None, None) if weights is None or handle.is_map else (handle.routing, weights)
        request = engine.request_along(
            rows, handle.dispatch, topk_idx, sent, num_sms=num_sms, expert_range=None if sent is None else experts
        )
        result = engine.dispatch(request)
        received = result.rows
        if sent is not None:
            probs = _probs_of(result, experts)
        elif weights is not None:
            _, probs = send_along(engine, handle.dispatch, experts, None, weights, num_sms)
        return as_given(received.data, as_bytes), probs, received.scales, handle

    @collective("combine")
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: HybridHandle | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Brings rows back to their source tokens and sums them over ranks, without weighting. Collective.

        Args:
            hidden: ``[N, H]`` bf16, in the order of dispatch.
            probs: ``[N, experts of the domain]`` float32, summed over ranks.
            handle: of the dispatch; required.

        Returns:
            hidden ``[T, H]`` bf16; probs ``[T, E]`` float32 (None without probs).

        Raises:
            ConfigError: an argument does not fit the handle at any rank, or ranks differ.
            TimeoutError, TransportError: a rank was lost; on the cuda engine from a later call.
        """
        engine = self.engine
        require(isinstance(handle, HybridHandle), "handle", type(handle).__name__, "a handle of dispatch")
        assert handle is not None
        dispatch, received = handle.dispatch, handle.received
        check_grid(self.grid, dispatch.grid)
        experts = begin, end = self._experts_of_domain(dispatch.num_experts)
        check_combined(hidden, probs, (received.shape[0], end - begin), engine.device)
        request = CombineRequest(packed(hidden), num_sms=self._num_sms_combine)
        if probs is None:
            return engine.combine(request, dispatch).data, None
        if handle.is_map:
            sent_probs = torch.where(received, probs, 0.0)
            combined = combine_with_probs(engine, request, sent_probs, experts, dispatch)
            return combined.data, combined.weights
        request = request._replace(weights=columns_of_experts(received, probs))
        combined = engine.combine(request, dispatch)
        assert combined.weights is not None
        # Columns of the same expert have the same value.
        return combined.data, experts_of_columns(handle.routing, combined.weights, dispatch.num_experts)

    def _experts_of_domain(self, num_experts: int) -> tuple[int, int]:
        """(first, end) of the experts that a plain dispatch reports."""
        num_local = num_experts // self.group_size
        return self.grid.domain.start * num_local, self.grid.domain.stop * num_local

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
        dense_routing: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermutedHandle]:
        """Dispatches and groups the rows by local expert, one copy for each expert of a token. Collective.

        Args:
            hidden: ``[T, H]`` bf16, or e4m3 (float8_e4m3fn or uint8) with `scaling_factor`.
            topk_idx: ``[T, K]`` int64, int32 or int16, global expert index or −1; or give `routing_map`, which has
                precedence.
            topk_weights: ``[T, K]`` float32, with `topk_idx`.
            num_of_experts_per_rank: LE; None = that of `num_of_experts`, else of the map, else of the buffer.
            num_of_experts: E, a multiple of the ranks; None = that of `num_of_experts_per_rank`, else of the map, else
                of the buffer.
            use_fp8: whether `hidden` is e4m3; None = not checked.
            routing_map: ``[T, E]`` bool. A token with more than 32 experts travels as several rows, each for the next
                32 of them in ascending order: it may reach a rank more than once, and combine rounds the sum of each.
            probs: ``[T, E]`` float32, in place of `topk_weights`. If top-k indices name an expert twice, the first
                column has it.
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
            dense_routing: accepted for compatibility: top-k indices travel as such in any case.
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
        topk_idx = as_indices(topk_idx, topk_weights, probs, routing_map)
        require_bools(("non_blocking", "dense_routing"), (non_blocking, dense_routing))
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
            weights = weights_along(
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
        check_handle(self.grid, permute.dispatch, rows, num_parts)
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
        check_grid(self.grid, permute.dispatch.grid)
        check_combined(hidden, probs, (permute.num_permuted,), engine.device)
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

    # Sizes and checks that depend on them.

    @property
    def _max_tokens(self) -> int:
        """The most tokens that a rank sends at once; grows with the calls of this rank."""
        return self.configurer.buffer_config.max_num_of_tokens_per_rank

    def _grow(self, hidden_dim: int | None, num_of_tokens_per_rank: int | None, num_local_experts: int | None) -> None:
        """Raises the buffer's sizes to those of a call; None = unchanged."""
        config = self.configurer.buffer_config
        if hidden_dim is not None:
            config.hidden_dim = max(config.hidden_dim, require_int("hidden_dim", hidden_dim, minimum=1))
        if num_of_tokens_per_rank is not None:
            tokens = require_int("num_of_tokens_per_rank", num_of_tokens_per_rank, minimum=0)
            if tokens > config.max_num_of_tokens_per_rank:
                config.max_num_of_tokens_per_rank = -(-tokens // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE
        if num_local_experts is not None:
            num_local = require_int("num_local_experts", num_local_experts, minimum=1)
            config.num_of_experts_per_rank = max(config.num_of_experts_per_rank, num_local)

    def _sizes(self, pad_multiple: int) -> HybridEpConfigInstance:
        """The sizes in force, shared by all handles that are made with them."""
        sizes = self.configurer.buffer_config
        most = sizes.max_num_of_tokens_per_rank
        return _sizes_of(sizes.hidden_dim, most, sizes.num_of_experts_per_rank, self.grid, pad_multiple)

    def _rows_and_routing(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        probs: Tensor | None,
        routing_map: Tensor | None,
        *,
        no_sync: bool = False,
        in_parts: bool = False,
    ) -> tuple[Rows, bool, Routing]:
        """Checks rows, as `_rows` does, and routing."""
        if num_experts is None:
            if routing_map is not None:
                require_plain("routing_map", routing_map)
                num_experts = routing_map.shape[1] if routing_map.dim() == 2 else None
            num_experts = num_experts or self._first_sizes.num_of_experts_per_rank * self.group_size
        require_int("num_of_experts", num_experts, minimum=1, multiple_of=self.group_size)
        rows, as_bytes = self._rows(hidden, scaling_factor)
        routing = self._routing(
            rows, topk_idx, topk_weights, num_experts, probs, routing_map, no_sync=no_sync, in_parts=in_parts
        )
        return rows, as_bytes, routing

    def _rows(self, hidden: Tensor, scaling_factor: Tensor | None) -> tuple[Rows, bool]:
        """Checks tokens. Also returns whether they are uint8, because results then are too."""
        data, scaling_factor, as_bytes = as_e4m3(hidden, scaling_factor)
        rows = check_rows("hidden", data, scaling_factor, device=self.engine.device)
        num_tokens, size = rows.data.shape
        self._grow(size, num_tokens, None)
        return rows, as_bytes

    def _routing(
        self,
        rows: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int,
        probs: Tensor | None,
        routing_map: Tensor | None,
        *,
        no_sync: bool = False,
        in_parts: bool = False,
    ) -> Routing:
        """Checks where tokens go.

        Tokens of a map with more than 32 columns are routed by their ranks. With `in_parts`, they are routed by their
        experts, and have a row of the result for every 32.
        """
        num_tokens, device = rows.data.shape[0], rows.data.device
        if routing_map is not None:
            shape = (num_tokens, num_experts)
            require_tensor("routing_map", routing_map, dtypes=(torch.bool,), shape=shape, device=device)
        self._grow(None, None, num_experts // self.group_size)
        if probs is not None:
            check_weights("probs", probs, (num_tokens, num_experts), device)
        if routing_map is not None:
            num_parts = 1
            if num_experts > MAX_TOPK:
                if not in_parts:
                    owners = routing_map.view(num_tokens, self.group_size, num_experts // self.group_size).any(2)
                    return routing_by_rank(self.grid, owners, num_experts)
                widest = min(self._max_experts_per_token, num_experts)
                if not (no_sync and routing_map.is_cuda):
                    widest = int(widest_token(routing_map))
                num_parts = max(1, -(-widest // MAX_TOPK))
            topk_idx, topk_weights = map_to_indices(routing_map, probs, num_parts)
            num_tokens *= num_parts
        elif topk_idx is None:
            raise ConfigError("neither of topk_idx and routing_map is given; allowed: one of them")
        check_topk(topk_idx, topk_weights, num_experts, device)
        if topk_idx.shape[0] != num_tokens:
            require(False, "rows of topk_idx", topk_idx.shape[0], f"{num_tokens}, as hidden has")
        if probs is not None and routing_map is None:
            topk_weights = probs_in_columns(topk_idx, probs)
        return Routing(packed(topk_idx), packed(topk_weights), num_experts)


def _num_sms(name: str, value: int | None) -> int | None:
    return None if value is None else require_int(name, value, minimum=1)


def _probs_of(received: Dispatched, experts: tuple[int, int]) -> Tensor | None:
    """``[N, end − first]`` of received top-k weights; None where none were sent."""
    if received.topk_weights is None:
        return None
    assert received.topk_idx is not None
    first, end = experts
    return weights_to_probs(received.topk_idx, received.topk_weights, end - first)


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


@functools.lru_cache
def _sizes_of(hidden: int, tokens: int, num_local: int, grid: RankGrid, pad_multiple: int) -> HybridEpConfigInstance:
    return HybridEpConfigInstance(
        hidden, tokens, num_local, grid.num_ranks_per_domain, grid.num_domains, pad_multiple=pad_multiple
    )
