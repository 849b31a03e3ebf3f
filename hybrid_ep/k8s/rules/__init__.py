"""What schemas cannot know: manifests that fit them, and are refused, hang, fall back or fail.

A rule is a function over one manifest, or over all of one build, that yields findings. Its id, its level and its
docstring are what docs/kubernetes.md lists. Tests break a shipped overlay for each and see it found by that rule alone.
"""

from hybrid_ep.k8s.rules import jobs, mpijob, network, pods, references
from hybrid_ep.k8s.rules.registry import RULES, Rule, check_rules

__all__ = ["RULES", "Rule", "check_rules", "jobs", "mpijob", "network", "pods", "references"]
