"""The grid of ranks: the domain of a rank, its rank in the domain, and its peers in the other domains."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.errors import TopologyError


@dataclass(frozen=True)
class RankGrid:
    """Ranks laid out as domains × ranks per domain; rank = domain_idx × num_ranks_per_domain + domain_rank.

    Attributes:
        rank: this rank.
        num_ranks: all ranks of the group.
        num_ranks_per_domain: ranks that can map each other's memory; divides `num_ranks`.
    """

    rank: int
    num_ranks: int
    num_ranks_per_domain: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise TopologyError(f"rank is {self.rank}; allowed: 0 … {self.num_ranks - 1}")
        if self.num_ranks_per_domain < 1 or self.num_ranks % self.num_ranks_per_domain:
            raise TopologyError(
                f"num_ranks_per_domain is {self.num_ranks_per_domain}; allowed: a divisor of {self.num_ranks} ranks"
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.num_domains} domains of {self.num_ranks_per_domain} ranks"

    @property
    def num_domains(self) -> int:
        return self.num_ranks // self.num_ranks_per_domain

    @property
    def domain_idx(self) -> int:
        return self.rank // self.num_ranks_per_domain

    @property
    def domain_rank(self) -> int:
        return self.rank % self.num_ranks_per_domain

    @property
    def domain(self) -> range:
        """The ranks of this rank's domain, ascending."""
        first = self.domain_idx * self.num_ranks_per_domain
        return range(first, first + self.num_ranks_per_domain)

    @property
    def peers(self) -> range:
        """The ranks with this domain rank in every domain, this rank included, ascending."""
        return range(self.domain_rank, self.num_ranks, self.num_ranks_per_domain)
