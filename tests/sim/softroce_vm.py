"""A throw-away virtual machine with real RDMA devices: Debian's kernel with rdma_rxe (Soft-RoCE) under qemu.

    kernel package ─► vmlinuz + the modules that are needed ─► initrd (busybox, softroce_init.sh)
    host root, read-only over 9p ─► overlay in memory ─► the job's commands ─► its folder on the host, over 9p

The guest sees this machine's files, so a job can use the same virtual environment; what it writes vanishes, except
below ``/job``. No network leaves the machine: it has no network device but those that softroce_network.sh makes inside.
"""

from __future__ import annotations

import lzma
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.prerequisites import CACHE, find, missing

HERE = Path(__file__).resolve().parent
BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_rng")
RDMA_MODULES = ("crc32_generic", "veth", "bridge", "sch_netem", "ib_core", "ib_uverbs", "rdma_ucm", "rdma_rxe")
TOOLS = ("qemu-system-x86_64", "busybox", "modprobe", "depmod", "apt-get", "dpkg-deb", "ip", "rdma")


class MissingPrerequisite(Exception):  # noqa: N818 - a fact about the machine: tests skip on it
    """This machine cannot run the virtual machine; the message says what is missing."""


@dataclass(frozen=True)
class Boot:
    """What qemu starts.

    Attributes:
        kernel: bzImage of Debian's kernel.
        initrd: busybox, init and modules.
    """

    kernel: Path
    initrd: Path


def run_in_vm(commands: str, folder: Path, *, num_nics: int = 2, memory_mb: int = 1024, limit_s: float = 240) -> str:
    """Runs shell commands as root in a fresh machine with `num_nics` devices rxe0, rxe1 …

    Args:
        commands: shell text; the working directory and PATH are those of this process.
        folder: seen by the job as ``/job``; holds its results afterwards. Must be empty or absent.
        num_nics: Soft-RoCE devices, GID index 1 = RoCE v2 over 10.77.0.(1 + i).
        memory_mb: memory of the machine, which also holds what the job writes.
        limit_s: time from power on to power off.

    Returns:
        What the job printed.

    Raises:
        MissingPrerequisite: a tool or the kernel is not to be had here.
        RuntimeError: the machine did not come up, or the job failed; the message ends with its output.
        subprocess.TimeoutExpired: it took longer than `limit_s`.
    """
    boot = prepare(CACHE / "softroce")
    folder.mkdir(parents=True, exist_ok=True)
    network = (HERE / "softroce_network.sh").read_text()
    (folder / "run.sh").write_text(
        f"export PATH={shlex.quote(os.environ['PATH'])}:/usr/sbin:/sbin\ncd {shlex.quote(os.getcwd())}\n"
        f"set -- {num_nics}\n{network}\n{commands}\n"
    )
    console = folder / "console"
    subprocess.run(_qemu(boot, folder, console, memory_mb), check=True, timeout=limit_s, capture_output=True)
    status, output = folder / "status", folder / "output"
    if not status.exists():
        raise RuntimeError(f"the machine did not finish its job:\n{console.read_text(errors='replace')[-2000:]}")
    text = output.read_text(errors="replace")
    if status.read_text().strip() != "0":
        raise RuntimeError(f"the job ended with status {status.read_text().strip()}:\n{text[-4000:]}")
    return text


def prepare(cache: Path) -> Boot:
    """Downloads Debian's kernel and builds the initrd, once for each kernel version."""
    absent = missing(*TOOLS)
    if platform.machine() != "x86_64" or absent:
        raise MissingPrerequisite(f"needs x86-64 and {', '.join(absent or TOOLS)}: see ci/system_packages.sh")
    package = _kernel_package()
    boot = Boot(cache / package / "vmlinuz", cache / package / "initrd")
    init = HERE / "softroce_init.sh"
    if not boot.initrd.exists() or boot.initrd.stat().st_mtime < max(
        init.stat().st_mtime, Path(__file__).stat().st_mtime
    ):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            work = Path(folder)
            root = _unpack_kernel(package, work)
            (cache / package).mkdir(exist_ok=True)
            shutil.copy(next(root.glob("boot/vmlinuz-*")), boot.kernel)
            _build_initrd(root, work / "initrd", boot.initrd)
    return boot


def _kernel_package() -> str:
    """The kernel that Debian's metapackage stands for now (not the cloud one: that has no RDMA)."""
    shown = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=False)
    found = re.search(r"Depends: (linux-image-\S+)", shown.stdout)
    if found is None:
        raise MissingPrerequisite("apt knows no linux-image-amd64 (apt-get update?)")
    return found[1]


def _unpack_kernel(package: str, work: Path) -> Path:
    done = subprocess.run(["apt-get", "download", package], cwd=work, capture_output=True, text=True, check=False)
    archives = list(work.glob("*.deb"))
    if done.returncode or not archives:
        raise MissingPrerequisite(f"apt-get download {package}: {done.stderr.strip()[-300:]}")
    subprocess.run(["dpkg-deb", "-x", str(archives[0]), str(work / "root")], check=True)
    return work / "root"


def _build_initrd(root: Path, stage: Path, target: Path) -> None:
    """Writes busybox, init and the modules, in loading order, as one archive."""
    version = next((root / "lib/modules").iterdir()).name
    subprocess.run(["depmod", "-b", str(root), version], check=True, env=_with_sbin())
    (stage / "bin").mkdir(parents=True)
    (stage / "modules").mkdir()
    shutil.copy(str(find("busybox")), stage / "bin/busybox")
    shutil.copy(HERE / "softroce_init.sh", stage / "init")
    (stage / "init").chmod(0o755)
    boot = _module_files(root, version, BOOT_MODULES)
    rdma = [path for path in _module_files(root, version, RDMA_MODULES) if path not in boot]
    for path in boot + rdma:
        content = path.read_bytes()
        (stage / "modules" / path.stem.removesuffix(".ko")).write_bytes(
            lzma.decompress(content) if path.suffix == ".xz" else content
        )
    for name, paths in (("modules.boot", boot), ("modules.rdma", rdma)):
        (stage / name).write_text("\n".join(path.stem.removesuffix(".ko") for path in paths) + "\n")
    names = "\n".join(str(path.relative_to(stage)) for path in sorted(stage.rglob("*")))
    with target.open("wb") as archive:
        subprocess.run(
            ["busybox", "cpio", "-o", "-H", "newc"], input=names.encode(), stdout=archive, cwd=stage, check=True
        )


def _module_files(root: Path, version: str, names: tuple[str, ...]) -> list[Path]:
    """The files of the modules and of everything they depend on, in loading order; built-in ones need none."""
    files: list[Path] = []
    for name in names:
        command = ["modprobe", "--dirname", str(root), "--set-version", version, "--show-depends", name]
        shown = subprocess.run(command, capture_output=True, text=True, check=False, env=_with_sbin())
        if shown.returncode:
            raise MissingPrerequisite(f"{version} has no module {name}: {shown.stderr.strip()}")
        files += [Path(line.split()[1]) for line in shown.stdout.splitlines() if line.startswith("insmod ")]
    return list(dict.fromkeys(files))


def _with_sbin() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


def _qemu(boot: Boot, folder: Path, console: Path, memory_mb: int) -> list[str]:
    """Emulation only: it needs no /dev/kvm, which is missing or incomplete on many CI machines."""
    host = "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"
    job = f"local,id=job,path={folder},security_model=none"
    return [
        *("qemu-system-x86_64", "-accel", "tcg", "-cpu", "Nehalem", "-machine", "q35"),
        *("-m", str(memory_mb), "-smp", str(min(2, os.cpu_count() or 1))),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", str(boot.kernel), "-initrd", str(boot.initrd)),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off"),
        *("-serial", f"file:{console}"),
        *("-fsdev", host, "-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-fsdev", job, "-device", "virtio-9p-pci,fsdev=job,mount_tag=job"),
        *("-device", "virtio-rng-pci"),
    ]
