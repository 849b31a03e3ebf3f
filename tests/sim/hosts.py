"""Several hosts on one machine, for whatever needs more than one: MPIJobs, playbooks.

A host is a set of namespaces (mount, network, UTS, IPC, PID) over this machine's root folder. It has everything that is
installed here. Its writes are in memory, and end with the host. All hosts are on one bridge. Hosts and bridge are
inside one outermost PID and network namespace. When the first process of that namespace dies, for whatever reason, the
kernel ends the rest. So no process, mount or network is left behind, and runs do not interfere.

    with Cluster(image) as cluster:
        host = cluster.add_host("worker-0")
        host.start(["hostname"], user=1000).wait()
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from hybrid_ep.errors import HybridEPError
from tests.prerequisites import missing

_NETWORK = ipaddress.ip_network("10.42.0.0/16")
_START_S = 20.0
_PROGRAMS = ("unshare", "nsenter", "setpriv", "ip")

# $1 = an empty folder, $2 = host name, then folders that the root overlay does not show; each gets an overlay.
_SETUP_HOST = r"""
set -e
work=$1; name=$2; shift 2
mount --make-rprivate /
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
cd "$work/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do touch dev/$device; mount --bind /dev/$device dev/$device; done
mkdir dev/shm dev/pts; mount -t tmpfs -o mode=1777,size=64m tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts; ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs run
i=0
for folder; do
  i=$((i + 1)); mkdir -p "$work/upper$i" "$work/work$i" ".$folder"
  mount -t overlay overlay -o "lowerdir=$folder,upperdir=$work/upper$i,workdir=$work/work$i" ".$folder"
done
mkdir -p mnt/.old; pivot_root . mnt/.old; cd /; umount -l /mnt/.old
hostname "$name"; ip link set lo up
echo ready
exec sleep infinity
"""
# $1 = the switch's own address, from which hosts are probed.
_SETUP_CLUSTER = r"""
set -e
mount -t proc proc /proc
ip link add switch type bridge
ip link set switch up
ip address add "$1" dev switch
echo ready
exec sleep infinity
"""


class HostError(HybridEPError):
    """A simulated host or the switch between hosts did not come up."""


def missing_prerequisites() -> list[str]:
    """What keeps this machine from running hosts, in words; empty when nothing does."""
    root = [] if os.geteuid() == 0 else ["root (namespaces and mounts)"]
    return root + missing(*_PROGRAMS)


@dataclass(frozen=True)
class Image:
    """What a host has on top of this machine's root folder, as a container image would.

    Attributes:
        files: path → content; executable where the content starts with ``#!``.
        path: the variable PATH of its commands.
        user: name, user id and home of its user.
        visible: folders that must be readable for that user, wherever they lie.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    user: tuple[str, int, str] = ("hep", 1000, "/home/hep")
    visible: tuple[Path, ...] = ()


class Host:
    """One host; made by `Cluster.add_host`."""

    def __init__(self, name: str, address: str, pid: int, image: Image) -> None:
        self.name = name
        self.address = address
        self.pid = pid  # of its first process, as seen from outside
        self._image = image

    def path(self, inside: str) -> Path:
        """Where a path of the host can be reached from outside.

        Links are followed here: the kernel would take an absolute one to this machine's own folders.
        """
        root = place = Path(f"/proc/{self.pid}/root")
        todo = list(reversed(Path(inside).parts))
        while todo:
            part = todo.pop()
            if part == "/":
                place = root
            elif part == "..":
                place = place if place == root else place.parent
            elif (place / part).is_symlink():
                todo.extend(reversed(Path(os.readlink(place / part)).parts))
            else:
                place /= part
        return place

    def write(self, inside: str, content: str, mode: int = 0o644) -> None:
        """Writes a file of root's, making its folders."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(mode)

    def start(
        self,
        command: Sequence[str],
        *,
        user: int = 0,
        variables: Mapping[str, str] | None = None,
        output: IO[bytes] | int | None = None,
        confined: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Starts a command with exactly these variables and the image's PATH; stdout and stderr go to `output`.

        With `confined` it has no capabilities and can gain none, as under a strict security context.
        """
        privileges = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        if confined:
            privileges += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        settings = {"PATH": self._image.path, "HOME": "/root" if user == 0 else self._image.user[2]} | (variables or {})
        words = [f"{name}={value}" for name, value in settings.items()]
        return subprocess.Popen(
            [*_enter(self.pid, "mount", "uts", "ipc", "net", "pid"), *privileges, "env", "-i", *words, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def stop(self) -> None:
        """Ends the host and every process in it."""
        _kill(self.pid)


class Cluster:
    """Hosts on one switch. Needs root; see `missing_prerequisites`.

    Args:
        image: of every host.

    Raises:
        HostError: a prerequisite is missing, or the namespaces could not be made.
    """

    def __init__(self, image: Image) -> None:
        if missing := missing_prerequisites():
            raise HostError(f"simulated hosts need {', '.join(missing)}")
        self._image = image
        self._work = Path(tempfile.mkdtemp(prefix="hybrid-ep-hosts-"))
        self._addresses = _NETWORK.hosts()
        self._processes: list[subprocess.Popen[bytes]] = []
        address = f"{self.reserve_address()}/{_NETWORK.prefixlen}"
        try:
            self._pid = self._unshare([], ["net", "pid", "mount"], ["sh", "-c", _SETUP_CLUSTER, "sh", address])
        except HostError:
            shutil.rmtree(self._work, ignore_errors=True)
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def make_folder(self) -> Path:
        """A folder outside the hosts that goes when the cluster does."""
        return Path(tempfile.mkdtemp(dir=self._work))

    def reserve_address(self) -> str:
        """An address for a host that is added later."""
        return str(next(self._addresses))

    def add_host(self, name: str, address: str | None = None) -> Host:
        """Starts a host and connects it.

        Raises:
            HostError: it did not come up.
        """
        address = address or self.reserve_address()
        work = self._work / f"{len(self._processes)}"
        work.mkdir()
        elsewhere = [str(path) for path in self._image.visible if _is_hidden(path)]
        setup = ["sh", "-c", _SETUP_HOST, "sh", str(work), name, *elsewhere]
        pid = self._unshare(_enter(self._pid, "net", "pid", "mount"), ["mount", "uts", "ipc", "net", "pid"], setup)
        cable = f"port{len(self._processes)}"
        inside = _enter(pid, "net")
        for command in (
            [*_enter(self._pid, "net"), "ip", "link", "add", cable, "type", "veth", "peer", "eth0", "netns", str(pid)],
            [*_enter(self._pid, "net"), "ip", "link", "set", cable, "master", "switch", "up"],
            [*inside, "ip", "address", "add", f"{address}/{_NETWORK.prefixlen}", "dev", "eth0"],
            [*inside, "ip", "link", "set", "eth0", "up"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise HostError(f"{name}: {' '.join(command)}: {done.stderr.strip()}")
        host = Host(name, address, pid, self._image)
        self._install(host)
        return host

    def can_connect(self, address: str, port: int, limit_s: float = 1.0) -> bool:
        """Whether something listens there, as seen from the switch."""
        command = [*_enter(self._pid, "net"), "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
        try:
            return subprocess.run(command, capture_output=True, timeout=limit_s).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def close(self) -> None:
        """Ends every host."""
        _kill(self._pid)
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        shutil.rmtree(self._work, ignore_errors=True)

    def _unshare(self, enter: list[str], kinds: list[str], command: list[str]) -> int:
        """Starts `command` as the first process of new namespaces; returns its PID once it has said "ready"."""
        options = [f"--{kind}" for kind in kinds]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *enter, "unshare", *options, "--fork", "--kill-child=KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._processes.append(process)
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            if line == b"ready\n":
                return _last_descendant(process.pid)
            said.append(line.decode().strip())
        raise HostError(f"namespaces could not be set up: {' '.join(said) or 'no word'} (exit {process.wait()})")

    def _install(self, host: Host) -> None:
        name, number, home = self._image.user
        for table, entry in (
            ("/etc/passwd", f"{name}:x:{number}:{number}::{home}:/bin/bash"),
            ("/etc/group", f"{name}:x:{number}:"),
        ):
            others = [line for line in host.path(table).read_text().splitlines() if line.split(":")[2] != str(number)]
            host.write(table, "\n".join([*others, entry]) + "\n")
        host.path(home).mkdir(parents=True, exist_ok=True)
        os.chown(host.path(home), number, number)
        for path, content in self._image.files.items():
            host.write(path, content, 0o755 if content.startswith("#!") else 0o644)
        for path in self._image.visible:
            for folder in [path, *path.parents]:
                inside = host.path(str(folder))
                if not inside.stat().st_mode & 0o001:
                    inside.chmod(inside.stat().st_mode | 0o001)


def _is_hidden(path: Path) -> bool:
    """Whether a host would not see a folder: it lies on another file system than /, or where hosts have their own."""
    return path.stat().st_dev != os.stat("/").st_dev or any(path.is_relative_to(own) for own in ("/tmp", "/run"))


def _enter(pid: int, *kinds: str) -> list[str]:
    return ["nsenter", f"--target={pid}", *(f"--{kind}" for kind in kinds), "--"]


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def _last_descendant(pid: int) -> int:
    """The process at the end of a chain of only children: what nsenter and unshare have forked."""
    begun = time.monotonic()
    while time.monotonic() - begun < _START_S:
        children = list(_children(pid))
        if not children:
            return pid
        pid = children[0]
    raise HostError(f"process {pid} keeps forking")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
