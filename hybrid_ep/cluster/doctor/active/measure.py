"""What the active checks measure, in plain PyTorch: copies, a matrix-multiply burn, a memory pattern, RDMA, NCCL.

Every bandwidth is in GB/s of one direction (10⁹ bytes), timed by the host around work that was waited for. The same
code runs on tensors of the CPU, which is how it is tested; nothing here judges.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from hybrid_ep.cluster.doctor.active.gpu_direct import Written, write_by_verbs
from hybrid_ep.watched import Unreadable

if TYPE_CHECKING:
    import torch

_COPY_BYTES = 256 << 20
_PATTERN_BYTES = 1 << 30
_RDMA_SECONDS, _RDMA_LIMIT_S = 3, 30.0
_SEED = 20250917


@dataclass(frozen=True)
class Burn:
    """One GPU's matrix-multiply burn.

    Attributes:
        tflops: 10¹² floating-point operations per second.
        checksums: of the result after each round; one value where the GPU computes the same bits every time.
        celsius, watts, mhz: highest temperature and power, and lowest SM clock, of the second half; None without NVML.
    """

    tflops: float
    checksums: tuple[int, ...]
    celsius: int | None = None
    watts: int | None = None
    mhz: int | None = None


class Machine(Protocol):
    """What can be measured; `TorchMachine` is the real one, and tests have others."""

    @property
    def num_gpus(self) -> int:
        """GPUs of this process."""

    def host_copy(self, gpu_idx: int, *, to_gpu: bool) -> float:
        """Bandwidth between pinned host memory and a GPU."""

    def device_copy(self, gpu_idx: int) -> float:
        """Bandwidth within a GPU's memory; each byte is read and written."""

    def pair_copy(self, source: int, target: int) -> float:
        """Bandwidth from one GPU to another, with nothing else under way."""

    def ring_copy(self) -> list[float]:
        """Bandwidth from every GPU to the next one, all at once."""

    def burn(self, seconds: float) -> list[Burn]:
        """All GPUs multiply the same matrices at once for so long."""

    def count_bad_words(self, gpu_idx: int, fraction: float) -> tuple[int, int]:
        """Writes patterns into that share of the free memory and reads them back: (wrong words, words)."""

    def all_to_all(self) -> float:
        """Bandwidth of NCCL's all-to-all, for each GPU."""


class TorchMachine:
    """The GPUs of this process, or stand-ins on the CPU.

    Args:
        devices: the GPUs; None takes all that CUDA shows.
        copy_bytes: of one copy.
        size: rows and columns of the matrices.
    """

    def __init__(
        self, devices: Sequence[str] | None = None, *, copy_bytes: int = _COPY_BYTES, size: int = 8192
    ) -> None:
        import torch

        self._torch = torch
        if devices is None:
            if not torch.cuda.is_available():
                raise Unreadable("CUDA shows no GPU")
            devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        self._devices = [torch.device(name) for name in devices]
        self._copy_bytes, self._size = copy_bytes, size

    @property
    def num_gpus(self) -> int:
        return len(self._devices)

    def host_copy(self, gpu_idx: int, *, to_gpu: bool) -> float:
        torch, device = self._torch, self._devices[gpu_idx]
        host = torch.empty(self._copy_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
        inside = torch.empty(self._copy_bytes, dtype=torch.uint8, device=device)
        source, target = (host, inside) if to_gpu else (inside, host)
        return self._rate(lambda: target.copy_(source, non_blocking=True), [device])

    def device_copy(self, gpu_idx: int) -> float:
        torch, device = self._torch, self._devices[gpu_idx]
        source = torch.empty(self._copy_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * self._rate(lambda: target.copy_(source), [device])

    def pair_copy(self, source: int, target: int) -> float:
        return self._rate(self._copier(source, target), [self._devices[source], self._devices[target]])

    def ring_copy(self) -> list[float]:
        copies = [self._copier(i, (i + 1) % self.num_gpus) for i in range(self.num_gpus)]

        def all_at_once() -> None:
            for copy in copies:
                copy()

        # One time for all, so that each figure is a share of what all of them moved together.
        return [self._rate(all_at_once, self._devices)] * self.num_gpus

    def burn(self, seconds: float) -> list[Burn]:
        torch = self._torch
        dtype = torch.bfloat16 if self._devices[0].type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(_SEED)
        left, right = (
            torch.randn(self._size, self._size, generator=generator, device="cpu").to(dtype) for _ in range(2)
        )
        pairs = [(left.to(device), right.to(device)) for device in self._devices]
        sums: list[list[int]] = [[] for _ in self._devices]
        traces = [_Trace(device.index or 0, device.type == "cuda") for device in self._devices]
        rounds, per_round = 0, 8
        self._wait(self._devices)
        started = time.perf_counter()
        while True:
            results = [[a @ b for _ in range(per_round)][-1] for a, b in pairs]
            self._wait(self._devices)
            elapsed = time.perf_counter() - started
            rounds += 1
            for kept, result, trace in zip(sums, results, traces, strict=True):
                # The bits as integers: a float sum would hide a flipped low bit.
                words = result.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
                kept.append(int(words.to(torch.int64).sum()))
                trace.take(late=elapsed > seconds / 2)
            if elapsed > seconds:
                break
        flops = 2 * self._size**3 * per_round * rounds
        elapsed = time.perf_counter() - started
        return [
            Burn(flops / elapsed / 1e12, tuple(dict.fromkeys(kept)), trace.celsius, trace.watts, trace.mhz)
            for kept, trace in zip(sums, traces, strict=True)
        ]

    def count_bad_words(self, gpu_idx: int, fraction: float) -> tuple[int, int]:
        torch, device = self._torch, self._devices[gpu_idx]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what earlier checks left
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4 * self._copy_bytes
        block = min(_PATTERN_BYTES, self._copy_bytes) // 8
        blocks = [
            torch.arange(block, dtype=torch.int64, device=device)
            for _ in range(max(1, int(free * fraction) // 8 // block))
        ]
        pattern = torch.arange(block, dtype=torch.int64, device=device)
        bad = 0
        # Each word holds its own address, then its complement: every bit is written as 0 and as 1.
        for invert in (0, -1):
            for number, words in enumerate(blocks):
                torch.add(pattern, number * block, out=words)
                words.bitwise_xor_(invert)
            for number, words in enumerate(blocks):
                bad += int((words.bitwise_xor_(invert).sub_(number * block) != pattern).sum())
        num_words = 2 * block * len(blocks)
        del blocks, words
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other processes measure next
        return bad, num_words

    def all_to_all(self) -> float:
        """As `Machine.all_to_all`; one process for each GPU, since NCCL wants that."""
        torch = self._torch
        if self._devices[0].type != "cuda" or not torch.distributed.is_nccl_available():
            raise Unreadable("NCCL needs GPUs")
        from torch import multiprocessing

        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [
            context.Process(target=_all_to_all_rank, args=(rank, self.num_gpus, port, self._copy_bytes, answers))
            for rank in range(self.num_gpus)
        ]
        for rank in ranks:
            rank.start()
        try:
            return min(float(answers.get(timeout=90)) for _ in ranks)
        except Exception as error:
            raise Unreadable(f"NCCL all-to-all: {type(error).__name__}: {error}") from None
        finally:
            for rank in ranks:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()

    def _copier(self, source: int, target: int) -> Callable[[], object]:
        torch = self._torch
        here = torch.empty(self._copy_bytes, dtype=torch.uint8, device=self._devices[source])
        there = torch.empty(self._copy_bytes, dtype=torch.uint8, device=self._devices[target])
        # torch orders a copy between GPUs on the current streams of both: copies that share one wait for each other.
        streams = [torch.cuda.Stream(tensor.device) for tensor in (here, there) if tensor.is_cuda]

        def copy() -> None:
            with contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                there.copy_(here, non_blocking=True)

        return copy

    def _wait(self, devices: Sequence[torch.device]) -> None:
        for device in devices:
            if device.type == "cuda":
                self._torch.cuda.synchronize(device)

    def _rate(self, copy: Callable[[], object], devices: Sequence[torch.device], repeats: int = 10) -> float:
        """GB/s of a copy: the best of three runs after one to warm up, since others only ever make it slower."""
        times = []
        for _ in range(4):
            self._wait(devices)
            started = time.perf_counter()
            for _ in range(repeats):
                copy()
            self._wait(devices)
            times.append(time.perf_counter() - started)
        return self._copy_bytes * repeats / min(times[1:]) / 1e9


class _Trace:
    """Temperature, power and clock of a GPU during a burn, from NVML by CUDA's order of PCI addresses."""

    def __init__(self, gpu_idx: int, is_gpu: bool) -> None:
        self.celsius: int | None = None
        self.watts: int | None = None
        self.mhz: int | None = None
        self._handle: Any = None
        if is_gpu:
            import pynvml
            import torch

            try:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(gpu_idx).uuid}")
            except (pynvml.NVMLError, AttributeError):
                self._handle = None

    def take(self, *, late: bool) -> None:
        """Reads once; the clock only in the second half, when the GPU is warm."""
        if self._handle is None:
            return
        import pynvml

        try:
            celsius = int(pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU))
            watts = int(pynvml.nvmlDeviceGetPowerUsage(self._handle)) // 1000
            mhz = int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            return
        self.celsius, self.watts = max(celsius, self.celsius or 0), max(watts, self.watts or 0)
        if late:
            self.mhz = min(mhz, self.mhz or mhz)


def _all_to_all_rank(rank: int, num_ranks: int, port: int, num_bytes: int, answers: Any) -> None:
    import torch
    from torch import distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    source = torch.empty(num_bytes // num_ranks * num_ranks, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        distributed.all_to_all_single(target, source)
    torch.cuda.synchronize()
    distributed.barrier()
    started = time.perf_counter()
    for _ in range(20):
        distributed.all_to_all_single(target, source)
    torch.cuda.synchronize()
    # What stays on the GPU does not cross a link.
    answers.put(20 * source.numel() * (num_ranks - 1) / num_ranks / (time.perf_counter() - started) / 1e9)
    distributed.destroy_process_group()


def write_over_rdma(
    pairs: Sequence[tuple[int, str, int, str]], gid_index: int | None, *, bidirectional: bool
) -> list[Written]:
    """GPU memory to GPU memory through NICs, all pairs at once.

    By perftest's ib_write_bw where that knows CUDA, else by the verbs transport (gpu_direct.py). Host memory is never
    measured in its place.

    Args:
        pairs: (GPU that listens, its NIC, GPU that writes, its NIC).
        gid_index: for RoCE; None on InfiniBand.
        bidirectional: both ends write.

    Returns:
        The rate of each pair, of one direction (of both together where bidirectional).

    Raises:
        Unreadable: neither can measure GPU memory, or what measured has failed; with its words.
    """
    program = shutil.which("ib_write_bw")
    usage = ""
    if program is not None:
        shown = subprocess.run([program, "--help"], capture_output=True, text=True, errors="replace", check=False)
        usage = shown.stdout + shown.stderr
    if program is None or "--use_cuda" not in usage:
        lacks = "is not installed" if program is None else "was built without CUDA"
        try:
            return write_by_verbs(pairs, gid_index, bidirectional=bidirectional, seconds=_RDMA_SECONDS)
        except Unreadable as error:
            raise Unreadable(f"ib_write_bw {lacks}; by the verbs transport: {error}") from None
    common = [program, "--report_gbits", "-D", str(_RDMA_SECONDS), "-s", str(1 << 20), "-q", "4", "-F"]
    common += ["-b"] if bidirectional else []
    common += ["-x", str(gid_index)] if gid_index is not None else []
    common += ["--use_cuda_dmabuf"] if "--use_cuda_dmabuf" in usage else []
    running: list[tuple[subprocess.Popen[str], subprocess.Popen[str]]] = []
    try:
        for number, (gpu, nic, writer_gpu, writer_nic) in enumerate(pairs):
            port = ["-p", str(18600 + number)]
            listener = _start([*common, *port, "-d", nic, f"--use_cuda={gpu}"])
            time.sleep(1.0)  # perftest's client does not try twice
            writer = _start([*common, *port, "-d", writer_nic, f"--use_cuda={writer_gpu}", "127.0.0.1"])
            running.append((listener, writer))
        return [Written(_read_gbps(writer) / 8, by="by perftest") for _, writer in running]
    finally:
        for both in running:
            for process in both:
                process.kill()
                process.wait()


def _start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def _read_gbps(writer: subprocess.Popen[str]) -> float:
    """The average of the last line of figures: bytes, iterations, peak, average, message rate."""
    try:
        text, _ = writer.communicate(timeout=_RDMA_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Unreadable(f"ib_write_bw: no answer in {_RDMA_LIMIT_S:.0f} s") from None
    found = re.findall(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", text, re.MULTILINE)
    if writer.returncode or not found:
        last = text.strip().splitlines()[-1:] or ["nothing"]
        raise Unreadable(f"ib_write_bw: exit status {writer.returncode}, said {last[0][:160]!r}")
    return float(found[-1])
