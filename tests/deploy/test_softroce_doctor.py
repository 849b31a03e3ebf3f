"""The NIC checks and the verbs part of the probe on real RDMA devices: Soft-RoCE in a throw-away virtual machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep import _C
from hybrid_ep.topology.node_probe import READERS
from tests.prerequisites import require
from tests.sim.softroce_job import STEPS, Step
from tests.sim.softroce_vm import MissingPrerequisite, run_in_vm

pytestmark = pytest.mark.cluster
# Debian's python3-pyverbs, for Debian's Python.
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of tests/sim/softroce_job.py."""
    folder = tmp_path_factory.mktemp("softroce")
    site = folder / "site"  # pyverbs, and nothing else of Debian's Python packages
    site.mkdir()
    (site / "pyverbs").symlink_to(PYVERBS)
    try:
        run_in_vm(f"PYTHONPATH=/job/site {shlex.quote(sys.executable)} -m tests.sim.softroce_job /job", folder)
    except MissingPrerequisite as reason:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(reason))
    return folder


def _statuses(job: Path, step: str) -> dict[str, tuple[str, str]]:
    report: dict[str, Any] = json.loads((job / f"{step}.json").read_text())
    return {result["id"]: (result["status"], result["seen"]) for result in report["results"]}


def test_healthy_devices_pass(job: Path) -> None:
    found = _statuses(job, "healthy")
    assert {check_id: seen for check_id, (status, seen) in found.items() if status != "pass"} == {}
    assert found["nic.mtu"][1] == "4096 bytes"
    assert found["nic.gid"][1] == "RoCE v2 at index 1"
    assert found["nic.uverbs"][1] == "2 devices"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name.replace(" ", "-"))
def test_fault_is_found_by_its_check_alone(job: Path, step: Step) -> None:
    failed = {name: text for name, (status, text) in _statuses(job, step.name).items() if status != "pass"}
    assert list(failed) == [step.check_id]
    assert step.seen in failed[step.check_id]


def test_gpudirect_measurement_writes_memory_that_the_nics_register(job: Path) -> None:
    """Host memory stands in for the GPUs'; where a NIC takes none, that is the answer, and nothing is measured."""
    require(_C.has_verbs, "the verbs transport (libibverbs-dev when the package was built)")
    found = json.loads((job / "gpu_direct.json").read_text())
    refused = found.pop("refused")
    assert refused == "rxe0 port 1 takes no GPU memory: dma-buf: host memory has none; nvidia-peermem: Bad address"
    assert list(found) == ["taken, one way", "taken, both ways"], found
    for written in found.values():
        assert (written["num_wrong"], written["by"]) == (0, "by the verbs transport")
        assert written["gbytes_per_s"] > 0


def test_both_readers_give_the_same_facts(job: Path) -> None:
    said = {name: json.loads((job / f"reader {name}.json").read_text()) for name in READERS}
    reason = said["pyverbs"].get("reason")
    if reason and os.environ.get("CI") != "true":
        pytest.skip(f"pyverbs: {reason} (see ci/system_packages.sh)")
    assert said["pyverbs"] == said["_verbs"]
    for device, name in zip(said["pyverbs"]["devices"], ("rxe0", "rxe1"), strict=True):
        assert device == {"name": name, "dmabuf": False, "ports": [{"port": 1, "active_mtu_bytes": 4096}]}
    assert json.loads((job / "topology.json").read_text())["verbs_reader"] == "pyverbs"


def test_probe_asks_libibverbs(job: Path) -> None:
    topology = json.loads((job / "topology.json").read_text())
    assert "verbs" not in topology["missing"]
    assert [nic["name"] for nic in topology["nics"]] == ["rxe0", "rxe1"]
    for nic in topology["nics"]:
        assert nic["pci_address"] == ""
        assert nic["dmabuf"] is False  # rxe has no ibv_reg_dmabuf_mr
        assert [port["active_mtu_bytes"] for port in nic["ports"]] == [4096]
        assert nic["ports"][0]["state"] == "ACTIVE"
