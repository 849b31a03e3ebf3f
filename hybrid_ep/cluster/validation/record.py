"""What the playbooks write into the results folder.

`begin_validation` checks the inventory against the rules of the playbooks' inventories, and makes a new folder. Every
group has hosts. Every host has a platform (a profile of the doctor). If NVLink domains of a platform span nodes, each
of its nodes is in one group ``domain_NAME``.

`record` turns what a test job printed into its result. A job is a program that prints one JSON document somewhere in
its output: `hybrid-ep bench --json` or `hybrid-ep validation nic-bandwidth`. It passed if it ended with 0, the document
is there and reports a pass.

`compare_nodes` writes ``compare.json``, the doctor's own comparison, which knows no inventory. `check_domains` compares
the reports with the inventory: the nodes of one NVLink domain must be in one clique, and a clique must not reach into
another domain. It writes one result for each domain to ``jobs/``. Both take time linear in the nodes.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.doctor import Report
from hybrid_ep.cluster.doctor.compare import compare
from hybrid_ep.cluster.doctor.profile import load_profile
from hybrid_ep.cluster.validation.causes import telling_lines
from hybrid_ep.cluster.validation.names import fault_of_name
from hybrid_ep.cluster.validation.results import JobFile, Metric, read_inventory, read_node
from hybrid_ep.errors import ConfigError
from hybrid_ep.report.units import shorten_names

CLIQUES = "-cliques"  # ends the name of a result that is no test job's: it comes from the nodes' reports

_OPERATIONS = ("dispatch", "combine")
_TIMED_OUT = 124  # exit status of timeout(1)
_KILLED = 137


def record(folder: Path, name: str, kind: str, hosts: tuple[str, ...], exit_code: int, output: str) -> JobFile:
    """Judges a job and writes its result and its log; arguments as `judge_output`."""
    (folder / "jobs").mkdir(exist_ok=True)
    job = judge_output(name, kind, hosts, exit_code, output)
    if job.log:
        (folder / job.log).write_text(output.rstrip() + "\n", encoding="utf-8")
    write_job(folder, job)
    return job


def judge_output(name: str, kind: str, hosts: tuple[str, ...], exit_code: int, output: str) -> JobFile:
    """Judges a job by its exit code and its output.

    Args:
        name, kind, hosts: as in `JobFile`.
        exit_code: of the launcher, e.g. mpirun or timeout.
        output: stdout and stderr, in whatever order.
    """
    document = next(_documents(output), None)
    metrics: tuple[Metric, ...] = ()
    if document is not None:
        metrics = tuple(_metrics(document))
        good = document["ok"] and not exit_code
        status = document.get("status", "pass" if good else "fail")
        reason = _reason(document) or ("" if good else f"ended with {exit_code}: {_why(output)}")
    elif exit_code in (_TIMED_OUT, _KILLED):
        status, reason = "fail", f"did not end in time; last said: {_why(output)}"
    elif exit_code:
        status, reason = "fail", f"ended with {exit_code}: {_why(output)}"
    else:
        status, reason = "unknown", f"ended with 0 and left no result; last said: {_last_line(output)}"
    return JobFile(name, kind, hosts, status, reason, metrics, f"jobs/{name}.log" if output.strip() else "")


def write_job(folder: Path, job: JobFile) -> None:
    """Writes ``jobs/NAME.json``."""
    (folder / "jobs").mkdir(exist_ok=True)
    text = json.dumps({**asdict(job), "log": job.log or None}, indent=2)
    (folder / "jobs" / f"{job.name}.json").write_text(text + "\n", encoding="utf-8")


def record_node(folder: Path, host: str, output: str) -> str:
    """Writes ``nodes/HOST.json`` from what the doctor printed, or why there is no report; returns its status."""
    report = next((found for found in _objects(output) if "results" in found and "status" in found), None)
    tree = report or {"unreachable": f"the doctor gave no report: {_why(output)}"}
    (folder / "nodes").mkdir(exist_ok=True)
    (folder / "nodes" / f"{host}.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return str(report["status"]) if report else str(tree["unreachable"])


def remove_jobs(folder: Path) -> int:
    """Removes results and logs of test jobs; returns how many."""
    found = [path for path in (folder / "jobs").glob("*.json") if not path.stem.endswith(CLIQUES)]
    for path in found:
        path.unlink()
        path.with_suffix(".log").unlink(missing_ok=True)
    return len(found)


def _documents(output: str) -> Iterator[dict[str, Any]]:
    """JSON objects that are a job's result."""
    yield from (found for found in _objects(output) if "ok" in found)


def _objects(output: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    place = 0
    while (place := output.find("{", place)) >= 0:
        try:
            found, end = decoder.raw_decode(output, place)
        except ValueError:
            place += 1
            continue
        if isinstance(found, dict):
            yield found
        place = end


def _reason(document: dict[str, Any]) -> str:
    outcomes = document.get("outcomes", [])
    problems = [problem for outcome in outcomes for problem in outcome["problems"]]
    # Rows crossed between domains without the kernels; readers of their bandwidth must know.
    problems += [
        f"between domains by engine {outcome['engine']}"
        for outcome in outcomes
        if outcome.get("num_ranks_per_domain") and outcome["engine"] != "cuda"
    ]
    return "; ".join(problems) or str(document.get("reason", ""))


def _metrics(document: dict[str, Any]) -> Iterator[Metric]:
    """Bandwidth (of all received rows) and median time of the two operations; or what the document lists itself.

    The bench's other forms of them (routing given, cached …) stay in the log.
    """
    for outcome in document.get("outcomes", []):
        for operation in outcome["operations"]:
            if operation["name"] not in _OPERATIONS:
                continue
            yield Metric(operation["name"], operation["gbps"], "GB/s")
            yield Metric(f"{operation['name']} time", operation["median_us"], "µs")
    for metric in document.get("metrics", []):
        yield Metric(str(metric["name"]), float(metric["value"]), str(metric["unit"]))


def _why(output: str) -> str:
    """Every line that names a cause, a few at most; where none does, the last one."""
    return "; ".join(telling_lines(map(str.strip, output.splitlines()))) or _last_line(output)


def _last_line(output: str) -> str:
    """The last line that is not one of mpirun's notes, which it frames with dashes; else how the first note begins."""
    said: list[str] = []
    noted: list[str] = []
    in_note = False
    for line in map(str.strip, output.splitlines()):
        if line.startswith("-----"):
            in_note = not in_note
        elif line:
            (noted if in_note else said).append(line)
    return said[-1] if said else noted[0] if noted else "nothing"


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


DOMAIN_PREFIX = "domain_"
# Groups that Ansible makes itself; they may be empty.
_BUILT_IN = frozenset({"all", "ungrouped"})


@dataclass(frozen=True)
class Inventory:
    """The hosts of a playbook.

    Attributes:
        title: of the validation.
        hosts: that are to be validated.
        groups: name → its hosts, also those that are not validated this time.
        platforms: host → name or file of its profile; empty or absent where the inventory names none.
    """

    title: str
    hosts: Sequence[str]
    groups: Mapping[str, Sequence[str]]
    platforms: Mapping[str, str]

    @classmethod
    def from_json(cls, text: str) -> Inventory:
        """Reads one JSON object with the attributes' names.

        Raises:
            ConfigError: it is something else.
        """
        try:
            tree: dict[str, Any] = json.loads(text)
            return cls(str(tree["title"]), list(tree["hosts"]), dict(tree["groups"]), dict(tree["platforms"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the inventory is not a JSON object with title, hosts, groups, platforms: {error!r}"
            ) from error


def begin_validation(folder: Path, inventory: Inventory) -> None:
    """Writes ``inventory.json`` into `folder`; results of an earlier validation there are removed.

    Raises:
        ConfigError: the inventory breaks a rule (all breaches are named), or the folder holds something else.
    """
    domains = _domains(inventory)
    hosts = [
        {"name": host, "platform": inventory.platforms[host], "domain": domains.get(host)} for host in inventory.hosts
    ]
    if folder.exists() and any(folder.iterdir()) and not (folder / "inventory.json").exists():
        raise ConfigError(f"{folder} is neither empty nor a results folder; allowed: one of them, or a new path")
    for name in ("nodes", "jobs"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    (folder / "compare.json").unlink(missing_ok=True)
    content = {"hosts": hosts, "started": datetime.now(timezone.utc).isoformat(), "title": inventory.title}
    (folder / "inventory.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _domains(inventory: Inventory) -> dict[str, str]:
    """Host → its domain, once all rules hold."""
    faults = [] if inventory.hosts else ["it has no host"]
    for group, members in sorted(inventory.groups.items()):
        if not members and group not in _BUILT_IN:
            faults.append(f"group {group!r} is empty: add its hosts, or remove it")
    groups_of: dict[str, list[str]] = {}
    for group, members in sorted(inventory.groups.items()):
        for host in members if group.startswith(DOMAIN_PREFIX) else ():
            groups_of.setdefault(host, []).append(group)
    spans: dict[str, bool] = {}  # whether a platform's domains span nodes
    seen: set[str] = set()
    for host in inventory.hosts:
        fault = fault_of_name("host", host)
        if fault is not None:
            faults.append(fault)
            continue
        if host in seen:
            faults.append(f"host {host!r} is given twice; allowed: each host once")
        seen.add(host)
        platform = inventory.platforms.get(host, "")
        if not platform:
            faults.append(f"host {host!r} has no platform: put it into a group that sets doctor_profile")
            continue
        try:
            if platform not in spans:
                spans[platform] = bool(load_profile(platform)["mnnvl.domain_gpus"])
        except ConfigError as error:
            faults.append(f"host {host!r}: {error}")
            continue
        found = groups_of.get(host, [])
        if len(found) > 1:
            faults.append(f"host {host!r} is in the NVLink domains {', '.join(found)}; allowed: one")
        elif not found and spans[platform]:
            faults.append(f"host {host!r} is in no group {DOMAIN_PREFIX}NAME, but the domains of {platform} span nodes")
    if faults:
        raise ConfigError("the inventory is not usable: " + "; ".join(faults))
    return {host: found[0].removeprefix(DOMAIN_PREFIX) for host, found in groups_of.items()}
