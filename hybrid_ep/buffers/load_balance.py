"""DeepEP's `lb_prefetch_weights` and `lb_reduce_grads`: experts' weights to the ranks of replicas, and gradients back.

Weights and gradients are sent as rows of a dispatch, bit for bit. A row is a piece of one expert's tensor, viewed as
bf16. It goes to the ranks that hold a replica. So every engine can send them, with the errors and timeouts of a
dispatch. Only the sums are made here.

    weights   experts[LE, …] ─ rows ─► dispatch to the ranks of the replicas ─► spare[B, …]
    gradients spare[B, …] ─ rows ─► dispatch to the home ranks ─► added in fp32: this rank's first, then by rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.core.checks import MAX_TOPK, require, require_expert_indices, require_int, require_tensor
from hybrid_ep.core.event import EventHandle, EventOverlap, as_overlap
from hybrid_ep.core.layout import map_to_indices
from hybrid_ep.engine.calls import DispatchRequest, Routing, Rows

__all__ = ["LoadBalanceCalls", "add_gradients", "copy_weights", "gather_counts"]

_ROW_ELEMENTS = 4096  # bf16; a row is at most so long
_ROW_MULTIPLE = 8  # 16 bytes
_MAX_ROWS = 65536  # of one dispatch of the cuda engine (csrc/layout/limits.h: kMaxTokens)


class LoadBalanceCalls(BaseBuffer):
    """The calls; a part of `Buffer`, `ElasticBuffer` and `EPBuffer`."""

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensor | Sequence[Tensor],
        expert_weights: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
    ) -> EventOverlap:
        """Fills spare slots with the weights of their experts. Collective over the buffer's group.

        Values are copied bit for bit, on the current stream. A slot whose entry in the mapping is −1 is not written.

        Args:
            redundant_expert_weights: ``[B, *shape]`` of any dtype, or several; written where the mapping names an
                expert.
            expert_weights: ``[LE, *shape]`` of the same dtypes: those of this rank's experts.
            redundancy_mapping: ``[ranks of the domain, B]`` int32 or int64, the same on all ranks of the domain: the
                expert in each spare slot, counted within the domain, −1 where it is empty.
            num_sms: SMs to use; 0 = the engine's choice.
            previous_event: the current stream waits for it first.

        Returns:
            An event on the current stream, behind the copies.

        Raises:
            ConfigError: an argument does not fit, a tensor is not contiguous, or, where the mapping is on a CPU, it
                names no expert of the domain.
            TimeoutError, TransportError: a rank was lost; on the cuda engine from a later call.
        """
        spare = _tensors("redundant_expert_weights", redundant_expert_weights)
        experts = _tensors("expert_weights", expert_weights)
        self._move(copy_weights, spare, experts, redundancy_mapping, num_sms, previous_event)
        return EventOverlap(EventHandle())

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor | Sequence[Tensor],
        expert_grads: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
    ) -> EventOverlap:
        """Adds the gradients of replicas to those of their experts, in fp32. Collective over the buffer's group.

        The order of additions is fixed: the home rank's own replicas, then those of the other ranks in ascending
        order. The host waits for how many replicas there are.

        Args:
            redundant_expert_grads: ``[B, *shape]`` float32, or several.
            expert_grads: ``[LE, *shape]`` float32, added to.
            redundancy_mapping: as in `lb_prefetch_weights`.
            num_sms: SMs to use; 0 = the engine's choice.
            previous_event: the current stream waits for it first.

        Returns:
            An event on the current stream, behind the sums.

        Raises:
            ConfigError: as `lb_prefetch_weights`, or gradients are not float32.
            TimeoutError, TransportError: a rank was lost.
        """
        spare = _tensors("redundant_expert_grads", redundant_expert_grads)
        homes = _tensors("expert_grads", expert_grads)
        self._move(add_gradients, spare, homes, redundancy_mapping, num_sms, previous_event)
        return EventOverlap(EventHandle())

    def lb_get_theoretical_num_sms(self) -> int:
        """Returns how many SMs the two calls take with ``num_sms=0``: as many as a dispatch. Local."""
        return self.engine.default_num_sms

    def _move(
        self,
        move: Callable[..., None],
        spare: list[Tensor],
        homes: list[Tensor],
        mapping: Tensor,
        num_sms: int,
        previous_event: EventOverlap | EventHandle | None,
    ) -> None:
        """Checks what both calls share, and moves one pair of tensors after another."""
        require(len(spare) == len(homes), "tensors of spare slots", len(spare), f"{len(homes)}, as of the experts")
        shape = (self.grid.num_ranks_per_domain, spare[0].shape[0] if spare else None)
        require_tensor("redundancy_mapping", mapping, dtypes=(torch.int32, torch.int64), shape=shape)
        num_experts = self.grid.num_ranks_per_domain * (homes[0].shape[0] if homes else 0)
        require_expert_indices(mapping, num_experts, name="redundancy_mapping")
        require_int("num_sms", num_sms, minimum=0)
        event = as_overlap("previous_event", previous_event)
        if event is not None:
            event.current_stream_wait()
        for ours, theirs in zip(spare, homes, strict=True):
            _require_alike(ours, theirs, (spare[0].shape[0], homes[0].shape[0]))
        move(self, spare, homes, mapping.long(), self.grid.domain.start, num_sms or None)


def copy_weights(
    buffer: BaseBuffer,
    spare: Sequence[Tensor],
    experts: Sequence[Tensor],
    mapping: Tensor,
    first_rank: int,
    num_sms: int | None = None,
) -> None:
    """Fills each ``spare[B, *shape]`` from the ``experts[LE, *shape]`` of other ranks. Collective over the group.

    Args:
        buffer: moves the rows.
        spare: contiguous, written where the mapping names an expert.
        experts: contiguous; as many, of the same shapes and dtypes.
        mapping: ``[ranks, B]`` int64, the same on these ranks: experts, counted from those of `first_rank`, or −1.
        first_rank: that it begins with.
        num_sms: SMs to use; None = the engine's choice.
    """
    if not spare or spare[0].shape[0] == 0:
        return
    num_local, num_slots = experts[0].shape[0], spare[0].shape[0]
    mapping = mapping.to(experts[0].device)
    # [LE, R]: which ranks hold a replica of each of this rank's experts.
    local = mapping - (buffer.rank - first_rank) * num_local
    wanted = (local.unsqueeze(0) == torch.arange(num_local, device=mapping.device).view(-1, 1, 1)).any(2)
    ranks = torch.zeros(num_local, buffer.group_size, dtype=torch.bool, device=mapping.device)
    ranks[:, first_rank : first_rank + mapping.shape[0]] = wanted
    # The experts that have a replica come first, ascending; no more have one than there are slots.
    sent = ranks.any(1).logical_not().to(torch.uint8).argsort(stable=True)[: mapping.numel()]
    indices = _indices_of(ranks.index_select(0, sent))
    # Experts arrive by rank and number: slots of one expert share them.
    mine = mapping[buffer.rank - first_rank]
    is_first = (mine.unsqueeze(1) == mine).tril(-1).logical_not().all(1)
    nth = ((mine < mine.unsqueeze(1)) & is_first & (mine >= 0)).sum(1)
    is_used = (mine >= 0).unsqueeze(1)
    for slots, homes in zip(spare, experts, strict=True):
        ours, theirs = _wide(slots), _wide(homes)
        if ours.dtype != theirs.dtype:
            ours, theirs = _flat(slots), _flat(homes)
        for part in _parts(theirs, len(sent)):
            rows, num_pieces = _as_rows(theirs[:, part].index_select(0, sent))
            arrived = _send(buffer, rows, indices, num_slots * num_pieces, num_sms)
            target = ours[:, part]
            found = _as_tensors(arrived, tuple(target.shape), target.dtype).index_select(0, nth)
            torch.where(is_used, found, target, out=target)


def add_gradients(
    buffer: BaseBuffer,
    spare: Sequence[Tensor],
    homes: Sequence[Tensor],
    mapping: Tensor,
    first_rank: int,
    num_sms: int | None = None,
) -> None:
    """Adds float32 ``spare[B, *shape]`` of all ranks to ``homes[LE, *shape]``; arguments as of `copy_weights`."""
    for home in homes:
        require(home.dtype == torch.float32, "dtype of gradients", home.dtype, "torch.float32")
    if not spare or spare[0].shape[0] == 0:
        return
    num_local, device = homes[0].shape[0], homes[0].device
    mine = mapping[buffer.rank - first_rank].to(device)
    home_rank = torch.where(mine >= 0, mine.div(num_local, rounding_mode="floor") + first_rank, -1)
    indices = _indices_of(home_rank.unsqueeze(1) == torch.arange(buffer.group_size, device=device))
    local = (mapping - (buffer.rank - first_rank) * num_local).tolist()
    source = [
        (rank + first_rank != buffer.rank, expert)
        for rank, slots in enumerate(local)
        for expert in slots
        if 0 <= expert < num_local
    ]
    for ours, sums in zip(spare, homes, strict=True):
        for part in _parts(_flat(ours), len(ours)):
            rows, _ = _as_rows(_flat(ours)[:, part])
            arrived = _send(buffer, rows, indices, None, num_sms)
            target = _flat(sums)[:, part]
            found = _as_tensors(arrived, (len(source), target.shape[1]), target.dtype)
            for i in sorted(range(len(source)), key=lambda i: source[i][0]):
                target[source[i][1]] += found[i]


def gather_counts(buffer: BaseBuffer, counts: Tensor) -> Tensor:
    """``[n]`` int64 of each rank → ``[R, n]`` int64 of all, on every rank. Collective."""
    num_counts = counts.shape[0]
    rows, num_pieces = _as_rows(counts.unsqueeze(0))
    everyone = torch.arange(buffer.group_size, device=rows.device).unsqueeze(0).split(MAX_TOPK, 1)
    arrived = _send(buffer, rows, everyone, buffer.group_size * num_pieces, None)
    return _as_tensors(arrived, (buffer.group_size, num_counts), torch.int64)


def _indices_of(ranks: Tensor) -> list[Tensor]:
    """``[n, R]`` bool: which ranks get each of n → indices for each `MAX_TOPK` ranks, as `_send` takes them."""
    indices = []
    for first in range(0, ranks.shape[1], MAX_TOPK):
        some = torch.zeros_like(ranks)
        some[:, first : first + MAX_TOPK] = ranks[:, first : first + MAX_TOPK]
        indices.append(map_to_indices(some, None)[0])
    return indices


def _send(
    buffer: BaseBuffer, rows: Tensor, indices: Sequence[Tensor], bound: int | None, num_sms: int | None
) -> Tensor:
    """Sends ``[T, W]`` rows, T/n of each of n, to ranks.

    Returns what arrived, by source rank, then row; with `bound`, so many rows, of which the last may be of no use.

    Args:
        buffer: moves the rows.
        rows: bf16.
        indices: for each `MAX_TOPK` ranks of the group: ``[n, at most MAX_TOPK]`` int64, those of them that get the
            T/n rows of each of n, or −1. A row goes to no more ranks in one dispatch.
        bound: None = the host waits for the number of rows.
        num_sms: SMs to use; None = the engine's choice.
    """
    result = None
    for i, some in enumerate(indices):
        columns = some.repeat_interleave(rows.shape[0] // some.shape[0], 0)
        routing = Routing(columns, None, buffer.group_size)  # an expert stands for a rank
        received = buffer.engine.dispatch(DispatchRequest(Rows(rows), routing, bound or None, num_sms))
        if i == buffer.rank // MAX_TOPK:
            result = received.rows.data
    assert result is not None
    return result


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(tensor.shape[0], -1)


def _wide(tensor: Tensor) -> Tensor:
    """``[n, *shape]`` → ``[n, elements]`` of 8 bytes, where memory allows: torch selects few wide elements faster."""
    flat = _flat(tensor)
    is_wide = all(size * flat.dtype.itemsize % 8 == 0 for size in (flat.shape[1], flat.storage_offset()))
    return flat.view(torch.int64) if is_wide else flat


def _parts(tensor: Tensor, num_sent: int) -> Iterator[slice]:
    """Cuts ``[n, elements]`` along its elements, so that the rows of each part of `num_sent` fit one dispatch."""
    num_elements = tensor.shape[1]
    # Of the last part, rows may be four times as many as at least needed: _row_bytes.
    rows_of_each = max(1, _MAX_ROWS // (4 * num_sent))
    step = rows_of_each * 2 * _ROW_ELEMENTS // tensor.dtype.itemsize
    return (slice(first, min(first + step, num_elements)) for first in range(0, num_elements, step))


def _as_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """``[n, *shape]`` of any dtype → bf16 rows of the same bits, and how many there are of each of n."""
    flat = tensor.detach().contiguous().view(tensor.shape[0], -1).view(torch.uint8)
    num_bytes = flat.shape[1]
    width = _row_bytes(num_bytes)
    num_pieces = -(-num_bytes // width)
    if num_pieces * width != num_bytes:
        flat = torch.nn.functional.pad(flat, (0, num_pieces * width - num_bytes))
    return flat.view(tensor.shape[0] * num_pieces, width).view(torch.bfloat16), num_pieces


def _as_tensors(rows: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The reverse of `_as_rows`."""
    num_elements = 1
    for size in shape[1:]:
        num_elements *= size
    num_bytes = num_elements * dtype.itemsize
    width = _row_bytes(num_bytes)
    num_pieces = -(-num_bytes // width)
    flat = rows[: shape[0] * num_pieces].contiguous().view(torch.uint8).view(shape[0], num_pieces * width)
    return flat[:, :num_bytes].contiguous().view(dtype).view(shape)


def _row_bytes(num_bytes: int) -> int:
    """Bytes of a row: the most that divide an expert's bytes, so that nothing need be copied, or else a full row."""
    least, most = 2 * _ROW_MULTIPLE, 2 * _ROW_ELEMENTS
    for num_pieces in range(max(1, -(-num_bytes // most)), -(-4 * num_bytes // most) + 1):
        if num_bytes % (num_pieces * least) == 0:
            return num_bytes // num_pieces
    return min(most, -(-num_bytes // least) * least)


def _tensors(name: str, given: Tensor | Sequence[Tensor]) -> list[Tensor]:
    allowed = "a tensor, or a sequence of tensors"
    require(isinstance(given, Tensor | Sequence), name, type(given).__name__, allowed)
    tensors = [given] if isinstance(given, Tensor) else list(given)
    for tensor in tensors:
        require(isinstance(tensor, Tensor), f"an element of {name}", type(tensor).__name__, "a tensor")
        require(tensor.dim() >= 2 and tensor[:1].numel() > 0, f"shape of {name}", list(tensor.shape), "[n, *shape]")
        require(tensor.is_contiguous(), f"strides of {name}", tensor.stride(), "a contiguous (row-major) tensor")
    return tensors


def _require_alike(spare: Tensor, homes: Tensor, lengths: tuple[int, int]) -> None:
    found, wanted = [*spare.shape, spare.dtype, spare.device], [lengths[0], *homes.shape[1:], homes.dtype, homes.device]
    require(
        found == wanted, "shape, dtype and device of a tensor of spare slots", found, f"{wanted}, as of the experts"
    )
    require(homes.shape[0] == lengths[1], "experts of a tensor", homes.shape[0], f"{lengths[1]}, as of the first")
