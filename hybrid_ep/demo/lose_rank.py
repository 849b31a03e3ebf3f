"""A rank of the demo is killed in the middle of its work, and the others go on without it.

The lost rank's experts are on other ranks or are loaded again. Every output, before and after, is compared with a dense
float64 mixture of all experts.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.demo.paths import Experts, make_experts
from hybrid_ep.demo.settings import Settings
from hybrid_ep.demo.skew import ALLOWED_RMS
from hybrid_ep.elastic import recover
from hybrid_ep.errors import TransportError
from hybrid_ep.testing.batch import make_batch
from hybrid_ep.testing.cluster import VirtualCluster
from hybrid_ep.testing.reference import dense_moe

_TIMEOUT_S = 5.0
_WORK_S = 0.5  # before the rank is killed
_LIMIT_S = 60.0
_NUM_STEPS = 3  # of the survivors


@dataclass(frozen=True)
class LossResult:
    """The outcome of the job.

    Attributes:
        victim: the rank that was killed.
        named: the ranks that errors of the survivors named.
        raised_s: from the kill until the last survivor raised.
        recovered_s: from then on until all had a new group, buffer and placement.
        num_ranks: of the new group.
        num_loaded: experts that were loaded, because no survivor held them.
        num_unserved: experts that no rank holds.
        rms_before, rms_after: of the outputs of all ranks, against float64.
    """

    victim: int
    named: tuple[int | None, ...]
    raised_s: float
    recovered_s: float
    num_ranks: int
    num_loaded: int
    num_unserved: int
    rms_before: float
    rms_after: float

    @property
    def problems(self) -> list[str]:
        """The faults in words; empty = good."""
        found = [
            f"rms error {rms:.2%} {when} the loss; allowed {ALLOWED_RMS:.2%}"
            for when, rms in (("before", self.rms_before), ("after", self.rms_after))
            if not rms <= ALLOWED_RMS
        ]
        if set(self.named) != {self.victim}:
            found.append(f"survivors named ranks {sorted(set(map(str, self.named)))}")
        if self.num_unserved:
            found.append(f"{self.num_unserved} experts are not served")
        return [f"lost rank {self.victim}: {problem}" for problem in found]


@dataclass(frozen=True)
class _Raised:
    """The error and the recovery of one survivor; times by the clock that all processes share."""

    named: int | None
    raised_at: float
    recovered_at: float
    num_ranks: int
    num_loaded: int
    num_unserved: int
    before: tuple[float, float]
    after: tuple[float, float]


def lose_a_rank(cluster: VirtualCluster, settings: Settings) -> LossResult:
    """Kills a rank of the cluster while all work, and returns what the others did. The rank stays dead.

    Raises:
        RankError: a survivor failed.
    """
    victim = settings.num_ranks // 2
    survivors = [rank for rank in range(settings.num_ranks) if rank != victim]
    cluster.start(_work, settings)
    time.sleep(_WORK_S)
    killed_at = time.monotonic()
    os.kill(cluster.process_id(victim), signal.SIGKILL)
    seen: list[_Raised] = cluster.collect(survivors, limit_s=_LIMIT_S)
    raised_at = max(one.raised_at for one in seen)
    return LossResult(
        victim=victim,
        named=tuple(one.named for one in seen),
        raised_s=raised_at - killed_at,
        recovered_s=max(one.recovered_at for one in seen) - raised_at,
        num_ranks=seen[0].num_ranks,
        num_loaded=sum(one.num_loaded for one in seen),
        num_unserved=seen[0].num_unserved,
        rms_before=_rms([one.before for one in seen]),
        rms_after=_rms([one.after for one in seen]),
    )


def _rms(squares: list[tuple[float, float]]) -> float:
    return float((sum(error for error, _ in squares) / sum(reference for _, reference in squares)) ** 0.5)


def _work(settings: Settings) -> _Raised:
    """Steps until a rank is lost, and some more without it."""
    experts = make_experts(settings.num_experts, settings.hidden, settings.ffn_hidden, settings.seed)
    num_slots = settings.num_local_experts + 1
    placement = ExpertPlacement.from_loads(
        torch.ones(1, settings.num_experts, device="cpu"),
        num_slots * settings.num_ranks,
        settings.num_ranks,
        num_ranks_per_domain=settings.num_ranks_per_domain,
    )
    buffer = Buffer(num_ranks_per_domain=settings.num_ranks_per_domain, timeout_s=_TIMEOUT_S)
    first = buffer.rank * num_slots
    weights = [_weights_of(experts, expert) for expert in placement.experts[0][first : first + num_slots]]
    before = (0.0, 0.0)
    try:
        while True:
            before = _step(settings, buffer, placement, weights)
    except TransportError as error:
        named, raised_at = error.peer, time.monotonic()
    buffer, placement, report = recover(buffer, placement, lambda _, expert: _weights_of(experts, expert))
    recovered_at = time.monotonic()
    weights = [report.loaded[0, slot] if old < 0 else weights[old] for slot, old in enumerate(report.kept[0].tolist())]
    after = (0.0, 0.0)
    for _ in range(_NUM_STEPS):
        after = _step(settings, buffer, placement, weights)
    num_unserved = len(report.unserved)
    return _Raised(named, raised_at, recovered_at, buffer.group_size, len(report.loaded), num_unserved, before, after)


def _weights_of(experts: Experts, expert: int) -> Experts:
    """The weights of one expert alone, as a checkpoint would give them."""
    return Experts(experts.up[expert : expert + 1].clone(), experts.down[expert : expert + 1].clone())


def _step(
    settings: Settings, buffer: Buffer, placement: ExpertPlacement, weights: list[Experts]
) -> tuple[float, float]:
    """Takes this process's tokens through the experts; returns the squares of the error and of the reference."""
    batch = make_batch(settings.workload("skewed", "bf16"), dist.get_rank())
    slots = placement.on("cpu", buffer.rank).map_topk(0, batch.topk_idx)
    per_rank, _, per_slot, in_rank, _ = buffer.get_dispatch_layout(slots, placement.num_replicas)
    received, idx, received_weights, _, handle, _ = buffer.dispatch(
        batch.x,
        topk_idx=slots,
        topk_weights=batch.topk_weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_slot,
    )
    assert isinstance(received, Tensor)
    assert idx is not None
    assert received_weights is not None
    assert handle is not None
    y = dense_moe(received, idx, received_weights, lambda slot, rows: weights[slot](0, rows))
    combined, _, _ = buffer.combine(y.to(torch.bfloat16), handle)
    experts = make_experts(settings.num_experts, settings.hidden, settings.ffn_hidden, settings.seed)
    truth = dense_moe(batch.x, batch.topk_idx, batch.topk_weights, experts)
    return float((combined.double() - truth).square().sum()), float(truth.square().sum())
