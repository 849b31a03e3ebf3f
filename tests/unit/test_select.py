"""How a process tells its host from others, and which engine several domains get."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hybrid_ep.core import host
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.engine.select import Choice, _choose, _Vote
from hybrid_ep.errors import ConfigError
from hybrid_ep.transport import TransportState

CUDA = Choice("cuda", "the extension is built and the GPU is capable")
TCP, LOOPBACK = (TransportState(name, True, None) for name in ("tcp", "loopback"))
NO_VERBS = TransportState("verbs", True, "no InfiniBand or RoCE device has an active port")
NO_FABRIC = TransportState("libfabric", False, "built without the headers of libfabric")
NVSHMEM = TransportState("nvshmem", False, "built without nvcc")


def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = set()
    for name, boot in [("node", "1"), ("node", "2"), ("other", "1")]:
        boot_id = tmp_path / f"{name}-{boot}"
        boot_id.write_text(f"{boot}\n")
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        monkeypatch.setattr(host, "_BOOT_ID", boot_id)
        hosts.add(host.host_name())
        assert host.host_name() in hosts
    assert len(hosts) == 3
    monkeypatch.setattr(host, "_BOOT_ID", tmp_path / "none")
    assert host.host_name() == "other "


def _choice(hosts: str, size: int, transports: list[str] | None = None, asked: str = "auto") -> Choice:
    """The choice of ranks on hosts, each named by a letter, in domains of a size."""
    pytest.importorskip("hybrid_ep._cuda")
    verbs = TransportState("verbs", True, None, "mlx5_0")
    states = (verbs if "n" in hosts else NO_VERBS, NO_FABRIC, TCP, LOOPBACK, NVSHMEM)
    votes = [
        _Vote(asked, None, "torch", CUDA, "", name, transport, states)
        for name, transport in zip(hosts, transports or ["auto"] * len(hosts), strict=True)
    ]
    return _choose([CUDA] * len(hosts), votes, RankGrid(0, len(hosts), size), asked)


def test_auto_takes_the_cuda_engine_for_domains_that_a_transport_joins() -> None:
    assert _choice("aaaa", 4) == CUDA
    assert _choice("aaaa", 2) == Choice("cuda", "2 domains of 2 ranks, joined by loopback: all ranks are on one host")
    assert _choice("mmnn", 2) == Choice("cuda", "2 domains of 2 ranks, joined by verbs: mlx5_0")
    assert _choice("aabb", 2).reason.startswith("2 domains of 2 ranks, joined by tcp: verbs cannot be used: rank 0: no")


def test_auto_takes_the_torch_engine_where_nothing_joins_and_says_why() -> None:
    assert _choice("aabb", 4) == Choice(
        "torch", "ranks 0 … 3 are on 2 hosts; engine='cuda' says that NVLink joins them"
    )
    assert _choice("aabc", 2).reason.startswith("ranks 2 … 3 are on 2 hosts; ")
    told = _choice("aabb", 2, ["verbs"] * 4)
    assert told.name == "torch"
    assert told.reason.startswith(
        "2 domains of 2 ranks; transport is 'verbs', but rank 0: no InfiniBand or RoCE device has an active"
    )
    many = _choice("a" * 130, 2)
    assert many == Choice(
        "torch",
        "grid is 65 domains of 2 ranks; allowed between domains: 2 … 64 domains of at most 72, 2048 ranks in all",
    )
    assert _choice("aabb", 2, asked="cuda") == CUDA, "asked for by name"


def test_ranks_that_ask_for_different_transports_are_told_so() -> None:
    with pytest.raises(ConfigError, match="transport is 'auto' at rank 0 and 'tcp' at rank 3; allowed: the same on"):
        _choice("aabb", 2, ["auto", "auto", "auto", "tcp"])
