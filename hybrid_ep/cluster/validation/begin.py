"""The start of a validation: checks the inventory against its rules, and makes a new results folder from it.

The rules are those of the playbooks' inventories. Every group has hosts. Every host has a platform (a profile of the
doctor). If NVLink domains of a platform span nodes, each of its nodes is in one group ``domain_NAME``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.doctor.profile import load_profile
from hybrid_ep.cluster.validation.names import fault_of_name
from hybrid_ep.errors import ConfigError

__all__ = ["DOMAIN_PREFIX", "Inventory", "begin_validation"]

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
