"""One hop of a route: rows from every rank of an axis (the peers between domains, or a domain) to every rank of it.

One object serves both directions: `forward` sends rows, `backward` sends partial rows back and sums them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_ep.engine.torch.exchange import Exchange
from hybrid_ep.engine.torch.records import RecordFormat


@dataclass(frozen=True)
class Hop:
    """The rows held here that go to each rank of an axis, and the number that comes from each.

    Attributes:
        name: for errors, e.g. ``"within domain"``.
        ranks: the axis, ascending; this rank among them.
        num_rows: rows held here before the hop.
        send_idx: for each rank of the axis, ``[n]`` int64 indices of the held rows that go there, ascending.
        recv_counts: for each rank of the axis, how many rows come from it; they arrive in this order.
    """

    name: str
    ranks: tuple[int, ...]
    num_rows: int
    send_idx: tuple[Tensor, ...]
    recv_counts: tuple[int, ...]

    @classmethod
    def plan(cls, exchange: Exchange, name: str, ranks: list[int], goes: Tensor) -> Hop:
        """Exchanges counts.

        Args:
            exchange: moves the counts.
            name: for errors.
            ranks: the axis, ascending.
            goes: ``[n, len(ranks)]`` bool; which held row goes to which rank of the axis.
        """
        send_idx = tuple(torch.nonzero(column).flatten() for column in goes.unbind(1))
        sent = torch.tensor([[idx.numel()] for idx in send_idx], dtype=torch.int64, device=goes.device)
        received = torch.zeros_like(sent)
        exchange.swap(
            f"counts {name}",
            {r: sent[i].view(torch.uint8) for i, r in enumerate(ranks)},
            {r: received[i].view(torch.uint8) for i, r in enumerate(ranks)},
        )
        return cls(name, tuple(ranks), goes.shape[0], send_idx, tuple(received.flatten().tolist()))

    def forward(self, exchange: Exchange, records: Tensor, wait_stats: Tensor | None = None) -> Tensor:
        """Carries ``[num_rows, bytes]`` uint8 records along the hop; returns ``[sum(recv_counts), bytes]``."""
        arrived = records.new_empty(sum(self.recv_counts), records.shape[1])
        outgoing = [records[idx] for idx in self.send_idx]
        self._swap(exchange, f"rows {self.name}", outgoing, list(arrived.split(self.recv_counts)), wait_stats)
        return arrived

    def backward(self, exchange: Exchange, rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Carries partial rows home and sums those of one row in fp32, in ascending order of the axis.

        Args:
            exchange: moves the rows.
            rows: ``[sum(recv_counts), H]``, in order of arrival; they cross in their own dtype.
            weights: ``[sum(recv_counts), W]`` float32, or None.

        Returns:
            ``[num_rows, H]`` float32 and ``[num_rows, W]`` float32, not rounded; 0 for rows that went nowhere.
        """
        columns = [rows] if weights is None else [rows, weights]
        fmt = RecordFormat.of(columns)
        records = fmt.pack(columns)
        home = [records.new_empty(idx.numel(), records.shape[1]) for idx in self.send_idx]
        self._swap(exchange, f"partial rows {self.name}", list(records.split(self.recv_counts)), home)
        sums = [column.new_zeros(self.num_rows, column.shape[1], dtype=torch.float32) for column in columns]
        for idx, part in zip(self.send_idx, home, strict=True):
            for total, column in zip(sums, fmt.unpack(part), strict=True):
                total.index_add_(0, idx, column.float())
        return sums[0], sums[1] if weights is not None else None

    def _swap(
        self,
        exchange: Exchange,
        step: str,
        outgoing: list[Tensor],
        incoming: list[Tensor],
        wait_stats: Tensor | None = None,
    ) -> None:
        exchange.swap(
            step,
            {r: t.reshape(-1) for r, t in zip(self.ranks, outgoing, strict=True)},
            {r: t.view(-1) for r, t in zip(self.ranks, incoming, strict=True)},
            wait_stats,
        )
