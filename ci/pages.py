"""Pages and pictures of the documentation that are made from the code. None of them is in the repository."""

from __future__ import annotations

from typing import Any

from ci.layers import draw
from hybrid_ep import env
from hybrid_ep.cluster.doctor.document import document as doctor_reference
from tests.sim.document import document as doctor_scenarios

__all__ = ["PICTURES", "pages"]

# Below docs/, with what makes them.
PICTURES = {"images/architecture.svg": draw}


def pages() -> dict[str, str]:
    """Path below docs/ → Markdown."""
    return {
        "doctor_reference.md": f"{doctor_reference()}\n{doctor_scenarios()}",
        "reference/environment.md": _environment(),
    }


def _environment() -> str:
    """The table of environment variables, from the one that the code reads."""
    lines = ["# Environment variables", "", "`hybrid-ep env` prints this table with the values in force.", ""]
    for phase, title in (("run", "Read by the package"), ("build", "Read by the build")):
        rows: list[list[Any]] = [
            [f"`{v.name}`", "unset" if v.default is None else f"`{v.default}`", v.allowed, v.effect]
            for v in env.VARIABLES
            if v.phase == phase
        ]
        lines += [f"## {title}", "", "| variable | default | takes | effect |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows] + [""]
    return "\n".join(lines)
