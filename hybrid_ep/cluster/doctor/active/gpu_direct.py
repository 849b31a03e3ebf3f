"""GPUDirect RDMA by the verbs transport: chunks from one GPU's memory into another's, where perftest has no CUDA.

A thread of the host gives the commands that kernels would give, so flags and credits are in host memory. The chunks are
in GPU memory that the NIC has registered, by dma-buf or nvidia-peermem. Host memory is never used instead: if a NIC
takes no GPU memory, the measurement ends with the reason.

Life of an `End`: address() to the other end → connect() → measure(), once.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from hybrid_ep.errors import TopologyError, TransportError
from hybrid_ep.topology import near_cpus, probe
from hybrid_ep.watched import Unreadable

CHUNK_BYTES = 1 << 20
NUM_SLOTS, SLOTS_PER_CREDIT = 16, 4
_WARM_UP_CHUNKS = 2 * NUM_SLOTS
_ENDLESS = 1 << 30  # chunks: the time ends the run
_WHERE = "GPUDirect RDMA"


@dataclass(frozen=True)
class Written:
    """What one path has carried.

    Attributes:
        gbytes_per_s: 10⁹ bytes per second; of both directions together where both ends write.
        num_wrong: chunks whose content at the receiver differs from what was sent.
        by: what measured.
    """

    gbytes_per_s: float
    num_wrong: int = 0
    by: str = ""


def window_bytes(chunk_bytes: int = CHUNK_BYTES) -> int:
    """Size of an end's memory: send slots, then receive slots."""
    return 2 * NUM_SLOTS * chunk_bytes


class GpuMemory(Protocol):
    """`window_bytes` of a GPU's memory."""

    @property
    def address(self) -> int:
        """Where it begins, as a device pointer."""

    def write(self, offset: int, content: bytes) -> None:
        """Copies bytes from the host, and waits until they are there."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Copies bytes to the host."""


class TorchMemory:
    """Memory of a CUDA device, zeroed."""

    def __init__(self, device_idx: int) -> None:
        import torch

        self._torch = torch
        self._tensor = torch.zeros(window_bytes(), dtype=torch.uint8, device=torch.device("cuda", device_idx))
        torch.cuda.synchronize(self._tensor.device)

    @property
    def address(self) -> int:
        return int(self._tensor.data_ptr())

    def write(self, offset: int, content: bytes) -> None:
        source = self._torch.frombuffer(bytearray(content), dtype=self._torch.uint8)
        self._tensor[offset : offset + len(content)].copy_(source)
        self._torch.cuda.synchronize(self._tensor.device)

    def read(self, offset: int, num_bytes: int) -> bytes:
        content = self._tensor[offset : offset + num_bytes].cpu()
        return ctypes.string_at(content.data_ptr(), num_bytes)


class End:
    """One end of a path: a NIC and the GPU memory that it reads and writes.

    Args:
        idx: 0 or 1; the other end has the other one.
        nic: as libibverbs names it.
        memory: what the NIC registers.
        native: the module that can export this memory: ``_cuda``.
        gid_index: for RoCE; None leaves the choice to the transport.
        device: CUDA's number of the GPU.
        cpus: where the thread that feeds the NIC may run; empty: anywhere.
        chunk_bytes: of a write; the same at both ends.
        timeout_s: for the other end to connect and the first chunks to arrive; half of it until a NIC is lost.

    Raises:
        TopologyError: the NIC cannot be opened, or takes no GPU memory.
    """

    def __init__(
        self,
        idx: int,
        nic: str,
        memory: GpuMemory,
        native: Any,
        *,
        gid_index: int | None = None,
        device: int = 0,
        cpus: Sequence[int] = (),
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 20.0,
    ) -> None:
        self._idx, self._memory, self._native = idx, memory, native
        self._chunk_bytes, self._timeout_s = chunk_bytes, timeout_s
        for slot in range(NUM_SLOTS):
            memory.write(slot * chunk_bytes, self._content(idx, slot))
        layout = native.LinkLayout(num_domains=2, domain_idx=idx, rings=[(chunk_bytes, NUM_SLOTS, SLOTS_PER_CREDIT)])
        assert layout.window_bytes == window_bytes(chunk_bytes)
        try:
            self._proxy = native.verbs_proxy(
                layout=layout,
                devices=[nic],
                gid_index=-1 if gid_index is None else gid_index,
                num_queue_pairs=4,
                timeout_s=timeout_s,
                memory=memory.address,
                window_only=True,
                num_fifos=1,
                device=device,
                cpus=list(cpus),
            )
        except ConnectionError as error:
            raise TopologyError(str(error.args[-1])) from None

    def address(self) -> bytes:
        """What the other end needs to connect."""
        address: bytes = self._proxy.address()
        return address

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Connects to the other end.

        Args:
            addresses: of end 0 and end 1.

        Raises:
            TransportError: the other end cannot be reached.
        """
        try:
            self._proxy.connect(list(addresses), self._timeout_s)
        except ConnectionError as error:
            raise TransportError(_WHERE, self._idx, 1 - self._idx, str(error.args[-1])) from None

    def measure(self, seconds: float, *, sends: bool, receives: bool, meet: Callable[[], object]) -> Written:
        """Carries chunks for so long, and ends the connection. Both ends call it at about the same time.

        A few chunks that must all arrive come first: so both ends begin together.

        Args:
            seconds: how long.
            sends, receives: what this end does; the other end does the opposite, or both do both.
            meet: returns when the other end has called its own. Called when every chunk of this end has arrived, so
                that neither end closes while the other one still writes.

        Raises:
            TransportError: a chunk did not arrive in time, or the NIC has failed.
        """
        proxy = self._proxy
        try:
            writer = self._native.HostWriter(proxy, 0)
            proxy.begin_call()
            _, sent, received = self._run(writer, _WARM_UP_CHUNKS, sends, receives, epoch=1, limit_s=self._timeout_s)
            if (sent, received) != (_WARM_UP_CHUNKS * sends, _WARM_UP_CHUNKS * receives):
                raise TransportError(
                    _WHERE, self._idx, 1 - self._idx, f"{sent} chunks sent, {received} come in {self._timeout_s:g} s"
                )
            took_s, sent, received = self._run(writer, _ENDLESS, sends, receives, epoch=2, limit_s=seconds)
            writer.end_call()
            is_drained = proxy.drain(self._timeout_s)
            self._check()
            if not is_drained:
                raise TransportError(
                    _WHERE, self._idx, 1 - self._idx, f"chunks on their way have not arrived in {self._timeout_s:g} s"
                )
            meet()
        finally:
            proxy.close(self._timeout_s)
        self._check()
        rate = (sent + received) * self._chunk_bytes / took_s / 1e9
        return Written(rate, self._count_wrong() if receives else 0)

    def _run(
        self, writer: Any, num: int, sends: bool, receives: bool, *, epoch: int, limit_s: float
    ) -> tuple[float, int, int]:
        seconds, sent, received, _ = writer.run_chunks(
            self._proxy,
            ring=0,
            num_out=num if sends else 0,
            num_in=num if receives else 0,
            num_bytes=self._chunk_bytes,
            epoch=epoch,
            verifies=False,  # the host cannot look into GPU memory
            timeout_s=limit_s,
        )
        self._check()
        return seconds, sent, received

    def _check(self) -> None:
        if (failure := self._proxy.failure) is not None:
            _, nic, detail = failure
            raise TransportError(_WHERE, self._idx, 1 - self._idx, f"{nic}: {detail}")

    def _count_wrong(self) -> int:
        """Counts receive slots with wrong bytes. All chunks of a slot are the same, so any of them may be the last."""
        slots, size = range(NUM_SLOTS), self._chunk_bytes
        read = (self._memory.read((NUM_SLOTS + slot) * size, size) for slot in slots)
        return sum(seen != self._content(1 - self._idx, slot) for slot, seen in zip(slots, read, strict=True))

    def _content(self, idx: int, slot: int) -> bytes:
        """What an end sends from a slot."""
        return random.Random(NUM_SLOTS * idx + slot).randbytes(self._chunk_bytes)


def open_gpu_end(idx: int, gpu_idx: int, nic: str, gid_index: int | None) -> End:
    """Opens an end with memory of a GPU of this node.

    Raises:
        Unreadable: this installation has no kernels, so nothing that could export GPU memory.
        TopologyError: the NIC cannot be opened, or takes no GPU memory.
    """
    try:
        from hybrid_ep import _cuda
    except ImportError as error:
        raise Unreadable(f"hybrid_ep has no module for CUDA here ({error})") from None
    cpus = near_cpus(probe(), gpu_idx)
    return End(idx, nic, TorchMemory(gpu_idx), _cuda, gid_index=gid_index, device=gpu_idx, cpus=cpus)


def write_by_verbs(
    pairs: Sequence[tuple[int, str, int, str]],
    gid_index: int | None,
    *,
    bidirectional: bool,
    seconds: float,
    open_end: Callable[[int, int, str, int | None], End] | None = None,
) -> list[Written]:
    """GPU memory to GPU memory through NICs of this node, all pairs at once.

    Args:
        pairs: (GPU that is written to, its NIC, GPU that writes, its NIC).
        gid_index: for RoCE; None on InfiniBand.
        bidirectional: both ends write.
        seconds: how long.
        open_end: makes an end from its number, GPU, NIC and GID index; None = `open_gpu_end`.

    Raises:
        Unreadable: GPU memory cannot be registered, or a NIC has failed; with the NIC's words.
    """
    open_end = open_end or open_gpu_end
    meeting = threading.Barrier(2 * len(pairs))

    def measure(ends: Sequence[End], idx: int) -> Written:
        try:
            sends, receives = bidirectional or idx == 1, bidirectional or idx == 0
            return ends[idx].measure(seconds, sends=sends, receives=receives, meet=meeting.wait)
        except BaseException:
            meeting.abort()  # the others need not wait
            raise

    try:
        opened = [
            (open_end(0, gpu, nic, gid_index), open_end(1, writer_gpu, writer_nic, gid_index))
            for gpu, nic, writer_gpu, writer_nic in pairs
        ]
        for ends in opened:
            addresses = [end.address() for end in ends]
            for end in ends:
                end.connect(addresses)
        with ThreadPoolExecutor(2 * len(pairs)) as pool:
            running = [[pool.submit(measure, ends, idx) for idx in range(2)] for ends in opened]
        broken = [run.exception() for both in running for run in both]
        for error in broken:  # the first cause, and not its consequences at the other end
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        by = "by the verbs transport"
        results = [(listener.result(), writer.result()) for listener, writer in running]
        return [Written(seen.gbytes_per_s, seen.num_wrong + other.num_wrong, by) for seen, other in results]
    except TopologyError as error:
        raise Unreadable(str(error)) from None
    except TransportError as error:
        raise Unreadable(error.detail) from None
