"""A MoE layer under a skewed router: without balance, with a placement, and with replicas planned for each batch.

The layer is a `MoELayer` with rows by expert and grouped matrix products. With replicas planned for each batch, their
weights move beside the dispatch. Its output is compared with the experts applied to some tokens directly.
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
from hybrid_ep.buffers.expert_moves import CountExchange, copy_weights
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.nn.experts import Experts
from hybrid_ep.nn.layer import MoELayer
from hybrid_ep.testing.batch import Batch, make_batch, make_routing

_TOLERANCES = {"online": 0.0, "online, 5 %": 0.05}  # by policy: how far a rank may be above the mean
POLICIES = ("none", "placement", *_TOLERANCES)
_NUM_SPARE = 2
_NUM_CHECKED = 4  # tokens of each rank
_ALLOWED_RMS = 8 * 2.0**-8  # a few roundings to bf16


def measure_balance(candidate: Candidate, plan: BenchPlan) -> RankMeasurement:
    """Checks, then times, the layer with the policy that the candidate names. Collective."""
    device = rank_device(plan.device)
    batch = make_batch(plan.workload, dist.get_rank(), device)
    with torch.no_grad(), Buffer() as buffer, Buffer() as mover:
        layer = _Layer(buffer, mover, candidate.implementation, plan, batch)
        problems = _check(layer.run(), batch, plan)
        times = {}
        if not anywhere(bool(problems), plan.device == "cuda"):
            calls = {"layer": layer.run, **layer.parts()}
            times = time_calls(calls, num_warmups=plan.num_warmups, num_runs=plan.num_runs, device=plan.device)
        return RankMeasurement(buffer.engine.name, problems, times, {}, layer.fullest)


class _Layer(MoELayer):
    """The layer with one policy, for the routing and the experts of the bench.

    With a placement, the layer's experts are the slots, and their weights are there before the first call.

    Args:
        buffer: moves the tokens.
        mover: moves the weights of replicas.
        policy: one of `POLICIES`.
        plan: what is measured.
        batch: this rank's tokens.
    """

    def __init__(self, buffer: Buffer, mover: Buffer, policy: str, plan: BenchPlan, batch: Batch) -> None:
        workload = plan.workload
        num_ranks, num_experts = buffer.group_size, workload.num_experts
        per_domain = buffer.grid.num_ranks_per_domain
        num_slots = num_experts // num_ranks + (_NUM_SPARE if policy != "none" else 0)
        routing = [make_routing(workload, rank)[0] for rank in range(num_ranks)]
        counts = torch.stack([topk_idx.flatten().bincount(minlength=num_experts) for topk_idx in routing])
        mapper = None
        if policy == "placement":
            placement = ExpertPlacement.from_loads(
                counts.sum(0, keepdim=True), num_slots * num_ranks, num_ranks, num_ranks_per_domain=per_domain
            )
            mapper = placement.on(batch.x.device, buffer.rank)
            slots = torch.cat([placement.on("cpu", r).map_topk(0, topk_idx) for r, topk_idx in enumerate(routing)])
            loads = slots.flatten().bincount(minlength=placement.num_replicas).view(num_ranks, -1).sum(1)
        elif policy in _TOLERANCES:
            loads = plan_online(
                counts, num_ranks_per_domain=per_domain, num_spare=_NUM_SPARE, tolerance=_TOLERANCES[policy]
            ).loads
        else:
            loads = counts.sum(0).view(num_ranks, -1).sum(1)
        most = int(loads.max())
        self.fullest = most * num_ranks / max(1, int(loads.sum()))  # copies of the most loaded rank over the mean
        super().__init__(
            buffer,
            hidden=workload.hidden,
            ffn_hidden=1,  # its own experts are made on the CPU in float32, and not used
            num_experts=num_experts if mapper is None else num_slots * num_ranks,
            topk=workload.num_topk,
            balance="online" if policy in _TOLERANCES else None,
            num_spare=_NUM_SPARE,
            tolerance=_TOLERANCES.get(policy, 0.0),
            weight_buffer=mover if policy in _TOLERANCES else None,
            num_rows=max(1, most),
        )
        weights = _weights(workload.hidden, workload.seed, buffer.rank, num_experts // num_ranks, batch.x.device)
        if mapper is not None:
            mapping = mapper.phy2log[0].view(num_ranks, num_slots)
            up, down = (one.new_zeros(num_slots, *one.shape[1:]) for one in weights)
            copy_weights(mover, mapping, (up, down), weights)
            weights = up, down
        self.experts = Experts(buffer, *weights)
        self._mover, self._mapper, self._batch = mover, mapper, batch
        self._tolerance = _TOLERANCES.get(policy, 0.0)

    def run(self) -> Tensor:
        """Takes the tokens through the layer: ``[T, H]`` bf16. Collective."""
        output: Tensor = self(self._batch.x)
        return output

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._map_placed(), self._batch.topk_weights

    def parts(self) -> dict[str, Callable[[], object]]:
        """The parts of the layer that the policy adds, to be timed alone. Collective."""
        if self._mapper is not None:
            return {"map_topk": self._map_placed}
        if self._balance_is_off:
            return {}
        exchange, num_local = CountExchange(self.buffer, self.num_experts), self.num_experts // self.buffer.group_size
        counts = exchange.gather(self._batch.topk_idx)
        plan = self._make_plan(counts)
        slots = self.experts.slots(_NUM_SPARE, self._mover)
        spare, home = [one[num_local:] for one in slots], [one[:num_local] for one in slots]
        return {
            "counts of all ranks": lambda: exchange.gather(self._batch.topk_idx),
            "plan": lambda: self._make_plan(counts),
            "map": lambda: map_online(plan, counts, self._batch.topk_idx, self.buffer.rank),
            "weights to replicas": lambda: copy_weights(self._mover, plan.spare, spare, home),
        }

    def _map_placed(self) -> Tensor:
        topk_idx = self._batch.topk_idx
        return topk_idx if self._mapper is None else self._mapper.map_topk(0, topk_idx)

    def _make_plan(self, counts: Tensor) -> OnlinePlan:
        return plan_online(
            counts,
            num_ranks_per_domain=self.buffer.grid.num_ranks_per_domain,
            num_spare=_NUM_SPARE,
            tolerance=self._tolerance,
        )


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
