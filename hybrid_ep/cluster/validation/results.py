"""The results folder: its files, each read by itself and checked against schemas.json.

    inventory.json     the hosts that were to be validated
    nodes/HOST.json    what `hybrid-ep doctor --json` wrote there, or {"unreachable": "reason"}
    compare.json       what `hybrid-ep doctor compare --json` wrote
    jobs/NAME.json     how a test job ended; jobs/NAME.log what it printed

A malformed inventory is an error, because nothing can be judged without it. Any other malformed file is a result of its
own, so that it does not hide the others.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema

from hybrid_ep.cluster.doctor.model import Report
from hybrid_ep.errors import ConfigError

_LOG_TAIL_BYTES = 4096
_ILLEGIBLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Host:
    """One host of the inventory.

    Attributes:
        name: as the inventory calls it.
        platform: its profile, by name or as a YAML file.
        domain: the NVLink domain that it shares with other hosts; empty where it is a domain of its own.
    """

    name: str
    platform: str
    domain: str


@dataclass(frozen=True)
class Inventory:
    """What was to be validated.

    Attributes:
        title: of the report.
        started: ISO 8601 time.
        hosts: at least one, each name once.
    """

    title: str
    started: str
    hosts: tuple[Host, ...]


@dataclass(frozen=True)
class Unreachable:
    """A host that gave no report, and why."""

    reason: str


@dataclass(frozen=True)
class Metric:
    """One figure that a job measured."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class JobFile:
    """How a test job ended.

    Attributes:
        name: that of its file.
        kind: ``pair``, ``group``, ``link`` or ``nic``.
        hosts: where it ran.
        status: ``pass``, ``fail``, ``unknown`` or ``skipped``.
        reason: why it did not pass; may be empty where it did.
        metrics: what it measured.
        log: its log, relative to the results folder; empty where there is none.
    """

    name: str
    kind: str
    hosts: tuple[str, ...]
    status: str
    reason: str
    metrics: tuple[Metric, ...]
    log: str


def read_inventory(folder: Path) -> Inventory:
    """Reads inventory.json.

    Raises:
        ConfigError: it is missing, malformed, or names a host twice.
    """
    path = folder / "inventory.json"
    tree = _read(path, "inventory")
    names: set[str] = set()
    for index, host in enumerate(tree["hosts"]):
        if host["name"] in names:
            raise ConfigError(f"{path}: hosts.{index}.name: {host['name']!r} is given twice; allowed: each host once")
        names.add(host["name"])
    hosts = tuple(Host(host["name"], host["platform"], host["domain"] or "") for host in tree["hosts"])
    return Inventory(tree["title"], tree["started"], hosts)


def read_node(folder: Path, host: str) -> Report | Unreachable | None:
    """Reads a host's report; None if there is no file.

    Raises:
        ConfigError: the file is malformed.
    """
    path = folder / "nodes" / f"{host}.json"
    if not path.exists():
        return None
    tree = _load(path)
    if isinstance(tree, dict) and "unreachable" in tree:
        _validate(tree, "unreachable", path)
        return Unreachable(tree["unreachable"])
    return _report(tree, path)


def read_compare(folder: Path) -> Report | None:
    """Reads what the nodes' reports say together; None if there is no file.

    Raises:
        ConfigError: the file is malformed.
    """
    path = folder / "compare.json"
    return _report(_load(path), path) if path.exists() else None


def read_job(folder: Path, name: str) -> JobFile:
    """Reads how a job ended.

    Raises:
        ConfigError: the file is malformed.
    """
    path = folder / "jobs" / f"{name}.json"
    tree = _read(path, "job")
    if tree["name"] != name:
        raise ConfigError(f"{path}: name: is {tree['name']!r}; allowed: {name!r}, as the file is called")
    metrics = tuple(Metric(**metric) for metric in tree["metrics"])
    fields = (tree["kind"], tuple(tree["hosts"]), tree["status"], tree["reason"], metrics, tree["log"] or "")
    return JobFile(name, *fields)


def read_log_tail(folder: Path, log: str) -> str:
    """The end of a job's log, whole lines; or why it cannot be read."""
    try:
        with (folder / log).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            text: str = _legible(file.read().decode(errors="replace"))
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    return text if size <= _LOG_TAIL_BYTES else "…\n" + text.partition("\n")[2]


def name_inside(folder: Path, error: ConfigError) -> str:
    """Returns what is wrong with a file of the results folder, which is named as the folder knows it."""
    return str(error).removeprefix(f"{folder}/")


def stems(folder: Path, kind: str) -> Sequence[str]:
    """Names of the JSON files in ``nodes`` or ``jobs``, sorted; none where there is no such folder."""
    return sorted(path.name.removesuffix(".json") for path in (folder / kind).glob("*.json"))


@functools.cache
def schema(name: str) -> Any:
    """The JSON schema of ``inventory``, ``node``, ``unreachable``, ``job`` or ``report``."""
    return json.loads((resources.files(__package__) / "schemas.json").read_text())["$defs"][name]


def _report(tree: Any, path: Path) -> Report:
    _validate(tree, "node", path)
    return Report.from_json(tree)


def _read(path: Path, kind: str) -> Any:
    tree = _load(path)
    _validate(tree, kind, path)
    return tree


def _load(path: Path) -> Any:
    try:
        return _legible(json.loads(path.read_bytes(), parse_constant=_refuse))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _legible(tree: Any) -> Any:
    """The tree with what no XML, HTML or UTF-8 file may hold (control characters, lone surrogates) replaced."""
    if isinstance(tree, str):
        return _ILLEGIBLE.sub("\N{REPLACEMENT CHARACTER}", tree)
    if isinstance(tree, list):
        return [_legible(item) for item in tree]
    return {_legible(key): _legible(item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def _validate(tree: Any, kind: str, path: Path) -> None:
    error = jsonschema.exceptions.best_match(_validator(kind).iter_errors(tree))
    if error is not None:
        place = ".".join(str(part) for part in error.absolute_path) or "the document"
        raise ConfigError(f"{path}: {place}: {_shorten(error.message)}")


def _shorten(message: str) -> str:
    return message if len(message) <= 300 else f"{message[:200]} … {message[-90:]}"


@functools.cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema(kind))
