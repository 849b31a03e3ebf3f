"""The simulated faults as a part of the doctor's reference: ``python -m tests.sim.document``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.sim.platforms import profile_of
from tests.sim.scenario import HEALTHY, Scenario, load_scenarios

_INTRODUCTION = """## Which fault is found by which check

Each row is a simulated node: a sound platform with one thing changed. A test examines it. The doctor must report what
the row has, and nothing else. So a fault raises no second alarm, and a sound node raises none. Every check fails in
at least one row.

`tests/sim/damage.py` also breaks files, NVML answers and facts at random, and gives every kind of file every kind of
damage. Every check must then end in a result.
"""


def document() -> str:
    """Returns the part as Markdown."""
    return "\n".join([_INTRODUCTION, *_faults(), *_sound()]) + "\n"


def _faults() -> Iterator[str]:
    faults = [scenario for scenario in load_scenarios() if scenario.expected]
    yield f"### Faults and what cannot be told ({len(faults)})\n"
    yield "| fault | node | fails | unknown | words | after |\n|---|---|---|---|---|---|"
    for item in faults:
        unknown = item.unknown_ids
        listed = ", ".join(unknown) if len(unknown) <= 4 else f"{', '.join(unknown[:3])} and {len(unknown) - 3} more"
        finds = ", ".join(item.finds.split())
        cells = (item.name, item.platform, finds or "–", listed or "–", _cell(item.seen), item.source)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _sound() -> Iterator[str]:
    sound = [*(Scenario(name, name) for name in HEALTHY), *(item for item in load_scenarios() if not item.expected)]
    yield f"### Sound nodes ({len(sound)})\n"
    yield "| node | platform | profile | verdict | after |\n|---|---|---|---|---|"
    for item in sound:
        yield f"| {item.name} | {item.platform} | {profile_of(item.platform)} | pass | {item.source} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(document())
