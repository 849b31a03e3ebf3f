"""The input of the model: a grid of ranks, a workload, a kind of call, and the hardware.

Each constant of the hardware has one meaning and one source, and is the same for every call. Constants whose source is
`benchmarks/results` were fitted, all at once, to the device times of these files. docs/figures_h100.md has the errors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace

from hybrid_ep.checks import require, require_int
from hybrid_ep.errors import ConfigError
from hybrid_ep.workload import Workload

MODES = ("normal", "permute", "low-latency")
GPU_MEMORY = {"H100": 3350.0, "H200": 4800.0}  # GB/s, by the data sheets; these GPUs differ in no other constant
_MOST_HIDDEN = 1 << 16  # of which two records still fit into a chunk
_MOST_RANKS = 1 << 13  # whose tables still take less than 1 GB
_RESULTS = "benchmarks/results"


def _constant(value: float, source: str) -> float:
    found: float = field(default=value, metadata={"source": source})
    return found


@dataclass(frozen=True)
class Machine:
    """Constants of the hardware and of the kernels: rates in GB/s (1e9), times in µs.

    Raises:
        ConfigError: a constant is not above 0, or an efficiency above 1.
    """

    # NVLink out of a GPU, and into it, by the vendor's data sheet; the share of it that rows reach.
    nvlink: float = _constant(450.0, "H100 and H200: NVLink 4, 18 links of 25 GB/s")
    nvlink_efficiency: float = _constant(0.76, f"{_RESULTS}; the wire alone there: 320 … 370 GB/s")
    # Rows that an SM pushes, to its own GPU too; that an SM of a combine in one domain takes in or sends.
    sm_push: float = _constant(50.0, "csrc/runtime/sm_model.cpp; a fit gives 49")
    sm_sum: float = _constant(62.0, _RESULTS)
    # Between domains: rows that a warp of combine takes in; to claim a part of a chunk and to see its sums written.
    warp_sum: float = _constant(3.45, "a combine of 2 × 1 H100 without a limit; docs/figures_h100.md")
    part_us: float = _constant(2.0, "2 × 2 H100 without a limit: parts and whole chunks; docs/reasons.md")
    # Memory of a GPU, by the vendor's data sheet; the share of it that rows reach, as a call copies them or a permuted
    # combine sums them; as a low-latency combine sums them; BF16 rows that a low-latency dispatch casts to FP8.
    memory: float = _constant(GPU_MEMORY["H200"], "data sheet of the H200; H100: 3350")
    memory_efficiency: float = _constant(0.51, _RESULTS)
    sum_efficiency: float = _constant(0.71, _RESULTS)
    cast: float = _constant(1750.0, _RESULTS)
    # An empty kernel, by the timer of `hybrid-ep bench`; in a CUDA graph, from the end of a call to the next begin.
    launch_us: float = _constant(5.2, "timer_floor_us of benchmarks/results")
    graph_launch_us: float = _constant(0.8, _RESULTS)
    # A call beside rows and ranks: counts, offsets, readiness, first and last row; `cached` repeats an earlier route.
    dispatch_us: float = _constant(15.0, f"{_RESULTS}; time stamps in docs/figures_h200.md: 11.5 + 3.3")
    cached_us: float = _constant(9.4, _RESULTS)
    combine_us: float = _constant(24.0, _RESULTS)
    low_latency_dispatch_us: float = _constant(6.5, _RESULTS)
    low_latency_combine_us: float = _constant(7.9, _RESULTS)
    # Each rank of the domain that is signalled and waited for; the same of calls in a CUDA graph.
    rank_us: float = _constant(0.6, _RESULTS)
    graph_rank_us: float = _constant(0.2, _RESULTS)
    # A rank's network port in each direction, Gbit/s; the share of it that chunks reach; from a posted write to its
    # flag at the peer, without the bytes.
    nic_gbits: float = _constant(400.0, "the asker")
    nic_efficiency: float = _constant(0.98, "computed: 82 bytes of RoCE v2 headers for each 4,096")
    nic_latency_us: float = _constant(2.0, "the asker")
    # From a kernel's command to its work request, and back to a kernel that polls; the proxy's thread for each work
    # request; a kernel that reads one word of another rank.
    proxy_us: float = _constant(2.6, "measured on H100: GPU, pinned memory, CPU, pinned memory, GPU")
    post_us: float = _constant(
        0.55, "hybrid-ep bench --mode link over loopback: command to work request, one at a time"
    )
    word_us: float = _constant(0.7, "assumed")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(0 < value < float("inf"), name, value, "a finite number > 0")
        for name in ("nvlink_efficiency", "memory_efficiency", "sum_efficiency", "nic_efficiency"):
            require(getattr(self, name) <= 1, name, getattr(self, name), "0 … 1")

    # Rates that rows or chunks reach, in bytes per µs.

    @property
    def nvlink_rate(self) -> float:
        return self.nvlink * self.nvlink_efficiency * 1e3

    @property
    def memory_rate(self) -> float:
        return self.memory * self.memory_efficiency * 1e3

    @property
    def low_latency_sum_rate(self) -> float:
        return self.memory * self.sum_efficiency * 1e3

    @property
    def warp_sum_rate(self) -> float:
        return self.warp_sum * 1e3

    @property
    def nic_rate(self) -> float:
        return self.nic_gbits / 8 * self.nic_efficiency * 1e3

    @classmethod
    def sources(cls) -> dict[str, str]:
        """Returns the source of each constant."""
        return {constant.name: constant.metadata["source"] for constant in fields(cls)}


@dataclass(frozen=True)
class Question:
    """One pair of dispatch and combine, of D domains of G ranks each.

    Raises:
        ConfigError: a value is not allowed.
    """

    workload: Workload  # of each rank
    num_domains: int  # D; 1 is one NVLink domain without a network
    num_ranks_per_domain: int  # G
    mode: str = "normal"  # of `MODES`; "permute" groups rows by expert
    num_sms: int = 16  # of a normal call
    is_cached: bool = False  # whether the dispatch repeats the route of an earlier one
    in_graph: bool = False  # whether low-latency calls follow each other in a CUDA graph, as the layers of a decoder
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
        experts, ranks = self.workload.num_experts, self.num_ranks
        require_int("experts", experts, minimum=ranks, maximum=_MOST_RANKS, multiple_of=ranks)

    @property
    def num_ranks(self) -> int:
        return self.num_domains * self.num_ranks_per_domain

    def with_domains(self, num_domains: int) -> Question:
        """Returns the question for another number of domains; more ranks than experts bring a new expert each."""
        num_ranks = num_domains * self.num_ranks_per_domain
        num_experts = -(-self.workload.num_experts // num_ranks) * num_ranks
        return replace(self, num_domains=num_domains, workload=replace(self.workload, num_experts=num_experts))
