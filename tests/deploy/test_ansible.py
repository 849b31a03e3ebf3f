"""The playbooks, run: five nodes reached by ssh, of which one has faults and one is switched off; and this machine.

The nodes are trays of an NVL72 (tests/sim/fleet.py): what the doctor reads there is simulated; ssh, mpirun, the ranks
and the files that `configure.yml` writes are real.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_ep.cluster.validation.record import Inventory, begin_validation
from hybrid_ep.cluster.validation.results import read_inventory
from tests.prerequisites import require, require_programs
from tests.sim.fleet import HOME, ROOT, SIMULATED, Fleet, Play, names_of
from tests.sim.hosts import missing_prerequisites
from tests.sim.platforms import healthy
from tests.sim.scenario import Scenario, build_stub

pytestmark = pytest.mark.timeout(1200)
FIT = ("node-a", "node-b", "node-c")
FAULTS = {"nvlink.links", "host.memlock"}
PROFILE = f"{HOME}/site/tray.yaml"  # on the controller only
# The domain is four trays of four GPUs, not 18: a profile of the site says so.
SITE = {"extends": "gb200-nvl72", "mnnvl": {"domain_gpus": 16, "imex": True}}
# Rows cross the network of one machine, by the torch engine: a share of the NICs' rate that this reaches.
SITE |= {"bandwidth": {"of_nics": dict.fromkeys(("fabric dispatch", "fabric combine"), 1e-7)}}
LINK = "--runs 20 --hidden 128 --topk 2"
BENCH = "--device cpu --tokens 16 --hidden 128 --topk 2 --runs 1 --warmups 1"
GROUPS = {"gb200_nvl72": (*FIT, "node-d", "node-e"), "domain_rack_1": (*FIT, "node-d"), "domain_rack_2": ("node-e",)}
# Nothing of this machine may be changed from within a node: what would reach the kernel notes that it was called.
_NOTE = '#!/bin/sh\necho "$(basename "$0") $*" >>/run/called\n'
_SYSTEMCTL = """#!/bin/sh
# Enough of systemctl for Ansible's module; a unit's state is a file.
state=/run/units; unit=$2
case $1 in
  show) echo "Id=$unit"; echo LoadState=loaded
    if [ -e "$state/$unit.active" ]; then echo ActiveState=active; else echo ActiveState=inactive; fi ;;
  is-enabled) if [ -e "$state/$unit.enabled" ]; then echo enabled; else echo disabled; exit 1; fi ;;
  start | restart | try-restart) mkdir -p "$state"; touch "$state/$unit.active"; echo "systemctl $*" >>/run/called ;;
  enable) mkdir -p "$state"; touch "$state/$unit.enabled" ;;
esac
"""
# Enough of docker: what stands before the image's name are options of run.
_DOCKER = """#!/bin/sh
echo "docker $*" >>/tmp/docker.log
case $1 in
  pull) [ -e /tmp/pulled ] || { touch /tmp/pulled; echo "Status: Downloaded newer image for $2"; }; exit ;;
  run) while [ "${1#hybrid-ep:test}" = "$1" ]; do shift; done; shift; exec "$@" ;;
esac
"""
FILES = {
    "/usr/local/bin/docker": _DOCKER,
    "/usr/sbin/modprobe": _NOTE,
    "/usr/sbin/update-initramfs": _NOTE,
    "/usr/bin/systemctl": _SYSTEMCTL,
    "/usr/bin/systemd-tmpfiles": _NOTE,
    "/usr/sbin/dcb": _NOTE,
    "/usr/lib/systemd/system/jobs-of-a-site.service": "[Service]\nExecStart=/bin/true\n",
}
USED = ("HOSTS", "INVENTORY", "OPTIONS", "PROFILE", "SIMULATE")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require(not missing_prerequisites(), ", ".join(missing_prerequisites()))
    require_programs("sshd", "ssh-keygen", "/usr/bin/mpirun", "ansible-playbook")
    broken = Scenario(
        "broken",
        "gb200-nvl72",
        nvml={"gpu.3.link.7.state": 0},
        files={
            "/proc/self/limits": "Max locked memory         65536                65536                bytes     \n"
            "Max open files            1048576              1048576              files     \n"
        },
    )
    nodes = {name: healthy("gb200-nvl72") for name in FIT} | {"node-d": broken.build(), "node-e": None}
    with Fleet(nodes, build_stub(tmp_path_factory.mktemp("stub")), FILES) as fleet:
        fleet.controller.write(PROFILE, yaml.safe_dump(SITE))
        write_inventory(fleet)
        yield fleet


def write_inventory(fleet: Fleet, **groups: tuple[str, ...]) -> None:
    fleet.write_inventory(
        names_of({**GROUPS, **groups}),
        doctor_profile=PROFILE,
        jobs_ranks_per_node=1,
        jobs_experts=4,
        jobs_bench_options=BENCH.split(),
        jobs_link_options=LINK.split(),
        jobs_poll_s=1,
        jobs_limit_s=120,
        mnnvl_address="2001:db8::{{ inventory_hostname[-1] }}",
    )


@pytest.fixture(scope="module")
def validated(fleet: Fleet) -> Play:
    return fleet.play("validate.yml")


@pytest.fixture(scope="module")
def tested(fleet: Fleet, validated: Play) -> Play:
    """test_jobs.yml, where node-b takes another address for node-c's, so that it can start no job there."""
    hosts = fleet.nodes["node-b"].path("/etc/hosts")
    lines = [line for line in hosts.read_text().splitlines() if not line.endswith(" node-c")]
    hosts.write_text("\n".join([*lines, f"{fleet.cluster.reserve_address()} node-c", ""]))
    # Two rounds of three: node-b with node-c, node-c with node-a.
    return fleet.play("test_jobs.yml", "-e", "nvlink_bandwidth=false", "-e", "jobs_rounds=2")


def findings(fleet: Fleet, folder: str = "results") -> dict[str, Any]:
    """Host → check → status of what did not pass; or why there is no report."""
    found: dict[str, Any] = {}
    for path in sorted(fleet.controller.path(f"{HOME}/{folder}/nodes").glob("*.json")):
        report = json.loads(path.read_text())
        wrong = {item["id"]: item["status"] for item in report.get("results", []) if item["status"] != "pass"}
        found[path.stem] = report.get("unreachable") or wrong
    return found


def jobs(fleet: Fleet) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in fleet.results("jobs").glob("*.json")}


@pytest.mark.cluster
def test_validation_names_exactly_the_broken_nodes(fleet: Fleet, validated: Play) -> None:
    found = findings(fleet)
    assert [found.pop(node) for node in FIT] == [{}, {}, {}], validated.output
    assert found.pop("node-d") == dict.fromkeys(FAULTS, "fail")
    assert "node-e" in found.pop("node-e")
    assert found == {}
    assert validated.code != 0
    assert [validated.recap(node)["failed"] for node in (*FIT, "node-d", "node-e")] == [0, 0, 0, 1, 1]
    said = " ".join(validated.output.split())
    assert "GPU 3: 17 of 18 links up, down: 7" in said
    assert "Reset the GPUs and restart the fabric manager" in said  # the remedy
    assert "3 of 5 nodes are fit" in said


@pytest.mark.cluster
def test_validation_changes_nothing(validated: Play) -> None:
    assert [validated.recap(node)["changed"] for node in GROUPS["gb200_nvl72"]] == [0] * 5


@pytest.mark.cluster
def test_cross_node_checks_ran_once_on_the_controller(fleet: Fleet, validated: Play) -> None:
    compared = json.loads(fleet.results("compare.json").read_text())
    assert compared["host"] == "4 nodes"  # node-e gave no report
    assert {item["status"] for item in compared["results"]} == {"pass"}
    domains = {name: job["status"] for name, job in jobs(fleet).items() if name.startswith("domain")}
    assert domains.items() >= {("domain-rack_1-cliques", "pass"), ("domain-rack_2-cliques", "unknown")}


@pytest.mark.cluster
def test_check_mode_finds_the_same(fleet: Fleet, validated: Play) -> None:
    checked = fleet.play("validate.yml", "--check", "-e", f"preflight_results={HOME}/checked")
    expected, found = findings(fleet), findings(fleet, "checked")
    assert all("no connection" in each.pop("node-e") for each in (expected, found))  # ssh knows more than one reason
    assert found == expected
    assert checked.code == validated.code
    assert [checked.recap(node)["changed"] for node in GROUPS["gb200_nvl72"]] == [0] * 5


@pytest.mark.cluster
def test_jobs_ran_on_the_fit_nodes_only(fleet: Fleet, tested: Play) -> None:
    ran = {name: job for name, job in jobs(fleet).items() if not name.endswith("-cliques")}
    assert {host for job in ran.values() for host in job["hosts"]} == set(FIT), tested.output
    pairs = [sorted(job["hosts"]) for job in ran.values() if job["kind"] == "pair"]
    assert sorted(pairs) == [["node-a", "node-c"], ["node-b", "node-c"]]
    whole, domain = ran.pop("all"), ran.pop("domain-rack_1")
    assert [sorted(job["hosts"]) for job in (whole, domain)] == [list(FIT)] * 2, tested.output
    assert whole["status"] == "pass", tested.output
    assert {metric["name"] for metric in whole["metrics"]} >= {"dispatch", "combine"}
    # Over NVLink alone: every rank is asked for the cuda engine, which these nodes do not have.
    assert "engine is 'cuda', but" in domain["reason"], tested.output
    assert {job["status"] for job in ran.values() if job["kind"] == "nic"} <= {"skipped", "fail"}
    assert "node-d is left out: " in tested.output


@pytest.mark.cluster
def test_what_crosses_between_nodes_is_held_to_the_rate_of_the_nics(fleet: Fleet, tested: Play) -> None:
    """Dispatch and combine of a pair and of all, and the link of each pair alone, by rail."""
    found = jobs(fleet)
    links = {name: job["status"] for name, job in found.items() if job["kind"] == "link"}
    assert links == {"link-node-c-node-a": "pass", "link-node-b-node-c": "fail"}, tested.output
    assert found["link-node-c-node-a"]["reason"] == "by tcp"
    assert [metric["name"] for metric in found["link-node-c-node-a"]["metrics"]] == ["write", "write rail0"]
    report = {job["name"]: job for job in json.loads(fleet.results("report/report.json").read_text())["jobs"]}
    for name in ("pair-node-c-node-a", "all"):
        floors = {metric["name"]: metric["least"] for metric in report[name]["metrics"]}
        judged = {f"fabric {call}{rail}" for call in ("dispatch", "combine") for rail in ("", " rail0")}
        assert {metric for metric, least in floors.items() if least == pytest.approx(5e-6)} == judged
        assert "of the 50 GB/s of a GPU's NICs, profile tray" in report[name]["expected"]


@pytest.mark.cluster
def test_failed_pair_does_not_stop_the_others(fleet: Fleet, tested: Play) -> None:
    ended = {name: job["status"] for name, job in jobs(fleet).items() if job["kind"] == "pair"}
    (failed,) = [name for name, status in ended.items() if status != "pass"]
    assert failed == "pair-node-b-node-c"
    assert sorted(ended.values()) == ["fail", "pass"]
    job = jobs(fleet)[failed]
    assert "node-c" in fleet.results(job["log"]).read_text()
    assert tested.recap("node-b")["rescued"] >= 1
    assert failed in tested.output


@pytest.mark.cluster
def test_report_holds_it_all(fleet: Fleet, tested: Play) -> None:
    report = json.loads(fleet.results("report/report.json").read_text())
    text = json.dumps(report)
    assert all(name in text for name in ("pair-node-b-node-c", "nvlink.links", "node-e", "domain-rack_2-cliques"))
    assert tested.code != 0
    for name in ("report.html", "report.md", "junit.xml"):
        assert fleet.results(f"report/{name}").stat().st_size > 1000


@pytest.mark.cluster
def test_empty_group_is_an_error_before_any_node_is_asked(fleet: Fleet, validated: Play) -> None:
    before = fleet.results("inventory.json").read_text()
    write_inventory(fleet, domain_rack_3=())
    try:
        done = fleet.play("validate.yml")
    finally:
        write_inventory(fleet)
    assert done.code != 0
    assert "''domain_rack_3'' is empty: add its hosts" in " ".join(done.output.split())
    assert "Ask the doctor" not in done.output
    assert fleet.results("inventory.json").read_text() == before


def write_wheel(path: Path) -> None:
    """A wheel of this checkout: its files and what its installation here says of it."""
    distribution = importlib.metadata.distribution("hybrid-ep")
    info = f"hybrid_ep-{distribution.version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        names = [name for name in (ROOT / "hybrid_ep").rglob("*") if name.is_file() and "__pycache__" not in name.parts]
        for name in names:
            wheel.write(name, str(name.relative_to(ROOT)))
        wheel.writestr(f"{info}/METADATA", str(distribution.metadata))
        wheel.writestr(f"{info}/entry_points.txt", distribution.read_text("entry_points.txt") or "")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{name.filename},,\n" for name in wheel.filelist))


@pytest.mark.cluster
def test_wheel_and_image_are_installed_when_asked_and_then_used(fleet: Fleet, tmp_path: Path) -> None:
    """node-a takes a wheel, node-b an image; the second time nothing changes, and both give a report."""
    name = f"hybrid_ep-{importlib.metadata.version('hybrid-ep')}-py3-none-any.whl"
    write_wheel(tmp_path / name)
    fleet.controller.path(f"{HOME}/{name}").write_bytes((tmp_path / name).read_bytes())
    # torch and the other packages are those of this machine's virtual environment.
    packages = {"PYTHONPATH": sysconfig.get_paths()["purelib"], **SIMULATED["container_environment"]}
    wheel = {"container_wheel": f"{HOME}/{name}", "container_pip_options": ["--no-deps"]}
    wheel |= {"container_python": f"{sys.prefix}/bin/python", "container_environment": packages}
    images = {"container_image": "hybrid-ep:test", "container_doctor_image": "hybrid-ep:test-doctor"}
    hosts = {"node-a": wheel, "node-b": images}
    groups = {"gb200_nvl72": {"hosts": hosts}, "domain_rack_1": {"hosts": dict.fromkeys(hosts)}}
    fleet.write_inventory(groups, doctor_profile=PROFILE)
    try:
        plays = [fleet.play("configure.yml", "--tags", "install") for _ in range(2)]
        used = fleet.play("validate.yml", "-e", f"preflight_results={HOME}/used")
    finally:
        write_inventory(fleet)
    assert [play.code for play in plays] == [0, 0], plays[0].output + plays[1].output
    assert [play.recap(node)["changed"] > 0 for play in plays for node in hosts] == [True, True, False, False]
    found = findings(fleet, "used")
    assert found == {"node-a": {}, "node-b": {}}, used.output
    log = fleet.nodes["node-b"].path("/tmp/docker.log").read_text()
    assert "docker run --rm --interactive --pull=never --network=host" in log
    doctor = r"hybrid-ep:test-doctor hybrid-ep doctor --json --sysroot /opt/node --profile - --asked-at \d+\.\d+\n"
    assert re.search(doctor, log), log
    assert log.count("docker pull hybrid-ep:test\n") == log.count("docker pull hybrid-ep:test-doctor\n") == 2


@pytest.mark.parametrize("path", sorted((ROOT / "ansible" / "inventories").glob("*.yml")), ids=lambda path: path.stem)
def test_example_inventory_is_one_that_preflight_takes(path: Path, tmp_path: Path) -> None:
    program = f"{sys.prefix}/bin/ansible-inventory"
    done = subprocess.run([program, "-i", path, "--list"], cwd=ROOT / "ansible", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    variables = tree.pop("_meta")["hostvars"]

    def members(group: str) -> list[str]:
        entry = tree.get(group, {})
        return [*entry.get("hosts", []), *(host for child in entry.get("children", []) for host in members(child))]

    platforms = {host: known.get("doctor_profile", "") for host, known in variables.items()}
    groups = {group: members(group) for group in tree}
    begin_validation(tmp_path / "results", Inventory("example", list(variables), groups, platforms))
    assert len(read_inventory(tmp_path / "results").hosts) >= 4
    defaults = "".join(file.read_text() for file in (ROOT / "ansible" / "roles").glob("*/defaults/main.yml"))
    for name in {name for known in variables.values() for name in known if not name.startswith("ansible_")}:
        assert f"\n{name}:" in defaults, f"{name} is no knob of a role"


def configure(fleet: Fleet, *options: str) -> Play:
    settings = {"nic_sysctl": {"net.ipv4.tcp_mtu_probing": 1}, "nvlink_services": ["nvidia-persistenced"]}
    # A setting of the node's own network namespace; gdr.ibgda and others are asked of the simulated node.
    settings |= {"nic_interfaces": ["eth0"], "nic_mtu": 1400, "nic_pfc_priority": 3}
    settings |= {"host_units": ["jobs-of-a-site", "absent"], "host_time_service": "chrony"}
    settings["host_restart_units"] = True
    settings["nvlink_verify"] = ["gpu.persistence", "nvlink.fabric_state"]
    words = ["-u", "root", "--tags", "host", "--limit", "node-a,node-d", "-e", json.dumps(settings), *options]
    return fleet.play("configure.yml", *words)


def probing(fleet: Fleet, node: str) -> str:
    process = fleet.nodes[node].start(["cat", "/proc/sys/net/ipv4/tcp_mtu_probing"], output=subprocess.PIPE)
    return process.communicate()[0].decode().strip()


def mtu(fleet: Fleet, node: str) -> str:
    process = fleet.nodes[node].start(["ip", "-json", "link", "show", "dev", "eth0"], output=subprocess.PIPE)
    return str(json.loads(process.communicate()[0])[0]["mtu"])


@pytest.mark.cluster
def test_configuration_is_opt_in_verified_and_changes_nothing_twice(fleet: Fleet) -> None:
    node = fleet.nodes["node-a"]
    written = [
        "/etc/modules-load.d/hybrid-ep.conf",
        "/etc/modprobe.d/hybrid-ep-nic.conf",
        "/etc/security/limits.d/90-hybrid-ep.conf",
        "/etc/sysctl.d/90-hybrid-ep.conf",
        "/etc/modprobe.d/hybrid-ep-mnnvl.conf",
        "/etc/nvidia-imex/nodes_config.cfg",
        "/etc/tmpfiles.d/hybrid-ep.conf",
        "/etc/systemd/system/jobs-of-a-site.service.d/90-hybrid-ep.conf",
        "/usr/local/sbin/hybrid-ep-interface",
        "/etc/udev/rules.d/90-hybrid-ep.rules",
    ]
    assert not any(node.path(path).exists() for path in written)
    assert probing(fleet, "node-a") == "0"

    foretold = configure(fleet, "--check", "--limit", "node-a")
    assert foretold.recap("node-a")["changed"] >= len(written), foretold.output
    assert not any(node.path(path).exists() for path in written)
    assert not node.path("/run/called").exists()

    first = configure(fleet)
    assert [first.recap(name)["failed"] for name in ("node-a", "node-d")] == [0, 1], first.output
    assert "host.memlock: " in first.output  # node-d: written, but the doctor is not content
    assert all(node.path(path).exists() for path in written)
    assert probing(fleet, "node-a") == "1"
    assert 'PeerMappingOverride=1;"' in node.path(written[1]).read_text()
    assert node.path(written[5]).read_text().split() == [f"2001:db8::{name[-1]}" for name in GROUPS["domain_rack_1"]]
    called = node.path("/run/called").read_text().splitlines()
    assert "modprobe --all nvidia_peermem" in called
    assert "update-initramfs -u" in called
    assert "systemctl start nvidia-persistenced" in called
    assert "systemctl start chrony" in called
    assert "systemctl try-restart jobs-of-a-site" in called
    assert "systemd-tmpfiles --create /etc/tmpfiles.d/hybrid-ep.conf" in called
    assert "LimitMEMLOCK=infinity" in node.path(written[7]).read_text()
    assert not node.path("/etc/systemd/system/absent.service.d").exists()
    assert mtu(fleet, "node-a") == "1400"
    assert [line for line in called if line.startswith("dcb")] == [
        "dcb pfc set dev eth0 prio-pfc all:off 3:on",
        "dcb app replace dev eth0 dscp-prio 26:3",
    ]

    second = configure(fleet, "--limit", "node-a")
    assert second.recap("node-a")["changed"] == 0, second.output
    assert node.path("/run/called").read_text().splitlines() == called


def foretell_domain(inventory: Path, node: str) -> str:
    """What the mnnvl role would do on a node, asked of this machine."""
    words = ["-i", str(inventory), node, "--connection=local", "--check", "--diff"]
    words += ["-e", f"ansible_python_interpreter={sys.executable}"]
    words += ["-m", "include_role", "-a", "name=mnnvl tasks_from=configure"]
    done = subprocess.run(
        [f"{sys.prefix}/bin/ansible", *words], cwd=ROOT / "ansible", capture_output=True, text=True, timeout=120
    )
    return " ".join((done.stdout + done.stderr).split())


def test_node_that_is_listed_for_imex_without_an_ip_address_is_named(tmp_path: Path) -> None:
    hosts = {"tray-1": {"mnnvl_address": "192.0.2.1"}, "tray-2": {"ansible_host": "2001:db8::2"}, "tray-3": {}}
    hosts |= {"tray-4": {"mnnvl_address": "192.0.2"}}
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(yaml.safe_dump({"domain_1": {"hosts": hosts}}))
    said = foretell_domain(inventory, "tray-1")
    assert "tray-3 is tray-3 in nodes_config.cfg, which wants IP addresses: set its mnnvl_address" in said
    assert "tray-4 is 192.0.2 in nodes_config.cfg" in said
    assert [f"{name} is " in said for name in ("tray-1", "tray-2")] == [False, False]
    assert "+192.0.2.1" not in said  # nothing is written


def test_example_of_a_domain_lists_ip_addresses() -> None:
    said = foretell_domain(ROOT / "ansible" / "inventories" / "gb200-nvl72.yml", "rack-2-tray-18")
    assert " ".join(f"+198.51.100.{tray}" for tray in range(1, 19)) in said


def make_validate(out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in USED}
    return subprocess.run(
        ["ci/validate.sh", f"{sys.prefix}/bin"],
        env={**environment, "OUT": str(out), **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("", "set PROFILE; allowed: "),
        ("h100", "profile 'h100' is not known; allowed: "),
        ("gpu-server", "set PROFILE to a YAML file that extends it by gpu.count"),
        ("gone.yaml", "profile gone.yaml cannot be read"),
    ],
)
def test_make_validate_refuses_hosts_of_which_it_knows_too_little(tmp_path: Path, profile: str, said: str) -> None:
    done = make_validate(tmp_path / "out", HOSTS="node-a node-b", PROFILE=profile)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


def test_make_validate_on_this_machine(tmp_path: Path) -> None:
    done = make_validate(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("This ")  # what it is going to do
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert "node-localhost" in json.dumps(report)
    assert done.stdout.rstrip().endswith(f"{tmp_path}/out/report/report.html")
