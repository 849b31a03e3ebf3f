"""Scenarios as data, and the one process that runs them all against the NVML stub.

The stub has the soname of the driver's library, so it must not be loaded into a process that also uses a real driver:
`run_all` starts ``python -m tests.sim.scenario`` with the stub first on the loader's path and reads the reports back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybrid_ep.cluster.doctor import Node, Report, Status, examine, load_profile
from hybrid_ep.cluster.doctor.capture import capture
from hybrid_ep.cluster.doctor.command import propose
from hybrid_ep.cluster.doctor.registry import GROUPS
from hybrid_ep.cluster.doctor.rises import Memory
from hybrid_ep.topology.recording import Recording, decode
from tests.sim.platforms import PLATFORMS, bridge_config, healthy, nic_config, profile_of

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = Path(__file__).parent / "scenarios"  # a file for each group of checks, and one for sound nodes
RECORDINGS = Path(__file__).parent / "recordings"  # of real nodes, written by `hybrid-ep doctor --record`
SITE_PROFILES = ROOT / "docs" / "profiles"  # one for each recording, under its name
HEALTHY = (*PLATFORMS, "cpu")
# A simulated node is hundreds of tiny files; they need no disk.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class Scenario:
    """A healthy platform with something broken: one entry of a file in ``scenarios``.

    The doctor must report `finds`, and nothing else, as failed (or `unknown`), with `seen` and `remedy` in its words.

    Attributes:
        nvml: key → value in the stub's language: "7+5" rises by 5 at each reading, "!15" is an error; null removes.
        files: path → content; null removes.
        later: path → content when counters are read again.
        devices, facts, links: path or key → value.
        remove: every file, link and device below these paths.
        acs_on: a bridge's configuration space.
        nic_config: path → settings of a NIC's configuration space.
        driver: False: NVML does not start.
        remembered: counters of the last run, see `memory`.
        site: a profile of the site that extends the platform's.
        source: the public report that shows such a node.
    """

    name: str
    platform: str
    finds: str = ""
    unknown: str | list[str] = ""
    seen: str = ""
    remedy: str = ""
    nvml: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str | None] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    acs_on: str = ""
    links: dict[str, str] = field(default_factory=dict)
    nic_config: dict[str, Any] = field(default_factory=dict)
    driver: bool = True
    remembered: dict[str, Any] = field(default_factory=dict)
    site: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def expected(self) -> dict[str, Status]:
        """Check id → status of every check that does not pass."""
        return {
            **{check_id: Status.FAIL for check_id in self.finds.split()},
            **{check_id: Status.UNKNOWN for check_id in self.unknown_ids},
        }

    @property
    def unknown_ids(self) -> list[str]:
        """The ids in `unknown`, which is a list where it repeats another one by a YAML alias."""
        return (self.unknown if isinstance(self.unknown, str) else " ".join(self.unknown)).split()

    def memory(self) -> Memory | None:
        """The last run's counters, as ``remembered`` has them: hours ago, and check → thing → counter → value."""
        if not self.remembered:
            return None
        counters = {
            check_id: {(thing, name): value for thing, values in things.items() for name, value in values.items()}
            for check_id, things in self.remembered.items()
            if check_id != "hours_ago"
        }
        return Memory(Path("/nowhere"), time.time() - 3600 * float(self.remembered["hours_ago"]), counters)

    def build(self) -> Recording:
        """The healthy platform with this scenario's fault."""
        node = healthy(self.platform)
        for table in (node.files, node.links, node.devices):
            for path in [path for path in table if any(f"{path}/".startswith(f"{gone}/") for gone in self.remove)]:
                del table[path]
        changes = {**self.files, **({self.acs_on: bridge_config(acs_control=0x1D)} if self.acs_on else {})}
        for path, settings in self.nic_config.items():
            changes[path] = nic_config(**{"read_request": 512, "relaxed_ordering": True, **settings})
        tables = (node.nvml, self.nvml), (node.files, changes), (node.devices, self.devices), (node.links, self.links)
        for table, change in tables:
            for key, value in change.items():
                if value is None:
                    del table[key]
                else:
                    table[key] = str(value)
        if str(count := self.nvml.get("gpu_count")).isdigit():
            node.facts["cuda_start"]["devices"] = count
        node.facts |= {key: value for key, value in self.facts.items() if key != "verbs"}
        for device in self.facts.get("verbs", []):
            node.facts["verbs"] = [other for other in node.facts["verbs"] if other["name"] != device["name"]] + [device]
        return node


def load_scenarios() -> list[Scenario]:
    """All scenarios: those of sound nodes last, the others in the order of the checks' groups."""
    files = [SCENARIOS / f"{name}.yaml" for name in (*GROUPS, "sound")]
    return [Scenario(**entry) for file in files if file.exists() for entry in yaml.safe_load(file.read_text())]


def run(scenario: Scenario, root: Path) -> Report:
    """Lays the node out below `root` and examines it; only in a process that found the stub."""
    scenario.build().write(root)
    os.environ["HYBRID_EP_NVML_STUB"] = str(root / "hybrid_ep" / "nvml.conf")
    if not scenario.driver:
        del os.environ["HYBRID_EP_NVML_STUB"]

    def wait(since: float) -> float:
        for path, content in scenario.later.items():
            (root / path.lstrip("/")).write_bytes(decode(content))
        return 1.0

    with closing(Node(root)) as node:
        name, source = propose(node, scenario.memory())
        if scenario.site:
            site = root / "site.yaml"
            site.write_text(yaml.safe_dump({"extends": name, **scenario.site}))
            name = str(site)
        return examine(node, load_profile(name), source, memory=scenario.memory(), wait=wait)


def build_stub(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Compiles the NVML stub into `folder`, for LD_LIBRARY_PATH; `without` hides functions, as in an older driver."""
    headers = sorted(Path(sysconfig.get_paths()["platlib"]).glob("nvidia/*/include/nvml.h"))
    assert headers, "nvml.h comes with nvidia-nvml-dev, which the dev extra installs"
    source = Path(__file__).with_name("nvml_stub.c")
    target = folder / "libnvidia-ml.so.1"
    exports = folder / "exports"
    exports.write_text(f"{{ global: *; local: {'; '.join(without) or 'none_at_all'}; }};\n")
    options = ["-shared", "-fPIC", "-O1", f"-I{headers[0].parent}", "-Wl,-soname,libnvidia-ml.so.1"]
    options.append(f"-Wl,--version-script={exports}")
    subprocess.run(["cc", *options, str(source), "-o", str(target)], check=True)
    return folder


def stub_environment(stub: Path, nvml_conf: Path | None = None) -> dict[str, str]:
    """The environment of a process on a simulated node."""
    found = {**os.environ, "LD_LIBRARY_PATH": str(stub), "PYTHONPATH": str(ROOT)}
    return {**found, "HYBRID_EP_NVML_STUB": str(nvml_conf)} if nvml_conf else found


def run_all(stub: Path, names: Collection[str] = ()) -> dict[str, Report]:
    """Reports by the name of the healthy platform, of the scenario, or "RECORDING as PROFILE".

    `names` limits them to these platforms and scenarios.
    """
    command = [sys.executable, "-m", "tests.sim.scenario", *names]
    done = subprocess.run(command, env=stub_environment(stub), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Report.from_json(report) for name, report in json.loads(done.stdout).items()}


def run_recording(recording: Recording, profile: str, root: Path) -> Report:
    """Examines a recorded node below `root`; only in a process that found the stub."""
    recording.write(root)
    os.environ["HYBRID_EP_NVML_STUB"] = str(root / "hybrid_ep" / "nvml.conf")
    with closing(Node(root)) as node:
        return examine(node, load_profile(profile), "given", wait=lambda since: 1.0)


def main() -> None:
    """Prints the reports of the scenarios that are named.

    Without names: of all, of recordings taken from the healthy ones, and of real nodes' recordings.
    """
    names = sys.argv[1:]
    scenarios = [Scenario(name=name, platform=name) for name in HEALTHY] + load_scenarios()
    reports = {}
    for scenario in [scenario for scenario in scenarios if not names or scenario.name in names]:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            reports[scenario.name] = run(scenario, Path(folder)).to_json()
    if not names:
        reports |= _replayed()
    sys.stdout.write(json.dumps(reports))  # json.dump would write it piece by piece


def _replayed() -> dict[str, Any]:
    """Reports of recordings: of the healthy nodes, and of real ones."""
    reports = {}
    for name in HEALTHY:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            healthy(name).write(Path(folder, "node"))
            os.environ["HYBRID_EP_NVML_STUB"] = str(Path(folder, "node", "hybrid_ep", "nvml.conf"))
            with closing(Node(Path(folder, "node"))) as node:
                examine(node, load_profile(profile_of(name)), "given", wait=lambda since: 1.0)
                recording = capture(node)
            again = run_recording(recording, profile_of(name), Path(folder, "again"))
            reports[f"recorded {name}"] = again.to_json()
    for path in sorted(RECORDINGS.glob("*.json")):
        recording = Recording.load(path)
        for name in ("hgx-h200", str(SITE_PROFILES / f"{path.stem}.yaml")):
            with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                report = run_recording(recording, name, Path(folder))
                reports[f"{path.stem} as {report.profile}"] = report.to_json()
    return reports


if __name__ == "__main__":
    main()
