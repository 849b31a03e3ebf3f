"""Results folders of whole clusters, as the playbooks leave them; nodes are the doctor's reports of simulated nodes.

    python -m tests.sim.cluster DIR --hosts 1000 --rounds 30

Nodes are copies of one healthy HGX H200 under other names; some have a fault of the scenarios, one cannot be reached,
one left nothing and one an unreadable file. Figures of the test jobs are made up, with one slow host.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.doctor import Report, Result, Severity, Status
from hybrid_ep.cluster.doctor.compare import compare
from hybrid_ep.cluster.validation.rounds import rounds
from tests.sim.scenario import build_stub, run_all

PLATFORM = "hgx-h200"
FAULTS = ("missing NIC", "port down", "link down", "memlock low", "fatal Xid", "port down", "peermem missing")
STARTED = "2026-11-21T09:00:00Z"


def names(num_hosts: int) -> list[str]:
    """``worker-1`` …, with as many digits as the last one needs."""
    digits = len(str(num_hosts))
    return [f"worker-{number:0{digits}}" for number in range(1, num_hosts + 1)]


def write_inventory(folder: Path, hosts: list[str], *, title: str = "Simulated cluster", domain: int = 0) -> None:
    """Writes inventory.json; `domain` hosts at a time share an NVLink domain, 0: none does."""
    entries = [
        {"name": name, "platform": PLATFORM, "domain": f"rack-{index // domain + 1}" if domain else None}
        for index, name in enumerate(hosts)
    ]
    write(folder / "inventory.json", {"hosts": entries, "started": STARTED, "title": title})


def make_result(status: Status, severity: Severity = Severity.ERROR, **fields: str) -> Result:
    """A result of the check `gpu.count`."""
    remedy = "" if status is Status.PASS else "reseat it"
    result = Result("gpu.count", "gpu", "number of GPUs", status, severity, "7", "8", "NVML", remedy)
    return replace(result, **fields)


def make_report(host: str, *results: Result) -> Report:
    """A node's report, with facts that fit those of other nodes."""
    facts: dict[str, Any] = {
        "driver": "580.95.05",
        "cuda": 13000,
        "packages": {"torch": "2.11.0"},
        "gpus": [{"name": "NVIDIA H200", "uuid": host, "vbios": "96.00.D9.00.01", "cluster_uuid": None, "clique": None}]
        * 8,
        "kernel": "6.8.0",
        "memory_gib": 2015.6,
        "boot_id": f"boot of {host}",
        "tree": ["GPU 0 0000:13:00.0 NUMA 0"],
        "nic_firmware": ["28.43.2026"],
        "nic_guids": {"mlx5_0": f"guid of {host}"},
        "clock": {"synchronized": True, "max_error_us": 2000},
        "domain_gpus": None,
        "clock_error_ms": 500,
    }
    return Report("0.1.0", host, "hgx-h200", "given", 0.1, results, ("mnnvl.clique",), facts)


def write_sound_results(folder: Path, hosts: list[str]) -> None:
    """Writes the inventory, a report of each host on which everything passed, and what compare says of them."""
    write_inventory(folder, hosts)
    reports = [make_report(host, make_result(Status.PASS)) for host in hosts]
    for report in reports:
        write(folder / "nodes" / f"{report.host}.json", report.to_json())
    write(folder / "compare.json", compare(reports).to_json())


def write_nodes(folder: Path, reports: Mapping[str, Report], scenario_of: Mapping[str, str]) -> list[Report]:
    """Writes a report for each host; `scenario_of` names its scenario, or the healthy platform."""
    written = []
    for name, scenario in scenario_of.items():
        report = reports[scenario]
        gpus = [{**gpu, "uuid": f"GPU-{name}-{index}"} for index, gpu in enumerate(report.facts["gpus"])]
        guids = {nic: f"{name} {guid}" for nic, guid in report.facts["nic_guids"].items()}
        own = {"gpus": gpus, "nic_guids": guids, "boot_id": f"boot of {name}"}
        written.append(replace(report, host=name, facts={**report.facts, **own}))
        write(folder / "nodes" / f"{name}.json", written[-1].to_json())
    return written


def write_job(folder: Path, name: str, kind: str, hosts: list[str], **fields: Any) -> None:
    """Writes how a job ended; it passed and measured nothing unless `fields` say otherwise."""
    job = {"name": name, "kind": kind, "hosts": hosts, "status": "pass", "reason": "", "metrics": [], "log": None}
    write(folder / "jobs" / f"{name}.json", {**job, **fields})


def write_pair_jobs(folder: Path, hosts: list[str], num_rounds: int, *, slow: str = "") -> Iterator[tuple[str, str]]:
    """Writes a pair job and, in the first round, a nic job of each pair; yields the pairs.

    Args:
        folder: the results folder.
        hosts: who takes part.
        num_rounds: of the tournament.
        slow: this host has half the bandwidth with everyone.
    """
    noise = random.Random(0)
    for number, item in enumerate(rounds(hosts, num_rounds)):
        for a, b in item.pairs:
            share = noise.gauss(0.55 if slow in (a, b) else 1.0, 0.008)
            figures = [("dispatch", 88.2, "GB/s"), ("combine", 81.4, "GB/s")]
            metrics = [{"name": n, "value": round(value * share, 2), "unit": unit} for n, value, unit in figures]
            write_job(folder, f"pair-{a}-{b}", "pair", [a, b], metrics=metrics)
            if number == 0:
                metrics = [{"name": "write", "value": round(391.0 * share, 1), "unit": "Gb/s"}]
                write_job(folder, f"nic-{a}-{b}", "nic", [a, b], metrics=metrics)
            yield a, b


def write_large(folder: Path, reports: Mapping[str, Report], num_hosts: int, num_rounds: int) -> None:
    """Writes the cluster that this file's head describes."""
    hosts = names(num_hosts)
    write_inventory(folder, hosts, title=f"{num_hosts} simulated hosts", domain=9)
    places = random.Random(1).sample(range(num_hosts), len(FAULTS) + 3)
    broken = {hosts[place]: fault for place, fault in zip(places, FAULTS, strict=False)}
    unreachable, missing, malformed = (hosts[place] for place in places[-3:])
    silent = {unreachable, missing, malformed}
    scenario_of = {name: broken.get(name, PLATFORM) for name in hosts if name not in silent}
    written = write_nodes(folder, reports, scenario_of)
    write(folder / "nodes" / f"{unreachable}.json", {"unreachable": "ssh: connect to host: No route to host"})
    (folder / "nodes" / f"{malformed}.json").write_text('{"host": "' + malformed)
    write(folder / "compare.json", compare(written).to_json())
    healthy = [name for name in scenario_of if name not in broken]
    for _ in write_pair_jobs(folder, healthy, num_rounds, slow=healthy[len(healthy) // 3]):
        pass
    log = "".join(f"[{rank}] dispatch and combine checked\n" for rank in range(400))
    (folder / "jobs" / "group-all.log").write_text(log)
    metrics = [{"name": "dispatch", "value": 41.3, "unit": "GB/s"}, {"name": "combine", "value": 39.8, "unit": "GB/s"}]
    write_job(folder, "group-all", "group", healthy, metrics=metrics, log="jobs/group-all.log")


def write_small(folder: Path, reports: Mapping[str, Report]) -> None:
    """Writes four hosts: one without a NIC, one pair of the others whose network is slow, a job that failed."""
    hosts = names(4)
    write_inventory(folder, hosts, title="Four simulated HGX H200")
    written = write_nodes(folder, reports, dict.fromkeys(hosts, PLATFORM) | {hosts[1]: "missing NIC"})
    write(folder / "compare.json", compare(written).to_json())
    healthy = [hosts[0], *hosts[2:]]
    for a, b in write_pair_jobs(folder, healthy, 3):
        (folder / "jobs" / f"pair-{a}-{b}.log").write_text(f"{a} {b}\nrank 0: every row arrived and came back right\n")
    slow = [hosts[0], hosts[3]]
    metrics = [{"name": "write", "value": 212.4, "unit": "Gb/s"}]
    write_job(folder, "nic-" + "-".join(slow), "nic", slow, metrics=metrics)
    text = "rank 12: TimeoutError: dispatch: rank 12 waited 20 s for rank 3: no counts\nmpirun: exit code 1\n"
    (folder / "jobs" / "group-all.log").write_text(text)
    reason = "rank 12 waited 20 s for rank 3"
    write_job(folder, "group-all", "group", healthy, status="fail", reason=reason, log="jobs/group-all.log")
    write_job(folder, "nic-without-worker-2", "nic", [hosts[1]], status="skipped", reason="worker-2 is excluded")


def write(path: Path, tree: object) -> None:
    """Writes a JSON file, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))


def simulated_reports() -> dict[str, Report]:
    """The doctor's reports of the simulated nodes that these clusters are made of."""
    with tempfile.TemporaryDirectory() as folder:
        return run_all(build_stub(Path(folder)), {PLATFORM, *FAULTS})


def main() -> None:
    """Writes one results folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    write_large(arguments.folder, simulated_reports(), arguments.hosts, arguments.rounds)


if __name__ == "__main__":
    main()
