"""The CUDA kernels and what launches them. Pointers and streams are integers; the caller keeps tensors alive."""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from hybrid_ep._C import Faults as Faults
from hybrid_ep._C import HostWriter as HostWriter
from hybrid_ep._C import LinkLayout as LinkLayout
from hybrid_ep._C import LinkView as LinkView
from hybrid_ep._C import Proxy as Proxy
from hybrid_ep._C import active_verbs_devices as active_verbs_devices
from hybrid_ep._C import between_control_bytes as between_control_bytes
from hybrid_ep._C import between_link_bytes as between_link_bytes
from hybrid_ep._C import between_record as between_record
from hybrid_ep._C import between_ring as between_ring
from hybrid_ep._C import between_route_ints as between_route_ints
from hybrid_ep._C import between_told_words as between_told_words
from hybrid_ep._C import fabric_devices as fabric_devices
from hybrid_ep._C import fabric_proxy as fabric_proxy
from hybrid_ep._C import has_fabric as has_fabric
from hybrid_ep._C import has_verbs as has_verbs
from hybrid_ep._C import loopback_proxy as loopback_proxy
from hybrid_ep._C import low_latency_region_bytes as low_latency_region_bytes
from hybrid_ep._C import nvshmem_proxy as nvshmem_proxy
from hybrid_ep._C import tcp_proxy as tcp_proxy
from hybrid_ep._C import verbs_proxy as verbs_proxy
from hybrid_ep.engine.calls import (
    CombineRequest,
    DispatchHandle,
    DispatchRequest,
    LowLatencyCombineRequest,
    LowLatencyDispatchRequest,
    PermuteHandle,
)
from hybrid_ep.engine.cuda.arena import Arena
from hybrid_ep.engine.cuda.engine import CudaEngine
from hybrid_ep.engine.cuda.route import Chunk

version: str
control_bytes: int
control_count_row_bytes: int
control_offsets: dict[str, int]
max_ranks: int
max_experts: int
max_tokens: int
max_topk: int
max_row_bytes: int
row_align_bytes: int

_Address = Tensor | int | None  # of a tensor, an address itself, or none

class DispatchShape:
    """What is sent and published by a dispatch. Dtypes are numbers of `agree.fields.DTYPES`.

    Args:
        rank, num_ranks: this rank.
        num_tokens, hidden, dtype, num_scales, scale_dtype: of the rows that are sent; −1 = they have no scales.
        num_topk, num_experts, has_topk, has_weights: of the routing.
        expert_range: (first, end) of the experts that are reported; None: the dispatch reads a route that another made.
        pad_multiple: 0 = rows by source; otherwise by expert, blocks padded to a multiple.
        bound: rows of the result; None = the host waits for the counts.
        common_bound: with a bound that differs between ranks, a bound of them all, equal at all ranks.
        num_sms: SMs to use; None = the default.
        max_tokens: the most tokens of a rank, equal at all ranks; None = what the kernels take.
        num_slots, num_mapped_ranks: of the mapping, if the rows are weights or gradients of experts.
        drops_rows: rows beyond the bound only set a flag.
        refusal: number of the refusal of this rank, which then sends nothing.

    Raises:
        ConfigError: more experts than the kernels take, or rows that they cannot move.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        num_tokens: int,
        hidden: int,
        dtype: int,
        num_topk: int,
        num_experts: int,
        num_scales: int = 0,
        scale_dtype: int = -1,
        has_topk: bool = True,
        has_weights: bool = False,
        expert_range: tuple[int, int] | None = None,
        pad_multiple: int = 0,
        bound: int | None = None,
        common_bound: int | None = None,
        num_sms: int | None = None,
        max_tokens: int | None = None,
        num_slots: int | None = None,
        num_mapped_ranks: int | None = None,
        drops_rows: bool = False,
        refusal: int | None = None,
    ) -> None: ...
    @property
    def num_tokens(self) -> int:
        """Tokens that this rank sends; 0 if it has more than is allowed."""

    @property
    def refusal(self) -> tuple[FaultKind, int, int] | None:
        """What is wrong with this rank's arguments, the value, and what is allowed."""

    @property
    def record_bytes(self) -> int: ...
    def slot_bytes_for(self, num_rows: int) -> int: ...

class DispatchPlan(DispatchShape):
    """A dispatch inside a domain."""

    @property
    def route_ints(self) -> int: ...

class CombinePlan:
    """A combine of bf16 rows. `num_tokens` are of the result, `num_weights` of a row.

    Raises:
        ConfigError: as `DispatchShape`.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        hidden: int,
        num_topk: int,
        num_experts: int,
        num_weights: int = 0,
        num_sms: int | None = None,
        refusal: int | None = None,
    ) -> None: ...
    @property
    def record_bytes(self) -> int: ...
    def slot_bytes_for(self, num_rows: int) -> int: ...

dispatch_number_bits: int

def dispatch_number(buffer: int, number: int) -> int:
    """The number that identifies a dispatch: its buffer and its number there, each modulo what its bits hold."""

class FaultKind(Enum):
    TIMEOUT = ...
    BAD_EXPERT = ...
    OVERFLOW = ...
    OTHER_CALL = ...
    BAD_BOUND = ...
    TOO_MANY_TOKENS = ...
    TRANSPORT = ...
    NO_SIGNAL = ...
    REFUSED = ...
    NONE = ...

class Fault:
    @property
    def kind(self) -> FaultKind: ...
    @property
    def kernel(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def witness(self) -> int: ...
    @property
    def missed(self) -> list[int]: ...
    @property
    def expected(self) -> int: ...
    @property
    def seen(self) -> int: ...
    @property
    def waited_s(self) -> float: ...

class Communicator:
    def __init__(self, *, rank: int, control: list[int], device: int, timeout_s: float) -> None: ...
    def set_arena(self, arena: list[int], slot_bytes: int, number: int) -> None: ...
    @property
    def default_dispatch_sms(self) -> int: ...
    @property
    def default_copy_sms(self) -> int: ...
    def add_peer_memory(self, begin: int, num_bytes: int, peers: int) -> None: ...
    def staging_bytes(self, tensors: list[tuple[int, int, int]], num_slots: int) -> int: ...
    def copy_experts(
        self,
        *,
        tensors: list[tuple[int, int, int]],
        mapping: int,
        num_slots: int,
        num_local: int,
        num_sms: int,
        only_compares: bool,
        stream: int,
    ) -> None: ...
    def wait_for_counts(
        self, counts_epoch: int, stream: int, counts: int, num_counts: int
    ) -> tuple[bool, int, int, int, int, int, int, int, int, int] | None: ...
    def take_fault(self) -> Fault | None: ...
    @property
    def has_fault(self) -> bool: ...

rank_elsewhere: int
max_domains: int
max_mapped_domains: int
max_matrix_ranks: int

def between_chunk(plan: DispatchShape | CombinePlan) -> tuple[int, int]: ...
def between_rank_prefix(
    *, num_domains: int, ranks_per_domain: int, num_tokens: int, num_topk: int, num_experts: int
) -> int: ...
def between_counts(
    *, num_domains: int, ranks_per_domain: int, num_tokens: int, num_topk: int, num_experts: int
) -> tuple[int, int]: ...

class BetweenCommunicator:
    def __init__(
        self, *, domain: Communicator, rank: int, num_domains: int, proxy: Proxy, kernels: object | None = None
    ) -> None: ...
    def dispatch(
        self,
        *,
        plan: DispatchShape,
        rows: int,
        topk_idx: int,
        topk_weights: int,
        scales: int,
        route: int,
        mapping_checksum: int,
        held_capacity: int,
        handle: int,
        slot_idx: int,
        stream: int,
    ) -> int: ...
    def stream_chunks(self, *, num_chunks: int, chunk_bytes: int, num_sms: int, stream: int) -> None: ...
    def combine(
        self,
        *,
        plan: CombinePlan,
        rows: int,
        num_rows: int,
        weights: int,
        bias: list[int],
        out: int,
        out_weights: int,
        own_sums: int,
        own_weights: int,
        route: int,
        held_capacity: int,
        handle: int,
        stream: int,
    ) -> None: ...

class SlotMemory:
    """The slots of one piece of symmetric memory. `memory` keeps it alive."""

    def __init__(
        self,
        *,
        base: int,
        slot_bytes: int,
        num_slots: int,
        device: int,
        memory: object,
        current_stream: Callable[[int], int],
    ) -> None: ...
    def record_stream(self, address: int, stream: int) -> None: ...
    @property
    def num_free(self) -> int: ...
    @property
    def was_captured(self) -> bool: ...

class SlotLease:
    """A slot for the rows of one dispatch. Its end frees the slot, unless results hold it."""

    @property
    def slot_idx(self) -> int: ...
    @property
    def is_captured(self) -> bool: ...
    def results(self, plan: DispatchShape, num_rows: int) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Returns rows, scales, experts and weights; once. They hold the slot, or are copies of what is in slot 0."""

    def give_back(self) -> None:
        """Frees the slot. May be called again."""

class Slots:
    """The slots of an arena, which owns this object.

    Args:
        arena: grows when the ranks have agreed on more slots.
        communicator: knows what they have agreed on.
        unfreed: what could not be freed while a graph was captured; emptied outside of captures.
    """

    def __init__(self, arena: Arena, communicator: Communicator, unfreed: list[object]) -> None: ...
    def use(self, memory: SlotMemory, more_slots: int) -> None:
        """Names the memory of later leases, and how many slots a growth would give; 0 = there is none."""

    def lease(self, stream: int) -> SlotLease:
        """Returns a slot for the next dispatch on `stream`. Collective where the ranks have agreed on more slots."""

    def note_use(self, stream: int) -> None:
        """Must be called before `stream` uses slot 0 without a lease. A captured use keeps the memory for good."""

class LaunchOrder:
    """Orders the launches of one engine after each other, whatever their streams.

    `current_stream` takes a GPU and returns the calling thread's current stream there.
    """

    def __init__(self, device: int, current_stream: Callable[[int], int]) -> None: ...
    def begin(self, *, is_low_latency: bool = False) -> int:
        """Orders the next launch on the current stream after the earlier ones; returns the stream.

        A low-latency launch also runs after the low-latency launches of all other buffers of this GPU.
        """

    def end(self) -> None:
        """Must be called after a call's last launch, and last use of memory that its next call may write."""

class RouteMemory:
    """Memory that is cut into pieces. `make_chunk` takes a number of bytes and the current stream."""

    def __init__(self, make_chunk: Callable[[int, int], Chunk]) -> None: ...
    def take(self, num_ints: int, stream: int, *, alone: bool) -> tuple[Chunk, int]:
        """Returns a chunk and the address of a piece of it.

        Args:
            num_ints: int32 of the piece.
            stream: the current one, which writes it.
            alone: no other piece is cut from the chunk. What a captured graph uses, nothing else may.
        """

    def clear(self) -> None:
        """Drops the chunks. Their pieces stay as they are."""

class Route:
    """The state of the cuda engine in a DispatchHandle: csrc/calls/route.h."""

    @property
    def chunk(self) -> Chunk: ...
    @property
    def address(self) -> int: ...
    @property
    def counts_at(self) -> int: ...
    @property
    def num_recv(self) -> int: ...
    @property
    def max_recv(self) -> int: ...
    @property
    def stream(self) -> int: ...

class Domain:
    """Dispatches and combines inside a domain, of one engine, which owns this object: csrc/calls/domain.h."""

    def __init__(
        self,
        *,
        engine: CudaEngine,
        rank: int,
        num_ranks: int,
        number: int,
        communicator: Communicator,
        launches: LaunchOrder,
        routes: RouteMemory,
        slots: Slots,
        device: torch.device,
    ) -> None: ...
    def dispatch(
        self, request: DispatchRequest
    ) -> tuple[
        Tensor,
        Tensor | None,
        Tensor | None,
        Tensor | None,
        list[int] | Tensor | None,
        Tensor,
        Route,
        tuple[Tensor, Chunk, int] | None,
    ]:
        """Returns rows, scales, experts, weights, counts of the local experts, the rank prefix matrix, the route, and
        what a handle of rows by expert keeps.
        """

    def dispatch_along(self, request: DispatchRequest) -> tuple[Tensor, Tensor | None]:
        """Returns rows and scales."""

    def combine(self, request: CombineRequest, handle: DispatchHandle | PermuteHandle) -> tuple[Tensor, Tensor | None]:
        """Returns the sums of rows and of weights."""

    def sent_topk_idx(self, route: Route, num_tokens: int, num_topk: int) -> Tensor:
        """Returns the top-k indices, ``[T, K]`` int64, that a dispatch has copied to its route."""

    def refuse_dispatch(self, refusal: int) -> None:
        """Takes part in a dispatch that this rank refuses; `refusal` is its number."""

    def refuse_combine(self, refusal: int) -> None: ...

def push_rows(
    *,
    rows: int,
    dst_rows: int,
    memory: list[int],
    progress: int,
    num_rows: int,
    num_dst_rows: int,
    row_bytes: int,
    num_sms: int,
    stream: int,
) -> None: ...

class LayoutCounts:
    def __init__(
        self,
        *,
        num_topk: int,
        num_experts: int,
        num_ranks: int,
        num_ranks_per_domain: int,
        device: torch.device,
        device_index: int,
        current_stream: Callable[[int], int],
        by_python: bool = False,
    ) -> None: ...
    def __call__(self, topk_idx: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

def weights_to_probs(
    *,
    topk_idx: int,
    weights: int,
    probs: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    adds_columns: bool,
    device: int,
    stream: int,
) -> None:
    """Writes ``[T, E]`` probabilities. `adds_columns`: the weights of an expert's columns are summed; otherwise they
    are equal.
    """

def probs_to_weights(
    *,
    topk_idx: int,
    weights: int,
    probs: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    device: int,
    stream: int,
) -> None:
    """Writes ``[T, K]`` weights from ``[T, E]`` probabilities, 0 where no expert is named."""

def map_topk(
    *,
    topk_idx: int,
    replicas: int,
    num_choices: int,
    slots: int,
    num_copies: int,
    num_topk: int,
    num_experts: int,
    max_replicas: int,
    num_slots: int,
    rank_turn: int,
    device: int,
    stream: int,
) -> None: ...
def plan_fits(*, num_ranks: int, num_experts: int, ranks_per_domain: int, num_spare: int) -> bool: ...
def plan_online(
    *,
    counts: int,
    spare: int,
    quota: int,
    loads: int,
    num_ranks: int,
    num_experts: int,
    ranks_per_domain: int,
    num_spare: int,
    tolerance_factor: float,
    device: int,
    stream: int,
) -> None: ...
def map_online(
    *,
    counts: int,
    spare: int,
    quota: int,
    topk_idx: int,
    slots: int,
    num_copies: int,
    num_ranks: int,
    num_experts: int,
    ranks_per_domain: int,
    num_spare: int,
    rank: int,
    device: int,
    stream: int,
) -> None: ...

max_replicas: int
replica_routes_max_experts: int

def replica_routes(
    *,
    mapping: int,
    sent: int,
    columns: int,
    arrived: int,
    homes: int,
    checksum: int,
    num_mapped_ranks: int,
    num_slots: int,
    num_local: int,
    num_sent: int,
    num_ranks: int,
    rank: int,
    first_rank: int,
    device: int,
    stream: int,
) -> None: ...
def take_experts(
    *,
    target: int,
    source: int,
    index: int,
    target_stride: int,
    source_stride: int,
    num_bytes: int,
    num_items: int,
    device: int,
    stream: int,
) -> None: ...
def can_run(device: int) -> bool: ...

map_online_max_experts: int
low_latency_buffers: int
low_latency_min_tokens_to_sum: int
low_latency_no_sums: int
low_latency_masks_offset: int
low_latency_channel_bytes: int

def low_latency_call_fields(words: int) -> dict[str, int]: ...

low_latency_channel_offsets: dict[str, int]
low_latency_between_bytes: int
low_latency_session_offset: int
low_latency_max_chunk_bytes: int

class ScaleFormat(Enum):
    NONE = ...
    FLOAT = ...
    POWER_OF_TWO = ...
    UE8M0 = ...
    NVFP4 = ...
    NVFP4_UE8M0 = ...

class LowLatencyCapacity:
    def united_with(self, other: LowLatencyCapacity) -> LowLatencyCapacity: ...
    @property
    def epochs_bytes(self) -> int: ...
    @property
    def region_bytes(self) -> int: ...

class LowLatencyPlan:
    def __init__(
        self, *, num_ranks: int, num_experts: int, num_topk: int, hidden: int, max_tokens: int, format: ScaleFormat
    ) -> None: ...
    @property
    def capacity(self) -> LowLatencyCapacity: ...
    @property
    def num_ints(self) -> int: ...
    @property
    def num_ints_between(self) -> int: ...
    @staticmethod
    def refused(*, num_ranks: int, number: int) -> LowLatencyPlan: ...
    @property
    def refusal_of_combine(self) -> tuple[int, int]: ...
    def compared(self) -> LowLatencyPlan: ...
    def peer_chunk_bytes(self, group_size: int) -> tuple[int, int]: ...

class LowLatencyRegion:
    def __init__(
        self, *, communicator: Communicator, memory: list[int], capacity: LowLatencyCapacity, takes_masks: bool
    ) -> None: ...
    def covers(self, plan: LowLatencyPlan) -> bool: ...
    @property
    def was_captured(self) -> bool: ...
    def dispatch(self, plan: LowLatencyPlan, call: LowLatencyDispatch, halves: Halves, stream: int) -> None: ...
    def combine(self, plan: LowLatencyPlan, call: LowLatencyCombine, halves: Halves, stream: int) -> None: ...

class Halves(Enum):
    SEND = ...
    RECEIVE = ...

class LowLatencyDispatch:
    def __init__(
        self,
        *,
        buffer_idx: int,
        rows: int,
        topk_idx: int,
        num_tokens: int,
        received_rows: int,
        received_scales: int,
        results: int,
    ) -> None: ...

class LowLatencyCombine:
    def __init__(
        self,
        *,
        buffer_idx: int,
        results: int,
        topk_idx: int,
        topk_weights: int,
        num_tokens: int,
        rows: int,
        out: int,
    ) -> None: ...

class LowLatencyKind(Enum):
    DISPATCH = ...
    COMBINE = ...

class LowLatencyState:
    """The state of the cuda engine in a LowLatencyHandle.

    Attributes:
        plan: of the dispatch.
        chunk: the memory that its results beside the rows are a piece of.
        memory: of the chunk.
        results: address of the piece.
        stream: that the dispatch was sent on.
    """

    @property
    def plan(self) -> LowLatencyPlan: ...
    @property
    def chunk(self) -> Chunk: ...
    @property
    def memory(self) -> Tensor: ...
    @property
    def results(self) -> int: ...
    @property
    def stream(self) -> int: ...
    def __call__(self) -> tuple[Tensor, Tensor]:
        """`src_info` and `layout_range` of the handle."""

class LowLatencyReceive:
    def __call__(self) -> None:
        """Launches the second half of a call on the current stream; once."""

class LowLatencyCalls:
    """The low-latency calls of one buffer, and which buffers of the region are in use.

    Args:
        communicator: of the domain.
        order: of the engine's launches.
        results: memory for what dispatches return beside their rows.
        num_ranks: R.
        device: of the tensors that calls return.
        by_python: tensors are made as where torch has no interface for C; for tests.
    """

    def __init__(
        self,
        *,
        communicator: Communicator,
        order: LaunchOrder,
        results: RouteMemory,
        num_ranks: int,
        device: torch.device,
        by_python: bool = False,
    ) -> None: ...
    def begin(self, region: LowLatencyRegion | None, counter: int) -> None:
        """Forgets all calls. Those that follow go through the region; `counter` is that of `low_latency_counter`."""

    def covers(self, plan: LowLatencyPlan) -> bool: ...
    def can_send(self, kind: LowLatencyKind) -> bool:
        """Whether a buffer is free."""

    @property
    def are_in_flight(self) -> bool:
        """Whether any call has been sent and not yet received."""

    def plan_of(self, request: LowLatencyDispatchRequest, format: int) -> LowLatencyPlan:
        """The plan of a dispatch; `format` is the `format_code`.

        Raises:
            ConfigError: more experts or tokens than the kernels take, or rows that they cannot move.
        """

    def dispatch(
        self, request: LowLatencyDispatchRequest, format: int
    ) -> LowLatencyPlan | tuple[Tensor, Tensor | None, Tensor, LowLatencyState, LowLatencyReceive | None]:
        """Returns rows, scales, counts, the state of the handle and, with a hook, what receives.

        Where the region does not cover the plan, nothing has been done, and the plan is returned.

        Raises:
            ConfigError: as `plan_of`; or no buffer is free.
        """

    def combine(self, request: LowLatencyCombineRequest, state: LowLatencyState) -> LowLatencyReceive | None:
        """Returns what receives, with a hook.

        Raises:
            ConfigError: the request does not fit the dispatch of the handle, or no buffer is free.
        """

    def launch_empty(
        self, kind: LowLatencyKind, plan: LowLatencyPlan, results: Tensor, global_scale: Tensor | None = None
    ) -> None:
        """Launches a call without tokens, which publishes the fields of its plan: ranks compare them, or learn of a
        refusal. `results` has as many int32 as the plan says.

        Raises:
            ConfigError: no buffer is free.
        """

class LowLatencyBetweenRegion(LowLatencyRegion):
    def __init__(
        self,
        *,
        communicator: Communicator,
        rank: int,
        num_domains: int,
        group_size: int,
        memory: list[int],
        capacity: LowLatencyCapacity,
        takes_masks: bool,
        proxy: Proxy,
        kernels: object | None = None,
    ) -> None: ...
