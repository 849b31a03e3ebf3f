"""What the kernel's log says of GPUs: Xids and SXids, judged by NVIDIA's catalogue (xids.yaml).

Other lines that show a fault, which the check judges and a recording keeps, are those of kernel_lines.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hybrid_ep.cluster.doctor.node import LogLine

# Action of the catalogue → what an operator does; those without one are no fault of the node.
ACTIONS = {
    "ignore": "",
    "restart_app": "",
    "reset_gpu": "reset the GPU",
    "reboot": "reboot the node",
    "service": "have it serviced",
    "check_power": "check the power cables",
    "update": "update driver and firmware",
    "by_severity": "reset the GPU",
    "as_told": "",
}
_XID = re.compile(
    r"\bXid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?\): (\d{1,4})\b(.*)"
)
_SXID = re.compile(r"\bSXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d{1,6}), Fatal")
_NOT_STARTED = re.compile(
    r"\bNVRM: (?:The NVIDIA )?GPU ([0-9a-fA-F:]+)\.[0-7].*?(RmInitAdapter failed|fallen off the bus)"
)
_NEEDS_OPEN_MODULE = re.compile(r"requires use of the NVIDIA open kernel modules")
_TOLD = re.compile(r"changed from .*? to 0x[0-9a-fA-F]+ \(([^)]*)\)")
_DRIVER_LOADED = re.compile(r"\bNVRM: loading NVIDIA UNIX")

_PROPRIETARY = "proprietary kernel modules"


@dataclass
class Incident:
    """One kind of event on one device since it was last reset.

    Attributes:
        name: ``Xid 79``, ``SXid 20034``, or the driver's words where it cannot start a GPU.
        device: PCI address of the GPU or NVSwitch.
        what: what it means; empty where the catalogue has no such number.
        action: what to do; empty for an event that is no fault.
        seconds: after the boot, of each time.
    """

    name: str
    device: str
    what: str
    action: str
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        times = f"{len(self.seconds)} times, last" if len(self.seconds) > 1 else "once,"
        do = f"; {self.action}" if self.action else ""
        return f"{self.name} on {self.device} ({self.what}), {times} {_after_boot(self.seconds[-1])}{do}"


@cache
def catalogue() -> dict[int, dict[str, Any]]:
    """xids.yaml: number → ``what``, ``action``, ``gpus``."""
    found: dict[int, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "xids.yaml").read_text())
    return found


def read_incidents(lines: Iterable[LogLine], overrides: Mapping[int, str]) -> list[Incident]:
    """Reads the log.

    A GPU's events are forgotten when the driver says that it needs no further recovery (Xid 154, "None"), and all
    events when the driver is loaded again.

    Args:
        lines: oldest first.
        overrides: number → action, of a site that knows better than the catalogue.
    """
    found: dict[tuple[str, str], Incident] = {}
    for line in lines:
        if _DRIVER_LOADED.search(line.message):
            found.clear()
        elif sxid := _SXID.search(line.message):
            _note(found, Incident(f"fatal SXid {sxid[2]}", sxid[1], "NVSwitch", ACTIONS["by_severity"]), line.seconds)
        elif _NEEDS_OPEN_MODULE.search(line.message):
            named = re.search(r"GPU ([0-9a-fA-F:]+)\.[0-7]", line.message)
            device = named[1].lower()[-10:] if named else "a GPU"
            text = "the GPU needs the open ones"
            _note(found, Incident(_PROPRIETARY, device, text, "install the open kernel modules"), line.seconds)
        elif lost := _NOT_STARTED.search(line.message):
            if not any(name == _PROPRIETARY for name, _ in found):  # then that is the cause
                incident = Incident(
                    lost[2], lost[1].lower()[-10:], "the driver cannot start the GPU", ACTIONS["reboot"]
                )
                _note(found, incident, line.seconds)
        elif xid := _XID.search(line.message):
            device, number, text = xid[1].lower()[-10:], int(xid[2]), xid[3]
            entry = catalogue().get(number, {"what": "not in the catalogue", "action": "ignore"})
            action = overrides.get(number, entry["action"])
            told = _TOLD.search(text) if action == "as_told" else None
            if told:  # the newest word counts
                found.pop((f"Xid {number}", device), None)
            if told and told[1] == "None":
                for key in [key for key in found if key[1] == device]:
                    del found[key]
                continue
            do = told[1].lower() if told else ACTIONS[action]
            if action == "by_severity" and re.search(r"\bNon-?fatal\b", text, re.IGNORECASE):
                do = ""
            _note(found, Incident(f"Xid {number}", device, entry["what"], do), line.seconds)
    return list(found.values())


def _note(found: dict[tuple[str, str], Incident], incident: Incident, seconds: float) -> None:
    known = found.setdefault((incident.name, incident.device), incident)
    known.action = known.action or incident.action  # one fatal event among others that are not
    known.seconds.append(seconds)


def _after_boot(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes} min after the boot" if hours else f"{minutes} min after the boot"


@dataclass(frozen=True)
class FaultLine:
    """A kind of line of the kernel's log: its form, the fault that it shows, and whether that is an error."""

    pattern: re.Pattern[str]
    what: str
    severity: str

    def matches(self, line: LogLine) -> bool:
        return self.pattern.search(line.message) is not None


@cache
def fault_lines() -> list[FaultLine]:
    """The kinds of kernel_lines.yaml; the first that matches a line counts."""
    entries = yaml.safe_load((Path(__file__).parent / "kernel_lines.yaml").read_text())
    return [FaultLine(re.compile(each["pattern"]), each["what"], each.get("severity", "error")) for each in entries]
