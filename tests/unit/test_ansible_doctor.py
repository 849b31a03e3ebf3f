"""Ansible's module for the doctor, without a fleet: what it asks on the node, and what the controller adds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ansible", reason="ansible-core, which needs Python 3.11")
ANSIBLE = Path(__file__).resolve().parents[2] / "ansible"
REPORT = {"status": "pass", "results": [], "facts": {"unix_time_s": 5.0}}


def asked(folder: Path, **arguments: Any) -> list[str]:
    """The words with which the module calls the doctor."""
    doctor = folder / "doctor"
    doctor.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{folder}/words\necho '{json.dumps(REPORT)}'\n")
    doctor.chmod(0o755)
    given = json.dumps({"ANSIBLE_MODULE_ARGS": {"command": [str(doctor)], **arguments}})
    words = [sys.executable, str(ANSIBLE / "library" / "hybrid_ep_doctor.py")]
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["report"] == REPORT
    return (folder / "words").read_text().split()


def test_node_is_told_when_it_was_asked(tmp_path: Path) -> None:
    assert asked(tmp_path, asked_at=1234.5) == ["doctor", "--json", "--asked-at", "1234.5"]
    assert asked(tmp_path) == ["doctor", "--json"]


@pytest.mark.parametrize("kept", [True, False])
def test_controller_notes_when_it_asked_and_when_the_report_came(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the report goes into a file or back to the playbook."""
    monkeypatch.setattr(sys, "intern", sys.intern)  # Ansible's modules replace it, and torch._dynamo cannot be imported
    spec = importlib.util.spec_from_file_location("plugin", ANSIBLE / "action_plugins" / "hybrid_ep_doctor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sent: list[dict[str, Any]] = []

    def execute(plugin: Any, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        sent.append(module_args)
        return {"report": json.loads(json.dumps(REPORT))}

    monkeypatch.setattr(module.ActionBase, "run", lambda plugin, tmp=None, task_vars=None: {})
    monkeypatch.setattr(module.ActionModule, "_execute_module", execute)
    plugin = object.__new__(module.ActionModule)
    plugin._task = SimpleNamespace(args={"command": ["hybrid-ep"], **({"results": str(tmp_path)} if kept else {})})
    before = time.time()
    answer = plugin.run(task_vars={"inventory_hostname": "n1"})
    report = json.loads((tmp_path / "nodes" / "n1.json").read_text()) if kept else answer["report"]
    (arguments,) = sent
    assert before <= arguments["asked_at"] <= report["facts"]["received_s"] + 1e-3 <= time.time() + 1e-2
