"""The commands of docs/several_nodes.md, between two hosts that a network joins, as a reader would type them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.prerequisites import require
from tests.sim.hosts import Cluster, Host, missing_prerequisites
from tests.sim.pods import checkout_image

pytestmark = pytest.mark.cluster

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "several_nodes.md"
RANKS_PER_HOST = 2
_LIMIT_S = 120


def _commands() -> str:
    """Every command, with so few ranks that two hosts of one machine bear them."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    text = "".join(blocks).replace("--nproc-per-node 8", f"--nproc-per-node {RANKS_PER_HOST}")
    return text.replace("-m hybrid_ep bench\n", "-m hybrid_ep bench --tokens 64 --hidden 512 --experts 16 --runs 2\n")


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the commands print on each host."""
    require(not missing_prerequisites(), ", ".join(missing_prerequisites()))
    with Cluster(checkout_image()) as cluster:
        hosts = [cluster.add_host(f"node-{i}") for i in range(2)]
        running = [_start(host, node, hosts[0]) for node, host in enumerate(hosts)]
        texts = []
        try:
            for process in running:
                texts.append(process.communicate(timeout=_LIMIT_S)[0].decode())
                assert process.returncode == 0, texts[-1]
        finally:
            for host in hosts:
                host.stop()
        return texts


def _start(host: Host, node: int, head: Host) -> subprocess.Popen[bytes]:
    variables = {"NODE": str(node), "HEAD": head.address, "IFACE": "eth0", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return host.start(["sh", "-ec", _commands()], user=1000, variables=variables, output=subprocess.PIPE)


def test_info_names_the_transport(said: list[str]) -> None:
    for text in said:
        assert re.search(r"between domains\W+(tcp|verbs)", text), text


def test_the_link_is_measured_over_the_network(said: list[str]) -> None:
    ranks = re.findall(r"rank \d: .* GB/s each way to 1 peers, .*, every chunk right", "".join(said))
    assert len(ranks) == 2 * RANKS_PER_HOST, said
    assert re.search(r"^(tcp|verbs): ", said[0], re.M), said


def test_dispatch_and_combine_are_checked_and_timed(said: list[str]) -> None:
    assert "dispatch" in said[0] + said[1]
    assert f"{2 * RANKS_PER_HOST} ranks" in said[0] + said[1], said
