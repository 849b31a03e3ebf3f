"""Findings from the reports of all nodes together. They are made once, on the controller, in time linear in the nodes.

`compare_nodes` writes ``compare.json``, the doctor's own comparison, which knows no inventory. `check_domains` compares
the reports with the inventory: the nodes of one NVLink domain must be in one clique, and a clique must not reach into
another domain. It writes one result for each domain to ``jobs/``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hybrid_ep.cluster.doctor import Report
from hybrid_ep.cluster.doctor.compare import compare
from hybrid_ep.cluster.validation.record import CLIQUES, write_job
from hybrid_ep.cluster.validation.results import JobFile, read_inventory, read_node
from hybrid_ep.errors import ConfigError
from hybrid_ep.report.names import shorten_names

__all__ = ["check_domains", "compare_nodes"]

_Clique = tuple[str, int]  # cluster UUID, clique


def compare_nodes(folder: Path) -> Report | None:
    """Compares the nodes that gave a report; writes nothing and returns None where they are fewer than two."""
    reports = [report for _, report in _reports(folder)]
    if len(reports) < 2:
        return None
    compared = compare(reports)
    (folder / "compare.json").write_text(json.dumps(compared.to_json(), indent=2) + "\n", encoding="utf-8")
    return compared


def check_domains(folder: Path) -> list[JobFile]:
    """Writes and returns one result for each domain of the inventory, named ``domain-NAME-cliques``."""
    reports = dict(_reports(folder))
    domains: dict[str, list[str]] = defaultdict(list)
    for host in read_inventory(folder).hosts:
        if host.domain:
            domains[host.domain].append(host.name)
    cliques = {host: _cliques(report) for host, report in reports.items()}
    reached: dict[_Clique, set[str]] = defaultdict(set)  # clique → the inventory's domains that it reaches into
    for domain, members in domains.items():
        for name in members:
            for clique in cliques.get(name, set()):
                reached[clique].add(domain)
    results = [_judge(domain, hosts, cliques, reached) for domain, hosts in sorted(domains.items())]
    for result in results:
        write_job(folder, result)
    return results


def _judge(
    domain: str, hosts: list[str], cliques: dict[str, set[_Clique]], reached: dict[_Clique, set[str]]
) -> JobFile:
    found: dict[_Clique, list[str]] = defaultdict(list)
    for host in hosts:
        for clique in cliques.get(host, set()):
            found[clique].append(host)
    outside = [host for host in hosts if host in cliques and not cliques[host]]
    silent = [host for host in hosts if host not in cliques]
    faults = []
    if len(found) > 1:
        parts = (
            f"cluster {uuid} clique {clique} on {shorten_names(on)}" for (uuid, clique), on in sorted(found.items())
        )
        faults.append(f"one domain in the inventory, {len(found)} in the fabric: {', '.join(parts)}")
    faults += [f"in no multi-node domain: {shorten_names(outside)}"] if outside else []
    others = sorted({other for clique in found for other in reached[clique]} - {domain})
    faults += [f"its clique also holds nodes that the inventory puts into {', '.join(others)}"] if others else []
    unknown = f"no report of {shorten_names(silent)}" if silent else ""
    status = "fail" if faults else "unknown" if unknown else "pass"
    reason = "; ".join([*faults, *([unknown] if unknown else [])])
    return JobFile(f"domain-{domain}{CLIQUES}", "group", tuple(hosts), status, reason, (), "")


def _cliques(report: Report) -> set[_Clique]:
    return {
        (gpu["cluster_uuid"], gpu["clique"])
        for gpu in report.facts["gpus"]
        if gpu["cluster_uuid"] and gpu["cluster_uuid"].strip("0")
    }


def _reports(folder: Path) -> Iterator[tuple[str, Report]]:
    """The nodes' reports under their inventory's names; a file that is malformed is the report command's to name."""
    for host in read_inventory(folder).hosts:
        try:
            found = read_node(folder, host.name)
        except ConfigError:
            continue
        if isinstance(found, Report):
            yield host.name, found
