"""How ranks exchange their addresses: through the store that made the process group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid_ep.errors import TimeoutError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["exchange", "refuse"]

_POLL_S = 0.005
_VALUE, _REFUSAL = "+", "!"


def exchange(
    store: Store, prefix: str, rank: int, peers: Sequence[int], value: bytes, timeout_s: float, *, where: str
) -> dict[int, bytes]:
    """Gives `value` to the peers and returns theirs, by rank.

    Args:
        store: reached by all of them.
        prefix: names this exchange; used once.
        rank: this rank.
        peers: the ranks that take part, with or without this one.
        value: of this rank; may be empty.
        timeout_s: how long to wait for all of them.
        where: the step, for the error.

    Raises:
        TimeoutError: some rank has not come; it names the first one and lists the others.
        TransportError: a rank has refused, and says why; or the store cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    missing = [peer for peer in peers if peer != rank]
    found = {rank: value}
    try:
        store.set(f"{prefix}/{rank}", _VALUE + value.hex())
        while missing:
            for peer in list(missing):
                key = f"{prefix}/{peer}"
                if store.check([key]):
                    text = store.get(key).decode()
                    if text.startswith(_REFUSAL):
                        raise TransportError(where, rank, peer, text.removeprefix(_REFUSAL))
                    found[peer] = bytes.fromhex(text.removeprefix(_VALUE))
                    missing.remove(peer)
            if missing and time.monotonic() > deadline:
                others = f"; ranks {missing} are missing" if len(missing) > 1 else ""
                raise TimeoutError(where, rank, missing[0], f"it has published no address{others}", timeout_s)
            if missing:
                time.sleep(_POLL_S)
    except RuntimeError as error:
        raise TransportError(where, rank, None, f"the process group's store: {error}") from error
    return found


def refuse(store: Store, prefix: str, rank: int, why: str) -> None:
    """Publishes to the ranks that wait in `exchange` that this one cannot take part."""
    store.set(f"{prefix}/{rank}", _REFUSAL + why)
