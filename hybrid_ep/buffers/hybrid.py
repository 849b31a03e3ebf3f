"""`HybridEPBuffer`: dispatch and combine with the interface of Hybrid-EP.

The calls that permute are in `hybrid_permuted`. Callers pass top-k indices or a dense map. A map becomes top-k indices
here, and decides only the form of the results.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.hybrid_arguments import MAX_PAD, as_given, check_made_with
from hybrid_ep.buffers.hybrid_config import BufferConfig, Configurer, HybridEpConfigInstance
from hybrid_ep.buffers.hybrid_handles import HybridHandle
from hybrid_ep.buffers.hybrid_maps import combine_with_probs, send_along
from hybrid_ep.buffers.hybrid_permuted import PermutedCalls
from hybrid_ep.checks import MAX_TOPK, require, require_int
from hybrid_ep.core.checks import packed, packed_copy, require_tensor
from hybrid_ep.core.layout import (
    columns_of_experts,
    experts_of_columns,
    indices_to_map,
    weights_to_probs,
)
from hybrid_ep.engine.calls import CombineRequest, Dispatched, DispatchRequest, Rows

__all__ = ["HybridEPBuffer", "indices_to_map"]


class HybridEPBuffer(PermutedCalls):
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
            topk_idx: ``[T, K]`` int64, global expert index or −1; or give `routing_map`.
            topk_weights: ``[T, K]`` float32, with `topk_idx`.
            num_of_experts: E, a multiple of the ranks; None = LE × ranks of the buffer.
            probs: ``[T, E]`` float32, with `routing_map`.
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
        if handle is not None:
            rows, as_bytes = self._rows(hidden, scaling_factor)
            require(isinstance(handle, HybridHandle), "handle", type(handle).__name__, "a handle of dispatch")
            self._check_handle(handle.dispatch, rows)
            num_experts = handle.dispatch.num_experts
            check_made_with(
                ("num_of_experts", num_of_experts, num_experts),
                ("num_dispatched_tokens", num_dispatched_tokens, handle.dispatch.num_recv),
            )
            along = self._probs_along if handle.is_map else self._weights_along
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
        self._check_geometry(dispatch.grid)
        experts = begin, end = self._experts_of_domain(dispatch.num_experts)
        self._check_combined(hidden, probs, (received.shape[0], end - begin))
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


def _num_sms(name: str, value: int | None) -> int | None:
    return None if value is None else require_int(name, value, minimum=1)


def _probs_of(received: Dispatched, experts: tuple[int, int]) -> Tensor | None:
    """``[N, end − first]`` of received top-k weights; None where none were sent."""
    if received.topk_weights is None:
        return None
    assert received.topk_idx is not None
    first, end = experts
    return weights_to_probs(received.topk_idx, received.topk_weights, end - first)
