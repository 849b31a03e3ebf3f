"""The packages whose versions must agree across a group, and NCCL's settings.

A node reports its versions; `compare` compares them.
"""

from __future__ import annotations

import re

from hybrid_ep.cluster.doctor.model import Finding, Severity
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


# NCCL's manual keeps these for debugging: "should not be used in production" (NCCL 2.28, environment variables, section
# Debugging). Left out are those of that section that clouds' own images set, such as NCCL_IB_PCI_RELAXED_ORDERING.
_FOR_DEBUGGING = re.compile(
    r"NCCL_(P2P_DISABLE|P2P_LEVEL|P2P_DIRECT_DISABLE|SHM_DISABLE|BUFFSIZE|NTHREADS|MAX_NCHANNELS|"
    r"MIN_NCHANNELS|MAX_CTAS|MIN_CTAS|CHECKS_DISABLE|CHECK_POINTERS|LAUNCH_MODE|IB_DISABLE|"
    r"CUMEM_ENABLE|ALGO|PROTO|NVB_DISABLE|PXN_DISABLE|NVLS_ENABLE|MNNVL_ENABLE|DMABUF_ENABLE|"
    r"LL_THRESHOLD|TREE_THRESHOLD|SINGLE_RING_THRESHOLD|GRAPH_REGISTER|COMM_BLOCKING)"
)
_SETTINGS = ("/etc/nccl.conf", "/etc/environment")


@check(
    "software.nccl",
    title="NCCL settings for every job of the node",
    source=f"{' and '.join(_SETTINGS)}; the environment",
    expectation="none that NCCL's manual keeps for debugging",
    remedy="Take them out where they hold for all jobs, and set them in the one job that needs them. They switch off "
    "paths, and cost all other jobs bandwidth.",
    wants="gpu.count",
    severity=Severity.WARNING,
)
def software_nccl(node: Node, profile: Profile) -> Finding:
    places = {"the environment": node.nccl_variables()}
    for path in _SETTINGS:
        if node.is_seen(path):
            lines = re.findall(r"^\s*(?:export\s+)?(NCCL_\w+)\s*=\s*(.*?)\s*$", node.read(path), re.MULTILINE)
            places[path] = dict(lines)
    faults = [
        f"{name}={value} in {place}"
        for place, variables in places.items()
        for name, value in variables.items()
        if _FOR_DEBUGGING.fullmatch(name)
    ]
    return Finding.judge(faults, "none")
