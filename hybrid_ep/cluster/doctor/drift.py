"""What has changed on a node since it was accepted: facts of two reports of the same node, side by side.

A change is no fault: it may be wanted. So it is a warning, and an operator decides whether to validate the node again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid_ep.cluster.doctor.model import Result, Severity, Status


class _Fact(NamedTuple):
    """A key of a report's facts, and what it is."""

    key: str
    title: str


FACTS = (
    _Fact("driver", "the driver"),
    _Fact("cuda", "the CUDA version of the driver"),
    _Fact("packages", "the Python packages that jobs run with"),
    _Fact("gpus", "the GPUs: models, serial identities, memory, power limits and NVLink domain"),
    _Fact("nic_firmware", "the NICs' firmware"),
    _Fact("nic_guids", "the NICs"),
    _Fact("ports", "the NICs' ports: link layer, rate, MTU and GID"),
    _Fact("kernel", "the kernel"),
    _Fact("tree", "the slots of GPUs and NICs"),
)
_REMEDY = "If the change is wanted, validate the node again and record it anew; otherwise find out who made it."


def changes(accepted: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Result, ...]:
    """Compares the facts of a report with those of the same node when it was accepted; one result for each key.

    A key that the accepted facts do not have, because they could not be read, is left out.
    """
    return tuple(_result(fact, accepted[fact.key], now.get(fact.key)) for fact in FACTS if accepted.get(fact.key))


def _result(fact: _Fact, before: Any, after: Any) -> Result:
    if not after:
        status, seen = Status.UNKNOWN, "not known any more"
    elif before == after:
        status, seen = Status.PASS, "as it was"
    else:
        status, seen = Status.FAIL, "; ".join(_differences(before, after))
    remedy = "" if status is Status.PASS else _REMEDY
    where = ("as it was when the node was accepted", "the facts of both reports", remedy)
    return Result(f"drift.{fact.key}", "drift", fact.title, status, Severity.WARNING, seen, *where)


def _differences(before: Any, after: Any) -> list[str]:
    """What is gone and what has come, each by its name where it has one."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        return [f"{key}: {before.get(key, 'none')} → {after.get(key, 'none')}" for key in keys]
    if isinstance(before, list) and isinstance(after, list):
        if len(before) == len(after):
            pairs = [(i, old, new) for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
            return [f"{i}: {text}" for i, old, new in pairs for text in _differences(old, new)]
        gone, come = [each for each in before if each not in after], [each for each in after if each not in before]
        return (
            [f"{len(before)} → {len(after)}"] + [f"gone: {each}" for each in gone] + [f"new: {each}" for each in come]
        )
    return [f"{before} → {after}"]
