"""The transports that join domains of one host in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_ep.transport import nvshmem
from tests.rank_pool import RankPool

__all__ = ["TRANSPORTS", "RunRanks", "check_by_puts", "needs_nvshmem", "ranks_over", "variables_of"]

_OBSTACLE = nvshmem.obstacle()[1]
needs_nvshmem = pytest.mark.skipif(_OBSTACLE is not None, reason=str(_OBSTACLE))
RunRanks = Callable[..., object]
TRANSPORTS = ["loopback", "tcp", pytest.param("nvshmem", marks=needs_nvshmem)]


def check_by_puts(check: Callable[..., object], *args: object) -> None:
    """Runs a check in which no peer's window counts as mapped, so that NVSHMEM gets every put."""

    def map_own(window: nvshmem.Window, pes: Sequence[int]) -> list[int]:
        return [window.address if pe == dist.get_rank() else 0 for pe in pes]

    with mock.patch.object(nvshmem.Window, "map_at", map_own):
        check(*args)


def variables_of(transport: str) -> dict[str, str]:
    """The environment of ranks with the cuda engine, whose domains a transport joins."""
    return {
        "HYBRID_EP_ENGINE": "cuda",
        "HYBRID_EP_LOW_LATENCY_BETWEEN": "cuda",
        "HYBRID_EP_TIMEOUT_S": "30",
        "HYBRID_EP_TRANSPORT": transport,
        "HYBRID_EP_TCP_ADDRESS": "127.0.0.1",
    }


@contextlib.contextmanager
def ranks_over(transport: str) -> Iterator[RunRanks]:
    """Gives `run(num_ranks, function, *args)` on such ranks, which share the GPUs."""
    pool = RankPool(device="cuda", variables=variables_of(transport), one_at_a_time=True, ranks_share_gpus=True)
    with contextlib.closing(pool):
        yield pool.run
