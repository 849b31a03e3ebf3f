"""Scans what an image's SBOM lists for updates and advisories: scan.py SBOM [--release bookworm]

Two sources, and nothing else is asked. Debian: apt's own lists of packages on this machine (`apt-get update` renews
them), which hold the security suite's fixes. A package that is older there than in the image lacks no fix; one that is
newer there is a finding. PyPI: pip-audit, which asks an advisory service. Where a source does not answer, its packages
are unknown and not sound.

Exit status: 0 = nothing found, 1 = findings, 2 = nothing found, but some packages could not be judged.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

_OURS = ("hybrid-ep",)  # not on PyPI
_LIMIT_S = 600


def packages(sbom: Path) -> Iterator[tuple[str, str, str]]:
    """(type, name, version) of each package URL, as ``("deb", "tini", "0.19.0-1")``."""
    for entry in json.loads(sbom.read_text())["packages"]:
        for reference in entry["externalRefs"]:
            found = re.fullmatch(r"pkg:(\w+)/(?:[^@]*/)?([^/@]+)@([^?]+)(\?.*)?", reference["referenceLocator"])
            if found is None:
                raise ValueError(f"{sbom}: {reference['referenceLocator']!r} is no package URL")
            yield found[1], found[2], unquote(found[3])


def apt_lists(release: str) -> list[str]:
    """Texts of apt's lists of packages of this Debian release: main, updates, security."""
    words = ["apt-get", "indextargets", "--format", "$(CODENAME) $(FILENAME)", "Created-By: Packages"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout.splitlines()
    names = [line.split(" ", 1)[1] for line in listed if re.fullmatch(rf"{release}(-\w+)*", line.split(" ", 1)[0])]
    cat = "/usr/lib/apt/apt-helper"  # the lists may be compressed
    done = [subprocess.run([cat, "cat-file", name], capture_output=True, text=True, timeout=120) for name in names]
    return [found.stdout for found in done if found.returncode == 0]


def newest(lists: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """The newest version of each wanted package."""
    wanted, found = set(wanted), {}
    for text in lists:
        for block in text.split("\n\n"):
            fields = dict(re.findall(r"^(Package|Version): (.*)$", block, re.M))
            name, version = fields.get("Package"), fields.get("Version")
            if name in wanted and version and (name not in found or is_newer(version, found[name])):
                found[name] = version
    return found


def is_newer(version: str, than: str) -> bool:
    """By dpkg's order."""
    return subprocess.run(["dpkg", "--compare-versions", version, "gt", than], check=False).returncode == 0


def scan_debian(installed: dict[str, str], lists: list[str]) -> tuple[list[str], list[str]]:
    """(findings, unknown) of Debian's packages."""
    if installed and not lists:
        return [], [f"{len(installed)} Debian packages: apt has no lists of their release here"]
    there = newest(lists, installed)
    findings = [
        f"{name} {version}: Debian has {there[name]}"
        for name, version in installed.items()
        if name in there and there[name] != version and is_newer(there[name], version)
    ]
    gone = [name for name in installed if name not in there]
    return findings, [f"{', '.join(gone)}: not in apt's lists"] if gone else []


def scan_python(installed: dict[str, str]) -> tuple[list[str], list[str]]:
    """(findings, unknown) of PyPI's packages."""
    if not installed:
        return [], []
    if shutil.which("pip-audit") is None:
        return [], [f"{len(installed)} Python packages: pip-audit is not installed"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        # Advisories are of public versions: 2.13.0 for 2.13.0+cpu.
        file.writelines(f"{name}=={version.partition('+')[0]}\n" for name, version in installed.items())
        file.flush()
        words = ["pip-audit", "--requirement", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    try:
        answers = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return [], [f"{len(installed)} Python packages: pip-audit gave no answer: {said[:200]}"]
    findings = [
        f"{answer['name']} {answer['version']}: {vuln['id']}, fixed in {', '.join(vuln['fix_versions']) or 'none'}"
        for answer in answers
        for vuln in answer.get("vulns", [])
    ]
    answered = {answer["name"].lower(): answer.get("skip_reason") for answer in answers}
    skipped: dict[str, list[str]] = {}
    for name in installed:
        reason = answered.get(name.lower(), "pip-audit left it out")
        if reason is not None:  # which ends in ": NAME (VERSION)"
            skipped.setdefault(reason.partition(f": {name} (")[0], []).append(name)
    return findings, [f"{', '.join(names)}: {reason}" for reason, names in skipped.items()]


def main() -> int:
    """Scans, and says what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sbom", type=Path)
    parser.add_argument("--release", default="bookworm", help="Debian's, of the image")
    given = parser.parse_args()
    listed = list(packages(given.sbom))
    of_type = {kind: {name: version for found, name, version in listed if found == kind} for kind in ("deb", "pypi")}
    python = {name: version for name, version in of_type["pypi"].items() if name not in _OURS}
    debian = scan_debian(of_type["deb"], apt_lists(given.release))
    results = (
        ("Debian packages", len(of_type["deb"]), debian),
        ("Python packages", len(python), scan_python(python)),
    )
    for what, number, (findings, unknown) in results:
        print(f"{number} {what}: {len(findings)} findings{', not all are known' if unknown else ''}")
        for label, lines in (("FOUND", findings), ("unknown", unknown)):
            for line in lines:
                print(f"  {label} {line}")
    others = [f"{name} {version}" for kind, name, version in listed if kind not in of_type]
    if others:
        print(f"not scanned: {', '.join(others)}")
    if any(findings for _, _, (findings, _) in results):
        return 1
    return 2 if any(unknown for _, _, (_, unknown) in results) else 0


if __name__ == "__main__":
    sys.exit(main())
