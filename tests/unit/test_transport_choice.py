"""Which transport a group uses, and what it says of the others; NICs and CPUs near its GPU where nothing is set.

No connection is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_ep import _C
from hybrid_ep.errors import ConfigError
from hybrid_ep.topology import choice
from hybrid_ep.transport import TransportState, agree_on_transport, choose_transport, settings
from hybrid_ep.transport import choice as transport_choice

TCP = TransportState("tcp", True, None)
LOOPBACK = TransportState("loopback", True, None)
NVSHMEM = TransportState("nvshmem", True, "no GPU is visible", num_ranks=3, is_only_by_name=True)
FABRIC = TransportState("libfabric", True, None, "provider tcp", is_only_by_name=True)
NO_VERBS = TransportState("verbs", True, "no InfiniBand or RoCE device has an active port")
WITH_NICS = (TransportState("verbs", True, None, "mlx5_0"), FABRIC, TCP, LOOPBACK, NVSHMEM)
WITHOUT = (NO_VERBS, FABRIC, TCP, LOOPBACK, NVSHMEM)
WITH_EFA = (NO_VERBS, TransportState("libfabric", True, None, "provider efa on rdmap0s6"), TCP, LOOPBACK, NVSHMEM)
WITH_NVSHMEM = (*WITHOUT[:4], TransportState("nvshmem", True, None, num_ranks=3, is_only_by_name=True))


def test_auto_takes_verbs_then_libfabric_then_tcp() -> None:
    choice = choose_transport(WITH_NICS, asked="auto")
    assert (choice.name, choice.reason) == ("verbs", "mlx5_0")
    assert choice.others == {
        "libfabric": "usable where it is asked for by name",
        "tcp": "usable; verbs comes first",
        "loopback": "usable where all ranks are on one host",
        "nvshmem": "no GPU is visible",
    }
    choice = choose_transport(WITH_EFA, asked="auto")
    assert choice.name == "libfabric"
    assert choice.reason == (
        "provider efa on rdmap0s6; verbs cannot be used: no InfiniBand or RoCE device has an active port"
    )
    choice = choose_transport(WITHOUT, asked="auto")
    assert (choice.name, choice.reason) == (
        "tcp",
        "verbs cannot be used: no InfiniBand or RoCE device has an active port",
    )
    assert choice.others["verbs"] == "no InfiniBand or RoCE device has an active port"


def test_what_was_asked_for_is_taken_or_refused() -> None:
    assert choose_transport(WITH_NICS, asked="tcp").others["verbs"] == "usable; tcp is asked for by name"
    with pytest.raises(
        ConfigError, match=r"'verbs', but no InfiniBand or RoCE device .* allowed here: auto, libfabric, tcp, loopback"
    ):
        choose_transport(WITHOUT, asked="verbs")


def test_one_rank_without_nic_decides_for_all() -> None:
    assert agree_on_transport([WITH_EFA] * 2, ["a", "b"], "auto").name == "libfabric"
    assert agree_on_transport([WITH_EFA, WITHOUT], ["a", "b"], "auto").name == "tcp"
    choice = agree_on_transport([WITH_NICS, WITH_NICS, WITHOUT], ["a", "b", "c"], "auto")
    assert choice.name == "tcp"
    assert choice.reason == "verbs cannot be used: rank 2: no InfiniBand or RoCE device has an active port"
    with pytest.raises(ConfigError, match="transport is 'verbs', but rank 2: no InfiniBand or RoCE device"):
        agree_on_transport([WITH_NICS, WITH_NICS, WITHOUT], ["a", "b", "c"], "verbs")


@pytest.mark.parametrize(
    ("nics", "named", "provider"),
    [
        ({"class/infiniband/rdmap0s6/device/driver": "efa"}, "", "efa"),
        ({"class/infiniband/mlx5_0/device/driver": "mlx5_core", "class/cxi/cxi0": ""}, "", "cxi"),
        ({"class/infiniband/mlx5_0/device/driver": "mlx5_core"}, "", "tcp"),
        ({"class/infiniband/rdmap0s6/device/driver": "efa"}, "shm", "shm"),
    ],
)
def test_provider_of_libfabric_is_that_of_the_nics(
    nics: dict[str, str], named: str, provider: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path, driver in nics.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / path).symlink_to(tmp_path / "drivers" / driver)
    monkeypatch.setattr(transport_choice, "_SYSFS", tmp_path)
    monkeypatch.setenv("HYBRID_EP_FABRIC_PROVIDER", named)
    assert transport_choice.fabric_provider() == provider


def test_loopback_is_for_one_host() -> None:
    assert agree_on_transport([WITH_NICS] * 2, ["a", "a"], "auto").name == "loopback"
    assert agree_on_transport([WITH_NICS] * 2, ["a", "a"], "verbs").name == "verbs"
    with pytest.raises(ConfigError, match="'loopback', but the ranks are on 2 hosts"):
        agree_on_transport([WITH_NICS] * 2, ["a", "b"], "loopback")


def test_slingshot_nics_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The topology does not know them."""
    monkeypatch.setattr(_C, "fabric_devices", lambda provider: [f"{provider}{i}" for i in range(4)])
    assert [settings.fabric_nics(topology(0, 0), i, "cxi") for i in (0, 1, None)] == [["cxi0"], ["cxi1"], ["cxi0"]]
    monkeypatch.setenv("HYBRID_EP_NICS", "cxi3+cxi2,cxi0")
    assert [settings.fabric_nics(topology(0, 0), i, "cxi") for i in range(2)] == [["cxi3", "cxi2"], ["cxi0"]]


@pytest.fixture(scope="module")
def efa_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libibverbs that shows an EFA interface and a RoCE card."""
    if not _C.has_verbs:
        pytest.skip("built without verbs")
    folder = tmp_path_factory.mktemp("verbs")
    source = Path(__file__).parents[1] / "sim" / "verbs_stub.c"
    library = folder / "libibverbs.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", str(source), "-o", library], check=True)
    return folder


# Two ends whose ports have these tables of partition keys.
CONNECT = """
import json, os, sys
from hybrid_ep import _C
tables, pkey_index = json.loads(sys.argv[1]), int(sys.argv[2])
ends = []
try:
    for i, table in enumerate(tables):
        os.environ["VERBS_STUB_PKEYS"] = table
        layout = _C.LinkLayout(num_domains=2, domain_idx=i, rings=[(1024, 4, 1)])
        ends.append(_C.verbs_proxy(layout=layout, devices=["mlx5_0"], pkey_index=pkey_index))
    for i, end in enumerate(ends):
        print(f"end {i}", flush=True)
        end.connect([end.address() for end in ends], 1.0)
except ConnectionError as error:
    print(error.args[1], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("tables", "pkey_index", "told"),
    [
        (["ffff", "ffff"], -1, [0, 0]),
        (["7fff 8001 8002", "7fff 8002 8001"], -1, [1, 2]),  # the first one of the lower domain
        (["7fff 8003 8002", "8002 8001"], -1, [2, 0]),
        (["ffff 8001", "ffff 0001"], 1, [1, 1]),
        (["8001", "8002"], -1, "mlx5_0 port 1 and the peer's port share no partition; "),
        (["7fff", "ffff"], -1, "mlx5_0 port 1 is a full member of no partition"),
        (["ffff", "ffff"], 5, "mlx5_0 port 1 has no partition key with index 5"),
    ],
)
def test_queue_pairs_are_in_a_partition_of_both_ports_and_have_a_udp_port_each(
    efa_library: Path, tables: list[str], pkey_index: int, told: list[int] | str
) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(efa_library)}
    command = [sys.executable, "-c", CONNECT, json.dumps(tables), str(pkey_index)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    if isinstance(told, str):
        assert told in said
        return
    ends = [end.split("\n")[1:-1] for end in said.split("end ")[1:]]
    assert [{line for line in end if "pkey" in line} for end in ends] == [{f"pkey_index {idx}"} for idx in told]
    labels = [int(line.split()[1]) for end in ends for line in end if "flow_label" in line]
    assert len(set(labels)) == len(labels) == 4
    assert all(0 < label < 1 << 14 for label in labels), "the kernel folds the other bits"


def _on_efa(library: Path, program: str, **variables: str) -> str:
    """What a program says where libibverbs is the stub."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_nic_without_reliable_connections_is_passed_over(efa_library: Path) -> None:
    """EFA's port is active, but verbs could not connect over it."""
    program = "from hybrid_ep.transport import choose_transport as c; t = c(asked='auto'); print(t.name, t.reason)"
    assert _on_efa(efa_library, program) == "verbs mlx5_0"
    alone = _on_efa(efa_library, program, VERBS_STUB_ONLY_EFA="1")
    assert alone == "tcp verbs cannot be used: no InfiniBand or RoCE device has an active port"


def test_a_nic_without_reliable_connections_is_refused_by_name(efa_library: Path) -> None:
    program = (
        "from hybrid_ep import _C\n"
        "layout = _C.LinkLayout(num_domains=2, domain_idx=0, rings=[(1024, 4, 1)])\n"
        "try: _C.verbs_proxy(layout=layout, devices=['rdmap0s6'])\n"
        "except ConnectionError as error: print(error.args[1])"
    )
    told = _on_efa(efa_library, program)
    assert told.startswith("RDMA device 'rdmap0s6' has no reliable connections")
    assert told.endswith("use HYBRID_EP_TRANSPORT=libfabric there, and tcp elsewhere")


def test_nvshmem_is_taken_where_it_is_asked_for() -> None:
    choice = choose_transport(WITH_NVSHMEM, asked="auto")
    assert choice.name == "tcp"
    assert choice.others["nvshmem"] == "usable where it is asked for by name"
    assert agree_on_transport([WITH_NVSHMEM] * 3, ["a", "a", "b"], "nvshmem").name == "nvshmem"
    with pytest.raises(ConfigError, match="'nvshmem', but rank 1: no GPU is visible"):
        agree_on_transport([WITH_NVSHMEM, WITH_NICS, WITH_NVSHMEM], ["a", "a", "b"], "nvshmem")


def test_nvshmem_is_for_all_ranks_of_a_job() -> None:
    with pytest.raises(ConfigError, match="'nvshmem', but it joins all 3 ranks of the job, and the group has 2"):
        agree_on_transport([WITH_NVSHMEM] * 2, ["a", "b"], "nvshmem")


NODES = Path("/sys/devices/system/node")


def topology(*numa_nodes: int) -> Any:
    """GPUs on these NUMA nodes."""
    return SimpleNamespace(gpus=[SimpleNamespace(gpu_idx=i, numa_node=node) for i, node in enumerate(numa_nodes)])


def test_cpus_of_a_list() -> None:
    assert choice._parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert choice._parse_cpus("\n") == set()


@pytest.mark.parametrize("gpu_idx", [None, 1, 2, 3])
def test_proxy_runs_anywhere_where_the_node_of_its_gpu_is_not_known(gpu_idx: int | None) -> None:
    """Without a GPU, with one that the probe has not seen, on node −1, or on a node that is not there."""
    assert choice.near_cpus(topology(0, -1, 4095), gpu_idx) == []


@pytest.mark.skipif(not (NODES / "node0/cpulist").exists(), reason="this kernel tells no NUMA nodes")
def test_proxy_runs_on_the_node_of_its_gpu_where_the_process_may() -> None:
    near = choice._parse_cpus((NODES / "node0/cpulist").read_text())
    allowed = os.sched_getaffinity(0)
    assert choice.near_cpus(topology(0), 0) == sorted(near & allowed)
    os.sched_setaffinity(0, {min(near & allowed)})
    try:
        assert choice.near_cpus(topology(0), 0) == [min(near & allowed)]
    finally:
        os.sched_setaffinity(0, allowed)


def test_nics_without_a_gpu_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_EP_NICS", "mlx5_0+mlx5_1,mlx5_2")
    assert settings.nic_names(topology(), None) == ["mlx5_0", "mlx5_1", "mlx5_2"]


@pytest.mark.skipif(not _C.has_verbs, reason="built without verbs")
@pytest.mark.parametrize("timeout_s", [1.0, 5.0, 20.0, 100.0, 600.0])
def test_retries_of_verbs_end_within_half_of_the_timeout(timeout_s: float) -> None:
    """NICs take up to four times as long as the formula of the specification says."""
    timeout, retries = _C.verbs_retries(timeout_s)
    longest_s = 4 * (retries + 1) * 4.096e-6 * 2**timeout
    assert longest_s <= timeout_s / 2
    assert timeout == 20 or 2 * longest_s > timeout_s / 2
    assert retries < 7, "some drivers take 7 for any number"
