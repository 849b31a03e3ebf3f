"""`hybrid-ep doctor --active`: loads the GPUs for some minutes and measures them. For idle nodes only.

measure.py   what is measured, in plain PyTorch, from a child process
judge.py     what the figures mean: against the profile, else against the median of the run
"""

from __future__ import annotations

from hybrid_ep.cluster.doctor.active.judge import examine_actively
from hybrid_ep.cluster.doctor.active.measure import Machine, TorchMachine

__all__ = ["Machine", "TorchMachine", "examine_actively"]
