"""The input of the model: a grid of ranks, a workload, a kind of call, and the hardware."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hybrid_ep.checks import require, require_int
from hybrid_ep.cluster.model.machine import Machine
from hybrid_ep.errors import ConfigError
from hybrid_ep.workload import Workload

__all__ = ["MODES", "Question"]

MODES = ("normal", "permute", "low-latency")
_MOST_HIDDEN = 1 << 16  # of which two records still fit into a chunk
_MOST_RANKS = 1 << 13  # whose tables still take less than 1 GB


@dataclass(frozen=True)
class Question:
    """One pair of dispatch and combine.

    Attributes:
        workload: of each rank.
        num_domains: D; 1 is one NVLink domain without a network.
        num_ranks_per_domain: G.
        mode: ``normal``, ``permute`` (rows grouped by expert) or ``low-latency``.
        num_sms: of a normal call.
        is_cached: whether the dispatch repeats the route of an earlier one.
        in_graph: whether low-latency calls follow each other in a CUDA graph, as the layers of a decoder.
        machine: the hardware.

    Raises:
        ConfigError: a value is not allowed.
    """

    workload: Workload
    num_domains: int
    num_ranks_per_domain: int
    mode: str = "normal"
    num_sms: int = 16
    is_cached: bool = False
    in_graph: bool = False
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        require_int("domains", self.num_domains, minimum=1, maximum=_MOST_RANKS)
        require_int("ranks-per-domain", self.num_ranks_per_domain, minimum=1, maximum=_MOST_RANKS)
        require_int("domains × ranks-per-domain", self.num_ranks, minimum=1, maximum=_MOST_RANKS)
        require(self.mode in MODES, "mode", self.mode, ", ".join(MODES))
        require_int("num-sms", self.num_sms, minimum=1)
        if self.in_graph and self.mode != "low-latency":
            raise ConfigError(f"in-graph is given with mode {self.mode}; allowed: with mode low-latency")
        if self.is_cached and self.mode == "low-latency":
            raise ConfigError("cached is given with mode low-latency; allowed: with mode normal or permute")
        require_int("tokens", self.workload.num_tokens, minimum=1)
        require_int("hidden", self.workload.hidden, minimum=1, maximum=_MOST_HIDDEN)
        require_int(
            "experts",
            self.workload.num_experts,
            minimum=self.num_ranks,
            maximum=_MOST_RANKS,
            multiple_of=self.num_ranks,
        )

    @property
    def num_ranks(self) -> int:
        return self.num_domains * self.num_ranks_per_domain

    def with_domains(self, num_domains: int) -> Question:
        """Returns the question for another number of domains; more ranks than experts bring a new expert each."""
        num_ranks = num_domains * self.num_ranks_per_domain
        num_experts = -(-self.workload.num_experts // num_ranks) * num_ranks
        return replace(self, num_domains=num_domains, workload=replace(self.workload, num_experts=num_experts))
