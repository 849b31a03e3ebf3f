"""A MoE layer under a skewed router: without balance, with a placement, and with replicas planned for each batch.

The layer is a permuting dispatch, two matrix products for each expert, and a combine. Its output is compared with the
experts applied to some tokens directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybrid_ep.balance.online import OnlinePlan, map_online, plan_online
from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.bench.machine import rank_device
from hybrid_ep.bench.measure import RankMeasurement, anywhere
from hybrid_ep.bench.plan import BenchPlan, Candidate
from hybrid_ep.bench.timing import time_calls
from hybrid_ep.buffers.hybrid import HybridEPBuffer
from hybrid_ep.buffers.load_balance import copy_weights, gather_counts
from hybrid_ep.buffers.normal import Buffer
from hybrid_ep.testing.workload import Batch, make_batch, make_routing

__all__ = ["POLICIES", "measure_balance"]

POLICIES = ("none", "placement", "online")
_NUM_SPARE = 2
_NUM_CHECKED = 4  # tokens of each rank
_ALLOWED_RMS = 8 * 2.0**-8  # a few roundings to bf16


def measure_balance(candidate: Candidate, plan: BenchPlan) -> RankMeasurement:
    """Checks, then times, the layer with the policy that the candidate names. Collective."""
    device = rank_device(plan.device)
    batch = make_batch(plan.workload, dist.get_rank(), device)
    with torch.no_grad(), _Layer(candidate.implementation, plan, batch) as layer:
        output = layer.forward()
        problems = _check(output, batch, plan)
        fullest = layer.fullest()
        times = {}
        if not anywhere(bool(problems), plan.device == "cuda"):
            calls = {"layer": layer.forward, **layer.parts()}
            times = time_calls(calls, num_warmups=plan.num_warmups, num_runs=plan.num_runs, device=plan.device)
        return RankMeasurement(layer.engine, problems, times, {}, fullest)


class _Layer:
    """This rank's part of the layer.

    Args:
        policy: one of `POLICIES`.
        plan: what is measured.
        batch: this rank's tokens.
    """

    def __init__(self, policy: str, plan: BenchPlan, batch: Batch) -> None:
        workload = plan.workload
        self._policy, self._batch = policy, batch
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._num_experts, self._num_local = workload.num_experts, workload.num_experts // self._num_ranks
        device = batch.x.device
        self._mover = Buffer()
        self._per_domain = self._mover.grid.num_ranks_per_domain
        num_slots = self._num_local + (_NUM_SPARE if policy != "none" else 0)
        self._num_slots = num_slots
        self._buffer = HybridEPBuffer(None, workload.hidden, max(1, workload.num_tokens), num_slots)
        self.engine = self._buffer.engine.name
        home = _weights(workload.hidden, workload.seed, self._rank, self._num_local, device)
        spare = num_slots - self._num_local
        self._weights = [torch.cat([one, one.new_zeros(spare, *one.shape[1:])]) for one in home]
        if policy == "placement":
            chosen = torch.cat([make_routing(workload, rank)[0].flatten() for rank in range(self._num_ranks)])
            load = torch.bincount(chosen, minlength=workload.num_experts)
            placement = ExpertPlacement.from_loads(
                load.unsqueeze(0),
                num_slots * self._num_ranks,
                self._num_ranks,
                num_ranks_per_domain=self._per_domain,
            )
            self._mapper = placement.on(device, self._rank)
            mapping = placement.phy2log[0].view(self._num_ranks, num_slots).to(device)
            for one, slots in zip(home, self._weights, strict=True):
                copy_weights(self._mover, slots, one.contiguous(), mapping, 0)
        if policy == "online":
            self._counts = self._gather()
            self._plan = self._make_plan()

    def __enter__(self) -> _Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.close()
        self._mover.close()

    def forward(self) -> Tensor:
        """Takes the tokens through the layer: ``[T, H]`` bf16. Collective."""
        slots = self._route()
        rows, probs, _, per_slot, handle = self._buffer.dispatch_with_permute(
            hidden=self._batch.x,
            topk_idx=slots,
            topk_weights=self._batch.topk_weights,
            num_of_experts=self._num_slots * self._num_ranks,
        )
        assert probs is not None
        counts = per_slot.tolist()
        self._num_copies = sum(counts)
        up, down = self._weights
        parts = [
            F.gelu(part @ up[slot].t()) @ down[slot].t()
            for slot, part in enumerate(rows[: self._num_copies].split(counts))
        ]
        y = (torch.cat(parts) * probs[: self._num_copies].unsqueeze(1)).to(torch.bfloat16)
        combined, _ = self._buffer.combine_with_unpermute(hidden=y, handle=handle)
        return combined

    def parts(self) -> dict[str, Callable[[], object]]:
        """What of the layer is the policy's, to be timed alone."""
        if self._policy == "placement":
            return {"map_topk": self._map_placed}
        if self._policy == "online":
            return {
                "counts of all ranks": self._gather,
                "plan": self._make_plan,
                "map": self._map_online,
                "weights to replicas": self._copy,
            }
        return {}

    def fullest(self) -> float:
        """Copies of the fullest rank over the mean, in the last forward pass. Collective."""
        most = torch.tensor([self._num_copies], device=self._batch.x.device)
        total = most.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return int(most) * self._num_ranks / max(1, int(total))

    def _route(self) -> Tensor:
        if self._policy == "none":
            return self._batch.topk_idx
        if self._policy == "placement":
            return self._map_placed()
        self._counts = self._gather()
        self._plan = self._make_plan()
        self._copy()
        return self._map_online()

    def _map_placed(self) -> Tensor:
        return self._mapper.map_topk(0, self._batch.topk_idx)

    def _gather(self) -> Tensor:
        chosen = self._batch.topk_idx.flatten()
        mine = chosen.new_zeros(self._num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        return gather_counts(self._mover, mine)

    def _make_plan(self) -> OnlinePlan:
        return plan_online(self._counts, num_ranks_per_domain=self._per_domain, num_spare=_NUM_SPARE)

    def _map_online(self) -> Tensor:
        return map_online(self._plan, self._counts, self._batch.topk_idx, self._rank)

    def _copy(self) -> None:
        for one in self._weights:
            copy_weights(self._mover, one[self._num_local :], one[: self._num_local], self._plan.spare, 0)


def _expert(hidden: int, seed: int, expert: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[F, H]`` and ``[H, F]`` bf16 weights of an expert, the same on every rank."""
    width = max(1, hidden // 4)
    generator = torch.Generator(device).manual_seed((seed << 20) + expert)
    up = torch.randn(width, hidden, generator=generator, device=device) / hidden**0.5
    down = torch.randn(hidden, width, generator=generator, device=device) / width**0.5
    return up.to(torch.bfloat16), down.to(torch.bfloat16)


@functools.lru_cache(maxsize=1)
def _weights(hidden: int, seed: int, rank: int, num_local: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[LE, F, H]`` and ``[LE, H, F]`` of this rank; kept, because all plans of a run have the same."""
    experts = [_expert(hidden, seed, rank * num_local + i, device) for i in range(num_local)]
    return torch.stack([up for up, _ in experts]), torch.stack([down for _, down in experts])


def _check(output: Tensor, batch: Batch, plan: BenchPlan) -> list[str]:
    """Compares some tokens with their experts applied directly."""
    error = reference = 0.0
    num_tokens = batch.x.shape[0]
    for token in range(0, num_tokens, max(1, -(-num_tokens // _NUM_CHECKED))):
        x, want = batch.x[token].double(), torch.zeros_like(batch.x[token], dtype=torch.float64)
        for expert, weight in zip(batch.topk_idx[token].tolist(), batch.topk_weights[token].tolist(), strict=True):
            up, down = (
                part.double() for part in _expert(plan.workload.hidden, plan.workload.seed, expert, batch.x.device)
            )
            want += weight * (F.gelu(x @ up.t()) @ down.t())
        error += float((output[token].double() - want).square().sum())
        reference += float(want.square().sum())
    rms = (error / reference) ** 0.5 if reference else 0.0
    rank = dist.get_rank()
    return [] if rms <= _ALLOWED_RMS else [f"rank {rank}: rms error {rms:.2%}; allowed {_ALLOWED_RMS:.2%}"]
