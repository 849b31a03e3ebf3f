"""Everything that a check may read of a node, live or below --sysroot.

A check reads nothing by itself. That keeps three promises in one place: a recorded node answers like the real one,
what cannot be read becomes `unknown` with the reason, and a missing file counts as missing only where its folder can be
seen.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import socket
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from hybrid_ep.doctor.nvml import Nvml
from hybrid_ep.doctor.unreadable import Unreadable
from hybrid_ep.topology import Topology, probe
from hybrid_ep.topology.recording import read_facts

__all__ = ["ClockState", "CudaDevice", "Node", "Unreadable"]

_COMMAND_TIMEOUT_S = 5
_PACKAGES = re.compile(r"(hybrid[-_]ep|deep[-_]ep|torch|triton|nvidia[-_](nccl|nvshmem)[-_]cu\d+|nvshmem4py[-_]cu\d+)")


@dataclass(frozen=True)
class ClockState:
    """The kernel's clock discipline.

    Attributes:
        synchronized: whether something (NTP, PTP) keeps the clock.
        max_error_us: bound of its distance from true time in µs; meaningful when synchronized.
    """

    synchronized: bool
    max_error_us: int


@dataclass(frozen=True)
class CudaDevice:
    """What libcuda says of a GPU.

    Attributes:
        dmabuf: its memory can be exported as dma-buf.
        fabric_handles: its memory can be exported to other nodes of an MNNVL domain.
    """

    dmabuf: bool
    fabric_handles: bool


class Node:
    """One node.

    Args:
        sysroot: ``/`` for this node, or the folder of a recorded one.

    Attributes:
        listed: folders that were looked into, so that a recording can say that the rest was not there.
    """

    def __init__(self, sysroot: Path = Path("/")) -> None:
        self.root = sysroot
        self.is_live = sysroot == Path("/")
        self.listed: set[str] = set()
        self._facts = {} if self.is_live else read_facts(sysroot)

    @cached_property
    def topology(self) -> Topology:
        """GPUs, NICs and distances."""
        return probe(self.root)

    @cached_property
    def nvml(self) -> Nvml:
        """NVML of whichever library the loader finds; Unreadable where it does not start."""
        if isinstance(self._nvml_or_reason, Unreadable):
            raise self._nvml_or_reason
        return self._nvml_or_reason

    @cached_property
    def _nvml_or_reason(self) -> Nvml | Unreadable:
        """NVML is started once; if it does not, every check gets the same reason."""
        try:
            return Nvml()
        except Unreadable as error:
            return error

    def close(self) -> None:
        """Shuts NVML down if it was started."""
        if isinstance(self.__dict__.get("_nvml_or_reason"), Nvml):
            self.nvml.close()

    # ---- files ----

    def _place(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def link(self, path: str) -> str | None:
        """Name that a symbolic link points at; None where there is none."""
        try:
            return os.path.basename(os.readlink(self._place(path)))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}") from None

    def exists(self, path: str) -> bool:
        """Whether there is such a file; Unreadable where its folder cannot be seen: nothing can be concluded then."""
        return Path(path).name in self.names(str(Path(path).parent))

    def read(self, path: str) -> str:
        """Text of a file without the last newline."""
        try:
            return self._place(path).read_text(errors="replace").rstrip("\n")
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}") from None

    def read_or_none(self, path: str) -> str | None:
        """Text of a file, or None where there is none; Unreadable where that cannot be told."""
        return self.read(path) if self.exists(path) else None

    def read_bytes(self, path: str) -> bytes:
        """Content of a file."""
        try:
            return self._place(path).read_bytes()
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}") from None

    def read_int(self, path: str) -> int:
        """The number that a file holds."""
        text = self.read(path)
        try:
            return int(text, 0)
        except ValueError:
            raise Unreadable(f"{path} holds {text!r}, not a number") from None

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; Unreadable where it cannot be listed."""
        try:
            found = sorted(os.listdir(self._place(path)))
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}") from None
        self.listed.add(path)
        return found

    def names_or_none(self, path: str) -> list[str]:
        """Names in a folder, sorted; none where it does not exist."""
        return self.names(path) if self.exists(path) else []

    def char_device(self, path: str) -> tuple[int, int] | None:
        """(major, minor) of a character device; None where the path is none. Recorded as text ``char MAJOR:MINOR``."""
        if not self.exists(path):
            return None
        place = self._place(path)
        found = place.stat()
        if stat.S_ISCHR(found.st_mode):
            return os.major(found.st_rdev), os.minor(found.st_rdev)
        recorded = re.fullmatch(r"char (\d+):(\d+)", place.read_text().strip()) if not self.is_live else None
        return (int(recorded[1]), int(recorded[2])) if recorded else None

    def kernel_log(self) -> Iterator[tuple[int, str]]:
        """Records of /dev/kmsg as (sequence number, message), oldest first.

        Sequence numbers start at 0 with the boot, so the first one tells whether older records were overwritten.
        """
        try:
            descriptor = os.open(self._place("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise Unreadable(f"/dev/kmsg: {error.strerror}") from None
        try:
            for record in self._kmsg_records(descriptor):
                prefix, _, message = record.partition(";")
                fields = prefix.split(",")
                if len(fields) >= 2 and fields[1].isdigit():
                    yield int(fields[1]), message
        finally:
            os.close(descriptor)

    @staticmethod
    def _kmsg_records(descriptor: int) -> Iterator[str]:
        """One read of the device gives one record; of a recorded file, many lines."""
        while True:
            try:
                chunk = os.read(descriptor, 1 << 20)
            except BlockingIOError:
                return  # the end of the log
            except BrokenPipeError:
                continue  # records were overwritten while we read; the next read starts at the oldest
            except OSError as error:
                raise Unreadable(f"/dev/kmsg: {error.strerror}") from None
            if not chunk:
                return
            yield from chunk.decode(errors="replace").splitlines()

    # ---- what no file holds ----

    def command(self, *words: str) -> str:
        """Standard output of another program; Unreadable where it is missing, fails or takes more than 5 s."""
        line = shlex.join(words)
        if not self.is_live:
            return str(self._recorded("commands", line))
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise Unreadable(f"{words[0]} is not installed") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unreadable(f"{line}: {error}") from None
        if done.returncode:
            raise Unreadable(f"{line}: exit status {done.returncode}: {done.stderr.strip()[:200]}")
        return done.stdout

    def clock(self) -> ClockState:
        """The kernel's view of its clock, from adjtimex(2), which needs no privilege to read."""
        if not self.is_live:
            return ClockState(**self._recorded("clock"))
        return _read_clock()

    def cuda(self) -> CudaDevice:
        """Attributes of GPU 0 from libcuda."""
        if not self.is_live:
            return CudaDevice(**self._recorded("cuda"))
        return _read_cuda()

    def torch_cuda(self) -> str | None:
        """CUDA version that torch was built for, e.g. 13.0; None without CUDA. Read without importing it."""
        if not self.is_live:
            recorded = self._recorded("torch_cuda")
            return None if recorded is None else str(recorded)
        try:
            version = metadata.distribution("torch").locate_file("torch/version.py").read_text()
        except metadata.PackageNotFoundError:
            raise Unreadable("torch is not installed, see software.packages") from None
        except OSError as error:
            raise Unreadable(f"torch/version.py: {error.strerror}") from None
        cuda = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+)['\"])", version, re.MULTILINE)
        if cuda is None:
            raise Unreadable("torch/version.py names no CUDA version")
        return cuda[1]

    def packages(self) -> dict[str, str]:
        """Versions of the installed distributions that have to agree across a group, without importing any."""
        if not self.is_live:
            return dict(self._recorded("packages"))
        found = ((item.metadata["Name"] or "", item.version) for item in metadata.distributions())
        return {name.lower().replace("_", "-"): version for name, version in found if _PACKAGES.fullmatch(name.lower())}

    def hostname(self) -> str:
        """Name of the node."""
        return socket.gethostname() if self.is_live else str(self._facts.get("hostname", self.root.name))

    def _recorded(self, *keys: str) -> Any:
        value: Any = self._facts
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise Unreadable(f"{' '.join(keys)}: not recorded")
            value = value[key]
        return value


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as far as it is read here; the rest is room for the kernel to write into."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def _read_clock() -> ClockState:
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex()  # modes = 0: read only
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        raise Unreadable(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    unsynchronized = 0x40  # STA_UNSYNC
    return ClockState(not timex.status & unsynchronized, int(timex.maxerror))


def _read_cuda() -> CudaDevice:
    """Attribute numbers are CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED and …_HANDLE_TYPE_FABRIC_SUPPORTED of cuda.h."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unreadable(str(error)) from None
    status = libcuda.cuInit(0)
    if status:
        raise Unreadable(f"cuInit: CUDA error {status}")

    def attribute(number: int) -> bool:
        value = ctypes.c_int(0)
        status = libcuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        if status:
            raise Unreadable(f"cuDeviceGetAttribute({number}): CUDA error {status}")
        return bool(value.value)

    return CudaDevice(dmabuf=attribute(124), fabric_handles=attribute(128))
