"""Experts' weights to the ranks of their replicas, and the gradients of replicas back.

Weights go by a kernel of the engine if it has one. Otherwise both are sent as rows of a dispatch, bit for bit. So every
engine can send them, with the errors and timeouts of a dispatch. The bytes of one expert in all tensors make a record,
which is cut into rows of bf16. Only the sums are made here.

    weights   experts[LE, …] ─ records ─► dispatch to the ranks of the replicas ─► spare[B, …]
    gradients spare[B, …] ─ records ─► dispatch to the home ranks ─► added in fp32: this rank's first, then by rank
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_ep.checks import MAX_TOPK, require
from hybrid_ep.core import kernels
from hybrid_ep.core.checks import packed
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.calls import DispatchRequest, ExpertCopies, ReplicaMapping, Routing, Rows

_MAX_ROW_BYTES = 8192
_ALIGN_BYTES = 16  # of rows, and of the tensors in a record
_MAX_ROWS = 32768  # of one dispatch: 256 MiB. The cuda engine takes twice as many (csrc/layout/limits.h: kMaxTokens).


class Mover(Protocol):
    """What moves rows: a buffer. It raises ClosedError where its engine is gone."""

    rank: int
    group_size: int

    @property
    def engine(self) -> Engine: ...


class ReplicaRoutes(NamedTuple):
    """The ranks between which experts travel, as tensors for a dispatch.

    A mapping of experts to spare slots gives the routes of all tensors: of weights to the replicas, of gradients back.

    Attributes:
        first_rank: rank of the mapping's first row.
        mapping: which the routes are of.
        sent: ``[n]`` int64: experts of this rank that have a replica, ascending; then −1.
        columns: ``[n, R]`` int64: the ranks that get each of them, rank r in column r, or −1.
        arrived: ``[B]`` int64: index, among the experts that arrive, of the one in each spare slot; −1 if it is empty.
        homes: ``[B]`` int64: the home rank of the expert in each spare slot, or −1.
    """

    first_rank: int
    mapping: ReplicaMapping
    sent: Tensor
    columns: Tensor
    arrived: Tensor
    homes: Tensor


def route_replicas(buffer: Mover, mapping: Tensor, num_local: int, first_rank: int = 0) -> ReplicaRoutes:
    """Returns the routes of a mapping. Local, and without a host sync; on a GPU one kernel.

    Args:
        buffer: its ranks have the experts.
        mapping: ``[ranks, B]`` int64, the same on these ranks: experts, counted from those of `first_rank`, or −1.
        num_local: LE, experts of a rank.
        first_rank: with which the mapping begins.
    """
    mapping = packed(mapping)
    num_mapped_ranks, num_slots = mapping.shape
    num_sent = min(mapping.numel(), num_local)  # no more experts have a replica
    most = max(num_local, num_slots)
    if kernels.run_on(mapping) and most <= kernels.native.replica_routes_max_experts:
        sizes = (num_sent, num_sent * buffer.group_size, num_slots, num_slots, 1)
        sent, columns, arrived, homes, checksum = mapping.new_empty(sum(sizes)).split(sizes)
        kernels.native.replica_routes(
            mapping=mapping.data_ptr(),
            sent=sent.data_ptr(),
            columns=columns.data_ptr(),
            arrived=arrived.data_ptr(),
            homes=homes.data_ptr(),
            checksum=checksum.data_ptr(),
            num_mapped_ranks=num_mapped_ranks,
            num_slots=num_slots,
            num_local=num_local,
            num_sent=num_sent,
            num_ranks=buffer.group_size,
            rank=buffer.rank,
            first_rank=first_rank,
            **kernels.place_of(mapping),
        )
        columns = columns.view(num_sent, buffer.group_size)
        return ReplicaRoutes(first_rank, ReplicaMapping(mapping, checksum), sent, columns, arrived, homes)
    device = mapping.device
    local = mapping - (buffer.rank - first_rank) * num_local
    wanted = (local.unsqueeze(0) == torch.arange(num_local, device=device).view(-1, 1, 1)).any(2)
    has_replica = wanted.any(1)
    order = has_replica.logical_not().to(torch.uint8).argsort(stable=True)[:num_sent]
    columns = mapping.new_full((num_sent, buffer.group_size), -1)
    ranks = torch.arange(first_rank, first_rank + num_mapped_ranks, device=device)
    columns[:, first_rank : first_rank + num_mapped_ranks] = torch.where(wanted[order], ranks, -1)
    # Experts arrive by rank and number: slots of one expert share them.
    mine = mapping[buffer.rank - first_rank]
    is_first = (mine.unsqueeze(1) == mine).tril(-1).logical_not().all(1)
    nth = ((mine < mine.unsqueeze(1)) & is_first & (mine >= 0)).sum(1)
    return ReplicaRoutes(
        first_rank,
        ReplicaMapping(mapping, _checksum_of(mapping)),
        sent=torch.where(has_replica[order], order, -1),
        columns=columns,
        arrived=torch.where(mine >= 0, nth, -1),
        homes=torch.where(mine >= 0, mine.div(num_local, rounding_mode="floor") + first_rank, -1),
    )


def _checksum_of(mapping: Tensor) -> Tensor:
    """``[1]`` int64: the checksum of csrc/device/replica_mapping.cuh."""
    mixed = mapping.flatten() * 0x9E3779B1 + torch.arange(mapping.numel(), device=mapping.device) * 0x85EBCA77
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        mixed = mixed & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> shift) * factor
    return (mixed & 0xFFFFFFFF).sum(0, keepdim=True).bitwise_and(0xFFFFFFFF) >> 1


def copy_weights(
    buffer: Mover,
    mapping: Tensor,
    spare: Sequence[Tensor],
    experts: Sequence[Tensor],
    first_rank: int = 0,
    num_sms: int | None = None,
) -> None:
    """Fills each ``spare[B, *shape]`` from the ``experts[LE, *shape]`` of other ranks. Collective over the group.

    Args:
        buffer: moves the weights.
        mapping: as in `route_replicas`, on the device of the tensors.
        spare: contiguous, written where the mapping names an expert.
        experts: contiguous; as many, of the same shapes and dtypes.
        first_rank: with which the mapping begins.
        num_sms: SMs to use; None = the engine's choice.
    """
    if not spare or mapping.shape[1] == 0:
        return
    mapping = packed(mapping)
    if buffer.engine.copy_experts(ExpertCopies(spare, experts, mapping, num_sms)):
        return
    routes = route_replicas(buffer, mapping, experts[0].shape[0], first_rank)
    num_sent, num_slots = len(routes.sent), len(routes.arrived)
    for part in _parts_of(experts, num_sent):
        records = part.empty(num_sent, experts[0].device)
        for cut in part.cuts:
            _take(records, cut.in_record, experts[cut.tensor], cut.in_tensor, routes.sent, cut.num_bytes)
        columns = _of_rows(routes.columns, part.num_rows)
        rows = _send(buffer, part.as_rows(records), columns, num_slots * part.num_rows, num_sms, routes.mapping)
        arrived = part.as_records(rows, num_slots)
        for cut in part.cuts:
            _take(spare[cut.tensor], cut.in_tensor, arrived, cut.in_record, routes.arrived, cut.num_bytes)


def add_gradients(
    buffer: Mover,
    routes: ReplicaRoutes,
    mapping: list[list[int]],
    spare: Sequence[Tensor],
    homes: Sequence[Tensor],
    num_sms: int | None = None,
) -> None:
    """Adds ``spare[B, *shape]`` of all ranks to float32 ``homes[LE, *shape]``. Collective over the group.

    If the mapping has all ranks of the group, the host waits for nothing, and without a replica no row is sent.

    Args:
        buffer: moves the rows.
        routes: of the mapping, on the device of the tensors.
        mapping: that the routes are of.
        spare: contiguous, of any dtype.
        homes: contiguous; as many, of the same shapes.
        num_sms: SMs to use; None = the engine's choice.
    """
    for home in homes:
        require(home.dtype == torch.float32, "dtype of gradients", home.dtype, "torch.float32")
    num_slots = len(routes.homes)
    if not spare or num_slots == 0:
        return
    num_local, first_rank = homes[0].shape[0], routes.first_rank
    replicas = [[rank, expert] for rank, slots in enumerate(mapping) for expert in slots if expert >= 0]
    most = None
    if len(mapping) == buffer.group_size:
        most = max(Counter(expert // num_local for _, expert in replicas).values(), default=0)
    num_sent = 0 if most == 0 else num_slots  # without replicas, ranks only compare their mappings
    own = buffer.rank - first_rank
    sources = [(rank != own, expert - own * num_local) for rank, expert in replicas if expert // num_local == own]
    in_order = sorted(range(len(sources)), key=lambda i: sources[i][0])  # this rank's first
    for part in _parts_of(homes, num_slots):
        records = part.empty(num_sent, homes[0].device)
        for cut in part.cuts:
            target = records[:, cut.in_record : cut.in_record + cut.num_bytes].view(torch.float32)
            target.copy_(_elements(spare[cut.tensor], cut)[:num_sent])
        columns = _of_rows(routes.homes[:num_sent].unsqueeze(1), part.num_rows)
        bound = None if most is None else most * part.num_rows
        rows = _send(buffer, part.as_rows(records), columns, bound, num_sms, routes.mapping)
        arrived = part.as_records(rows, len(sources))
        for cut in part.cuts:
            sums = _elements(homes[cut.tensor], cut)
            found = arrived[:, cut.in_record : cut.in_record + cut.num_bytes].view(torch.float32)
            for i in in_order:
                sums[sources[i][1]] += found[i]


class CountExchange:
    """The copies of tokens for each expert, of all ranks.

    Args:
        buffer: moves the counts.
        num_experts: E.
    """

    def __init__(self, buffer: Mover, num_experts: int) -> None:
        self._buffer, self._num_experts = buffer, num_experts
        (self._part,) = _parts((8 * num_experts,), 1, _Limits(_MAX_ROWS, _MAX_ROW_BYTES))
        self._columns: dict[torch.device, list[Tensor]] = {}
        if buffer.engine.device is not None:
            self._columns_on(buffer.engine.device)  # now, and not in a CUDA graph

    def gather(self, topk_idx: Tensor) -> Tensor:
        """``[T, K]`` experts of this rank, none of them −1 → ``[R, E]`` int64: how often each rank names each expert.

        Collective. The host does not wait on the cuda engine.
        """
        part, num_ranks = self._part, self._buffer.group_size
        chosen = topk_idx.flatten()
        counts = chosen.new_zeros(part.num_rows * part.row_bytes // 8)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        bound = num_ranks * part.num_rows
        rows = _send(self._buffer, part.as_rows(counts), self._columns_on(topk_idx.device), bound, None)
        return rows.view(torch.int64).view(num_ranks, -1)[:, : self._num_experts]

    def _columns_on(self, device: torch.device) -> list[Tensor]:
        known = self._columns.get(device)
        if known is None:
            everyone = torch.arange(self._buffer.group_size, device=device).unsqueeze(0)
            known = self._columns[device] = _of_rows(everyone, self._part.num_rows)
        return known


def _of_rows(columns: Tensor, num_rows: int) -> list[Tensor]:
    """``[n, R]`` ranks or −1 of each record → those of each of its rows; one dispatch takes `MAX_TOPK` columns."""
    return list(columns.repeat_interleave(num_rows, 0).split(MAX_TOPK, 1))


def _send(
    buffer: Mover,
    rows: Tensor,
    columns: Sequence[Tensor],
    bound: int | None,
    num_sms: int | None,
    replicas: ReplicaMapping | None = None,
) -> Tensor:
    """Sends ``[T, W]`` bf16 rows to ranks.

    Returns what arrived, by source rank, then row; with `bound`, so many rows, of which the last may be of no use.

    Args:
        buffer: moves the rows.
        rows: contiguous.
        columns: for each `MAX_TOPK` ranks of the group: ``[T, at most MAX_TOPK]`` int64, those of them that get each
            row, or −1. With one tensor it may name any ranks.
        bound: None = the host waits for the number of rows.
        num_sms: SMs to use; None = the engine's choice.
        replicas: the mapping, where rows are of experts.
    """
    result = None
    for i, some in enumerate(columns):
        routing = Routing(packed(some), None, buffer.group_size)  # an expert stands for a rank
        received = buffer.engine.dispatch(DispatchRequest(Rows(rows), routing, bound, num_sms, replicas=replicas))
        if len(columns) == 1 or i == buffer.rank // MAX_TOPK:
            result = received.rows.data
    assert result is not None
    return result


class _Cut(NamedTuple):
    """A range of bytes that is in each item of a tensor, and in a part of each record.

    Attributes:
        tensor: index of the tensor.
        in_tensor: offset of the range in an item.
        in_record: offset of the range in the part of a record.
        num_bytes: length of the range.
    """

    tensor: int
    in_tensor: int
    in_record: int
    num_bytes: int


class _Part(NamedTuple):
    """The part of the records that goes into one dispatch.

    Attributes:
        num_rows: rows of each record.
        row_bytes: bytes of a row.
        cuts: ranges of the tensors that the part holds.
    """

    num_rows: int
    row_bytes: int
    cuts: tuple[_Cut, ...]

    def empty(self, num_records: int, device: torch.device) -> Tensor:
        """``[n, bytes]`` uint8, not written yet."""
        return torch.empty(num_records, self.num_rows * self.row_bytes, dtype=torch.uint8, device=device)

    def as_rows(self, records: Tensor) -> Tensor:
        """Returns a view of the records as ``[n × num_rows, W]`` bf16."""
        return records.view(torch.bfloat16).view(-1, self.row_bytes // 2)

    def as_records(self, rows: Tensor, num_records: int) -> Tensor:
        """Returns a view of the first rows as ``[n, bytes]`` uint8."""
        used = rows[: num_records * self.num_rows]
        return used.view(torch.uint8).view(num_records, self.num_rows * self.row_bytes)


class _Limits(NamedTuple):
    """The most rows of a dispatch, and bytes of a row."""

    num_rows: int
    row_bytes: int


def _parts_of(tensors: Sequence[Tensor], num_records: int) -> tuple[_Part, ...]:
    return _parts(tuple(_item_bytes(one) for one in tensors), num_records, _Limits(_MAX_ROWS, _MAX_ROW_BYTES))


@functools.lru_cache(maxsize=256)
def _parts(sizes: tuple[int, ...], num_records: int, limits: _Limits) -> tuple[_Part, ...]:
    """Cuts records of tensors of so many bytes, so that the rows of all records fit each dispatch."""
    begins, num_bytes = [], 0
    for size in sizes:
        begins.append(num_bytes)
        num_bytes += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    row_bytes = _row_bytes(num_bytes, limits.row_bytes)
    num_rows = -(-num_bytes // row_bytes)
    step = max(1, limits.num_rows // num_records)
    return tuple(
        _Part(
            min(step, num_rows - row),
            row_bytes,
            tuple(_cuts(begins, sizes, row * row_bytes, min(row + step, num_rows) * row_bytes)),
        )
        for row in range(0, num_rows, step)
    )


def _cuts(begins: Sequence[int], sizes: Sequence[int], first: int, end: int) -> Iterator[_Cut]:
    """The ranges of the tensors that the bytes from `first` to `end` of a record hold."""
    for i, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        at, upto = max(first, begin), min(end, begin + size)
        if at < upto:
            yield _Cut(i, at - begin, at - first, upto - at)


def _row_bytes(num_bytes: int, most: int) -> int:
    """Bytes of a row: the most that divide a record, so that nothing is padded, or else a full row."""
    for num_rows in range(max(1, -(-num_bytes // most)), -(-4 * num_bytes // most) + 1):
        if num_bytes % (num_rows * _ALIGN_BYTES) == 0:
            return num_bytes // num_rows
    return min(most, num_bytes)


def _item_bytes(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[0] * tensor.dtype.itemsize


def _bytes(tensor: Tensor, at: int, num_bytes: int) -> Tensor:
    """``[n, *shape]`` → ``[n, num_bytes]`` uint8, from byte `at` of each item on."""
    return tensor.detach().view(tensor.shape[0], -1).view(torch.uint8)[:, at : at + num_bytes]


def _elements(tensor: Tensor, cut: _Cut) -> Tensor:
    """``[n, *shape]`` → ``[n, elements]``: the float32 elements of each tensor that lie in the cut."""
    first, end = cut.in_tensor // 4, (cut.in_tensor + cut.num_bytes) // 4
    return tensor.detach().view(tensor.shape[0], -1)[:, first:end]


def _take(target: Tensor, at_target: int, source: Tensor, at_source: int, index: Tensor, num_bytes: int) -> None:
    """Copies so many bytes from byte `at_source` of item ``index[i]`` to byte `at_target` of item i; none at −1."""
    begins = target.data_ptr() + at_target, source.data_ptr() + at_source
    strides = _item_bytes(target), _item_bytes(source)
    if kernels.run_on(target) and not any(one % _ALIGN_BYTES for one in (*begins, *strides, num_bytes)):
        kernels.native.take_experts(
            target=begins[0],
            source=begins[1],
            index=index.data_ptr(),
            target_stride=strides[0],
            source_stride=strides[1],
            num_bytes=num_bytes,
            num_items=len(index),
            **kernels.place_of(target),
        )
        return
    ours, theirs = _bytes(target, at_target, num_bytes), _bytes(source, at_source, num_bytes)
    # torch selects few wide elements faster.
    if not any(one % 8 for one in (ours.storage_offset(), theirs.storage_offset(), *strides, num_bytes)):
        ours, theirs = ours.view(torch.int64), theirs.view(torch.int64)
    found = theirs.index_select(0, index.clamp_min(0))
    torch.where((index >= 0).unsqueeze(1), found, ours, out=ours)
