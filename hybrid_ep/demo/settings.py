"""The settings of a demo."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.checks import require, require_int
from hybrid_ep.workload import Workload

ROUTINGS = ("skewed", "uniform")


@dataclass(frozen=True)
class Path:
    """One way through the library.

    Attributes:
        flavour: ``buffer`` (`Buffer`), ``permuted`` (`HybridEPBuffer` with permutation) or ``low-latency``.
        dtype: of the dispatched tokens.
    """

    flavour: str
    dtype: str

    @property
    def title(self) -> str:
        """Name of the path in tables."""
        names = {
            "buffer": "Buffer",
            "permuted": "HybridEPBuffer",
            "low-latency": "Buffer, low latency",
        }
        return names[self.flavour]


PATHS = tuple(Path(flavour, dtype) for flavour in ("buffer", "permuted", "low-latency") for dtype in ("bf16", "fp8"))


@dataclass(frozen=True)
class Settings:
    """Sizes of the virtual cluster and of its MoE layer.

    Attributes:
        num_ranks: R, processes.
        num_domains: D, virtual NVLink domains; divides R.
        num_tokens: T, tokens of each rank.
        hidden: H, a multiple of 128 (tokens are also sent as fp8).
        num_topk: K.
        num_experts: E, a multiple of R.
        num_steps: training steps.
        seed: of everything random.
        skew: also run a layer with a skewed router, without balance and with.
        lose_rank: also kill a rank, and go on without it.

    Raises:
        ConfigError: a value is not allowed.
    """

    num_ranks: int = 8
    num_domains: int = 2
    num_tokens: int = 256
    hidden: int = 512
    num_topk: int = 4
    num_experts: int = 32
    num_steps: int = 40
    seed: int = 0
    skew: bool = False
    lose_rank: bool = False

    def __post_init__(self) -> None:
        require_int("ranks", self.num_ranks, minimum=1)
        require(not self.lose_rank or self.num_ranks > 1, "ranks", self.num_ranks, "≥ 2 to lose one")
        require_int("domains", self.num_domains, minimum=1)
        is_regular = self.num_ranks % self.num_domains == 0
        require(is_regular, "ranks", self.num_ranks, f"multiples of domains = {self.num_domains}")
        require_int("tokens", self.num_tokens, minimum=1)
        require_int("experts", self.num_experts, minimum=1, multiple_of=self.num_ranks)
        require_int("steps", self.num_steps, minimum=2)
        require_int("seed", self.seed, minimum=0)
        for routing in ROUTINGS:
            self.workload(routing, "fp8")

    @property
    def num_ranks_per_domain(self) -> int:
        """Ranks of one domain."""
        return self.num_ranks // self.num_domains

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def ffn_hidden(self) -> int:
        """Width inside an expert: half of hidden."""
        return self.hidden // 2

    def workload(self, routing: str, dtype: str) -> Workload:
        """One rank's tokens."""
        return Workload(
            self.num_tokens, self.hidden, self.num_topk, self.num_experts, dtype=dtype, routing=routing, seed=self.seed
        )
