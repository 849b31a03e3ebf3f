"""NVSHMEM as a transport: its library, the world of all ranks, and windows on its symmetric heap.

A process has one NVSHMEM world of all ranks of the job, which torch's NVSHMEM backend shares. So a link needs a group
of all ranks. Joining and allocating are collective, and have no deadline in NVSHMEM. Before each, all ranks meet at the
process group's store, and that wait has a deadline.

Memory of the heap is freed by all ranks together, without a deadline. So it is not freed: a window whose link is closed
at every rank is used again.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_ep.agree.rendezvous import exchange, refuse
from hybrid_ep.errors import CudaError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MODULE = "hybrid_ep._nvshmem"
_LIBRARY = "libnvshmem_host.so.3"
_WHERE = "transport nvshmem"
_NEW = -1


@dataclass
class Window:
    """Memory of one size at every rank.

    Attributes:
        number: by which all ranks know it.
        address: at this rank.
        num_bytes: of it.
        device: of the memory.
        is_free: whether no link of this rank uses it.
    """

    number: int
    address: int
    num_bytes: int
    device: int
    is_free: bool = False

    def map_at(self, pes: Sequence[int]) -> list[int]:
        """Returns where this process maps the window of each of these PEs; 0: nowhere, so that puts go by a NIC."""
        return list(_native().map_peers(memory=self.address, pes=list(pes)))

    def give_back(self, timeout_s: float) -> bool:
        """Lets another link use the window when this rank's puts are complete. Its kernels must have ended.

        Returns:
            Whether they were complete in time. Otherwise the window is never used again.
        """
        self.is_free = self.drain(timeout_s)
        return self.is_free

    def drain(self, timeout_s: float) -> bool:
        """Returns whether this rank's puts are complete in time. The kernels that made them must have ended.

        Raises:
            CudaError: a call of the CUDA runtime failed.
        """
        try:
            return bool(_native().quiet(device=self.device, timeout_s=timeout_s))
        except ConnectionError as error:
            raise CudaError(error.args[1]) from error


class Heap:
    """This process's part of the symmetric heap.

    Attributes:
        windows: that it has, by number. All ranks have the same numbers and sizes.
        device: index of the GPU whose memory it is; None: the process has not joined the world yet.
    """

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.device: int | None = None

    def take(
        self, store: Store, prefix: str, rank: int, num_ranks: int, num_bytes: int, *, device: int, timeout_s: float
    ) -> Window:
        """Returns memory of zeros for a link. Collective over all ranks of the job.

        Args:
            store: reached by all of them.
            prefix: names this link there; used once.
            rank: this rank, of `num_ranks`.
            num_bytes: of the window; equal at all ranks.
            device: index of the GPU.
            timeout_s: how long to wait for the ranks.

        Raises:
            TimeoutError: a rank has not come in time.
            TransportError: a rank cannot take part, and says why.
            ConnectionError: NVSHMEM does not start here, or has no memory left; as the native module raises it.
        """
        plan = self._agree(store, prefix, rank, num_ranks, num_bytes, device, timeout_s)
        native = _native()
        if self.device is None:
            native.join(rank=rank, num_ranks=num_ranks, unique_id=bytes.fromhex(plan["unique_id"]), device=device)
            self.device = device
        number: int = plan["number"]
        if number == _NEW:
            address = native.allocate(num_bytes=num_bytes, device=device)
            self.windows.append(Window(len(self.windows), address, num_bytes, device))
            return self.windows[-1]
        window = self.windows[number]
        native.clear(memory=window.address, num_bytes=window.num_bytes, device=device)
        window.is_free = False
        return window

    def _agree(
        self, store: Store, prefix: str, rank: int, num_ranks: int, num_bytes: int, device: int, timeout_s: float
    ) -> dict[str, Any]:
        """Returns the same at every rank: the id of the world, and the number of the window. Rank 0 decides."""
        offers, answer = f"{prefix}/windows", f"{prefix}/window"
        try:
            mine = self._offer(rank, device)
        except (ConnectionError, ImportError, OSError) as error:
            why = str(error.args[-1])
            refuse(store, answer if rank == 0 else offers, rank, why)
            raise TransportError(_WHERE, rank, None, why) from error
        text = json.dumps(mine).encode()
        if rank != 0:
            exchange(store, offers, rank, [], text, timeout_s, where=_WHERE)
            # Rank 0 may wait until its own deadline before it says who is missing.
            answers = exchange(store, answer, rank, [0], b"", 2 * timeout_s, where=_WHERE)
            plan: dict[str, Any] = json.loads(answers[0])
            return plan
        try:
            found = exchange(store, offers, rank, range(num_ranks), text, timeout_s, where=_WHERE)
        except TransportError as error:
            refuse(store, answer, rank, f"rank {error.peer}: {error.detail}")
            raise
        number = _choose([json.loads(offer)["free"] for offer in found.values()], num_bytes)
        plan = {"unique_id": mine["unique_id"], "number": number}
        exchange(store, answer, rank, [], json.dumps(plan).encode(), timeout_s, where=_WHERE)
        return plan

    def _offer(self, rank: int, device: int) -> dict[str, Any]:
        """Returns an id for a world, if this is rank 0, and the numbers and sizes of this rank's free windows."""
        native = _native()
        if self.device not in (None, device):
            raise ConnectionError(f"NVSHMEM of this process is on cuda:{self.device}, and the buffer on cuda:{device}")
        unique_id = native.unique_id().hex() if rank == 0 and self.device is None else ""
        free = [[window.number, window.num_bytes] for window in self.windows if window.is_free]
        return {"unique_id": unique_id, "free": free}


_heap = Heap()
take_window = _heap.take


def obstacle() -> tuple[bool, str | None]:
    """Returns whether the module was built, and why NVSHMEM cannot be used in this process; None where it can."""
    if importlib.util.find_spec(_MODULE) is None:
        return False, "built without nvcc, or without the wheel nvidia-nvshmem-cu13 or -cu12"
    if _library_path() is None:
        return True, f"{_LIBRARY} was not found: pip install hybrid-ep[nvshmem]"
    return True, None


def kernels() -> Any:
    """Returns the capsule of the kernels that are compiled for NVSHMEM, for `_cuda`."""
    return _native().link_kernels


def _choose(free: Sequence[Sequence[Sequence[int]]], num_bytes: int) -> int:
    """Returns the smallest window that is free at every rank and large enough; `_NEW` where there is none."""
    common = set.intersection(*({(size, number) for number, size in windows} for windows in free))
    return min((entry for entry in common if entry[0] >= num_bytes), default=(0, _NEW))[1]


def _library_path() -> Path | None:
    """The library in NVIDIA's wheel."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders if (path := Path(folder) / "lib" / _LIBRARY).is_file()), None)


@lru_cache(1)
def _native() -> Any:
    """The extension module. The dynamic linker knows its library by name once it is loaded.

    Raises:
        OSError, ImportError: one of them cannot be loaded.
    """
    ctypes.CDLL(str(_library_path() or _LIBRARY))
    return importlib.import_module(_MODULE)
