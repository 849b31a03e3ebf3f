"""Stand-ins for NICs that register GPU memory: links inside this process, and memory that holds what was sent."""

from __future__ import annotations

from typing import Any

from hybrid_ep import _C
from hybrid_ep.cluster.doctor.active.gpu_direct import CHUNK_BYTES, NUM_SLOTS, End, window_bytes


class Memory:
    """In the place of a GPU's memory. Its receive slots hold what the other end's send slots do, as if a NIC wrote."""

    address = 4096

    def __init__(self, ends: Ends, idx: int) -> None:
        self.content = bytearray(window_bytes())
        self._ends, self._idx = ends, idx

    def write(self, offset: int, content: bytes) -> None:
        self.content[offset : offset + len(content)] = content

    def read(self, offset: int, num_bytes: int) -> bytes:
        slot = offset // CHUNK_BYTES - NUM_SLOTS
        sent = self._ends.memories[1 - self._idx].content[slot * CHUNK_BYTES :][:num_bytes]
        sent[0] ^= slot < self._ends.num_wrong
        return bytes(sent)


class Native:
    """`_cuda` with links inside this process; refuses GPU memory where a test says why."""

    LinkLayout, HostWriter = _C.LinkLayout, _C.HostWriter

    def __init__(self, refuses: str = "", **faults: Any) -> None:
        self.refuses, self.faults, self.asked = refuses, faults, list[dict[str, Any]]()

    def verbs_proxy(self, *, layout: _C.LinkLayout, num_fifos: int, **asked: Any) -> _C.Proxy:
        self.asked.append(asked)
        if self.refuses:
            raise ConnectionError(-1, self.refuses)
        return _C.loopback_proxy(layout=layout, num_fifos=num_fifos, faults=_C.Faults(**self.faults))


class Ends:
    """Opens ends; so many receive slots hold another byte."""

    def __init__(self, native: Native, *, timeout_s: float = 20.0, num_wrong: int = 0) -> None:
        self.native, self.timeout_s, self.num_wrong = native, timeout_s, num_wrong
        self.memories: dict[int, Memory] = {}  # what an end sends depends on its number alone

    def __call__(self, idx: int, gpu_idx: int, nic: str, gid_index: int | None) -> End:
        memory = self.memories[idx] = Memory(self, idx)
        return End(idx, nic, memory, self.native, gid_index=gid_index, device=gpu_idx, timeout_s=self.timeout_s)
