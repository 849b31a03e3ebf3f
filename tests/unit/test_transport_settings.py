"""What a rank's link uses where nothing is set: NICs and CPUs near its GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_ep import _C
from hybrid_ep.topology import choice
from hybrid_ep.transport import settings

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
