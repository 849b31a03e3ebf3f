"""Pure arithmetic of routings: which rank gets which token, counts, and the order of rows grouped by expert.

Nothing here talks to another rank. Tensors may be on any device; only the functions that say so wait for a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_ep import _C
from hybrid_ep.checks import MAX_TOPK, require, require_int
from hybrid_ep.core import kernels
from hybrid_ep.core.checks import packed, require_expert_indices, require_tensor
from hybrid_ep.core.streams import current_raw_stream


class Layout(NamedTuple):
    """Counts of one rank's tokens.

    Attributes:
        num_tokens_per_rank: ``[R]`` int32.
        num_tokens_per_domain: ``[D]`` int32; tokens with at least one expert in the domain.
        num_tokens_per_expert: ``[E]`` int32; columns that name the expert.
        is_token_in_rank: ``[T, R]`` bool.
    """

    num_tokens_per_rank: Tensor
    num_tokens_per_domain: Tensor
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor


def compute_layout(topk_idx: Tensor, num_experts: int, num_ranks: int, num_ranks_per_domain: int) -> Layout:
    """Counts tokens per rank, domain and expert. Every column counts for its expert; −1 counts nowhere.

    Args:
        topk_idx: ``[T, K]`` int64, contiguous, every index in −1 … E−1.
        num_experts: E, a multiple of R.
        num_ranks: R.
        num_ranks_per_domain: divides R.

    Raises:
        ConfigError: on a CPU tensor, an index outside −1 … E−1.
    """
    if kernels.run_on(topk_idx):
        return Layout(*layout_by_kernel(topk_idx, num_experts, num_ranks, num_ranks_per_domain)(topk_idx))
    num_tokens, num_topk = topk_idx.shape
    device = topk_idx.device
    if device.type == "cpu":
        # This C++ and the device code share the map of experts.
        per_rank = torch.empty(num_ranks, dtype=torch.int32, device="cpu")
        per_expert = torch.empty(num_experts, dtype=torch.int32, device="cpu")
        in_rank = torch.empty(num_tokens, num_ranks, dtype=torch.bool, device="cpu")
        bad = _C.compute_layout(
            topk_idx=topk_idx.data_ptr(),
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=num_experts,
            num_ranks=num_ranks,
            num_tokens_per_rank=per_rank.data_ptr(),
            num_tokens_per_expert=per_expert.data_ptr(),
            is_token_in_rank=in_rank.data_ptr(),
        )
        require(bad < 0, "topk_idx", int(topk_idx.flatten()[bad]) if bad >= 0 else "", f"−1 … {num_experts - 1}")
    else:
        per_rank, per_expert, in_rank = compute_layout_on_device(topk_idx, num_experts, num_ranks)
    in_domain = in_rank.view(num_tokens, num_ranks // num_ranks_per_domain, num_ranks_per_domain).any(-1)
    return Layout(per_rank, in_domain.sum(0, dtype=torch.int32), per_expert, in_rank)


LayoutByKernel = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]  # the tensors of a Layout, in its order


@functools.lru_cache(256)  # making one takes longer than a layout
def _shared_layout(
    num_topk: int, device: torch.device, index: int, num_experts: int, num_ranks: int, num_ranks_per_domain: int
) -> LayoutByKernel:
    """Makes layouts of any number of tokens, on a GPU with kernels, whose number is `index`.

    It keeps memory of that GPU, for totals of the next layouts.
    """
    return kernels.native.LayoutCounts(
        num_topk=num_topk,
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_ranks_per_domain=num_ranks_per_domain,
        device=device,
        device_index=index,
        current_stream=current_raw_stream,
    )


def layout_by_kernel(topk_idx: Tensor, num_experts: int, num_ranks: int, num_ranks_per_domain: int) -> LayoutByKernel:
    """The layouts of top-k indices with as many columns; arguments as of `compute_layout`."""
    index = kernels.place_of(topk_idx)["device"]
    return _shared_layout(topk_idx.shape[1], topk_idx.device, index, num_experts, num_ranks, num_ranks_per_domain)


def compute_layout_on_device(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens per rank, per expert, and the ranks of each token, in torch operations that never wait for the device."""
    routing_map = _scatter_to_map(topk_idx, num_experts)
    in_rank = routing_map.view(topk_idx.shape[0], num_ranks, num_experts // num_ranks).any(-1)
    columns = torch.where(topk_idx < 0, num_experts, topk_idx).flatten()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
    per_expert.index_add_(0, columns, torch.ones_like(columns, dtype=torch.int32))
    return in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts], in_rank


def first_occurrence(topk_idx: Tensor) -> Tensor:
    """Returns ``[T, K]`` bool: True for the first occurrence of each index ≥ 0 in its row."""
    return (_num_before(topk_idx) == 0) & (topk_idx >= 0)


def _scatter_to_map(topk_idx: Tensor, num_experts: int) -> Tensor:
    """``[T, K]`` indices → ``[T, E]`` bool; index −1 falls into a column that is cut off again."""
    padded = torch.zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool, device=topk_idx.device)
    padded.scatter_(1, torch.where(topk_idx < 0, num_experts, topk_idx), True)
    return padded[:, :num_experts].contiguous()


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Turns top-k indices and weights into a dense routing map and probabilities.

    Args:
        topk_idx: ``[T, K]`` int64, global expert index or −1.
        topk_weights: ``[T, K]`` float32, or None.
        num_of_tokens: T.
        num_of_experts: E.

    Returns:
        ``[T, E]`` bool, and ``[T, E]`` float32 (None without weights): the sum of the weights of an expert's columns.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit; on a CPU, an index is outside −1 … E−1. On a GPU no index
            is checked.

    Example:
        >>> hybrid_ep.indices_to_map(torch.tensor([[0, 2]]), torch.tensor([[0.25, 0.75]]), 1, 3)
        (tensor([[ True, False,  True]]), tensor([[0.2500, 0.0000, 0.7500]]))
    """
    require_int("num_of_tokens", num_of_tokens, minimum=0)
    require_int("num_of_experts", num_of_experts, minimum=1)
    require_tensor("topk_idx", topk_idx, dtypes=(torch.int64,), shape=(num_of_tokens, None))
    require_expert_indices(topk_idx, num_of_experts)
    routing_map = _scatter_to_map(topk_idx, num_of_experts)
    if topk_weights is None:
        return routing_map, None
    shape = tuple(topk_idx.shape)
    require_tensor("topk_weights", topk_weights, dtypes=(torch.float32,), shape=shape, device=topk_idx.device)
    return routing_map, weights_to_probs(topk_idx, topk_weights, num_of_experts)


def _has_kernel(topk_idx: Tensor) -> bool:
    return 1 <= topk_idx.shape[1] <= MAX_TOPK and kernels.run_on(topk_idx)


def _probs_by_kernel(topk_idx: Tensor, values: Tensor, num_experts: int, *, adds_columns: bool) -> Tensor:
    (num_tokens, num_topk), place = topk_idx.shape, kernels.place_of(topk_idx)
    topk_idx, values = packed(topk_idx), packed(values)
    probs = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=topk_idx.device)
    kernels.native.weights_to_probs(
        topk_idx=topk_idx.data_ptr(),
        weights=values.data_ptr(),
        probs=probs.data_ptr(),
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=num_experts,
        adds_columns=adds_columns,
        **place,
    )
    return probs


def weights_to_probs(topk_idx: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """``[T, K]`` indices and float32 weights → ``[T, E]`` probabilities: of an expert in several columns, the sum."""
    if _has_kernel(topk_idx):
        return _probs_by_kernel(topk_idx, topk_weights, num_experts, adds_columns=True)
    same = topk_idx.unsqueeze(2) == topk_idx.unsqueeze(1)
    # In float64, so that the order of the terms, which devices choose, does not show.
    totals = torch.where(same, topk_weights.unsqueeze(1), 0.0).sum(2, dtype=torch.float64).float()
    return experts_of_columns(topk_idx, totals, num_experts)


def experts_of_columns(topk_idx: Tensor, values: Tensor, num_experts: int) -> Tensor:
    """``[T, K]`` indices and float32 values → ``[T, E]``, 0 where an expert is not named.

    The columns of an expert have equal values.
    """
    if _has_kernel(topk_idx):
        return _probs_by_kernel(topk_idx, values, num_experts, adds_columns=False)
    columns = torch.where(topk_idx < 0, num_experts, topk_idx)
    experts = values.new_zeros(topk_idx.shape[0], num_experts + 1).scatter_(1, columns, values)
    return experts[:, :num_experts].contiguous()


def columns_of_experts(topk_idx: Tensor, probs: Tensor) -> Tensor:
    """``[T, K]`` indices and ``[T, E]`` float32 → ``[T, K]``, 0 where no expert is named."""
    if _has_kernel(topk_idx):
        topk_idx, probs = packed(topk_idx), packed(probs)
        weights = torch.empty(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        kernels.native.probs_to_weights(
            topk_idx=topk_idx.data_ptr(),
            weights=weights.data_ptr(),
            probs=probs.data_ptr(),
            num_tokens=topk_idx.shape[0],
            num_topk=topk_idx.shape[1],
            num_experts=probs.shape[1],
            **kernels.place_of(topk_idx),
        )
        return weights
    return torch.where(topk_idx >= 0, probs.gather(1, topk_idx.clamp(0, probs.shape[1] - 1)), 0.0)


def probs_in_columns(topk_idx: Tensor, probs: Tensor) -> Tensor:
    """``[T, K]`` indices and ``[T, E]`` probabilities → ``[T, K]`` weights: of several columns, the first has it."""
    return torch.where(first_occurrence(topk_idx), probs.gather(1, topk_idx.clamp(0, probs.shape[1] - 1)), 0.0)


def weights_in_columns(wanted_idx: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """``[T, J]`` indices, ``[T, K]`` others and their weights → ``[T, J]`` weights, 0 where an index is not among them.

    Of an expert in several columns, the first has the weight of the first, and so on.
    """
    same = wanted_idx.unsqueeze(2) == topk_idx.unsqueeze(1)
    same &= _num_before(wanted_idx).unsqueeze(2) == _num_before(topk_idx).unsqueeze(1)
    found = topk_weights.gather(1, same.byte().argmax(2))
    return torch.where(same.any(2), found, 0.0)


def _num_before(topk_idx: Tensor) -> Tensor:
    """``[T, K]`` int64: in how many earlier columns of the row the same index occurs."""
    return (topk_idx.unsqueeze(2) == topk_idx.unsqueeze(1)).tril(-1).sum(2)


def map_to_indices(routing_map: Tensor, probs: Tensor | None, num_parts: int = 1) -> tuple[Tensor, Tensor | None]:
    """Turns a dense routing map into top-k indices: ascending experts, then −1.

    Args:
        routing_map: ``[T, E]`` bool.
        probs: ``[T, E]`` float32, or None.
        num_parts: S; a token has S rows of the result, each with the next K of its experts.

    Returns:
        ``[T×S, K]`` int64, and ``[T×S, K]`` float32 weights (0 at −1; None without probs). K = min(E, 32): the same on
        every rank, whatever its tokens. Experts of a token beyond S × 32 are left out: see `widest_token`.
    """
    num_experts = routing_map.shape[1]
    num_topk = min(num_experts, MAX_TOPK)
    experts = torch.arange(num_experts, device=routing_map.device)
    columns = torch.where(routing_map, experts, num_experts).sort(1).values[:, : num_parts * num_topk]
    if columns.shape[1] < num_parts * num_topk:
        columns = torch.nn.functional.pad(columns, (0, num_parts * num_topk - columns.shape[1]), value=num_experts)
    topk_idx = torch.where(columns < num_experts, columns, -1)
    weights = None
    if probs is not None:
        weights = torch.where(topk_idx >= 0, probs.gather(1, columns.clamp_max(num_experts - 1)), 0.0)
        weights = weights.view(-1, num_topk)
    return topk_idx.view(-1, num_topk), weights


def widest_token(routing_map: Tensor) -> Tensor:
    """Returns, as a scalar tensor, the most experts (columns) that any token of a ``[T, E]`` bool map has."""
    return (
        routing_map.sum(1).max()
        if routing_map.shape[0]
        else torch.zeros((), dtype=torch.int64, device=routing_map.device)
    )


class Permutation(NamedTuple):
    """The rows of the copies of N received rows once they are grouped by local expert.

    Attributes:
        row: ``[C]`` int64; the received row of each copy, copies in order of (local expert, row, column).
        column: ``[C]`` int64; the top-k column that names the expert of each copy.
        dst_row: ``[C]`` int64; row of each copy in the permuted tensor.
        num_tokens_per_expert: ``[LE]`` int32, padding included.
    """

    row: Tensor
    column: Tensor
    dst_row: Tensor
    num_tokens_per_expert: Tensor

    def rows_of_copies(self, num_recv: int, num_topk: int) -> Tensor:
        """``[N, K]`` int32; the permuted row of each copy of a received row, −1 where there is none."""
        rows = torch.full((num_recv, num_topk), -1, dtype=torch.int32, device=self.row.device)
        rows[self.row, self.column] = self.dst_row.to(torch.int32)
        return rows


def permutation_by_expert(local_topk_idx: Tensor, num_local_experts: int, pad_multiple: int) -> Permutation:
    """Groups received rows by local expert, a copy for each column that names one. Waits for a GPU.

    Args:
        local_topk_idx: ``[N, K]`` int64, local expert or −1.
        num_local_experts: LE.
        pad_multiple: every expert's block is rounded up to a multiple of it.
    """
    row, column = torch.nonzero(local_topk_idx >= 0, as_tuple=True)
    expert = local_topk_idx[row, column]
    order = torch.argsort(expert, stable=True)
    row, column, expert = row[order], column[order], expert[order]
    counts = torch.bincount(expert, minlength=num_local_experts)
    padded = (counts + pad_multiple - 1) // pad_multiple * pad_multiple
    # Copies are in order of experts, so a row moves only by the padding of the experts before.
    padding_before = (padded - counts).cumsum(0) - (padded - counts)
    dst_row = torch.arange(row.numel(), device=row.device) + padding_before[expert]
    return Permutation(row, column, dst_row, padded.to(torch.int32))
