"""The packages whose versions must agree across a group. A node reports its versions; `compare` compares them."""

from __future__ import annotations

from hybrid_ep.cluster.doctor.model import Finding
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check


@check(
    "software.packages",
    title="Python packages",
    source="metadata of the installed distributions",
    expectation="{software.packages} installed",
    remedy="pip install the missing ones, in the versions of the other nodes.",
    wants="software.packages",
    of_jobs=True,
)
def software_packages(node: Node, profile: Profile) -> Finding:
    found = node.packages()
    missing = [f"{name} is not installed" for name in profile["software.packages"] if name not in found]
    return Finding.judge(missing, ", ".join(f"{name} {version}" for name, version in sorted(found.items())))
