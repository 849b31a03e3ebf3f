"""The node doctor: is this node fit to run hybrid_ep, and if not, what has to be done?

    model.py      Check, Finding, Result, Report: what a check is and what it says
    registry.py   the list of checks; checks/ holds them, one file per group
    profile.py    what a platform should look like (profiles.yaml), never in code
    node.py       everything a check may read: files, NVML, commands, topology, live or below --sysroot; from a child
                  process, so that nothing that is read can hang or kill the doctor
    runner.py     chooses and runs checks; counters are sampled twice; what a report says of its node beside them
    compare.py    what only several nodes together can show
    command.py    `hybrid-ep doctor`; `hybrid-ep topology`, which no driver can hang either

Nothing here imports torch: the doctor must start where the installation itself is broken.
"""

from __future__ import annotations

from hybrid_ep.cluster.doctor.model import Check, Finding, Report, Result, Severity, Status
from hybrid_ep.cluster.doctor.node import Node, Unreadable, WatchedNode
from hybrid_ep.cluster.doctor.profile import Profile, load_profile, propose_profile
from hybrid_ep.cluster.doctor.runner import Selection, examine

__all__ = [
    "Check",
    "Finding",
    "Node",
    "Profile",
    "Report",
    "Result",
    "Selection",
    "Severity",
    "Status",
    "Unreadable",
    "WatchedNode",
    "examine",
    "load_profile",
    "propose_profile",
]
