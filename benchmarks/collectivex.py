"""An adapter for CollectiveX, the harness of InferenceX for expert-parallel transports.

Put this file's folder on the harness's path and register the class where it lists its backends:

    from collectivex import make_backend
    from ep_backend import EPBackend

    HybridEPBackend = make_backend(EPBackend)

The base class makes inputs, warms and times; nothing here measures. `normal` is `Buffer` with rows by source; the gate
is folded into the rows before combine, which is a plain sum over ranks. `low-latency` is `Buffer`'s low-latency calls,
rows packed by expert; combine applies the gate.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8

__all__ = ["make_backend"]


class _Transport:
    """What is asked of a backend; its base says how it is driven.

    A problem has `T` tokens `dispatch_x` ``[T, H]`` bf16, `topk_idx` ``[T, K]`` int64 and `topk_weights` ``[T, K]``
    float32. A handle is made by a dispatch and read by what follows it.
    """

    name = "hybrid-ep"
    maturity = "candidate"
    kernel_generation = "hybrid-ep"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")
    library_version = hybrid_ep.__version__
    requires_fresh_pair = False  # a handle serves any number of combines, and a dispatch may have none
    stage_device_work = False
    receive_layout = "token-rank"
    combine_weight_semantics = "unweighted-rank-sum"

    args: Any
    rank: int
    world_size: int
    mode: str
    precision: str
    _quant: Any

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: Any) -> None:
        super().__init__(args, rank, world_size, local_rank, device)  # type: ignore[call-arg]
        self._is_fp8 = self.precision == "fp8"
        self._num_local = args.experts // world_size
        if self._is_fp8:
            self.stage_device_work = True  # combine takes bf16, and the stand-in for the experts makes it
            # The base compiles what normal dispatches quantise with, outside of what it times, and checks its bits.
            self._enable_fp8("fp8-e4m3fn", cast_to_fp8, cast_from_fp8)  # type: ignore[attr-defined]
        if self.mode == "low-latency":
            self.receive_layout = "token-expert"
            self.combine_weight_semantics = "weighted-kernel-sum"

    def create_buffer(self, spec: Any) -> None:
        """Makes the buffer for at most `spec.max_tokens_per_rank` tokens of a rank. Collective."""
        self._most = spec.max_tokens_per_rank
        kind, args = hybrid_ep.Buffer, self.args
        if self.mode == "low-latency":
            num_bytes = kind.get_low_latency_rdma_size_hint(self._most, args.hidden, self.world_size, args.experts)
            self.buffer = kind(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True)
            return
        configs = kind.get_dispatch_config(self.world_size), kind.get_combine_config(self.world_size)
        num_bytes = max(one.get_nvl_buffer_size_hint(2 * args.hidden, self.world_size) for one in configs)
        self.buffer = kind(dist.group.WORLD, num_bytes, 0, explicitly_destroy=True)

    def dispatch(self, problem: Any) -> SimpleNamespace:
        """Rows are quantised here, as a model does it in every step."""
        x, topk_idx = problem.dispatch_x, problem.topk_idx
        if self.mode == "low-latency":
            received, counts, handle, _, _ = self.buffer.low_latency_dispatch(
                x, topk_idx, self._most, self.args.experts, use_fp8=self._is_fp8
            )
            return SimpleNamespace(received=received, counts=counts, handle=handle)
        per_rank, per_domain, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, self.args.experts)
        received, recv_idx, recv_weights, counts, handle, _ = self.buffer.dispatch(
            self._quant(x) if self._is_fp8 else x,
            topk_idx=topk_idx,
            topk_weights=problem.topk_weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return SimpleNamespace(
            received=received, recv_idx=recv_idx, recv_weights=recv_weights, counts=counts, handle=handle
        )

    def stage(self, problem: Any, handle: Any) -> None:
        """Makes what combine takes: the received rows, as bf16."""
        handle.combine_input = self._as_bf16(handle)

    def combine(self, problem: Any, handle: Any) -> Tensor:
        return self._combine(problem, handle, handle.combine_input)

    def combine_transformed(self, problem: Any, handle: Any, transformed: Tensor) -> Tensor:
        """The same with rows as `inspect_dispatch` gave them, after the oracle has changed them."""
        if self.mode == "low-latency":
            rows = torch.zeros_like(self._as_bf16(handle))
            rows[self._is_row(handle)] = transformed.to(rows.dtype)
            return self._combine(problem, handle, rows)
        return self._combine(problem, handle, transformed.to(torch.bfloat16))

    def recv_tokens(self, handle: Any) -> int:
        """Rows that arrived; in low latency a row for each expert of a token."""
        if self.mode == "low-latency":
            return int(handle.counts.sum())
        return len(handle.recv_idx)

    def inspect_dispatch(self, problem: Any, handle: Any) -> SimpleNamespace:
        """What arrived, in a form that is the same for every backend.

        Returns:
            payload ``[N, H]`` bf16; local_expert_counts ``[LE]`` int64; expert_ids, global: in normal mode ``[N, K]``
            with −1 for experts of other ranks, beside weights ``[N, K]``; in low latency ``[N]``.
        """
        first = self.rank * self._num_local
        if self.mode == "low-latency":
            local, _ = torch.nonzero(self._is_row(handle), as_tuple=True)
            return SimpleNamespace(
                payload=self._as_bf16(handle)[self._is_row(handle)],
                expert_ids=first + local,
                local_expert_counts=handle.counts.to(torch.int64),
            )
        is_here = handle.recv_idx >= 0
        return SimpleNamespace(
            payload=self._as_bf16(handle),
            expert_ids=torch.where(is_here, handle.recv_idx + first, -1),
            weights=torch.where(is_here, handle.recv_weights, 0.0),
            local_expert_counts=torch.bincount(handle.recv_idx[is_here], minlength=self._num_local),
        )

    def finalize(self, rc: int) -> int:
        """Gives the buffer back, then does as the base."""
        self.buffer.destroy()
        result: int = super().finalize(rc)  # type: ignore[misc]
        return result

    def _combine(self, problem: Any, handle: Any, rows: Tensor) -> Tensor:
        if self.mode == "low-latency":
            # With a hook each row crosses in bf16, as the oracle expects. Without it, those of a token are summed and
            # rounded on each rank before they cross.
            combined, _, receive = self.buffer.low_latency_combine(
                rows, problem.topk_idx, problem.topk_weights, handle.handle, return_recv_hook=True
            )
            receive()
            return combined
        combined, _, _ = self.buffer.combine(rows, handle.handle)
        return combined

    def _as_bf16(self, handle: Any) -> Tensor:
        """Received rows; of a packed dispatch those after an expert's count are undefined."""
        if not self._is_fp8:
            rows: Tensor = handle.received
            return rows
        data, scales = handle.received
        flat = cast_from_fp8(data.view(-1, data.shape[-1]), scales.reshape(-1, scales.shape[-1]))
        return flat.to(torch.bfloat16).view(data.shape)

    def _is_row(self, handle: Any) -> Tensor:
        """``[LE, M×R]``: which places of a packed dispatch have a row."""
        places = torch.arange(handle.handle.src_info.shape[1], device=handle.counts.device)
        return places < handle.counts.unsqueeze(1)


def make_backend(base: type) -> type:
    """Returns the backend as a subclass of the harness's `EPBackend`."""
    return type("HybridEPBackend", (_Transport, base), {"name": _Transport.name})
