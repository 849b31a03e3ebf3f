"""Which transport a group uses, and what it says of the others; no connection is made."""

from __future__ import annotations

import pytest

from hybrid_ep.errors import ConfigError
from hybrid_ep.transport import TransportState, agree_on_transport, choose_transport

TCP = TransportState("tcp", True, None)
LOOPBACK = TransportState("loopback", True, None)
NVSHMEM = TransportState("nvshmem", True, "no GPU is visible", num_ranks=3)
WITH_NICS = (TransportState("verbs", True, None, "mlx5_0"), TCP, LOOPBACK, NVSHMEM)
WITHOUT = (TransportState("verbs", True, "no RDMA device has an active port"), TCP, LOOPBACK, NVSHMEM)
WITH_NVSHMEM = (*WITHOUT[:3], TransportState("nvshmem", True, None, num_ranks=3))


def test_auto_takes_verbs_then_tcp() -> None:
    choice = choose_transport(WITH_NICS, asked="auto")
    assert (choice.name, choice.reason) == ("verbs", "mlx5_0")
    assert choice.others == {
        "tcp": "usable; verbs comes first",
        "loopback": "usable where all ranks are on one host",
        "nvshmem": "no GPU is visible",
    }
    choice = choose_transport(WITHOUT, asked="auto")
    assert (choice.name, choice.reason) == ("tcp", "verbs cannot be used: no RDMA device has an active port")
    assert choice.others["verbs"] == "no RDMA device has an active port"


def test_what_was_asked_for_is_taken_or_refused() -> None:
    assert choose_transport(WITH_NICS, asked="tcp").others["verbs"] == "usable; tcp is asked for by name"
    with pytest.raises(ConfigError, match=r"'verbs', but no RDMA device .* allowed here: auto, tcp, loopback"):
        choose_transport(WITHOUT, asked="verbs")


def test_one_rank_without_nic_decides_for_all() -> None:
    choice = agree_on_transport([WITH_NICS, WITH_NICS, WITHOUT], ["a", "b", "c"], "auto")
    assert choice.name == "tcp"
    assert choice.reason == "verbs cannot be used: rank 2: no RDMA device has an active port"
    with pytest.raises(ConfigError, match="transport is 'verbs', but rank 2: no RDMA device"):
        agree_on_transport([WITH_NICS, WITH_NICS, WITHOUT], ["a", "b", "c"], "verbs")


def test_loopback_is_for_one_host() -> None:
    assert agree_on_transport([WITH_NICS] * 2, ["a", "a"], "auto").name == "loopback"
    assert agree_on_transport([WITH_NICS] * 2, ["a", "a"], "verbs").name == "verbs"
    with pytest.raises(ConfigError, match="'loopback', but the ranks are on 2 hosts"):
        agree_on_transport([WITH_NICS] * 2, ["a", "b"], "loopback")


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
