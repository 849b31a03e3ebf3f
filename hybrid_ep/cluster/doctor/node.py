"""Everything that a check may read of a node, live or below --sysroot.

A check reads nothing by itself. That keeps three promises in one place. A recorded node answers like the real one.
What cannot be read becomes `unknown` with the reason. A missing file counts as missing only if its folder can be seen.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from hybrid_ep import env
from hybrid_ep.cluster.doctor.cuda_start import CudaStart, start_cuda
from hybrid_ep.cluster.doctor.dcb import DcbState, read_dcb
from hybrid_ep.cluster.doctor.nvml import Nvml
from hybrid_ep.topology import Topology, probe
from hybrid_ep.topology.recording import read_facts
from hybrid_ep.watched import LIMIT_S, Unreadable, Watched

__all__ = ["LIMIT_S", "ClockState", "Container", "CudaDevice", "LogLine", "Node", "Unreadable", "WatchedNode"]

T = TypeVar("T")
_COMMAND_TIMEOUT_S = 4  # shorter than what a `WatchedNode` waits for
_MOST_BYTES = 16 << 20  # of one file; /proc and /sys hold none near that
_KEPT_LOG_S = 900  # how old a kept kernel log may be
_JOURNAL_STARTS_S = 60  # after the boot: a journal that begins later has lost its beginning
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


@dataclass(frozen=True)
class LogLine:
    """One line of the kernel's log: seconds after the boot, and the message."""

    seconds: float
    message: str


@dataclass(frozen=True)
class Container:
    """Whether the doctor runs inside a container, and which GPUs that was given.

    Attributes:
        inside: it does.
        visible_devices: NVIDIA_VISIBLE_DEVICES, by which the container toolkit was asked; empty where it was not.
    """

    inside: bool
    visible_devices: str

    @property
    def may_see_few(self) -> bool:
        """Whether fewer GPUs than the node has are no fault: a container that was not given all of them."""
        return self.inside and self.visible_devices != "all"


class Node:
    """One node.

    Args:
        sysroot: ``/`` for this node, or the folder of a recorded one.
        kernel_log: read in place of /dev/kmsg; a file that is not renewed is ignored.

    Attributes:
        listed: folders that were looked into, so that a recording can say that the rest was not there.
        watch: is called with what will be read next; may refuse it by raising Unreadable.
    """

    def __init__(self, sysroot: Path = Path("/"), *, kernel_log: Path | None = None) -> None:
        self.root = sysroot
        self._kernel_log = kernel_log
        self.watch: Callable[[str], None] = lambda source: None
        self.is_live = sysroot == Path("/")
        self.listed: set[str] = set()
        self._facts = {} if self.is_live else read_facts(sysroot)
        self._cuda_start: CudaStart | None = None

    def run(self, task: Callable[..., T], *arguments: Any) -> T:
        """Returns ``task(self, *arguments)``, as `WatchedNode.run` does from another process."""
        return task(self, *arguments)

    def insist(self, task: Callable[..., T], *arguments: Any) -> T:
        """As `run`; see `WatchedNode.insist`."""
        return task(self, *arguments)

    @cached_property
    def topology(self) -> Topology:
        """GPUs, NICs and distances."""
        return probe(self.root, before=self.watch)

    @cached_property
    def product(self) -> str:
        """The machine's model by its firmware (SMBIOS), e.g. ``p5.48xlarge``; empty where that cannot be seen."""
        return self._firmware("product_name")

    @cached_property
    def machine(self) -> str:
        """``vendor; product; asset tag; PCI vendors of the NICs``: what shows a cloud."""
        nics = {self.topology.pci_device(nic.pci_address).vendor for nic in self.topology.nics if nic.pci_address}
        vendors = " ".join(f"{vendor:04x}" for vendor in sorted(nics) if vendor >= 0)
        said = (self._firmware("sys_vendor"), self.product, self._firmware("chassis_asset_tag"), vendors)
        return "; ".join(text for text in said if text)

    def _firmware(self, name: str) -> str:
        try:
            return self.read(f"/sys/class/dmi/id/{name}").strip()
        except Unreadable:
            return ""

    @cached_property
    def is_guest(self) -> bool:
        """Whether this is a virtual machine, whose hypervisor decides what the guest sees of PCIe."""
        if re.search(r"^flags\s*:.*\bhypervisor\b", self.read("/proc/cpuinfo"), re.MULTILINE):
            return True
        return bool(re.search(r"^QEMU;|Virtual Machine|Google Compute Engine|^Amazon EC2;(?!.*metal)", self.machine))

    @property
    def memory_gib(self) -> float:
        """Memory of the host in GiB, as the kernel counts it."""
        total = re.search(r"^MemTotal:\s+(\d{1,15}) kB", self.read("/proc/meminfo"), re.MULTILINE)
        if total is None:
            raise Unreadable("/proc/meminfo has no MemTotal")
        return int(total[1]) / 2**20

    @property
    def driver_is_loaded(self) -> bool:
        """Whether NVIDIA's kernel module is loaded, which needs a GPU; so is the host's, seen from a container."""
        return self.is_seen("/sys/module/nvidia")

    @cached_property
    def gpu_devices(self) -> list[str]:
        """The GPUs' device files: what a container was given, if it was given any."""
        try:
            return [name for name in self.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
        except Unreadable:
            return []

    @cached_property
    def switch_bridges(self) -> frozenset[str]:
        """RDMA devices that lead to the NVSwitches of an HGX board with NVLink 5, for the fabric manager alone.

        Their vital product data says so, which only root may read; for others the set is empty.
        """
        found = set()
        for nic in self.topology.nics:
            if nic.pci_address and any(port.link_layer == "InfiniBand" for port in nic.ports):
                with suppress(Unreadable):
                    if b"SW_MNG" in self.read_bytes(f"/sys/bus/pci/devices/{nic.pci_address}/vpd"):
                        found.add(nic.name)
        return frozenset(found)

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
            return Nvml(self.watch)
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
        self.watch(path)
        try:
            return os.path.basename(os.readlink(self._place(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None

    def exists(self, path: str) -> bool:
        """Whether there is such a file; Unreadable where its folder cannot be seen: nothing can be concluded then."""
        return Path(path).name in self.names(str(Path(path).parent))

    def is_seen(self, path: str) -> bool:
        """Whether there is such a file, as far as can be seen: False also where its folder cannot be read."""
        try:
            return self.exists(path)
        except Unreadable:
            return False

    def read(self, path: str) -> str:
        """Text of a file without the last newline."""
        return self.read_bytes(path).decode(errors="replace").rstrip("\n")

    def read_or_none(self, path: str) -> str | None:
        """Text of a file, or None where there is none; Unreadable if that cannot be determined."""
        return self.read(path) if self.exists(path) else None

    def read_bytes(self, path: str) -> bytes:
        """Content of a regular file; anything else is Unreadable, since a FIFO or a device could block."""
        self.watch(path)
        try:
            with open(self._place(path), "rb", opener=_open_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Unreadable(f"{path}: not a regular file")
                content = file.read(_MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        if len(content) > _MOST_BYTES:
            raise Unreadable(f"{path}: more than {_MOST_BYTES >> 20} MiB")
        return content

    def read_int(self, path: str) -> int:
        """The number that a file holds."""
        text = self.read(path)
        try:
            return int(text, 0)
        except ValueError:
            raise Unreadable(f"{path} holds {text[:40]!r}, not a number") from None

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; Unreadable where it cannot be listed."""
        self.watch(path)
        try:
            found = sorted(os.listdir(self._place(path)))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        self.listed.add(path)
        return found

    def names_or_none(self, path: str) -> list[str]:
        """Names in a folder, sorted; none where it does not exist."""
        return self.names(path) if self.exists(path) else []

    def char_device(self, path: str) -> tuple[int, int] | None:
        """(major, minor) of a character device; None where the path is none. Recorded as text ``char MAJOR:MINOR``."""
        if not self.exists(path):
            return None
        self.watch(path)
        try:
            found = self._place(path).stat()
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        if stat.S_ISCHR(found.st_mode):
            return os.major(found.st_rdev), os.minor(found.st_rdev)
        recorded = None if self.is_live else re.fullmatch(r"char (\d{1,9}):(\d{1,9})", self.read(path))
        return (int(recorded[1]), int(recorded[2])) if recorded else None

    def kernel_log(self) -> list[LogLine]:
        """The kernel's log since the boot, oldest first.

        From /dev/kmsg, or the file that was given in its place. Where that cannot be read or no longer reaches back to
        the boot (its records are numbered from 0), from the journal.

        Raises:
            Unreadable: neither can be read back to the boot; `log` has the longer rest. A journal without a line is
                one that this user may not read.
        """
        lines: list[LogLine] = []
        reason = f"{self._kernel_log or '/dev/kmsg'} no longer reaches back to the boot"
        try:
            numbered = list(self._kmsg())
            lines = [line for _, line in numbered]
            if numbered and numbered[0][0] == 0:
                return lines
        except Unreadable as error:
            reason = str(error)
        try:
            text = self.command("journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager")
        except Unreadable as error:
            raise Unreadable(f"{reason}; {error}", log=tuple(lines)) from None
        journal = _journal_lines(text)
        if journal and journal[0].seconds <= _JOURNAL_STARTS_S:
            return journal
        starts = f"begins {journal[0].seconds:.0f} s after the boot" if journal else "shows this user no line"
        raise Unreadable(f"{reason}; the journal {starts}", log=tuple(journal if len(journal) > len(lines) else lines))

    def _kmsg(self) -> Iterator[tuple[int, LogLine]]:
        """Records of /dev/kmsg, ``level,number,microseconds,flags;message``, with their numbers."""
        name = str(self._kernel_log or "/dev/kmsg")
        self.watch(name)
        try:
            descriptor = _open_without_waiting(self._kernel_log or self._place(name))
        except OSError as error:
            raise _unreadable(name, error) from None
        try:
            age_s = time.time() - os.fstat(descriptor).st_mtime
            if self._kernel_log and age_s > _KEPT_LOG_S:
                raise Unreadable(f"{name} was written {age_s:.0f} s ago, expected at most {_KEPT_LOG_S}")
            for record in self._kmsg_records(descriptor):
                prefix, _, message = record.partition(";")
                fields = prefix.split(",")
                numbers = [int(text) for text in fields[1:3] if re.fullmatch(r"[0-9]{1,18}", text)]
                if len(numbers) == 2:
                    yield numbers[0], LogLine(numbers[1] / 1e6, message)
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
        """Standard output of another program; Unreadable where it is missing, fails or takes more than 4 s."""
        line = shlex.join(words)
        self.watch(line)
        if not self.is_live:
            return str(self._recorded("commands", line))
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT_S, check=False
            )
        except FileNotFoundError:
            raise Unreadable(f"{words[0]} is not installed") from None
        except subprocess.TimeoutExpired:
            raise Unreadable(f"{line}: no answer in {_COMMAND_TIMEOUT_S} s") from None
        except OSError as error:
            raise _unreadable(line, error) from None
        if done.returncode:
            raise Unreadable(f"{line}: exit status {done.returncode}: {done.stderr.strip()[:200]}")
        return done.stdout

    def clock(self) -> ClockState:
        """The kernel's view of its clock, from adjtimex(2), which needs no privilege to read."""
        if not self.is_live:
            synchronized, max_error_us = (
                self._recorded("clock", "synchronized"),
                self._recorded("clock", "max_error_us"),
            )
            return ClockState(bool(synchronized), _number("clock max_error_us", max_error_us))
        self.watch("adjtimex")
        return _read_clock()

    def cuda(self) -> CudaDevice:
        """Attributes of GPU 0 from libcuda."""
        if not self.is_live:
            return CudaDevice(*(bool(self._recorded("cuda", name)) for name in ("dmabuf", "fabric_handles")))
        self.watch("libcuda")
        return _read_cuda()

    def cuda_start(self, idle_gpus: Collection[int]) -> CudaStart:
        """Starts CUDA and makes one context on each of these GPUs (NVML's indices), in a process of its own; once."""
        if self._cuda_start is None and self.is_live:
            self.watch("CUDA")
            self._cuda_start = start_cuda(idle_gpus, lambda: self.watch("CUDA"))
        return self.started_cuda()

    def started_cuda(self) -> CudaStart:
        """What `cuda_start` said, or on a recorded node was said then."""
        if self._cuda_start is None:
            init, devices, contexts, lost, library = (
                self._recorded("cuda_start", name) for name in ("init", "devices", "contexts", "lost", "library")
            )
            try:
                codes = {int(gpu): int(code) for gpu, code in contexts.items()}
                started, counted = (None if number is None else int(number) for number in (init, devices))
            except (TypeError, ValueError, OverflowError, AttributeError) as error:
                raise Unreadable(f"cuda_start: recorded as something else: {error}") from None
            self._cuda_start = CudaStart(started, counted, codes, str(lost), str(library))
        return self._cuda_start

    def dcb(self, netdev: str) -> DcbState:
        """Priority flow control and packet sorting of a network interface."""
        if not self.is_live:
            recorded = self._recorded("dcb", netdev)
            if not isinstance(recorded, dict):
                raise Unreadable(f"dcb {netdev}: recorded as something else than a table")
            return DcbState(
                _number("pfc_priorities", recorded.get("pfc_priorities")), bool(recorded.get("sorts_by_dscp"))
            )
        self.watch(f"DCB of {netdev}")
        return read_dcb(netdev)

    def free_mib(self, path: str) -> int:
        """Free space of a file system in MiB."""
        if not self.is_live:
            return _number(f"free_mib {path}", self._recorded("free_mib", path))
        self.watch(path)
        try:
            found = os.statvfs(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        return found.f_bavail * found.f_frsize >> 20

    def container(self) -> Container:
        """Whether this is a container, by /.dockerenv, /run/.containerenv or the environment."""
        if not self.is_live:
            recorded = self._facts.get("container")
            if not isinstance(recorded, dict):
                return Container(False, "")
            return Container(bool(recorded.get("inside")), str(recorded.get("visible_devices", "")))
        inside = any(mark.is_set for mark in (env.KUBERNETES_HOST, env.CONTAINER, env.VISIBLE_DEVICES))
        inside = inside or any(os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv"))
        return Container(inside, env.VISIBLE_DEVICES.get())

    def nccl_variables(self) -> dict[str, str]:
        """NCCL_* of this process's environment."""
        if not self.is_live:
            recorded = self._facts.get("nccl_variables", {})
            return {str(k): str(v) for k, v in recorded.items()} if isinstance(recorded, dict) else {}
        return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}

    def torch_cuda(self) -> str | None:
        """CUDA version that torch was built for, e.g. 13.0; None without CUDA. Read without importing it."""
        if not self.is_live:
            recorded = self._recorded("torch_cuda")
            return None if recorded is None else str(recorded)
        self.watch("torch/version.py")
        try:
            version = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(
                errors="replace"
            )
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
            recorded = self._recorded("packages")
            if not isinstance(recorded, dict):
                raise Unreadable("packages: recorded as something else than a table")
            return {str(name): str(version) for name, version in recorded.items()}
        self.watch("installed Python packages")
        said = (item.metadata for item in metadata.distributions())  # parsed at each look
        found = ((str(each["Name"] or "").lower(), str(each["Version"])) for each in said)
        return {name.replace("_", "-"): version for name, version in found if _PACKAGES.fullmatch(name)}

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


def _journal_lines(text: str) -> list[LogLine]:
    """Lines ``[   12.345678] host kernel: NVRM: Xid …``; what is indented continues the line before it."""
    lines: list[LogLine] = []
    for line in text.splitlines():
        if found := re.match(r"\[ *([0-9]{1,12}\.[0-9]{1,9})\] \S+ kernel: (.*)", line):
            lines.append(LogLine(float(found[1]), found[2]))
        elif lines and line.startswith(" "):
            lines[-1] = LogLine(lines[-1].seconds, f"{lines[-1].message} {line.strip()}")
    return lines


def _open_without_waiting(path: str | Path, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _unreadable(what: str, error: OSError | ValueError) -> Unreadable:
    return Unreadable(f"{what}: {getattr(error, 'strerror', None) or error}")


def _number(what: str, value: Any) -> int:
    if type(value) is not int:
        raise Unreadable(f"{what}: recorded as {value!r:.40}, not as a number")
    return value


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as far as it is read here; the kernel writes the rest too."""

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
