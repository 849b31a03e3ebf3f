"""A link between domains alone: the chunks of a dispatch, with their flags and credits, and no kernels.

A thread of the host gives the commands that kernels would give, so the rings are in host memory. Chunks are compared
once, then timed: to every peer and from every peer at once.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.distributed as dist

from hybrid_ep import _C, env
from hybrid_ep.bench.results import rail_metrics
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.errors import ConfigError
from hybrid_ep.report.units import format_bytes
from hybrid_ep.transport import Ring, open_link

if TYPE_CHECKING:
    from hybrid_ep.bench.launch import Run

ROWS_PER_CHUNK = 16
_ALIGN_BYTES = 128
_NUM_SLOTS, _SLOTS_PER_CREDIT = 16, 4
_CHECKED_CHUNKS = 2 * _NUM_SLOTS
_POSTS = 10_000


@dataclass(frozen=True)
class LinkFigures:
    """The figures of one rank.

    Attributes:
        transport: its name.
        description: what carries the link.
        num_peers: domains that chunks went to and came from.
        seconds: until every chunk had come and every credit was back.
        num_wrong: chunks that were missing or not what was sent.
        post_ns: median time from a command in the FIFO to its posted work request.
        num_ranks_per_domain: of the domains that the link joins.
    """

    transport: str
    description: str
    num_peers: int
    seconds: float
    num_wrong: int
    post_ns: float
    num_ranks_per_domain: int


@dataclass(frozen=True)
class LinkReport:
    """A run of ``hybrid-ep bench --mode link``.

    Attributes:
        chunk_bytes: of 16 records.
        num_chunks: to each peer, and from each.
        ranks: figures by rank.
    """

    chunk_bytes: int
    num_chunks: int
    ranks: list[LinkFigures]

    @property
    def ok(self) -> bool:
        return all(figures.num_wrong == 0 for figures in self.ranks)

    def gbytes_per_s(self, figures: LinkFigures) -> float:
        """Bandwidth of one rank, in each direction."""
        return self.chunk_bytes * self.num_chunks * figures.num_peers / figures.seconds / 1e9

    def to_json(self) -> dict[str, Any]:
        ranks = [asdict(one) | {"gbytes_per_s": self.gbytes_per_s(one)} for one in self.ranks]
        sizes = {"chunk_bytes": self.chunk_bytes, "num_chunks": self.num_chunks}
        return sizes | {"ok": self.ok, "reason": self._reason(), "metrics": self._metrics(), "ranks": ranks}

    def _metrics(self) -> list[dict[str, Any]]:
        """Returns the metrics for the report of a cluster."""
        values = [self.gbytes_per_s(one) for one in self.ranks]
        return rail_metrics("write", values, self.ranks[0].num_ranks_per_domain)

    def _faults(self) -> str:
        faults = {rank: one.num_wrong for rank, one in enumerate(self.ranks) if one.num_wrong}
        return "; ".join(f"rank {rank}: {num} chunks missing or wrong" for rank, num in faults.items())

    def _reason(self) -> str:
        """The faults, else what carried the chunks."""
        return self._faults() or f"by {self.ranks[0].transport}"


def chunk_bytes_of(hidden: int, num_topk: int) -> int:
    """Returns the size of a chunk of BF16 records: row, 12 bytes for each expert, source index; then aligned."""
    record = -(-(2 * hidden + 12 * num_topk + 8) // 16) * 16
    return -(-ROWS_PER_CHUNK * record // _ALIGN_BYTES) * _ALIGN_BYTES


def measure_link(chunk_bytes: int, num_chunks: int, transport: str) -> LinkFigures:
    """Measures this rank's link. Collective over the default group.

    Args:
        chunk_bytes: of a chunk; a multiple of 128.
        num_chunks: to each peer, and from each.
        transport: ``auto`` or a name.

    Raises:
        TransportError: a peer or a NIC was lost.
    """
    group = dist.group.WORLD
    assert group is not None
    timeout_s = env.TIMEOUT_S.get()
    ring = Ring(chunk_bytes, _NUM_SLOTS, _SLOTS_PER_CREDIT)
    grid = _grid(group)
    link = open_link(group, grid, [ring], device=torch.device("cpu"), timeout_s=timeout_s, native=_C, asked=transport)
    try:
        writer = _C.HostWriter(link.proxy, 0)
        num_peers = link.num_peers
        link.begin_call()
        num_wrong, seconds = 0, 0.0
        for epoch, num in enumerate((min(_CHECKED_CHUNKS, num_chunks), num_chunks), start=1):
            dist.barrier(group)
            seconds, _, num_received, wrong = writer.run_chunks(
                link.proxy,
                ring=0,
                num_out=num,
                num_in=num,
                num_bytes=chunk_bytes,
                epoch=epoch,
                verifies=epoch == 1,
                timeout_s=timeout_s,
            )
            link.check("bench: link")
            num_wrong += wrong + num * num_peers - num_received
        dist.barrier(group)
        post_ns = writer.median_post_ns(1 if grid.domain_idx == 0 else 0, _POSTS)
        writer.end_call()
        dist.barrier(group)
        name, per_domain = link.choice.name, grid.num_ranks_per_domain
        return LinkFigures(name, link.description, num_peers, seconds, num_wrong, post_ns, per_domain)
    finally:
        link.close()


def _grid(group: dist.ProcessGroup) -> RankGrid:
    """Domains as `HYBRID_EP_NUM_RANKS_PER_DOMAIN` says, else hosts; on one host each rank is one."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    size = env.NUM_RANKS_PER_DOMAIN.get()
    if size is None:
        hosts: list[Any] = [None] * num_ranks
        dist.all_gather_object(hosts, socket.gethostname(), group)
        size = hosts.count(hosts[0]) if len(set(hosts)) > 1 else 1
    grid = RankGrid(rank, num_ranks, size)
    if grid.num_domains < 2:
        raise ConfigError(f"mode 'link' needs 2 domains, and {num_ranks} ranks by {size} are {grid.num_domains}")
    return grid


def run_link_bench(run: Run, *, hidden: int, num_topk: int, num_chunks: int) -> LinkReport:
    """Measures the link of every rank at once; see `measure_link`."""
    chunk_bytes = chunk_bytes_of(hidden, num_topk)
    return LinkReport(chunk_bytes, num_chunks, run(measure_link, chunk_bytes, num_chunks, env.TRANSPORT.get()))


def print_link_report(report: LinkReport) -> None:
    """Prints a line for each rank."""
    first = report.ranks[0]
    click.echo(f"{first.transport}: {first.description}")
    click.echo(f"chunks of {ROWS_PER_CHUNK} rows, {format_bytes(report.chunk_bytes)}; {report.num_chunks} to each peer")
    for rank, figures in enumerate(report.ranks):
        state = "every chunk right" if figures.num_wrong == 0 else f"{figures.num_wrong} chunks missing or wrong"
        click.echo(
            f"rank {rank}: {report.gbytes_per_s(figures):.3g} GB/s each way to {figures.num_peers} peers, "
            f"command to work request {figures.post_ns:.0f} ns, {state}"
        )
