"""The model's constants of the hardware. Each has one meaning and one source, and is the same for every call.

Constants that are marked `benchmarks/results` were fitted, all at once, to the device times of these files.
docs/figures_h100.md has the errors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from hybrid_ep.checks import require

__all__ = ["GPU_MEMORY", "Machine"]

# GB/s, by the data sheets. The model has no other constant in which these GPUs differ.
GPU_MEMORY = {"H100": 3350.0, "H200": 4800.0}
_RESULTS = "benchmarks/results"


def _constant(value: float, source: str) -> float:
    found: float = field(default=value, metadata={"source": source})
    return found


@dataclass(frozen=True)
class Machine:
    """Rates in GB/s (1e9), times in µs.

    Attributes:
        nvlink: out of a GPU, and into it, by the vendor's data sheet.
        nvlink_efficiency: share of it that rows reach.
        sm_push: rows that an SM pushes, to its own GPU too.
        sm_sum: rows that an SM of combine takes in or sends, in one domain.
        warp_sum: rows that a warp of combine takes in, between domains.
        part_us: for such a warp to claim a part of a chunk, and to see its sums written.
        memory: of a GPU, by the vendor's data sheet.
        memory_efficiency: share of it that rows reach, as a call copies them or a permuted combine sums them.
        sum_efficiency: the same as a low-latency combine sums them.
        cast: BF16 rows that a GPU casts to FP8 in a low-latency dispatch.
        launch_us: an empty kernel, by the timer of `hybrid-ep bench`.
        graph_launch_us: from the end of a call in a CUDA graph to the begin of the next.
        dispatch_us: of a dispatch, beside rows and ranks: counts, offsets, first and last row.
        cached_us: the same with the route of an earlier one.
        combine_us: of a combine: readiness, first and last row.
        low_latency_dispatch_us, low_latency_combine_us: the same of the low-latency calls.
        rank_us: for each rank of the domain that is signalled and waited for.
        graph_rank_us: the same of calls that follow each other in a CUDA graph.
        nic_gbits: of a rank's network port, Gbit/s, in each direction.
        nic_efficiency: share of it that chunks reach.
        nic_latency_us: from a posted write to its flag at the peer, without the bytes.
        proxy_us: from a command of a kernel to its work request, and back to a kernel that polls.
        post_us: of the proxy's thread for each work request.
        word_us: for a kernel to read one word that another rank has written.

    Raises:
        ConfigError: a constant is not above 0, or an efficiency above 1.
    """

    nvlink: float = _constant(450.0, "H100 and H200: NVLink 4, 18 links of 25 GB/s")
    nvlink_efficiency: float = _constant(0.76, f"{_RESULTS}; the wire alone there: 320 … 370 GB/s")
    sm_push: float = _constant(50.0, "csrc/runtime/sm_model.cpp; a fit gives 49")
    sm_sum: float = _constant(62.0, _RESULTS)
    warp_sum: float = _constant(3.45, "a combine of 2 × 1 H100 without a limit; docs/figures_h100.md")
    part_us: float = _constant(2.0, "2 × 2 H100 without a limit: parts and whole chunks; docs/reasons.md")
    memory: float = _constant(GPU_MEMORY["H200"], "data sheet of the H200; H100: 3350")
    memory_efficiency: float = _constant(0.51, _RESULTS)
    sum_efficiency: float = _constant(0.71, _RESULTS)
    cast: float = _constant(1750.0, _RESULTS)
    launch_us: float = _constant(5.2, "timer_floor_us of benchmarks/results")
    graph_launch_us: float = _constant(0.8, _RESULTS)
    dispatch_us: float = _constant(15.0, f"{_RESULTS}; time stamps in docs/figures_h200.md: 11.5 + 3.3")
    cached_us: float = _constant(9.4, _RESULTS)
    combine_us: float = _constant(24.0, _RESULTS)
    low_latency_dispatch_us: float = _constant(6.5, _RESULTS)
    low_latency_combine_us: float = _constant(7.9, _RESULTS)
    rank_us: float = _constant(0.6, _RESULTS)
    graph_rank_us: float = _constant(0.2, _RESULTS)
    nic_gbits: float = _constant(400.0, "the asker")
    nic_efficiency: float = _constant(0.98, "computed: 82 bytes of RoCE v2 headers for each 4,096")
    nic_latency_us: float = _constant(2.0, "the asker")
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
