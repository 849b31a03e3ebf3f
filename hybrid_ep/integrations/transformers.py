"""`HybridEP`: the experts of Hugging Face transformers get their tokens through hybrid_ep.

    import hybrid_ep.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(
        name, distributed_config=DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="hybrid_ep"))

Importing this module registers the class as ``hybrid_ep``. Source of the interface: `EPImplementation` in
`transformers.distributed.expert_parallel`, 5.24.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.nn.modules import MoECombine, MoEDispatch

_buffers: dict[dist.ProcessGroup, Buffer] = {}  # which the layers of all models share


class HybridEP(EPImplementation):  # type: ignore[misc]
    """Sends tokens to the ranks of their experts, runs these, and brings the weighted sums back. Differentiable.

    Ranks of a tensor-parallel group, which share a batch, send disjoint slices of it, and gather the results. Ranks may
    have different numbers of tokens, or none. Every rank of the group must take part, forwards and backwards.

    Set the attributes on the class, the same on every rank, before models are made.

    Attributes:
        merges_rows: False: each pair of token and expert is a row, and its own rank weights and sums a token's rows, so
            that outputs are those of ``all_to_all`` bit for bit. True: a token crosses once to each rank of its
            experts, which weights and sums their outputs before they return: fewer bytes, and other rounding.
        max_tokens_per_rank: the most tokens that a rank sends at once, after slicing. With it the host does not wait
            for the GPU on the cuda engine, and experts get as many rows as could arrive, which takes memory and time.
            None: the host waits for the number of rows, as with ``all_to_all``.

    Args:
        experts: the module whose forward runs this rank's experts.
        ep_mesh: of the ranks among which the experts are split.
        tp_mesh: of the ranks that share a batch.

    Raises:
        ConfigError: hidden states are not bf16, or an argument does not fit at any rank.
        OverflowError: a rank had more than `max_tokens_per_rank` tokens, and too many rows arrived.
        TimeoutError, TransportError: a rank was lost.
    """

    merges_rows: ClassVar[bool] = False
    max_tokens_per_rank: ClassVar[int | None] = None

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        group = ep_mesh.get_group()
        if group not in _buffers:
            _buffers[group] = Buffer(group)
        self.buffer, self.num_experts = _buffers[group], self.num_local_experts * ep_mesh.size()
        self._combine = MoECombine(self.buffer)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted outputs of each token's experts, ``[T, H]``.

        Args:
            hidden_states: ``[T, H]`` bf16.
            top_k_index: ``[T, K]`` int64, global experts.
            top_k_weights: ``[T, K]``, float32 or the dtype of `hidden_states`.
        """
        num_tokens = hidden_states.shape[0]
        x, experts, weights = (self._slice(part) for part in (hidden_states, top_k_index, top_k_weights))
        (num_sent, num_topk), hidden = experts.shape, x.shape[1]
        most = (self.max_tokens_per_rank or 0) * self.buffer.group_size
        if self.merges_rows:
            return self._whole(self._through_experts(x, experts, weights, most), num_tokens)
        pairs = x.unsqueeze(1).expand(-1, num_topk, -1).reshape(-1, hidden)
        ones = torch.ones_like(weights).view(-1, 1)
        returned = self._through_experts(pairs, experts.reshape(-1, 1), ones, most * num_topk)
        combined = (returned.view(num_sent, num_topk, hidden) * weights.unsqueeze(-1)).sum(1)
        return self._whole(combined, num_tokens)

    def _through_experts(self, x: Tensor, experts: Tensor, weights: Tensor, bound: int) -> Tensor:
        """Sums of the experts' weighted outputs over ranks, ``[n, H]``; `bound`: of rows that arrive, 0 = none."""
        tokens = MoEDispatch(self.buffer, self.num_experts, bound)(x, experts, weights.float())
        rows, here = tokens.x, tokens.topk_idx >= 0
        ids = torch.where(here, tokens.topk_idx, self.num_local_experts)
        if bound:
            # Rows after the last that arrived are undefined. One of them, of zeros, goes to an expert with weight 0, so
            # that the backward pass reaches the experts' parameters on a rank that received none.
            is_row = here.any(1, keepdim=True)
            rows = torch.where(is_row, rows, 0.0)
            ids[-1, 0] = torch.where(is_row[-1, 0], ids[-1, 0], 0)
        if len(rows) == 0:
            # One row of the sum of none, so that the backward pass reaches the dispatch and the experts' parameters.
            rows, ids = rows.sum(0, keepdim=True), ids.new_zeros(1, 1)
            y = self.experts_forward(rows, ids, tokens.topk_weights.new_zeros(1, 1).to(weights.dtype))[:0]
        else:
            y = self.experts_forward(rows, ids, tokens.topk_weights.to(weights.dtype))
        combined: Tensor = self._combine(y, tokens.handle)
        return combined

    def _slice(self, whole: Tensor) -> Tensor:
        """This rank's rows of what the ranks of `tp_mesh` share."""
        if self.tp_mesh.size() == 1:
            return whole
        shared = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _whole(self, rows: Tensor, num_tokens: int) -> Tensor:
        """All ranks' rows, of `num_tokens`."""
        if self.tp_mesh.size() == 1:
            return rows
        shape = torch.Size((num_tokens, rows.shape[1]))
        parts = DTensor.from_local(rows.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
        return parts.full_tensor()


EPImplementationInterface.register("hybrid_ep", HybridEP)
