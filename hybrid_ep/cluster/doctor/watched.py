"""A node that is read by a child process, so that nothing it reads can hang or kill the doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.watched import LIMIT_S, Watched

__all__ = ["LIMIT_S", "WatchedNode"]


class WatchedNode(Watched[Node]):
    """Runs functions of a `Node` in a child process.

    Args:
        sysroot: as of `Node`.
        limit_s: for how long one source may be silent.
        open_node: makes the node, in the child.
    """

    def __init__(
        self, sysroot: Path = Path("/"), *, limit_s: float = LIMIT_S, open_node: Callable[[Path], Node] = Node
    ) -> None:
        def open_watched(watch: Callable[[str], None]) -> Node:
            node = open_node(sysroot)
            node.watch = watch
            return node

        super().__init__(open_watched, limit_s=limit_s)
