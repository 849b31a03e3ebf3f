"""`hybrid-ep topology`: print and draw which GPU sits next to which NIC."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import click

from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.watched import WatchedNode
from hybrid_ep.errors import ConfigError, TopologyError
from hybrid_ep.outputs import OutputFile
from hybrid_ep.topology import Topology
from hybrid_ep.topology.nccl import to_nccl_xml
from hybrid_ep.topology.svg import draw
from hybrid_ep.watched import Unreadable

__all__ = ["topology"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the tree and the matrix.")
@click.option("--svg", type=OutputFile(), help="Draw the node into this SVG file.")
@click.option("--nccl", type=OutputFile(), help="Write an NCCL topology file (XML).")
@click.option(
    "--sysroot",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("/"),
    help="Show a recorded or simulated node: read /sys below this folder.",
)
def topology(as_json: bool, svg: Path | None, nccl: Path | None, sysroot: Path) -> None:
    """Print or draw how GPUs, NICs and NVLink are connected.

    It also runs on a node without GPUs, NICs or drivers. What cannot be read is listed with the reason.
    """
    with closing(WatchedNode(sysroot)) as node:
        try:
            found = node.insist(read_topology)
        except Unreadable as error:
            raise TopologyError(f"this node cannot be read: {error}") from error
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        from rich.console import Console

        from hybrid_ep.topology.render import render

        Console().print(render(found))
    for path, text in ((svg, draw(found)), (nccl, to_nccl_xml(found))):
        if path is not None:
            try:
                path.write_text(text)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def read_topology(node: Node) -> Topology:
    """The task of a `WatchedNode`."""
    return node.topology
