"""Simulated nodes that a playbook reaches by ssh: each has a GPU platform of its own, healthy or with a fault.

    with Fleet({"node-a": healthy("hgx-h100"), …}, stub) as fleet:
        fleet.write_inventory(names_of({"hgx_h100": ["node-a", …]}), doctor_profile="hgx-h100")
        done = fleet.play("validate.yml")

A node is a host of tests/sim/hosts.py with sshd, a user without privileges, the NVML stub and a recorded or simulated
node below /opt/node, which the doctor reads. One more host is the controller: playbooks, mpirun and report run there
and on the nodes as they would on machines, over a real network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from hybrid_ep.topology.recording import Recording
from tests.sim.hosts import Cluster, Host, HostError
from tests.sim.platforms import healthy
from tests.sim.pods import checkout_image
from tests.sim.scenario import Scenario, build_stub

ROOT = Path(__file__).resolve().parents[2]
USER, HOME = 1000, "/home/hep"
RESULTS = f"{HOME}/results"
_START_S = 20.0
_PLAY_S = 800  # only a broken playbook takes so long
_SSHD = """
Port 22
HostKey /etc/ssh/fleet_host_key
AuthenticationMethods publickey
PermitRootLogin prohibit-password
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""
# What a playbook must know of a simulated node that it need not know of a real one.
SIMULATED = {
    "ansible_python_interpreter": "/usr/bin/python3",  # this machine's user may have another one first
    "doctor_options": ["--sysroot", "/opt/node"],
    "container_environment": {"LD_LIBRARY_PATH": "/opt/stub", "HYBRID_EP_NVML_STUB": "/opt/node/hybrid_ep/nvml.conf"},
}


@dataclass(frozen=True)
class Play:
    """How a playbook ended.

    Attributes:
        code: exit status of ansible-playbook.
        output: all that it printed.
    """

    code: int
    output: str

    def recap(self, node: str) -> dict[str, int]:
        """The counts of a node's line below PLAY RECAP."""
        for line in self.output.partition("PLAY RECAP")[2].splitlines():
            if line.split()[:1] == [node]:
                return {name: int(count) for name, count in (word.split("=") for word in line.split()[2:])}
        return {}


class Fleet:
    """Nodes and a controller on one switch.

    Args:
        nodes: name → what the doctor reads there; None is a node that is switched off.
        stub: folder of the NVML stub.
        files: path → content on every host, as of an image.
    """

    def __init__(
        self, nodes: Mapping[str, Recording | None], stub: Path, files: Mapping[str, str] | None = None
    ) -> None:
        image = checkout_image()
        self.cluster = Cluster(replace(image, files={**image.files, **(files or {})}))
        try:
            self._addresses = {name: self.cluster.reserve_address() for name in ("controller", *nodes)}
            keys = self._make_keys()
            self.controller = self._add("controller", keys)
            self.nodes = {name: self._add(name, keys) for name, node in nodes.items() if node is not None}
            for name, host in self.nodes.items():
                node = nodes[name]
                assert node is not None
                node.facts["hostname"] = name
                node.files["/proc/sys/kernel/random/boot_id"] = f"boot of {name}\n"
                _give_guids(node, name)
                node.write(host.path("/opt/node"))
                host.path("/opt/stub").mkdir()
                host.path("/opt/stub/libnvidia-ml.so.1").write_bytes((stub / "libnvidia-ml.so.1").read_bytes())
                self._start_sshd(host)
            for name in self.nodes:
                self._await_sshd(name)
        except BaseException:
            self.cluster.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cluster.close()

    def write_inventory(self, groups: Mapping[str, Any], **variables: Any) -> None:
        """Writes ~/inventory.yml on the controller: group → its content, and variables of all nodes."""
        content = {"all": {"children": dict(groups), "vars": {**SIMULATED, **variables}}}
        self.controller.write(f"{HOME}/inventory.yml", yaml.safe_dump(content))

    def play(self, playbook: str, *options: str, shown: bool = False, limit_s: float = _PLAY_S) -> Play:
        """Runs a playbook on the controller as the user, with results in ~/results.

        With `shown` its output goes to this process's own, and is not in the result.
        """
        words = [f"{sys.prefix}/bin/ansible-playbook", "-i", f"{HOME}/inventory.yml", playbook]
        words += ["-e", f"preflight_results={RESULTS}", *options]
        process = self.controller.start(
            ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT / "ansible"), *words],
            user=USER,
            variables={"LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
            output=None if shown else subprocess.PIPE,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise HostError(f"{playbook} took more than {limit_s:g} s:\n{(output or b'').decode()}") from None
        return Play(process.returncode, (output or b"").decode())

    def results(self, path: str = "") -> Path:
        """A path in the results folder, as seen from outside."""
        return self.controller.path(f"{RESULTS}/{path}")

    def _make_keys(self) -> dict[str, str]:
        folder = self.cluster.make_folder()
        keys = {}
        for name in ("user", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", folder / name], check=True)
            keys[name], keys[f"{name}.pub"] = (folder / name).read_text(), (folder / f"{name}.pub").read_text()
        return keys

    def _add(self, name: str, keys: Mapping[str, str]) -> Host:
        host = self.cluster.add_host(name, self._addresses[name])
        names = [f"{address} {other}" for other, address in self._addresses.items()]
        host.write("/etc/hosts", "\n".join(["127.0.0.1 localhost", *names, ""]))
        host.write("/etc/ssh/ssh_known_hosts", f"* {keys['host.pub']}")
        for user, home in ((0, "/root"), (USER, HOME)):
            folder = host.path(f"{home}/.ssh")
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
            os.chown(folder, user, user)
            for file, content in (("id_ed25519", keys["user"]), ("authorized_keys", keys["user.pub"])):
                host.write(f"{home}/.ssh/{file}", content, 0o600)
                os.chown(host.path(f"{home}/.ssh/{file}"), user, user)
        host.write("/etc/ssh/fleet_host_key", keys["host"], 0o600)
        host.write("/etc/ssh/fleet_config", _SSHD)
        return host

    def _start_sshd(self, host: Host) -> None:
        host.path("/run/sshd").mkdir(mode=0o755)
        host.start(["/usr/sbin/sshd", "-D", "-f", "/etc/ssh/fleet_config"], output=subprocess.DEVNULL)

    def _await_sshd(self, name: str) -> None:
        begun = time.monotonic()
        while not self.cluster.can_connect(self._addresses[name], 22):
            if time.monotonic() - begun > _START_S:
                raise HostError(f"sshd of {name} does not answer")
            time.sleep(0.05)


def _give_guids(node: Recording, host: str) -> None:
    """GUIDs of NICs that no other host has."""
    for path in node.files:
        if path.endswith("/node_guid"):
            node.files[path] = f"{zlib.crc32(f'{host} {path}'.encode()):08x}:0000:0001\n"


def names_of(groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Group → hosts as an inventory has it."""
    return {group: {"hosts": {host: {} for host in hosts}} for group, hosts in groups.items()}


def main() -> int:
    """Validates four simulated nodes, one of them broken, and copies the results into a folder: FOLDER."""
    out = Path(sys.argv[1])
    broken = Scenario("link down", "hgx-h100", nvml={"gpu.3.link.7.state": 0}).build()
    nodes = {f"node-{letter}": healthy("hgx-h100") for letter in "abc"} | {"node-d": broken}
    with tempfile.TemporaryDirectory() as folder, Fleet(nodes, build_stub(Path(folder))) as fleet:
        fleet.write_inventory(
            names_of({"hgx_h100": list(nodes)}),
            doctor_profile="hgx-h100",
            jobs_ranks_per_node=1,
            jobs_experts=4,
            jobs_bench_options=["--device", "cpu", "--tokens", "64", "--hidden", "512", "--topk", "2", "--runs", "3"],
        )
        for playbook in ("validate.yml", "test_jobs.yml"):  # a person who waits sees what it does, and can end it
            fleet.play(playbook, shown=True, limit_s=1800)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(fleet.results(), out)
    report = json.loads((out / "report" / "report.json").read_text())
    print(f"The report: {out}/report/report.html")
    unfit = [node["name"] for node in report["nodes"] if not node["fit"]]
    if unfit == ["node-d"]:
        return 0
    print(f"node-d is broken, but the report says that these are: {', '.join(unfit) or 'none'}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
