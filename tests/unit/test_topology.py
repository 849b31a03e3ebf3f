"""Distances, NIC choice, domains and the pictures of the topology, on nodes laid out in a folder."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from hybrid_ep.errors import ConfigError, TopologyError
from hybrid_ep.topology import Distance, DomainMember, Topology, choose_nic, choose_nics, find_domains, probe
from hybrid_ep.topology.node_probe import READERS, VerbsDevice, read_verbs
from hybrid_ep.topology.recording import Recording, decode, encode, read_facts
from hybrid_ep.topology.render import localities, render
from hybrid_ep.topology.svg import draw
from tests.sim.platforms import healthy


def _device(root: Path, *path: str, pci_class: str, vendor: str = "0x10de", numa_node: int = 0) -> None:
    place = root / "sys/devices" / "/".join(path)
    place.mkdir(parents=True)
    for name, value in (("class", pci_class), ("vendor", vendor), ("numa_node", str(numa_node))):
        (place / name).write_text(f"{value}\n")
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / path[-1]).symlink_to(Path("../../../devices", *path))


def _nic(root: Path, name: str, *path: str, numa_node: int = 0, state: str = "4: ACTIVE") -> None:
    _device(root, *path, pci_class="0x020700", vendor="0x15b3", numa_node=numa_node)
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (root / "sys/class/infiniband" / name / "device").symlink_to(Path("../../../devices", *path))
    for file, value in (("state", state), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
        (port / file).write_text(f"{value}\n")


@pytest.fixture
def one_gpu(tmp_path: Path) -> Path:
    """One GPU behind a switch behind a switch, and a NIC at each distance from it."""
    root = ("pci0000:10", "0000:10:01.0")
    near = (*root, "0000:11:00.0", "0000:12:00.0", "0000:13:00.0")
    _device(tmp_path, *near, "0000:14:00.0", "0000:15:00.0", pci_class="0x030200")
    _nic(tmp_path, "mlx5_0", *near, "0000:14:01.0", "0000:16:00.0")
    _nic(tmp_path, "mlx5_1", *root, "0000:11:00.0", "0000:12:01.0", "0000:17:00.0")
    _nic(tmp_path, "mlx5_2", "pci0000:10", "0000:10:02.0", "0000:18:00.0")
    _nic(tmp_path, "mlx5_3", "pci0000:40", "0000:40:01.0", "0000:41:00.0")
    _nic(tmp_path, "mlx5_10", "pci0000:80", "0000:80:01.0", "0000:81:00.0", numa_node=1)
    for numa_node in range(2):
        (tmp_path / f"sys/devices/system/node/node{numa_node}").mkdir(parents=True)
    return tmp_path


def test_distances(one_gpu: Path) -> None:
    topology = probe(one_gpu)
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_10"]
    assert [distance.name for distance in topology.nic_distances[0]] == ["PIX", "PXB", "PHB", "NODE", "SYS"]
    assert topology.gpu_distances == ((Distance.SELF,),)
    assert topology.num_numa_nodes == 2


def test_unknown_numa_node_is_far_unless_there_is_only_one(tmp_path: Path) -> None:
    _device(tmp_path, "pci0000:10", "0000:10:00.0", pci_class="0x030000", numa_node=-1)
    _nic(tmp_path, "mlx5_0", "pci0000:20", "0000:20:00.0", numa_node=-1)
    assert probe(tmp_path).nic_distances == ((Distance.NODE,),)
    for numa_node in range(2):
        (tmp_path / f"sys/devices/system/node/node{numa_node}").mkdir(parents=True)
    assert probe(tmp_path).nic_distances == ((Distance.SYS,),)


def test_empty_root_is_a_normal_answer(tmp_path: Path) -> None:
    topology = probe(tmp_path)
    assert (topology.pci, topology.nics, topology.num_numa_nodes) == ((), (), 1)


def test_this_machine_is_a_normal_answer() -> None:
    topology = probe()
    assert len(topology.nic_distances) == len(topology.gpus)
    assert set(topology.missing) <= {"nvml", "verbs"}
    assert all(topology.missing.values())


def test_port_values(one_gpu: Path) -> None:
    nic = probe(one_gpu).nics[0]
    port = nic.ports[0]
    assert nic.pci_address == "0000:16:00.0"
    assert (port.state, port.link_layer, port.rate_gbps) == ("ACTIVE", "InfiniBand", 400.0)
    assert (port.sm_lid, port.phys_state, port.active_mtu_bytes) == (-1, "", None)


# ---- verbs readers ----


def _failing(error: Exception) -> Callable[[], list[VerbsDevice]]:
    def read() -> list[VerbsDevice]:
        raise error

    return read


def test_first_verbs_reader_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device = VerbsDevice(name="mlx5_0", dmabuf=True, ports=[])
    monkeypatch.setitem(READERS, "pyverbs", _failing(ImportError("No module named 'pyverbs'")))
    monkeypatch.setitem(READERS, "_verbs", lambda: [device])
    assert read_verbs() == ("_verbs", [device])
    monkeypatch.setitem(READERS, "pyverbs", list)
    assert read_verbs() == ("pyverbs", [])


def test_no_verbs_reader_is_a_normal_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, "pyverbs", _failing(RuntimeError("Failed to get devices list")))
    monkeypatch.setitem(READERS, "_verbs", _failing(ImportError("was not built")))
    topology = probe()
    assert topology.verbs_reader == ""
    assert topology.missing["verbs"] == "pyverbs: Failed to get devices list; _verbs: was not built"


def test_pyverbs_with_another_interface_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs" / "device.py").write_text("def list_devices(): return []\n")
    (tmp_path / "pyverbs" / "pyverbs_error.py").write_text("class PyverbsError(Exception): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("pyverbs", "pyverbs.device", "pyverbs.pyverbs_error"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(RuntimeError, match="another interface"):
        READERS["pyverbs"]()
    for name in ("pyverbs", "pyverbs.device", "pyverbs.pyverbs_error"):
        monkeypatch.delitem(sys.modules, name, raising=False)


# ---- choice of the NIC ----


@pytest.fixture
def tray(tmp_path: Path) -> Topology:
    """Four GPUs over four NICs, two of each on a socket, all pairs of a socket at the same distance."""
    healthy("gb200-nvl72").write(tmp_path)
    return probe(tmp_path)


def test_nearest_nic_that_is_up(one_gpu: Path) -> None:
    nic = choose_nic(probe(one_gpu), 0)
    assert nic is not None
    assert nic.name == "mlx5_0"
    (one_gpu / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    nic = choose_nic(probe(one_gpu), 0)
    assert nic is not None
    assert nic.name == "mlx5_1"


def test_gpus_that_share_nics_take_them_in_turn(tray: Topology) -> None:
    assert [getattr(choose_nic(tray, idx), "name", None) for idx in range(4)] == [
        "mlx5_0",
        "mlx5_1",
        "mlx5_2",
        "mlx5_3",
    ]
    fewer = replace(tray, nics=tray.nics[:1], nic_distances=tuple(row[:1] for row in tray.nic_distances))
    assert [getattr(choose_nic(fewer, idx), "name", None) for idx in range(4)] == ["mlx5_0"] * 4


def test_dpus_of_the_same_rate_are_no_gpus_nics(tmp_path: Path) -> None:
    healthy("gb200-nvl72 with DPUs").write(tmp_path)
    tray = probe(tmp_path)
    assert [nic.name for nic in tray.nics] == [f"mlx5_{idx}" for idx in range(6)]  # the first two are the DPUs
    chosen = [[nic.name for nic in choose_nics(tray, idx)] for idx in range(4)]
    assert chosen == [["mlx5_2"], ["mlx5_3"], ["mlx5_4"], ["mlx5_5"]]


def test_nic_can_be_ordered(tray: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_EP_NICS", "mlx5_3, mlx5_2")
    assert [getattr(choose_nic(tray, idx), "name", None) for idx in range(4)] == ["mlx5_3", "mlx5_2"] * 2
    assert getattr(choose_nic(tray, 0, ["mlx5_1"]), "name", None) == "mlx5_1"
    monkeypatch.setenv("HYBRID_EP_NICS", "mlx5_9")
    with pytest.raises(TopologyError, match=r"NIC 'mlx5_9' was asked for GPU 2; this node has \['mlx5_0'"):
        choose_nic(tray, 2)
    monkeypatch.setenv("HYBRID_EP_NICS", "mlx5_0,,mlx5_1")
    with pytest.raises(ConfigError, match="HYBRID_EP_NICS"):
        choose_nic(tray, 2)


def test_several_nics_of_one_gpu(tray: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more NICs than GPUs, all GPUs take as many; the site can name several for each."""
    two = replace(tray, gpus=tray.gpus[:2], nic_distances=((Distance.PIX,) * 4,) * 2)
    assert [[nic.name for nic in choose_nics(two, idx)] for idx in range(2)] == [
        ["mlx5_0", "mlx5_2"],
        ["mlx5_1", "mlx5_3"],
    ]
    three = replace(tray, gpus=tray.gpus[:3], nic_distances=((Distance.PIX,) * 4,) * 3)
    assert [[nic.name for nic in choose_nics(three, idx)] for idx in range(3)] == [["mlx5_0"], ["mlx5_1"], ["mlx5_2"]]
    monkeypatch.setenv("HYBRID_EP_NICS", "mlx5_3+mlx5_1,mlx5_0")
    assert [nic.name for nic in choose_nics(tray, 2)] == ["mlx5_3", "mlx5_1"]
    assert [nic.name for nic in choose_nics(tray, 3)] == ["mlx5_0"]


def test_choice_without_nic_or_gpu(tray: Topology) -> None:
    bare = replace(tray, nics=(), nic_distances=tuple(() for _ in tray.gpus))
    assert choose_nic(bare, 0) is None
    with pytest.raises(TopologyError, match=r"gpu_idx is 7; allowed: \[0, 1, 2, 3\]"):
        choose_nic(tray, 7)


# ---- domains ----


def _member(rank: int, node: str, peers: str = "", fabric: tuple[str, int] | None = None) -> DomainMember:
    return DomainMember(rank, node, f"{node}{rank}", frozenset(peers.split()), fabric)


def test_domain_of_one_node_and_of_none() -> None:
    ranks = [_member(0, "a", "a1"), _member(1, "a", "a0"), _member(2, "a"), _member(3, "b")]
    assert find_domains(ranks) == ((0, 1), (2,), (3,))
    assert find_domains([]) == ()


def test_domain_across_nodes_is_one_clique() -> None:
    one, two = ("c", 1), ("c", 2)
    ranks = [_member(0, "a", fabric=one), _member(1, "b", fabric=two), _member(2, "b", fabric=one), _member(3, "c")]
    assert find_domains(ranks) == ((0, 2), (1,), (3,))


def test_domain_joins_whoever_is_joined_with_either() -> None:
    ranks = [_member(0, "a", "a2"), _member(1, "a", "a2"), _member(2, "a", "a0 a1")]
    assert find_domains(ranks) == ((0, 1, 2),)


def test_ranks_that_share_a_gpu_share_a_domain() -> None:
    assert find_domains([replace(_member(rank, "a"), gpu_uuid="GPU-0") for rank in (1, 0)]) == ((0, 1),)


# ---- pictures and recordings ----


def test_localities_follow_sockets(tray: Topology) -> None:
    assert [group.numa_node for group in localities(tray)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_svg_shows_every_device(tray: Topology) -> None:
    for topology in (tray, replace(tray, nics=(), nic_distances=((),) * 4), replace(tray, gpus=(), nic_distances=())):
        picture = ElementTree.fromstring(draw(topology))
        texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
        assert {nic.name for nic in topology.nics} <= texts
        assert {f"GPU {gpu.gpu_idx}" for gpu in topology.gpus} <= texts


def test_tree_and_matrix(one_gpu: Path) -> None:
    console = Console(width=150, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(probe(one_gpu)))
    text = captured.get()
    assert "NUMA node 1" in text
    assert "PIX*" in text
    assert "NIC mlx5_10  0000:81:00.0  InfiniBand 400 Gb/s ACTIVE" in text


def test_cpus_are_shown_where_the_only_numa_node_has_no_number(tmp_path: Path) -> None:
    """As in most virtual machines."""
    _device(tmp_path, "pci0000:00", "0000:00:06.0", pci_class="0x030200", numa_node=-1)
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-15\n")
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(probe(tmp_path)))
    assert "the only NUMA node  CPUs 0-15" in captured.get()


@pytest.mark.parametrize("port", [[], {}, "x", None, 1e300])
def test_recorded_port_that_is_no_number_is_damage(one_gpu: Path, port: object) -> None:
    """Of 6,036 damaged nodes, two had a list or a mapping there, and the topology crashed."""
    device = {"name": "mlx5_0", "dmabuf": True, "ports": [{"port": port, "active_mtu_bytes": 4096}]}
    (one_gpu / "hybrid_ep").mkdir()
    (one_gpu / "hybrid_ep/facts.json").write_text(json.dumps({"verbs": [device]}))
    topology = probe(one_gpu)
    assert [nic.name for nic in topology.nics][:1] == ["mlx5_0"]
    assert port == 1e300 or "the recorded facts are damaged" in topology.missing["verbs"]


def test_recording_survives_its_file(tmp_path: Path) -> None:
    node = healthy("hgx-h200")
    node.save(tmp_path / "node.json")
    assert Recording.load(tmp_path / "node.json") == node
    (tmp_path / "other.json").write_text('{"pages": 3}')
    with pytest.raises(ConfigError, match="is not a recording of a node"):
        Recording.load(tmp_path / "other.json")


@pytest.mark.parametrize("content", [b"text\n", b"", b"\x00\x01", b"\xff\xfe"])
def test_content_survives_its_encoding(content: bytes) -> None:
    assert decode(encode(content)) == content


def test_facts_of_a_bare_tree(tmp_path: Path) -> None:
    assert read_facts(tmp_path) == {}
    (tmp_path / "hybrid_ep").mkdir()
    (tmp_path / "hybrid_ep" / "facts.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list; allowed: an object"):
        read_facts(tmp_path)
