"""The active checks: the measurements on tensors of the CPU, and the judgement of machines with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_ep.cluster.doctor import Node, Profile, Result, Status, Unreadable, load_profile
from hybrid_ep.cluster.doctor.active import TorchMachine, examine_actively, gpu_direct, measure
from hybrid_ep.cluster.doctor.active.gpu_direct import Written, write_by_verbs
from hybrid_ep.cluster.doctor.active.judge import ACTIVE_CHECKS, judge_burn, judge_rates, judge_rdma
from hybrid_ep.cluster.doctor.active.measure import Burn, write_over_rdma
from tests.sim.gpu_direct import Ends, Native

_SOUND = Burn(tflops=700.0, checksums=(1234,), celsius=70, watts=690, mhz=1700)


class _Machine:
    """Four GPUs that reach the same figures, but for what a test changes."""

    def __init__(self, **wrong: Any) -> None:
        self._wrong = wrong
        self.num_gpus = 4

    def _value(self, name: str, key: object, usual: float) -> float:
        return float(self._wrong.get(name, {}).get(key, usual))

    def host_copy(self, gpu_idx: int, *, to_gpu: bool) -> float:
        return self._value("host", gpu_idx, 55.0)

    def device_copy(self, gpu_idx: int) -> float:
        return self._value("device", gpu_idx, 4000.0)

    def pair_copy(self, source: int, target: int) -> float:
        return self._value("pair", (source, target), 390.0)

    def ring_copy(self) -> list[float]:
        return [self._value("ring", i, 370.0) for i in range(self.num_gpus)]

    def burn(self, seconds: float) -> list[Burn]:
        return [self._wrong.get("burn", {}).get(i, _SOUND) for i in range(self.num_gpus)]

    def count_bad_words(self, gpu_idx: int, fraction: float) -> tuple[int, int]:
        return int(self._value("memory", gpu_idx, 0)), 1 << 30

    def all_to_all(self) -> float:
        if "nccl" in self._wrong:
            raise RuntimeError(self._wrong["nccl"])
        return self._value("all_to_all", "", 310.0)


@pytest.fixture
def profile() -> Profile:
    return load_profile("hgx-h200")


def _results(node: Node, profile: Profile, machine: Any) -> dict[str, Result]:
    found = examine_actively(node, profile, seconds=1.0, make_machine=lambda: machine)
    assert [result.id for result in found] == [check.id for check in ACTIVE_CHECKS]
    return {result.id: result for result in found}


def test_sound_machine_passes(tmp_path: Path, profile: Profile) -> None:
    found = _results(Node(tmp_path), profile, _Machine())
    rdma = found.pop("active.rdma")
    assert (rdma.status, rdma.seen) == (Status.UNKNOWN, "no GPU has a NIC that is up")
    assert {result.status for result in found.values()} == {Status.PASS}


@pytest.mark.parametrize(
    ("wrong", "check_id", "seen"),
    [
        ({"host": {2: 26.0}}, "active.host", "GPU 2 from host: 26.0 of 55.0 GB/s (the median)"),
        ({"device": {1: 2000.0}}, "active.device", "GPU 1: 2000.0 of 3800.0 GB/s (the profile's)"),
        ({"pair": {(3, 1): 195.0}}, "active.pairs", "GPU 3 → GPU 1: 195.0 of 390.0 GB/s (the profile's)"),
        ({"ring": {0: 180.0}}, "active.links", "GPU 0 → GPU 1, all at once: 180.0 of 390.0 GB/s (the profile's)"),
        ({"burn": {3: replace(_SOUND, checksums=(99,))}}, "active.burn", "GPU 3: other bits than the other GPUs"),
        ({"burn": {0: replace(_SOUND, checksums=(1234, 7))}}, "active.burn", "GPU 0: 2 different results"),
        ({"burn": {1: replace(_SOUND, celsius=97)}}, "active.burn", "GPU 1: 97 °C, allowed: 90"),
        ({"burn": {1: replace(_SOUND, mhz=900)}}, "active.burn", "GPU 1: 900.0 of 1700.0 MHz (the median)"),
        ({"memory": {2: 3}}, "active.memory", "GPU 2: 3 of 1073741824 words wrong"),
    ],
)
def test_fault_is_found_by_its_check_alone(
    tmp_path: Path, profile: Profile, wrong: dict[str, Any], check_id: str, seen: str
) -> None:
    found = _results(Node(tmp_path), profile, _Machine(**wrong))
    assert [result.id for result in found.values() if result.status is Status.FAIL] == [check_id]
    assert seen in found[check_id].seen
    assert found[check_id].remedy


def test_all_to_all_is_held_to_the_figure_of_as_many_gpus(tmp_path: Path) -> None:
    eight, four = load_profile("hgx-h200"), load_profile("hgx-h200").values
    assert "no figure for 4 GPUs" in _results(Node(tmp_path), eight, _Machine())["active.nccl"].seen
    site = Profile("site", four | {"gpu": four["gpu"] | {"count": 4}})
    machine = _Machine(all_to_all={"": 150.0})
    assert (
        _results(Node(tmp_path), site, machine)["active.nccl"].seen == "all-to-all: 150.0 of 310.0 GB/s (the profile's)"
    )


def test_what_breaks_is_unknown(tmp_path: Path, profile: Profile) -> None:
    found = _results(Node(tmp_path), profile, _Machine(nccl="unhandled cuda error"))
    assert found["active.nccl"].status is Status.UNKNOWN
    assert "RuntimeError: unhandled cuda error" in found["active.nccl"].seen


def test_figure_without_anything_to_compare_with_confirms_nothing() -> None:
    with pytest.raises(Unreadable, match=r"52.0 GB/s, and neither a figure of the profile nor another one"):
        judge_rates({"GPU 0": 52.0}, None, 0.9)
    assert judge_rates({"GPU 0": 52.0}, 55.0, 0.9).status is Status.PASS
    assert judge_rates({"GPU 0": 40.0}, 55.0, 0.9).status is Status.FAIL


def test_two_gpus_with_different_bits_are_both_suspect(profile: Profile) -> None:
    found = judge_burn([_SOUND, replace(_SOUND, checksums=(5,))], profile)
    assert (found.status, "GPU 0 and GPU 1 compute different bits" in found.seen) == (Status.FAIL, True)


def test_measurements_run_on_tensors_of_the_cpu() -> None:
    machine = TorchMachine(["cpu", "cpu"], copy_bytes=1 << 16, size=64)
    assert machine.num_gpus == 2
    rates = [machine.host_copy(0, to_gpu=True), machine.device_copy(1), machine.pair_copy(0, 1), *machine.ring_copy()]
    assert all(rate > 0 for rate in rates)
    first, second = machine.burn(0.05)
    assert first.checksums == second.checksums
    assert len(first.checksums) == 1
    assert machine.count_bad_words(0, 0.5) == (0, 2 * (1 << 13) * 2)
    with pytest.raises(Unreadable, match="NCCL needs GPUs"):
        machine.all_to_all()


def test_memory_pattern_sees_a_bit_that_sticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that loses its lowest bit after it was written."""
    import torch

    machine = TorchMachine(["cpu"], copy_bytes=1 << 12, size=8)
    add = torch.add

    def broken(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
        add(*arguments, out=out)
        out[7] &= ~1
        return out

    monkeypatch.setattr(torch, "add", broken)
    bad, _ = machine.count_bad_words(0, 0.5)
    assert bad > 0


_PAIR = (0, "mlx5_0", 1, "mlx5_1")


def test_rdma_without_perftest_or_its_cuda_is_measured_by_the_verbs_transport(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ends = Ends(Native())
    monkeypatch.setattr(gpu_direct, "open_gpu_end", ends)
    monkeypatch.setattr(measure, "_RDMA_SECONDS", 0.1)
    (found,) = write_over_rdma([_PAIR], 3, bidirectional=False)
    assert (found.by, found.num_wrong, found.gbytes_per_s > 0) == ("by the verbs transport", 0, True)
    asked = [(one["devices"], one["gid_index"], one["window_only"], one["device"]) for one in ends.native.asked]
    assert asked == [(["mlx5_0"], 3, True, 0), (["mlx5_1"], 3, True, 1)]
    _program(tmp_path, "echo 'Usage: ib_write_bw [options]'")
    both, again = write_over_rdma([_PAIR, (1, "mlx5_1", 0, "mlx5_0")], None, bidirectional=True)
    assert min(both.gbytes_per_s, again.gbytes_per_s) > 0
    assert {one["gid_index"] for one in ends.native.asked[2:]} == {-1}


def test_gpu_memory_that_no_nic_takes_is_unknown_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    why = "mlx5_0 port 1 takes no GPU memory: dma-buf: error 801; nvidia-peermem: Bad address"
    monkeypatch.setattr(gpu_direct, "open_gpu_end", Ends(Native(refuses=why)))
    with pytest.raises(Unreadable, match=f"ib_write_bw is not installed; by the verbs transport: {why}"):
        write_over_rdma([_PAIR], None, bidirectional=False)
    _program(tmp_path, "echo 'Usage: ib_write_bw [options]'")
    with pytest.raises(Unreadable, match=f"ib_write_bw was built without CUDA; by the verbs transport: {why}"):
        write_over_rdma([_PAIR], None, bidirectional=False)


def test_bytes_that_arrive_otherwise_are_counted() -> None:
    ends = Ends(Native(), num_wrong=1)
    (one_way,) = write_by_verbs([_PAIR], None, bidirectional=False, seconds=0.05, open_end=ends)
    (both,) = write_by_verbs([_PAIR], None, bidirectional=True, seconds=0.05, open_end=ends)
    assert (one_way.num_wrong, both.num_wrong) == (1, 2)


def test_nic_that_loses_chunks_is_unknown_in_time() -> None:
    ends = Ends(Native(seed=1, lost_fraction=0.9), timeout_s=0.3)
    with pytest.raises(Unreadable, match=r"chunks sent, \d+ come in 0\.3 s"):
        write_by_verbs([_PAIR], None, bidirectional=False, seconds=0.05, open_end=ends)


_FIGURES = "printf ' #bytes #iterations BW peak[Gb/sec] average MsgRate\\n 1048576 9000 0.00 %s 0.04\\n'"


@pytest.mark.parametrize(("script", "expected"), [(f"{_FIGURES} 392.40", 49.05), (f"{_FIGURES} 97.60", 12.2)])
def test_rdma_reads_perftests_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, expected: float
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _program(tmp_path, f'case "$*" in *--help*) echo "--use_cuda=<gpu> --use_cuda_dmabuf";; *) {script};; esac')
    (found,) = write_over_rdma([_PAIR], 3, bidirectional=False)
    assert (found.gbytes_per_s, found.by) == (pytest.approx(expected), "by perftest")


def test_rdma_that_fails_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _program(tmp_path, 'case "$*" in *--help*) echo --use_cuda;; *) echo "Couldn\'t allocate MR"; exit 1;; esac')
    with pytest.raises(Unreadable, match=r"exit status 1, said \"Couldn't allocate MR\""):
        write_over_rdma([_PAIR], None, bidirectional=True)


def test_slow_nic_is_named(tmp_path: Path, profile: Profile) -> None:
    from tests.sim.platforms import healthy

    healthy("hgx-h200").write(tmp_path)

    def write(pairs: list[tuple[int, str, int, str]], gid_index: int | None, *, bidirectional: bool) -> list[Written]:
        assert gid_index == 3
        rates = [(20.0 if pair[3] == "mlx5_5" else 49.0) * (2 if bidirectional else 1) for pair in pairs]
        return [Written(rate, by="by perftest") for rate in rates]

    found = judge_rdma(Node(tmp_path), profile, write)
    assert found.status is Status.FAIL
    assert "GPU 5 mlx5_5 → GPU 4 mlx5_4: 20.0 of 50.0 GB/s (the profile's)" in found.seen
    assert "mlx5_6 →" not in found.seen
    assert found.seen.endswith(", by perftest")


def test_nic_that_changes_bytes_is_named_although_it_is_fast(tmp_path: Path, profile: Profile) -> None:
    from tests.sim.platforms import healthy

    healthy("hgx-h200").write(tmp_path)

    def write(pairs: list[tuple[int, str, int, str]], gid_index: int | None, *, bidirectional: bool) -> list[Written]:
        wrong = int(bidirectional and pairs[0][3] == "mlx5_2")
        return [Written(49.0 * (2 if bidirectional else 1), wrong, "by the verbs transport") for _ in pairs]

    found = judge_rdma(Node(tmp_path), profile, write)
    assert (found.status, found.seen) == (
        Status.FAIL,
        "GPU 2 mlx5_2 → GPU 1 mlx5_1, both ways, each: 1 chunks with other bytes, by the verbs transport",
    )


def _program(folder: Path, script: str) -> None:
    place = folder / "ib_write_bw"
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
