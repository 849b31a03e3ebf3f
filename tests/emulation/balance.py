"""The kernels of `hybrid_ep.balance`, held to the torch form: equal in every number."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.balance.online import map_online, plan_online
from hybrid_ep.buffers import expert_moves
from hybrid_ep.buffers.expert_moves import route_replicas
from hybrid_ep.nn import MoELayer
from tests.battery.normal import equal
from tests.emulation.engine import local_kernels


def check_plan(count: int) -> None:
    """Random counts: even, skewed, with ties and zeros; several domains; more spare slots than experts."""
    from hybrid_ep import _cuda

    # What is left of expert 1 is as much as expert 0 has, which comes first: it gives to the last rank.
    _compare_plan(torch.tensor([[4, 12, 0, 0, 0, 0, 0, 0], *[[0] * 8] * 3]), 4, 1, 0.0, "equal copies that are left")
    for seed in range(count):
        draw = random.Random(seed)
        num_domains, per_domain = draw.choice([(1, 8), (1, 1), (2, 4), (3, 2), (1, 34), (1, 5)])
        num_local, num_spare = draw.choice([1, 2, 5, 32, 40]), draw.choice([0, 1, 2, 3, 33])
        num_ranks = num_domains * per_domain
        num_experts = num_ranks * num_local
        if not _cuda.plan_fits(
            num_ranks=num_ranks, num_experts=num_experts, ranks_per_domain=per_domain, num_spare=num_spare
        ):
            continue
        generator = torch.Generator().manual_seed(seed)
        most = draw.choice([1, 3, 1000])
        counts = torch.randint(0, most + 1, (num_ranks, num_experts), generator=generator)
        if draw.random() < 0.6:  # a few get most
            counts[:, torch.randint(0, num_experts, (3,), generator=generator)] *= draw.choice([0, 7, 300])
        about = f"seed {seed}, {num_domains} × {per_domain} ranks, {num_local} experts, {num_spare} spare slots"
        _compare_plan(counts, per_domain, num_spare, draw.choice([0.0, 0.0, 0.05, 0.3]), about)


def _compare_plan(counts: Tensor, per_domain: int, num_spare: int, tolerance: float, about: str) -> None:
    from hybrid_ep import _cuda

    num_ranks, num_experts = counts.shape
    want = plan_online(counts, num_ranks_per_domain=per_domain, num_spare=num_spare, tolerance=tolerance)
    spare = torch.full((num_ranks, num_spare), -7)
    quota = torch.full((num_experts, per_domain), -7)
    loads = torch.full((num_ranks,), -7)
    _cuda.plan_online(
        counts=counts.data_ptr(),
        spare=spare.data_ptr(),
        quota=quota.data_ptr(),
        loads=loads.data_ptr(),
        num_ranks=num_ranks,
        num_experts=num_experts,
        ranks_per_domain=per_domain,
        num_spare=num_spare,
        tolerance_factor=1 + tolerance,
        device=0,
        stream=0,
    )
    equal(spare, want.spare, f"{about}: spare")
    equal(quota, want.quota, f"{about}: quota")
    equal(loads, want.loads, f"{about}: loads")


def check_map_online(count: int) -> None:
    """Random routings along plans of theirs: hot experts, columns alike, holes, no tokens, several CTAs."""
    from hybrid_ep import _cuda

    for seed in range(count):
        draw = random.Random(seed)
        num_domains, per_domain = draw.choice([(1, 8), (1, 1), (2, 4), (3, 2), (1, 34), (1, 5)])
        num_local, num_spare = draw.choice([1, 2, 5, 32]), draw.choice([0, 1, 2, 3, 33])
        num_ranks, num_topk = num_domains * per_domain, draw.randint(1, 8)
        num_experts, rank = num_ranks * num_local, draw.randrange(num_ranks)
        generator = torch.Generator().manual_seed(seed)
        odds = torch.arange(1, num_experts + 1).double() ** -draw.choice([0.0, 1.0, 2.0])
        odds = odds[torch.randperm(num_experts, generator=generator)]
        routing = []
        for _ in range(num_ranks):
            num_tokens = draw.choice([0, 1, 200, 900])
            chosen = odds.multinomial(num_tokens * num_topk or 1, True, generator=generator)[: num_tokens * num_topk]
            chosen[torch.rand(chosen.shape, generator=generator) < 0.1] = -1
            routing.append(chosen.view(num_tokens, num_topk))
        counts = torch.stack([idx[idx >= 0].bincount(minlength=num_experts) for idx in routing])
        plan = plan_online(counts, num_ranks_per_domain=per_domain, num_spare=num_spare)
        slots = torch.full_like(routing[rank], -7)
        wrong = torch.tensor([[-2, num_experts]])
        wrong_slots = torch.zeros_like(wrong)
        for given, result in ((routing[rank], slots), (wrong, wrong_slots)):
            _cuda.map_online(
                counts=counts.data_ptr(),
                spare=plan.spare.data_ptr(),
                quota=plan.quota.data_ptr(),
                topk_idx=given.data_ptr(),
                slots=result.data_ptr(),
                num_copies=given.numel(),
                num_ranks=num_ranks,
                num_experts=num_experts,
                ranks_per_domain=per_domain,
                num_spare=num_spare,
                rank=rank,
                device=0,
                stream=0,
            )
        about = f"seed {seed}, {num_domains} × {per_domain} ranks, {num_local} experts, {num_spare} spare slots"
        equal(slots, map_online(plan, counts, routing[rank], rank), f"{about}: slots")
        equal(wrong_slots, torch.tensor([[-2, num_experts + num_ranks * num_spare]]), f"{about}: what is no slot")


def check_map_topk(count: int) -> None:
    """Random placements, some with lost ranks; holes; indices that dispatch is to report."""
    from hybrid_ep import _cuda

    for seed in range(count):
        draw = random.Random(seed)
        num_ranks, num_topk = 4, draw.randint(1, 8)
        num_experts = draw.choice([4, 12])
        replicas = num_experts + draw.choice([0, 4, 12])
        generator = torch.Generator().manual_seed(seed)
        loads = torch.rand(2, num_experts, generator=generator)
        placement = ExpertPlacement.from_loads(loads, replicas, num_ranks, num_ranks_per_domain=draw.choice([2, 4]))
        if draw.random() < 0.3:
            placement = placement.without([draw.randrange(num_ranks)])
        rank, layer = draw.randrange(num_ranks), draw.randrange(2)
        mapper = placement.on("cpu", rank)
        topk_idx = torch.randint(-1, num_experts, (draw.choice([0, 1, 300]), num_topk), generator=generator)
        slots = torch.full_like(topk_idx, -7)
        wrong = torch.tensor([[-2, num_experts]])
        wrong_slots = torch.zeros_like(wrong)
        for given, result in ((topk_idx, slots), (wrong, wrong_slots)):
            _cuda.map_topk(
                topk_idx=given.data_ptr(),
                replicas=mapper.replicas[layer].data_ptr(),
                num_choices=mapper.num_choices[layer].data_ptr(),
                slots=result.data_ptr(),
                num_copies=given.numel(),
                num_topk=given.shape[1],
                num_experts=num_experts,
                max_replicas=mapper.replicas.shape[2],
                num_slots=replicas,
                rank_turn=mapper.rank_turn,
                device=0,
                stream=0,
            )
        equal(slots, mapper.map_topk(layer, topk_idx), f"seed {seed}: slots")
        equal(wrong_slots, torch.tensor([[-2, replicas + num_experts]]), f"seed {seed}: what is no slot")


def check_routes(count: int, device: str = "cpu") -> None:
    """Random mappings: holes, an expert in several slots and on its own rank, no slots, several domains."""
    for seed in range(count):
        draw = random.Random(seed)
        num_domains, per_domain = draw.choice([(1, 8), (1, 1), (2, 4), (3, 2), (1, 34), (1, 5)])
        num_local, num_spare = draw.choice([1, 2, 5, 40]), draw.choice([0, 1, 2, 3, 33])
        num_ranks = num_domains * per_domain
        # Of the whole group, as a layer has it, or of one domain.
        first_rank, num_mapped = draw.choice([(0, num_ranks), (per_domain * (num_domains - 1), per_domain)])
        rank = first_rank + draw.randrange(num_mapped)
        generator = torch.Generator().manual_seed(seed)
        mapping = torch.randint(-1, num_mapped * num_local, (num_mapped, num_spare), generator=generator)
        mapping[torch.rand(mapping.shape, generator=generator) < draw.choice([0.0, 0.5, 1.0])] = -1
        buffer: Any = SimpleNamespace(rank=rank, group_size=num_ranks)
        want = route_replicas(buffer, mapping, num_local, first_rank)
        with contextlib.nullcontext() if device == "cuda" else local_kernels():
            got = route_replicas(buffer, mapping.to(device), num_local, first_rank)
        for name in ("sent", "columns", "arrived", "homes"):
            about = f"seed {seed}, rank {rank} of {num_domains} × {per_domain}, {num_local} experts: {name}"
            equal(getattr(got, name).cpu(), getattr(want, name), about)
        equal(got.mapping.checksum.cpu(), want.mapping.checksum, f"seed {seed}: checksum")


def check_take(count: int, device: str = "cpu") -> None:
    """Items of random sizes from the middle of others, in any order, several times, or not at all."""
    for seed in range(count):
        draw = random.Random(seed)
        at_target, at_source, num_bytes = 16 * draw.randrange(3), 16 * draw.randrange(3), 16 * draw.choice([1, 7, 5000])
        generator = torch.Generator().manual_seed(seed)
        num_items, num_sources = draw.choice([1, 3, 6]), draw.choice([1, 4])
        source = torch.randint(0, 256, (num_sources, at_source + num_bytes + 32), generator=generator).byte()
        index = torch.randint(-1, num_sources, (num_items,), generator=generator)
        want = torch.full((num_items, at_target + num_bytes + 16), 7, dtype=torch.uint8)
        taken = want.to(device, copy=True)
        expert_moves._take(want, at_target, source, at_source, index, num_bytes)
        with contextlib.nullcontext() if device == "cuda" else local_kernels():
            expert_moves._take(taken, at_target, source.to(device), at_source, index.to(device), num_bytes)
        got = taken.cpu()
        equal(got, want, f"seed {seed}")
        for i, item in enumerate(index.tolist()):
            found = source[item, at_source : at_source + num_bytes] if item >= 0 else torch.full((num_bytes,), 7).byte()
            equal(got[i, at_target : at_target + num_bytes], found, f"seed {seed}: item {i}")


def check_layer() -> None:
    """A layer with the online plan gives the same bits with the kernels as without, forwards and backwards."""
    results = []
    with hybrid_ep.Buffer() as buffer, hybrid_ep.Buffer() as mover:
        for where in (contextlib.nullcontext(), local_kernels()):
            with where:
                layer = MoELayer(
                    buffer, hidden=64, ffn_hidden=48, num_experts=8, topk=2, balance="online", weight_buffer=mover
                )
                generator = torch.Generator().manual_seed(dist.get_rank())
                x = torch.randn(20, 64, generator=generator) + layer.router[5].detach() * 20  # which is hot
                x.requires_grad_()
                y = layer(x)
                y.square().sum().backward()
                grads = [p.grad for p in (x, layer.router, layer.experts.up, layer.experts.down)]
                results.append([y.detach(), *(getattr(one, "_local_tensor", one) for one in grads)])
                # Expert 5 is on rank 1.
                assert dist.get_rank() == 1 or bool(layer.experts.slots(2, mover)[0][-2:].any()), "no replica has come"
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        equal(b, a, f"result {i}")
