"""Manifests rebuilt from public ones that work at their source: `hybrid-ep k8s check` finds no error in them.

Its other findings are listed here, so that a rule which becomes stricter fails a test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_ep.cluster.kubernetes.check import check

FOLDER = Path(__file__).resolve().parents[1] / "data" / "manifests" / "public"
FOUND = {
    "coreweave-infiniband": {
        "warning ipc-lock",
        "warning mpijob-limits",
        "warning mpijob-probe",
        "hint mpijob-hostfile",
        "hint mpijob-limits",
        "hint shared-memory",
    },
    "coreweave-nvlink-dra": {
        "warning ipc-lock",
        "warning mpijob-limits",
        "warning mpijob-probe",
        "hint mpijob-hostfile",
        "hint mpijob-limits",
        "hint shared-memory",
    },
    "coreweave-jobset": {"warning ipc-lock", "hint shared-memory"},
    "oke-host-network": {"warning mpijob-limits", "hint mpijob-limits", "hint unknown-kind"},
    "oke-virtual-functions": {"warning mpijob-limits", "hint mpijob-limits"},
    "kubeflow": {
        "warning image-pinned",
        "warning mpijob-limits",
        "warning mpijob-probe",
        "hint mpijob-hostfile",
        "hint mpijob-limits",
        "hint shared-memory",
    },
    "aks": {
        "warning image-pinned",
        "warning ipc-lock",
        "warning mpijob-limits",
        "hint mpijob-hostfile",
        "hint mpijob-limits",
        "hint reference",
        "hint shared-memory",
    },
    "jobset-torchrun": {"warning image-pinned", "hint shared-memory"},
    "llm-d": set(),
    "lws-sglang": set(),
}


def test_each_file_is_listed() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_public_manifests_have_no_error(name: str) -> None:
    result = check([FOLDER / f"{name}.yaml"])
    assert {f"{problem.level.value} {problem.rule}" for problem in result.problems} == FOUND[name]
    assert result.exit_code() == 0
