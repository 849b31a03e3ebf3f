"""Every healthy node passes, and every fault is found by exactly the check that is meant for it.

Damaged nodes give findings, too: every kind of file of every simulated node gets every kind of damage
(tests/sim/damage.py); no check raises an exception, and nothing hangs.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from hybrid_ep.cluster.doctor import Report, Status, examine, load_profile
from hybrid_ep.cluster.doctor.capture import ReplayedNode
from hybrid_ep.cluster.doctor.model import Severity
from hybrid_ep.cluster.doctor.registry import all_checks
from tests.sim.damage import FILE_DAMAGES, PLACE_DAMAGES
from tests.sim.document import document
from tests.sim.platforms import PLATFORMS, profile_of
from tests.sim.scenario import HEALTHY, MEMORY, ROOT, Scenario, build_stub, load_scenarios, run_all
from tests.sim.scenario import SCENARIOS as SCENARIO_FILES

SCENARIOS = load_scenarios()
Reports = dict[str, Report]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Reports of all scenarios, from one process on the stub."""
    return run_all(build_stub(tmp_path_factory.mktemp("stub")))


def _not_passed(report: Report) -> dict[str, Status]:
    return {result.id: result.status for result in report.results if result.status is not Status.PASS}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_node_raises_no_alarm(reports: Reports, name: str) -> None:
    report = reports[name]
    assert _not_passed(report) == {}
    assert report.profile == profile_of(name)
    assert report.exit_code == 0


@pytest.mark.parametrize("name", HEALTHY)
def test_recording_says_what_the_node_said(reports: Reports, name: str) -> None:
    seen = {result.id: (result.status, result.seen) for result in reports[name].results}
    again = {result.id: (result.status, result.seen) for result in reports[f"recorded {name}"].results}
    # A recording holds no configuration space: that would make it large, and only root could have read it.
    for check_id in {"host.acs", "nic.pcie_settings"} & set(seen):
        is_guest = name in PLATFORMS and PLATFORMS[name].guest  # where both pass unread
        assert again.pop(check_id)[0] is (Status.PASS if is_guest else Status.UNKNOWN)
        seen.pop(check_id)
    assert again == seen


REPLAYED = [Scenario(name, name) for name in HEALTHY]
REPLAYED += [each for each in SCENARIOS if each.nvml and not (each.later or each.remembered or each.site)]


@pytest.mark.parametrize("scenario", REPLAYED, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_replay_without_a_driver_says_what_nvml_said(reports: Reports, scenario: Scenario) -> None:
    """The stub stands for a driver; a replay reads the same answers by itself."""
    recording, report = scenario.build(), reports[scenario.name]
    with TemporaryDirectory(dir=MEMORY) as folder:
        recording.write(Path(folder))
        with closing(ReplayedNode(Path(folder), recorded=recording.nvml)) as node:
            again = examine(node, load_profile(report.profile), report.profile_source, wait=lambda since: 1.0)
    seen, expected = (
        # A function of the driver gives several of these counters at once, so the stub lets them rise more often.
        [(each.id, each.status, "" if each.id == "gpu.errors" else each.seen) for each in results]
        for results in (again.results, report.results)
    )
    assert seen == expected
    assert {**again.facts, "unix_time_s": 0} == {**report.facts, "unix_time_s": 0}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_fault_is_found_by_its_check_alone(reports: Reports, scenario: Scenario) -> None:
    report = reports[scenario.name]
    assert _not_passed(report) == scenario.expected
    results = [result for result in report.results if result.id in scenario.expected]
    assert scenario.seen in "; ".join(result.seen for result in results)
    assert scenario.remedy in "; ".join(result.remedy for result in results)
    errors = {result.status for result in results if result.severity is Severity.ERROR}
    assert report.exit_code == (1 if Status.FAIL in errors else 2 if errors else 0)


# The recording is older than these checks.
_OLDER = {
    "host.nofile": "/proc/self/limits has no line for it",
    "host.cpus": "/sys/devices/system/cpu/present: No such file or directory",
    "driver.cuda_start": "cuda_start init: not recorded",
}


def test_real_node_has_the_faults_that_its_profile_sees(reports: Reports) -> None:
    """Four of eight GPUs, no NIC, in a virtual machine: named once each; what needs a NIC is unknown, not passed."""
    report = reports["h200-4gpu-vm as hgx-h200"]
    failed = {result.id for result in report.results if result.status is Status.FAIL}
    assert failed == {"gpu.count", "nic.count", "gdr.ibgda", "host.clock"}
    unknown = {result.id: result.seen for result in report.results if result.status is Status.UNKNOWN}
    for check_id, seen in _OLDER.items():
        assert unknown.pop(check_id) == seen
    assert set(unknown.values()) == {"no NIC to examine, see nic.count"}
    assert {check_id.partition(".")[0] for check_id in unknown} == {"nic", "affinity", "gdr"}
    errors = next(result for result in report.results if result.id == "nvlink.errors")
    assert errors.seen == "288 counters in 1.0 s: no fault; crc_data by 2 at most, which is normal"
    assert report.exit_code == 1


def test_real_node_is_fit_by_its_sites_profile(reports: Reports) -> None:
    report = reports["h200-4gpu-vm as h200-4gpu-vm"]
    unknown = {name: status for name, status in _not_passed(report).items() if name not in _OLDER}
    assert unknown == {"host.clock": Status.FAIL}  # a warning
    assert not [result for result in report.results if result.shown_as == "fail"]


def test_page_has_a_row_for_each_scenario() -> None:
    page = document()
    for scenario in SCENARIOS:
        assert f"| {scenario.name} | {scenario.platform} | " in page


def test_each_scenario_stands_in_the_file_of_its_first_check() -> None:
    for file in SCENARIO_FILES.glob("*.yaml"):
        for entry in yaml.safe_load(file.read_text()):
            first = next(iter(Scenario(**entry).expected), "sound.")
            assert (file.stem, entry["name"]) == (first.partition(".")[0], entry["name"])


def test_there_are_many_sound_nodes(reports: Reports) -> None:
    sound = [*HEALTHY, *(scenario.name for scenario in SCENARIOS if not scenario.expected)]
    assert len(sound) >= 100
    assert [name for name in sound if _not_passed(reports[name])] == []


def test_every_check_has_been_seen_failing() -> None:
    """A check that no scenario can make fail may compare a threshold with the wrong field."""
    found = {check_id for scenario in SCENARIOS for check_id in scenario.finds.split()}
    assert found == {check.id for check in all_checks()}


def test_matrix_of_faults_and_checks(reports: Reports, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the matrix, one line for each scenario."""
    table = Table("scenario", "platform", "check", "result", "seen", title="faults × checks")
    for scenario in SCENARIOS:
        for result in reports[scenario.name].results:
            if result.status is not Status.PASS:
                table.add_row(scenario.name, scenario.platform, result.id, result.shown_as, result.seen)
    text = io.StringIO()
    Console(file=text, width=150).print(table)
    with capsys.disabled():
        print("\n" + text.getvalue())
    assert table.row_count == sum(len(scenario.expected) for scenario in SCENARIOS)
    assert sum(bool(scenario.finds) for scenario in SCENARIOS) >= 20


def test_stub_is_the_library_that_the_loader_knows(tmp_path: Path) -> None:
    """The name inside the stub is what `_nvml` needs at run time."""
    content = (build_stub(tmp_path) / "libnvidia-ml.so.1").read_bytes()
    assert b"libnvidia-ml.so.1\0" in content


@pytest.mark.parametrize(("seed", "num_nodes"), [(20261123, 24), pytest.param(20261124, 100, marks=pytest.mark.slow)])
def test_no_damage_crashes_the_doctor(seed: int, num_nodes: int) -> None:
    command = [sys.executable, "-m", "tests.sim.damage", str(seed), str(num_nodes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nodes"] >= num_nodes
    assert found["pairs"] >= 10 * min(num_nodes, 80)  # all that there are
    assert found["crashes"] == []
    assert {*FILE_DAMAGES, *PLACE_DAMAGES, "NVML", "fact", "silent"} <= set(found["damages"])
    assert set(found["statuses"]) >= {"pass", "fail", "unknown"}
