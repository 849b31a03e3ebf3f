"""How a process tells its host from others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hybrid_ep.engine import select


def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = set()
    for name, boot in [("node", "1"), ("node", "2"), ("other", "1")]:
        boot_id = tmp_path / f"{name}-{boot}"
        boot_id.write_text(f"{boot}\n")
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        monkeypatch.setattr(select, "_BOOT_ID", boot_id)
        hosts.add(select.host_name())
        assert select.host_name() in hosts
    assert len(hosts) == 3
    monkeypatch.setattr(select, "_BOOT_ID", tmp_path / "none")
    assert select.host_name() == "other "
