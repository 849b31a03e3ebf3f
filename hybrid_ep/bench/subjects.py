"""Implementations with DeepEP's or Hybrid-EP's interface, whatever module has it, as subjects of the benchmark.

A subject is driven as a model would drive it. `dispatch` and `combine` are what is timed and do nothing else;
`received` and `outputs` prepare what the check and the combine need, outside the timing. The baseline needs no library:
`all_to_all_single` of rows, NCCL on GPUs and gloo on a CPU. Its rows cross once for each destination rank, as in every
good implementation; it has no domains, overlaps nothing and fuses nothing.
"""

from __future__ import annotations

import abc
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import Permutation, compute_layout, permutation_by_expert
from hybrid_ep.engine.calls import Rows
from hybrid_ep.errors import ConfigError
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8
from hybrid_ep.testing.batch import Batch

BASELINE = "torch-nccl"
OWN = "hybrid_ep"
_CALLS_OF_A_GRAPH = 20


@dataclass(frozen=True)
class Received:
    """The rows that a dispatch brought, in a form that can be compared.

    Attributes:
        rows: ``[n, H]`` float32, dequantised, without padding; in any order.
        labels: ``[n, W]`` float64, what else is known of each row: its experts and weights, or where it comes from.
    """

    rows: Tensor
    labels: Tensor


class Subject(abc.ABC):
    """One implementation, ready to be driven with one batch."""

    engine: str
    grid: RankGrid | None = None  # its domains, where rows cross to a peer once for each domain
    waiting_calls: frozenset[str] = frozenset()  # in these the host waits for the device, so its time is the device's
    num_calls: Mapping[str, int] = MappingProxyType({})  # how many calls one run makes, of those that make several
    calls_with_results: tuple[str, ...] = ()  # dispatches whose results a caller may keep alive

    @abc.abstractmethod
    def dispatch(self) -> Any:
        """The timed call, layout and exchange of counts included. Collective."""

    @abc.abstractmethod
    def received(self, dispatched: Any) -> Received:
        """Returns the rows that `dispatch` brought. Local."""

    @abc.abstractmethod
    def outputs(self, dispatched: Any, factor: float) -> Tensor:
        """Replaces the experts: every received row times `factor`, in the form that combine takes. Local."""

    @abc.abstractmethod
    def combine(self, dispatched: Any, outputs: Tensor) -> Tensor:
        """The timed call; ``[T, H]`` bf16. Collective."""

    def further_calls(self, dispatched: Any, outputs: Tensor) -> dict[str, Callable[[], object]]:
        """Returns further calls to time in turn. Names begin with the call that they belong to. Collective."""
        return {}

    def close(self) -> None:  # noqa: B027 - most subjects hold nothing
        """Gives back what the implementation holds."""


def as_float32(rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """bf16 rows, or fp8 values (possibly as bytes) and their scales, as float32."""
    return cast_from_fp8(*rows, torch.float32) if isinstance(rows, tuple) else rows.float()


def require_known(implementation: str, mode: str) -> None:
    """Checks a name before any rank starts.

    Raises:
        ConfigError: it cannot be imported, or does not have what the mode needs.
    """
    if implementation == BASELINE:
        if mode == "low-latency":
            raise ConfigError(f"impl is {BASELINE!r} in low-latency mode; allowed there: modules with a Buffer")
        return
    needed = "HybridEPBuffer" if mode == "permute" else "Buffer"
    try:
        module = importlib.import_module(implementation)
    except ImportError as error:
        allowed = f"hybrid_ep, {BASELINE} or a module that can be imported"
        raise ConfigError(f"impl is {implementation!r} ({error}); allowed: {allowed}") from None
    if not hasattr(module, needed):
        raise ConfigError(f"impl is {implementation!r}, which has no {needed}; allowed in {mode} mode: one that has")


def open_subject(candidate: Candidate, plan: BenchPlan, batch: Batch) -> Subject:
    """Makes the subject of a candidate. Collective."""
    if candidate.implementation == BASELINE:
        return AllToAllSubject(plan, batch)
    module = importlib.import_module(candidate.implementation)
    kinds: dict[str, type[NormalSubject | PermuteSubject | LowLatencySubject]] = {
        "normal": NormalSubject,
        "permute": PermuteSubject,
        "low-latency": LowLatencySubject,
    }
    return kinds[plan.mode](module, candidate.num_sms, plan, batch)


class _ModuleSubject(Subject):
    """The base of subjects that come from a module.

    Args:
        module: has the interface.
        num_sms: SMs; None = the module's choice.
        plan: what is measured.
        batch: this rank's tokens.
    """

    buffer: Any

    def __init__(self, module: ModuleType, num_sms: int | None, plan: BenchPlan, batch: Batch) -> None:
        self.module, self.plan, self.batch = module, plan, batch
        self.num_ranks = dist.get_world_size()
        self.num_local_experts = plan.workload.num_experts // self.num_ranks
        self.tokens = cast_to_fp8(batch.x) if plan.workload.dtype == "fp8" else batch.x
        self.open(num_sms)
        inner = getattr(self.buffer, "engine", None)
        self.engine = getattr(inner, "name", module.__name__)
        self.grid = getattr(inner, "grid", None)

    @abc.abstractmethod
    def open(self, num_sms: int | None) -> None:
        """Makes `buffer`."""

    def make(self, kind: Any, *arguments: Any, **options: Any) -> Any:
        """Makes an object of the module that may be destroyed; some need an argument for that."""
        if "explicitly_destroy" in inspect.signature(kind).parameters:
            options["explicitly_destroy"] = True
        return kind(*arguments, **options)

    def close(self) -> None:
        for name in ("close", "destroy"):
            if hasattr(self.buffer, name):
                getattr(self.buffer, name)()
                return


class NormalSubject(_ModuleSubject):
    """`Buffer` of DeepEP's interface, its normal calls."""

    def open(self, num_sms: int | None) -> None:
        kind = self.module.Buffer
        if num_sms is not None:
            kind.set_num_sms(num_sms)
        configs = (kind.get_dispatch_config(self.num_ranks), kind.get_combine_config(self.num_ranks))
        self.dispatch_config: Any = None if num_sms is None else configs[0]
        self.combine_config: Any = None if num_sms is None else configs[1]
        hidden_bytes = self.plan.workload.combine_row_bytes
        num_nvl_bytes = max(c.get_nvl_buffer_size_hint(hidden_bytes, self.num_ranks) for c in configs)
        num_rdma_bytes = 0
        if self.num_ranks > torch.cuda.device_count() > 0:
            num_rdma_bytes = max(c.get_rdma_buffer_size_hint(hidden_bytes, self.num_ranks) for c in configs)
        self.buffer = self.make(kind, dist.group.WORLD, num_nvl_bytes, num_rdma_bytes)
        self.most_rows = self.plan.workload.num_tokens * self.num_ranks
        self.bound = self.most_rows if self.plan.no_sync else 0
        if not self.plan.no_sync:
            self.waiting_calls = frozenset({"dispatch", "dispatch: layout given"})
        self.calls_with_results = ("dispatch", "dispatch: cached")

    def dispatch(self) -> Any:
        return self._dispatch(self._layout(), self.bound)

    def _layout(self) -> Any:
        return self.buffer.get_dispatch_layout(self.batch.topk_idx, self.plan.workload.num_experts)

    def _dispatch(self, layout: Any, bound: int) -> Any:
        per_rank, per_domain, per_expert, in_rank, _ = layout
        return self.buffer.dispatch(
            self.tokens,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.batch.topk_idx,
            topk_weights=self.batch.topk_weights,
            num_worst_tokens=bound,
            config=self.dispatch_config,
        )

    def received(self, dispatched: Any) -> Received:
        rows, topk_idx, topk_weights = dispatched[:3]
        real = (topk_idx >= 0).any(1)  # with a bound, rows after the last have no expert
        weights = torch.where(topk_idx >= 0, topk_weights, 0.0)
        return Received(as_float32(rows)[real], torch.cat([topk_idx.double(), weights.double()], 1)[real])

    def outputs(self, dispatched: Any, factor: float) -> Tensor:
        return (as_float32(dispatched[0]) * factor).to(torch.bfloat16)

    def combine(self, dispatched: Any, outputs: Tensor) -> Tensor:
        combined: Tensor = self.buffer.combine(outputs, dispatched[4], config=self.combine_config)[0]
        return combined

    def further_calls(self, dispatched: Any, outputs: Tensor) -> dict[str, Callable[[], object]]:
        """The layout alone, and dispatch without it: as it is, with a bound, and with a handle's routes."""
        layout, handle = self._layout(), dispatched[4]
        calls: dict[str, Callable[[], object]] = {
            "layout": self._layout,
            "dispatch: layout given": lambda: self._dispatch(layout, self.bound),
        }
        if not self.plan.no_sync and layout[1] is None:  # DeepEP takes no bound between domains
            calls["dispatch: no sync"] = lambda: self._dispatch(layout, self.most_rows)
        calls["dispatch: cached"] = lambda: self.buffer.dispatch(
            self.tokens, handle=handle, config=self.dispatch_config
        )
        engine = getattr(self.buffer, "engine", None)
        if hasattr(engine, "stream_chunks"):
            calls |= self._link_alone(engine, layout[1])
        return calls

    def _link_alone(self, engine: Any, num_tokens_per_domain: Tensor) -> dict[str, Callable[[], object]]:
        """The chunks of both calls over the link between domains, and nothing else. Collective."""
        workload = self.plan.workload
        rows = Rows(*self.tokens) if isinstance(self.tokens, tuple) else Rows(self.tokens)
        counts = num_tokens_per_domain.clone()
        counts[engine.grid.domain_idx] = 0
        most = counts.max().to(torch.int64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        chunks = engine.chunks_of(rows, workload.num_topk, workload.num_experts)

        def call(per_chunk: int, chunk_bytes: int) -> Callable[[], object]:
            num_chunks = -(-int(most) // per_chunk)
            return lambda: engine.stream_chunks(num_chunks, chunk_bytes)

        names = ("dispatch: link alone", "combine: link alone")
        return {name: call(*chunk) for name, chunk in zip(names, chunks, strict=True)}


class PermuteSubject(_ModuleSubject):
    """`HybridEPBuffer` of Hybrid-EP's interface, permutation fused."""

    def open(self, num_sms: int | None) -> None:
        workload = self.plan.workload
        self.fp8 = workload.dtype == "fp8"
        self.buffer = self.module.HybridEPBuffer(
            group=dist.group.WORLD,
            hidden_dim=workload.hidden,
            max_num_of_tokens_per_rank=max(1, workload.num_tokens),
            num_local_experts=self.num_local_experts,
            use_fp8=self.fp8,
            num_sms_dispatch_api=num_sms,
            num_sms_combine_api=num_sms,
        )
        most = workload.num_tokens * self.num_ranks * min(workload.num_topk, self.num_local_experts)
        self.bound = most if self.plan.no_sync else None
        if not self.plan.no_sync:
            self.waiting_calls = frozenset({"dispatch"})
        self.most_rows = most
        self.calls_with_results = ("dispatch", "dispatch: no sync", "dispatch: cached")

    def dispatch(self) -> Any:
        return self._dispatch(self.bound)

    def _dispatch(self, bound: int | None) -> Any:
        return self._permute(
            topk_idx=self.batch.topk_idx,
            topk_weights=self.batch.topk_weights,
            num_of_experts=self.plan.workload.num_experts,
            num_permuted_tokens=bound,
            non_blocking=bound is not None,
        )

    def _permute(self, **options: Any) -> Any:
        hidden, scales = (self.tokens[0].view(torch.uint8), self.tokens[1]) if self.fp8 else (self.tokens, None)
        return self.buffer.dispatch_with_permute(
            hidden=hidden, scaling_factor=scales, use_fp8=self.fp8, fuse_permute_dispatch=True, **options
        )

    def further_calls(self, dispatched: Any, outputs: Tensor) -> dict[str, Callable[[], object]]:
        """Dispatch with a bound, so that the host does not wait, and along a handle's routes."""
        num_permuted, handle = dispatched[0].shape[0], dispatched[4]
        return {
            "dispatch: no sync": lambda: self._dispatch(self.most_rows),
            "dispatch: cached": lambda: self._permute(handle=handle, num_permuted_tokens=num_permuted),
        }

    def received(self, dispatched: Any) -> Received:
        _, probs, _, counts, _ = dispatched
        counts = counts.to(torch.int64)
        num_real = int(counts.sum())
        expert = torch.repeat_interleave(torch.arange(self.num_local_experts, device=counts.device), counts)
        labels = torch.stack([expert.to(probs.device).double(), probs[:num_real].double()], 1)
        return Received(self._rows(dispatched)[:num_real], labels)

    def outputs(self, dispatched: Any, factor: float) -> Tensor:
        return (self._rows(dispatched) * factor).to(torch.bfloat16)

    def combine(self, dispatched: Any, outputs: Tensor) -> Tensor:
        combined: Tensor = self.buffer.combine_with_unpermute(
            hidden=outputs, handle=dispatched[4], fuse_unpermute_combine=True
        )[0]
        return combined

    @staticmethod
    def _rows(dispatched: Any) -> Tensor:
        hidden, _, scales = dispatched[:3]
        return as_float32(hidden if scales is None else (hidden, scales))


class LowLatencySubject(_ModuleSubject):
    """`Buffer` of DeepEP's interface, its low-latency calls."""

    def open(self, num_sms: int | None) -> None:
        workload, kind = self.plan.workload, self.module.Buffer
        num_bytes = kind.get_low_latency_rdma_size_hint(
            workload.num_tokens, workload.hidden, self.num_ranks, workload.num_experts
        )
        self.buffer = self.make(
            kind, dist.group.WORLD, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=max(1, self.num_local_experts)
        )

    def dispatch(self, return_recv_hook: bool = False) -> Any:
        workload = self.plan.workload
        return self.buffer.low_latency_dispatch(
            self.batch.x,
            self.batch.topk_idx,
            workload.num_tokens,
            workload.num_experts,
            use_fp8=workload.dtype == "fp8",
            return_recv_hook=return_recv_hook,
        )

    def received(self, dispatched: Any) -> Received:
        packed, counts, handle = dispatched[:3]
        source_token, layout = handle[0], handle[1]
        rows, labels = [], []
        for local, count in enumerate(counts.tolist()):
            rows.append(_packed_rows(packed, local, count))
            source = torch.empty(count, dtype=torch.float64, device="cpu")
            for rank, packed_range in enumerate(layout[local].tolist()):
                begin, num = divmod(packed_range, 1 << 32)
                source[begin : begin + num] = rank
            token = source_token[local, :count].cpu().double()
            labels.append(torch.stack([torch.full_like(token, local), source, token], 1))
        return Received(torch.cat(rows), torch.cat(labels).to(self.batch.x.device))

    def outputs(self, dispatched: Any, factor: float) -> Tensor:
        packed, counts = dispatched[:2]
        data = packed[0] if isinstance(packed, tuple) else packed
        outputs = torch.zeros(data.shape, dtype=torch.bfloat16, device=data.device)
        for local, count in enumerate(counts.tolist()):
            outputs[local, :count] = (_packed_rows(packed, local, count) * factor).to(torch.bfloat16)
        return outputs

    def combine(self, dispatched: Any, outputs: Tensor) -> Tensor:
        combined: Tensor = self._combine(dispatched, outputs)[0]
        return combined

    def further_calls(self, dispatched: Any, outputs: Tensor) -> dict[str, Callable[[], object]]:
        """The halves of each call, as the hook splits them, and CUDA graphs of one call and of several in a row."""
        hooks: list[Callable[[], None]] = []

        def send_dispatch() -> None:
            hooks.append(self.dispatch(return_recv_hook=True)[-1])

        def send_combine() -> None:
            hooks.append(self._combine(dispatched, outputs, return_recv_hook=True)[-1])

        def receive() -> None:
            hooks.pop()()

        calls: dict[str, Callable[[], object]] = {
            "dispatch: send": send_dispatch,
            "dispatch: receive": receive,
            "combine: send": send_combine,
            "combine: receive": receive,
        }
        if self.plan.device == "cuda":
            whole: dict[str, Callable[[], object]] = {
                "dispatch": self.dispatch,
                "combine": lambda: self.combine(dispatched, outputs),
            }
            for name, call in whole.items():
                calls[f"{name}: graph"] = _capture(call)
                calls[f"{name}: graph of {_CALLS_OF_A_GRAPH}"] = _capture(call, _CALLS_OF_A_GRAPH)
            self.num_calls = {name: _CALLS_OF_A_GRAPH for name in calls if name.endswith(f"of {_CALLS_OF_A_GRAPH}")}
        return calls

    def _combine(self, dispatched: Any, outputs: Tensor, return_recv_hook: bool = False) -> Any:
        return self.buffer.low_latency_combine(
            outputs,
            self.batch.topk_idx,
            self.batch.topk_weights,
            dispatched[2],
            return_recv_hook=return_recv_hook,
        )


def _capture(call: Callable[[], object], num_calls: int = 1) -> Callable[[], object]:
    """So many of the call, one after the other, as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    return graph.replay


def _packed_rows(packed: Tensor | tuple[Tensor, Tensor], local_expert: int, count: int) -> Tensor:
    if isinstance(packed, tuple):
        return as_float32((packed[0][local_expert, :count], packed[1][local_expert, :count]))
    return as_float32(packed[local_expert, :count])


class _Dispatched(NamedTuple):
    """Attributes:
    columns: received rows, their scales where there are any, local experts ``[N, K]`` and weights ``[N, K]``.
    send_idx: ``[S]`` int64, the token of each row that was sent, by destination rank.
    num_sent, num_received: rows by rank.
    permutation: how rows are grouped by expert (permute mode).
    """

    columns: list[Tensor]
    send_idx: Tensor
    num_sent: list[int]
    num_received: list[int]
    permutation: Permutation | None


class AllToAllSubject(Subject):
    """Counts, then rows, experts and weights, each in one `all_to_all_single`.

    Args:
        plan: what is measured; modes normal and permute.
        batch: this rank's tokens.
    """

    def __init__(self, plan: BenchPlan, batch: Batch) -> None:
        self.engine = dist.get_backend()
        self.waiting_calls = frozenset({"dispatch"})
        self.plan, self.batch = plan, batch
        self.num_ranks = dist.get_world_size()
        self.num_local_experts = plan.workload.num_experts // self.num_ranks
        self.tokens = list(cast_to_fp8(batch.x)) if plan.workload.dtype == "fp8" else [batch.x]

    def dispatch(self) -> _Dispatched:
        topk_idx, topk_weights = self.batch.topk_idx, self.batch.topk_weights
        layout = compute_layout(topk_idx, self.plan.workload.num_experts, self.num_ranks, self.num_ranks)
        send_idx = torch.nonzero(layout.is_token_in_rank.t())[:, 1]
        received = torch.empty_like(layout.num_tokens_per_rank)
        dist.all_to_all_single(received, layout.num_tokens_per_rank)
        num_sent, num_received = layout.num_tokens_per_rank.tolist(), received.tolist()
        columns = [
            _all_to_all(column[send_idx], num_sent, num_received) for column in (*self.tokens, topk_idx, topk_weights)
        ]
        first = dist.get_rank() * self.num_local_experts
        mine = (columns[-2] >= first) & (columns[-2] < first + self.num_local_experts)
        columns[-2] = torch.where(mine, columns[-2] - first, -1)
        columns[-1] = torch.where(mine, columns[-1], 0.0)
        permutation = None
        if self.plan.mode == "permute":
            permutation = permutation_by_expert(columns[-2], self.num_local_experts, 1)
            columns[:-2] = [_bytes(column)[permutation.row].view(column.dtype) for column in columns[:-2]]
        return _Dispatched(columns, send_idx, num_sent, num_received, permutation)

    def received(self, dispatched: _Dispatched) -> Received:
        *_, topk_idx, topk_weights = dispatched.columns
        labels = torch.cat([topk_idx.double(), topk_weights.double()], 1)
        if dispatched.permutation is not None:
            row, column = dispatched.permutation.row, dispatched.permutation.column
            labels = torch.stack([topk_idx[row, column].double(), topk_weights[row, column].double()], 1)
        return Received(self._rows(dispatched), labels)

    def outputs(self, dispatched: _Dispatched, factor: float) -> Tensor:
        return (self._rows(dispatched) * factor).to(torch.bfloat16)

    def combine(self, dispatched: _Dispatched, outputs: Tensor) -> Tensor:
        if dispatched.permutation is not None:
            sums = outputs.new_zeros(sum(dispatched.num_received), outputs.shape[1], dtype=torch.float32)
            outputs = sums.index_add_(0, dispatched.permutation.row, outputs.float()).to(outputs.dtype)
        home = _all_to_all(outputs, dispatched.num_received, dispatched.num_sent)
        total = torch.zeros(self.batch.x.shape, dtype=torch.float32, device=outputs.device)
        return total.index_add_(0, dispatched.send_idx, home.float()).to(torch.bfloat16)

    @staticmethod
    def _rows(dispatched: _Dispatched) -> Tensor:
        data = dispatched.columns[:-2]
        return as_float32((data[0], data[1]) if len(data) == 2 else data[0])


def _bytes(rows: Tensor) -> Tensor:
    """fp8 as bytes: neither indexing nor every backend takes float8."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def _all_to_all(rows: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
    sent = rows.contiguous().view(torch.uint8)
    received = sent.new_empty(sum(num_received), sent.shape[1])
    dist.all_to_all_single(received, sent, num_received, num_sent)
    return received.view(rows.dtype)
