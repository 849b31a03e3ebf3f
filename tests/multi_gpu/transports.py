"""The transports that join domains of one host in tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_ep.transport import nvshmem
from tests.conftest import RunRanks
from tests.rank_pool import RankPool, needs_fabric, variables_over

_OBSTACLE = nvshmem.obstacle()[1]
needs_nvshmem = pytest.mark.skipif(_OBSTACLE is not None, reason=str(_OBSTACLE))
TRANSPORTS = [
    "loopback",
    "tcp",
    pytest.param("libfabric/tcp", marks=needs_fabric),
    pytest.param("nvshmem", marks=needs_nvshmem),
]


# NVSHMEM maps no peer, and gives every put to a remote transport: the one of `build_copy_transport`, which has the name
# of this one. The transport shares memory by CUDA IPC, so the heap is one allocation of a fixed size.
REMOTE_NVSHMEM = {
    "NVSHMEM_DISABLE_P2P": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "ucx",
    "NVSHMEM_DISABLE_CUDA_VMM": "1",
    "NVSHMEM_SYMMETRIC_SIZE": "2G",
}
_LIBRARY = "nvshmem_transport_ucx.so.3"


def build_copy_transport(folder: Path) -> Path:
    """Builds the remote transport for tests (copy_transport/) and returns its library."""
    library = nvshmem._library_path()
    if library is None or not library.with_name(_LIBRARY).is_file():
        pytest.skip(f"beside {library} is no {_LIBRARY}, whose binary interface copy_transport has")
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    sources = Path(__file__).with_name("copy_transport")
    compile_it = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{cuda}/include"]
    as_library = ["-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}"]
    for name, source, options in (("copy_process", "copy_process", []), (_LIBRARY, "copy_transport", as_library)):
        files = [f"{sources / source}.cpp", "-o", str(folder / name)]
        subprocess.run([*compile_it, *options, *files, "-l:libcuda.so.1", "-ldl"], check=True)
    return folder / _LIBRARY


def check_by_copies(library: Path, check: Callable[..., object], *args: object) -> object:
    """Runs a check that makes a buffer, and holds that its data went through NVSHMEM's remote transport for tests."""
    transport = ctypes.CDLL(str(library))  # NVSHMEM finds it by its name
    transport.num_copies.restype = ctypes.c_uint64
    before = transport.num_copies()
    map_at = nvshmem.Window.map_at
    mapped: list[int] = []

    def map_and_note(window: nvshmem.Window, pes: Sequence[int]) -> list[int]:
        addresses = map_at(window, pes)
        mapped.extend(address for pe, address in zip(pes, addresses, strict=True) if pe != dist.get_rank())
        return addresses

    with mock.patch.object(nvshmem.Window, "map_at", map_and_note):
        result = check(*args)
    assert mapped, "the check made no buffer"
    assert not any(mapped), f"NVSHMEM maps the peers' windows at {mapped}"
    assert transport.num_copies() > before, "NVSHMEM gave its transport nothing to copy"
    return result


def variables_of(transport: str) -> dict[str, str]:
    """The environment of ranks with the cuda engine, whose domains a transport joins."""
    return {
        "HYBRID_EP_ENGINE": "cuda",
        "HYBRID_EP_LOW_LATENCY_BETWEEN": "cuda",
        "HYBRID_EP_TIMEOUT_S": "30",
        **variables_over(transport),
    }


@contextlib.contextmanager
def ranks_over(transport: str, more: dict[str, str] | None = None) -> Iterator[RunRanks]:
    """Gives `run(num_ranks, function, *args)` on such ranks, which share the GPUs.

    Args:
        more: variables of the ranks besides those.
    """
    variables = variables_of(transport) | (more or {})
    pool = RankPool(device="cuda", variables=variables, one_at_a_time=True, ranks_share_gpus=True)
    with contextlib.closing(pool):
        yield pool.run
