"""Rules for faults that schemas cannot express: manifests that fit them, and are refused, hang, fall back or fail.

A rule is a function over one manifest, or over all of one build, that yields findings. docs/kubernetes_check.md lists
its id, level and docstring. Tests break a shipped overlay for each rule, and that rule alone must find it.
"""

from hybrid_ep.cluster.kubernetes.rules import (
    claims,
    fabric,
    fields,
    jobs,
    mpijob,
    network,
    nodes,
    pod_security,
    pods,
    references,
)
from hybrid_ep.cluster.kubernetes.rules.registry import RULES, Rule, check_rules

__all__ = ["RULES", "Rule", "check_rules", "claims", "fabric", "fields", "jobs", "mpijob", "network", "nodes", "pods"]
__all__ += ["pod_security", "references"]
