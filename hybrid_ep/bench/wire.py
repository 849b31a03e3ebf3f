"""The wire's limit: a plan's own rows, pushed to their ranks by a kernel that does nothing else.

It has no counts, no order, no metadata, no signals (`csrc/kernels/push_rows/push_rows.cu`). Ranks, timer, row bytes and
SMs are those of the candidates that are compared with it. If a rank cannot measure, it says why, and then no rank
measures.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import env
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.measure import RowCounts, count_rows, owners
from hybrid_ep.bench.plan import CALLS, BenchPlan, Candidate
from hybrid_ep.bench.timing import Times, time_calls
from hybrid_ep.core.layout import first_occurrence
from hybrid_ep.engine.cuda.symmetric import SymmetricMemory
from hybrid_ep.engine.select import choose_engine
from hybrid_ep.errors import TopologyError
from hybrid_ep.testing.batch import make_routing

# The default of the cuda engine, except for a dispatch of 7 and more ranks (csrc/runtime/sm_model.cpp).
_DEFAULT_SMS = 16
_LOW_LATENCY_SMS = 32  # low-latency calls take as many as they like; more do not make a push faster
_RANK_SHIFT = 32  # of a destination: (rank << 32) | row


@dataclass(frozen=True)
class RankWire:
    """The measurement of the wire on one rank.

    Attributes:
        obstacle: why nothing was measured, or None.
        times: SMs → call → time of each run.
        rows: call → rows that crossed to this rank.
    """

    obstacle: str | None
    times: dict[int, dict[str, Times]]
    rows: dict[str, RowCounts]


def compared_sms(candidate: Candidate, plan: BenchPlan) -> int:
    """SMs of the push that a candidate is compared with."""
    if candidate.num_sms is not None:
        return candidate.num_sms
    return _LOW_LATENCY_SMS if plan.mode == "low-latency" else _DEFAULT_SMS


def measure_wire(plan: BenchPlan) -> RankWire:
    """Times both calls' rows with each number of SMs that a candidate is compared with. Collective."""
    obstacle = _anyone(_obstacle(plan))
    if obstacle is not None:
        return RankWire(obstacle, {}, {})
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    topk_idx = make_routing(plan.workload, rank)[0].to(rank_device(plan.device))
    pushes, counts = {}, {}
    try:
        dst_rows = make_dst_rows(topk_idx, plan.workload.num_experts, rank, num_ranks)
        for call in CALLS:
            pushes[call] = Push(dst_rows, _aligned(plan.row_bytes(call)), rank, num_ranks * dst_rows.shape[0])
            counts[call] = count_rows(topk_idx, plan.workload.num_experts, once_per_expert=False)
    except TopologyError as error:
        obstacle = str(error)
    obstacle = _anyone(obstacle)
    if obstacle is None:
        obstacle = _anyone(next(filter(None, [pushes[call].check(counts[call]) for call in CALLS]), None))
    if obstacle is not None:
        return RankWire(obstacle, {}, {})
    times = {}
    for num_sms in sorted({compared_sms(candidate, plan) for candidate in plan.candidates}):
        calls: dict[str, Callable[[], object]] = {call: push.with_sms(num_sms) for call, push in pushes.items()}
        times[num_sms] = time_calls(calls, num_warmups=plan.num_warmups, num_runs=plan.num_runs, device=plan.device)
    dist.barrier()  # before memory is freed that others still write
    return RankWire(None, times, counts)


def make_dst_rows(topk_idx: Tensor, num_experts: int, rank: int, num_ranks: int) -> Tensor:
    """Returns the destinations of this rank's rows, one for each rank: ``[T, K]`` int64, ``(rank << 32) | row``, or −1.

    Every source has a part of each rank's memory to itself, so that nothing need be agreed on.

    Args:
        topk_idx: ``[T, K]``, this rank's routing.
        num_experts: E.
        rank: this one.
        num_ranks: R.
    """
    owner = owners(topk_idx, num_experts, num_ranks)
    row = torch.arange(topk_idx.shape[0], device=topk_idx.device).unsqueeze(1)
    return torch.where(first_occurrence(owner), (owner << _RANK_SHIFT) | (rank * topk_idx.shape[0] + row), -1)


_numbers = itertools.count(-1, -1)  # of this memory, below those of buffers; made in the same order at all ranks


class Push:
    """Rows of this rank, and memory for those that come here. Collective.

    Args:
        dst_rows: of `make_dst_rows`.
        row_bytes: of a row, a multiple of 16.
        rank: this one.
        num_rows_held: of the memory of each rank.
    """

    def __init__(self, dst_rows: Tensor, row_bytes: int, rank: int, num_rows_held: int) -> None:
        self.dst_rows, self.row_bytes = dst_rows, row_bytes
        num_tokens = dst_rows.shape[0]
        # Zeros would spare the wire some switching. Both ends of a row say which it is.
        self.rows = torch.randint(256, (num_tokens, row_bytes), dtype=torch.uint8, device=dst_rows.device)
        names = rank * num_tokens + torch.arange(1, num_tokens + 1, device=dst_rows.device)
        self.rows.view(torch.int64)[:, [0, -1]] = names.unsqueeze(1)
        self.progress = torch.zeros(2, dtype=torch.int32, device=dst_rows.device)
        roll_call = RollCall(dist.group.WORLD, rank, env.TIMEOUT_S.get(), next(_numbers))
        self.memory = SymmetricMemory.allocate(num_rows_held * row_bytes, roll_call, dst_rows.device)

    def check(self, counts: RowCounts) -> str | None:
        """Pushes once and looks at what landed here; returns what is wrong, or None. Collective."""
        self.with_sms(_DEFAULT_SMS)()
        torch.cuda.synchronize()
        dist.barrier()
        landed = self.memory.local.view(torch.int64).view(-1, self.row_bytes // 8)[:, [0, -1]]
        names = torch.arange(1, landed.shape[0] + 1, device=landed.device)
        num_right = int((landed == names.unsqueeze(1)).all(1).sum())
        num_landed = int((landed != 0).any(1).sum())
        if (num_right, num_landed) == (counts.total, counts.total):
            return None
        return f"of {counts.total} pushed rows {num_landed} landed, {num_right} of them right"

    def with_sms(self, num_sms: int) -> Callable[[], object]:
        """The push as a call."""
        from hybrid_ep import _cuda

        def push() -> None:
            _cuda.push_rows(
                rows=self.rows.data_ptr(),
                dst_rows=self.dst_rows.data_ptr(),
                memory=self.memory.addresses,
                progress=self.progress.data_ptr(),
                num_rows=self.dst_rows.shape[0],
                num_dst_rows=self.dst_rows.shape[1],
                row_bytes=self.row_bytes,
                num_sms=num_sms,
                stream=torch.cuda.current_stream().cuda_stream,
            )

        return push


def _obstacle(plan: BenchPlan) -> str | None:
    """Why this rank cannot measure, or None."""
    if plan.device != "cuda":
        return "the ranks are not on GPUs"
    if dist.get_world_size() == 1 or plan.workload.num_tokens == 0:
        return "no row crosses it"
    choice = choose_engine("auto")  # the push needs what the cuda engine needs
    if choice.name != "cuda":
        return choice.reason
    from hybrid_ep import _cuda

    row_bytes = max(map(plan.row_bytes, CALLS))
    if row_bytes > _cuda.max_row_bytes:
        return f"a row has {row_bytes} bytes; the push takes at most {_cuda.max_row_bytes}"
    return None


def _anyone(obstacle: str | None) -> str | None:
    """The obstacle of all ranks, or of the first that has one; the same on every rank."""
    found: list[tuple[str | None, str]] = [(None, "")] * dist.get_world_size()
    dist.all_gather_object(found, (obstacle, socket.gethostname()))
    num_hosts = len({host for _, host in found})
    if num_hosts > 1 and env.ENGINE.get() != "cuda":
        return f"the ranks are on {num_hosts} hosts; {env.ENGINE.name}=cuda says that NVLink joins them"
    if len({text for text, _ in found}) == 1:
        return obstacle
    return next(f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
