"""Rules for faults that schemas and the API server accept: manifests that hang, fall back, fail, or are slow.

A rule is a function over one manifest, which knows the other objects of its build, and yields findings.
docs/kubernetes_check.md lists its id, level and docstring. Tests break a manifest for each rule.
"""

from hybrid_ep.cluster.kubernetes.rules import devices, fabric, jobs, mpijob, ranks
from hybrid_ep.cluster.kubernetes.rules.registry import RULES, Rule, check_rules

__all__ = ["RULES", "Rule", "check_rules", "devices", "fabric", "jobs", "mpijob", "ranks"]
