from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

version: str
compiler: str
built: str
left_out: str

def compute_layout(
    *,
    topk_idx: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    num_ranks: int,
    num_tokens_per_rank: int,
    num_tokens_per_expert: int,
    is_token_in_rank: int,
) -> int: ...
def park_threads() -> None:
    """Lets other threads sleep, and not abort the process, that return from C++ once the interpreter is finalised."""

# Checks of tensors: csrc/calls/judge.cpp. Torch's function modes intercept none of what they read.

def require_plain(name: str, tensor: object, *, traced: bool = False) -> None:
    """Raises ConfigError unless `tensor` is a dense tensor with memory of its own, which kernels can read by address.

    Args:
        name: of the argument, for messages.
        tensor: the argument.
        traced: whether a tracer's tensors are taken, too: the call is made of operators of torch.
    """

def require_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
    contiguous: bool = False,
    traced: bool = False,
) -> Tensor:
    """Returns `tensor` if it is plain, its dtype is one of `dtypes` and its shape fits (None = any size).

    Only what a call writes to must be `contiguous`; what it reads may have any strides, and is copied by `packed`.
    `traced`: as in `require_plain`.
    """

def require_no_grad(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose gradient would be lost: no call of a buffer has a backward pass."""

def require_rows(
    name: str, data: Tensor, scales: Tensor | None, device: torch.device | None, opaque_scales: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Checks token rows, as `hybrid_ep.buffers.arguments.check_rows` explains them, and returns them packed."""

def require_topk(topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int, device: torch.device | None) -> None:
    """Checks a routing: ``[T, K]`` int64, K ≤ min(E, 32), and float32 weights of the same shape. Reads no values."""

# The tensor in rows without gaps, as engines and kernels read it; copied on the current stream where it is not. Whoever
# takes an address of a caller's tensor takes that of the packed one. Nothing else judges contiguity.
@overload
def packed(tensor: Tensor) -> Tensor: ...
@overload
def packed(tensor: None) -> None: ...
@overload
def packed(tensor: Tensor | None) -> Tensor | None: ...
def are_packed(*tensors: Tensor | None) -> bool:
    """Whether `packed` would copy none of them."""

def scan_sysfs(*, sysroot: str) -> dict[str, Any]:
    """PCI devices, NICs, NUMA nodes and GPU distances; see `hybrid_ep.topology.probe`."""

# Limits and sizes of the cuda engine: csrc/bindings/sizes.cpp. `_cuda` has the same names.

max_ranks: int
max_domains: int
max_mapped_domains: int
max_experts: int
max_tokens: int
max_topk: int
max_row_bytes: int
max_matrix_ranks: int
low_latency_min_tokens_to_sum: int
control_bytes: int
between_verdict_words: int

def between_control_bytes(*, num_domains: int, ranks_per_domain: int) -> int: ...
def between_told_words(*, num_domains: int, ranks_per_domain: int) -> tuple[int, int]:
    """Words of a call's header; columns of counts by rank."""

def between_ring(*, num_domains: int) -> tuple[int, int, int]:
    """Slot bytes, slots to each peer, slots per credit."""

def between_link_bytes(*, num_domains: int) -> int:
    """Window and words of the link; also beyond `max_domains`."""

def between_route_ints(
    *,
    num_domains: int,
    ranks_per_domain: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    held_capacity: int,
) -> int: ...
def between_record(
    *, row_bytes: int, num_scales: int, num_destinations: int, num_experts: int, num_weights: int
) -> tuple[int, int]:
    """Bytes of a record, and how many a chunk holds."""

def slot_bytes(*, rows: int, experts: int, weights: int, scales: int, num_rows: int) -> int: ...
def low_latency_region_bytes(
    *, num_ranks: int, num_experts: int, num_topk: int, hidden: int, max_tokens: int
) -> int: ...

# The transports between domains: csrc/transport. `_cuda` has the same names for memory that a GPU uses.

class LinkLayout:
    """Where chunks, flags and credits of a link stand: csrc/layout/link_layout.h.

    Args:
        num_domains: 2 to 64.
        domain_idx: of this rank.
        rings: slot bytes, slots per peer and direction, and slots per credit of each ring.
        num_near: domains in a row that the link does not join to each other; divides `num_domains`.
    """

    def __init__(
        self, *, num_domains: int, domain_idx: int, rings: Sequence[tuple[int, int, int]], num_near: int = 1
    ) -> None: ...
    @property
    def num_domains(self) -> int: ...
    @property
    def domain_idx(self) -> int: ...
    @property
    def window_bytes(self) -> int: ...
    @property
    def num_words(self) -> int: ...

class LinkView:
    """What kernels get of a link; opaque here."""

class Proxy:
    """A link and the thread that carries out its commands: csrc/transport/proxy.h."""

    def address(self) -> bytes: ...
    def connect(self, addresses: Sequence[bytes], timeout_s: float) -> None:
        """Raises ConnectionError(domain index or −1, what)."""
    def view(self) -> LinkView: ...
    def begin_call(self) -> None: ...
    @property
    def is_mapped(self) -> bool:
        """Whether kernels write every peer's window themselves."""
    @property
    def describe(self) -> str: ...
    def keep_other_peers(self) -> None:
        """From now on the loss of a peer is no failure of the link."""
    @property
    def failure(self) -> tuple[int, str, str] | None:
        """Domain index or −1, device, message."""
    @property
    def counts(self) -> dict[str, int]: ...
    def drain(self, timeout_s: float) -> bool:
        """Waits until every call has ended and its commands are carried out; False: not in time, or the link failed."""

    def close(self, timeout_s: float) -> bool: ...

class Faults:
    """What a link does wrong, for tests: csrc/transport/faulty_link.h."""

    def __init__(self, *, seed: int = 0, max_delay_us: int = 0, lost_fraction: float = 0.0) -> None: ...

has_fabric: bool

def fabric_devices(provider: str) -> list[str]:
    """Names of the provider's NICs; "" only loads libfabric. Raises ConnectionError where either is not there."""

has_verbs: bool

def active_verbs_devices(port: int = 1) -> list[str]:
    """Raises ConnectionError where libibverbs is not there."""

def verbs_retries(timeout_s: float) -> tuple[int, int]:
    """Retries of a queue pair: one after 4.096 µs × 2^first, and their number. Only where `has_verbs` is true."""

def loopback_proxy(
    *,
    layout: LinkLayout,
    windows: Sequence[int] = (),
    gbytes_per_s: float = 0.0,
    num_fifos: int = 8,
    device: int = 0,
    cpus: Sequence[int] = (),
    faults: Faults = ...,
) -> Proxy: ...
def nvshmem_proxy(
    *, layout: LinkLayout, windows: Sequence[int], pes: Sequence[int], device: int = 0, cpus: Sequence[int] = ()
) -> Proxy: ...
def tcp_proxy(
    *,
    layout: LinkLayout,
    host: str,
    num_connections: int = 4,
    timeout_s: float = 100.0,
    num_fifos: int = 8,
    device: int = 0,
    cpus: Sequence[int] = (),
    faults: Faults = ...,
) -> Proxy: ...
def verbs_proxy(
    *,
    layout: LinkLayout,
    devices: Sequence[str],
    port: int = 1,
    gid_index: int = -1,
    pkey_index: int = -1,
    service_level: int = 0,
    traffic_class: int = 0,
    mtu_bytes: int = 0,
    num_queue_pairs: int = 2,
    relaxed_ordering: bool = True,
    unordered: bool = False,
    timeout_s: float = 100.0,
    memory: int = 0,
    window_only: bool = False,
    num_fifos: int = 8,
    device: int = 0,
    cpus: Sequence[int] = (),
    faults: Faults = ...,
) -> Proxy: ...
def fabric_proxy(
    *,
    layout: LinkLayout,
    provider: str,
    devices: Sequence[str] = (),
    host: str = "",
    has_remote_data: bool = True,
    timeout_s: float = 100.0,
    memory: int = 0,
    num_fifos: int = 8,
    device: int = 0,
    cpus: Sequence[int] = (),
    faults: Faults = ...,
) -> Proxy: ...

class HostWriter:
    """A thread of the host in the place of a kernel, where windows are in host memory; alone on its FIFO."""

    def __init__(self, proxy: Proxy, fifo: int) -> None: ...
    def put(self, ring: int, peer: int, slot: int, num_bytes: int, word: int) -> bool: ...
    def credit(self, ring: int, peer: int, group: int, word: int) -> bool: ...
    def end_call(self) -> bool: ...
    def poll(self, ring: int, peer: int, slot: int) -> int: ...
    def poll_credit(self, ring: int, peer: int, group: int) -> int: ...
    def send_slot(self, ring: int, peer: int, slot: int) -> memoryview: ...
    def recv_slot(self, ring: int, peer: int, slot: int) -> memoryview: ...
    def run_chunks(
        self,
        proxy: Proxy,
        *,
        ring: int,
        num_out: int,
        num_in: int,
        num_bytes: int,
        epoch: int,
        verifies: bool,
        timeout_s: float,
    ) -> tuple[float, int, int, int]:
        """Sends `num_out` chunks to each peer and takes `num_in` from each. Collective over the domains.

        Returns seconds; chunks sent, received and wrong, of all peers.
        """
    def median_post_ns(self, peer: int, num: int) -> float: ...
    @property
    def num_pushed(self) -> int: ...
    @property
    def num_done(self) -> int: ...
