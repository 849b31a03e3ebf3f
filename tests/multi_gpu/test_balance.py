"""Balance on GPUs: the plan in a CUDA graph equals the CPU's, and weights and gradients move over the cuda engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.balance.grouped import dispatch_online
from hybrid_ep.balance.online import map_online, plan_online
from hybrid_ep.nn import MoELayer
from tests.conftest import RunRanks
from tests.emulation.balance import check_routes, check_take
from tests.emulation.experts import (
    begin_copy,
    check_copies,
    check_copies_in_turn,
    compare_copies,
    draw_experts,
    draw_mapping,
)
from tests.emulation.pushed_experts import (
    check_pushes,
    check_pushes_in_turn,
    check_ranks_that_disagree,
    check_several_launches,
)
from tests.multi_gpu.conftest import every_engine
from tests.multi_process.test_load_balance import check_other_mappings
from tests.rank_pool import RankPool

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="no GPU is visible")]


def test_a_captured_plan_is_that_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    odds = torch.arange(1, 65).double() ** -1.2
    routings = [[odds.multinomial(512, True, generator=generator).view(-1, 4) for _ in range(8)] for _ in range(2)]
    counts = [torch.stack([idx.flatten().bincount(minlength=64) for idx in routing]) for routing in routings]
    given_counts, given_idx = counts[0].cuda(), routings[0][5].cuda()

    def plan() -> tuple[torch.Tensor, ...]:
        made = plan_online(given_counts, num_ranks_per_domain=4, num_spare=2)
        return *made, map_online(made, given_counts, given_idx, 5)

    plan()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = plan()
    for count, routing in zip(counts, routings, strict=True):
        given_counts.copy_(count)
        given_idx.copy_(routing[5])
        graph.replay()
        want = plan_online(count, num_ranks_per_domain=4, num_spare=2)
        for a, b in zip(got, (*want, map_online(want, count, routing[5], 5)), strict=True):
            assert torch.equal(a.cpu(), b)


def test_a_captured_mapping_is_that_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(3)
    placement = ExpertPlacement.from_loads(torch.rand(2, 64, generator=generator), 80, 8, num_ranks_per_domain=4)
    placement = placement.without([2])
    here, there = placement.on("cpu", 5), placement.on("cuda", 5)
    routings = [torch.randint(-1, 64, (1000, 6), generator=generator) for _ in range(2)]
    given = routings[0].cuda()
    there.map_topk(1, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = there.map_topk(1, given)
    for routing in routings:
        given.copy_(routing)
        graph.replay()
        assert torch.equal(got.cpu(), here.map_topk(1, routing))
    assert there.map_topk(0, given[:0]).shape == (0, 6)
    assert torch.equal(there.map_topk(0, given[::2, :3]).cpu(), here.map_topk(0, routings[1][::2, :3]))


@pytest.mark.parametrize("num_spare", [0, 1, 2, 32, 40])
@pytest.mark.parametrize("num_ranks_per_domain", [8, 4])
def test_plans_are_those_of_the_cpu(num_ranks_per_domain: int, num_spare: int) -> None:
    generator = torch.Generator().manual_seed(num_spare)
    for exponent in (0.0, 1.0, 2.0):
        odds = torch.arange(1, 257).double() ** -exponent
        counts = torch.stack(
            [odds.multinomial(4096, True, generator=generator).bincount(minlength=256) for _ in range(8)]
        )
        for tolerance in (0.0, 0.1):
            options = {"num_ranks_per_domain": num_ranks_per_domain, "num_spare": num_spare, "tolerance": tolerance}
            for a, b in zip(plan_online(counts.cuda(), **options), plan_online(counts, **options), strict=True):
                assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("num_spare", [0, 2, 40])
@pytest.mark.parametrize("num_ranks_per_domain", [8, 4])
@pytest.mark.parametrize("num_tokens", [0, 1, 4096, 20000])
def test_copies_go_where_the_cpu_sends_them(num_tokens: int, num_ranks_per_domain: int, num_spare: int) -> None:
    """Even and skewed routings, with holes and columns alike; more copies than CTAs take at once."""
    generator = torch.Generator().manual_seed(num_spare)
    for exponent in (0.0, 1.0, 2.0):
        odds = torch.arange(1, 257).double() ** -exponent
        routing = [odds.multinomial(4096, True, generator=generator).view(-1, 8) for _ in range(8)]
        mine = odds.multinomial(8 * num_tokens + 1, True, generator=generator)[1:]
        mine[torch.rand(mine.shape, generator=generator) < 0.1] = -1
        routing[5] = mine.view(num_tokens, 8)
        counts = torch.stack([idx[idx >= 0].bincount(minlength=256) for idx in routing])
        plan = plan_online(counts, num_ranks_per_domain=num_ranks_per_domain, num_spare=num_spare)
        want = map_online(plan, counts, routing[5], 5)
        given_counts, given_idx = counts.cuda(), routing[5].cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = plan_online(given_counts, num_ranks_per_domain=num_ranks_per_domain, num_spare=num_spare)
            got = map_online(made, given_counts, given_idx, 5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got.cpu(), want)


def test_what_is_no_expert_becomes_what_is_no_slot() -> None:
    counts = torch.zeros(4, 8, dtype=torch.int64, device="cuda")
    plan = plan_online(counts, num_ranks_per_domain=4, num_spare=1)
    slots = map_online(plan, counts, torch.tensor([[-2, -1, 8, 9]], device="cuda"), 0)
    assert slots.tolist() == [[-2, -1, 12, 13]]


def test_routes_and_copies_of_replicas_are_those_of_the_cpu() -> None:
    check_routes(200, "cuda")
    check_take(100, "cuda")


def _move() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    everyone = torch.randn(num_ranks * 3, 96, 257, generator=generator)
    grads = torch.randn(num_ranks, 2, 1000, generator=generator)
    mapping = torch.arange(num_ranks * 2).mul(5).add(4).remainder(num_ranks * 3).view(num_ranks, 2)
    mapping[-1, 0] = -1
    spare = torch.zeros(2, 96, 257, device="cuda")
    home = torch.zeros(3, 1000, device="cuda")
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as buffer:
        on_gpu = mapping.to("cuda", torch.int32)
        buffer.lb_prefetch_weights(spare, everyone[rank * 3 : rank * 3 + 3].cuda(), on_gpu)
        buffer.lb_reduce_grads(grads[rank].cuda(), home, on_gpu)
    want_home = torch.zeros(3, 1000)
    for source in [rank, *(r for r in range(num_ranks) if r != rank)]:
        for slot, expert in enumerate(mapping[source].tolist()):
            if expert >= 0 and expert // 3 == rank:
                want_home[expert % 3] += grads[source, slot]
    for slot, expert in enumerate(mapping[rank].tolist()):
        assert torch.equal(spare[slot].cpu(), everyone[expert] if expert >= 0 else torch.zeros(96, 257))
    assert torch.equal(home.cpu(), want_home)


@every_engine
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_and_gradients_move(run_gpus: RunRanks, num_ranks: int) -> None:
    if num_ranks > NUM_GPUS:
        pytest.skip(f"{num_ranks} GPUs are needed, {NUM_GPUS} are visible")
    run_gpus(num_ranks, _move)


@every_engine
@pytest.mark.skipif(NUM_GPUS < 2, reason="two GPUs are needed")
def test_ranks_with_other_mappings_are_told_so(run_gpus: RunRanks) -> None:
    run_gpus(2, check_other_mappings, 2, "cuda")
    run_gpus(2, check_ranks_that_disagree)


@every_engine
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "check",
    [check_copies, check_copies_in_turn, check_pushes, check_pushes_in_turn, check_several_launches],
    ids=lambda check: check.__name__,
)
def test_copies_of_experts(run_gpus: RunRanks, check: Callable[[], None], num_ranks: int) -> None:
    """Of all sizes and alignments, between other calls and one behind the other."""
    if num_ranks > NUM_GPUS:
        pytest.skip(f"{num_ranks} GPUs are needed, {NUM_GPUS} are visible")
    run_gpus(num_ranks, check)


def _captured_copies(has_plan: bool) -> None:
    """A replay follows the mapping and the weights that are there then."""
    num_ranks, sizes = dist.get_world_size(), (1_000_000, 48)
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as buffer:
        mapping = draw_mapping(0, 3, 2).cuda()
        spare, experts = begin_copy(buffer, mapping, 3, sizes, 0, 0)
        if has_plan:
            plan = hybrid_ep.BufferAllocator()
            spare = [plan.allocate(one.shape, one.dtype) for one in spare]
            plan.materialize(buffer)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            buffer.lb_prefetch_weights(spare, experts, mapping)
        for call in range(1, 8):
            drawn = draw_mapping(call, 3, 2)
            mapping.copy_(drawn)
            everyone = [draw_experts(rank, 3, sizes, call) for rank in range(num_ranks)]
            for mine, one in zip(experts, everyone[dist.get_rank()], strict=True):
                mine.copy_(one)
            for one in spare:
                one.fill_(7)
            graph.replay()
            compare_copies(drawn, spare, everyone, call)
        buffer.raise_pending()


@pytest.mark.parametrize("has_plan", [False, True])
def test_captured_copies_of_experts(has_plan: bool) -> None:
    if NUM_GPUS < 2:
        pytest.skip(f"2 GPUs are needed, {NUM_GPUS} are visible")
    pool = RankPool(device="cuda", variables={"HYBRID_EP_ENGINE": "cuda"})
    pool.run(2, _captured_copies, has_plan)
    pool.close()


def _dispatch_without_sync() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local, num_tokens, num_topk = 4, 64, 2
    generator = torch.Generator().manual_seed(9)
    odds = torch.arange(1, num_ranks * num_local + 1).double() ** -1.5
    topk = torch.stack(
        [odds.repeat(num_tokens, 1).multinomial(num_topk, generator=generator) for _ in range(num_ranks)]
    )
    counts = torch.stack([idx.flatten().bincount(minlength=num_ranks * num_local) for idx in topk]).cuda()
    mine, x = topk[rank].cuda(), torch.ones(num_tokens, 128, dtype=torch.bfloat16, device="cuda")
    weights = torch.full((num_tokens, num_topk), 0.5, device="cuda")
    with hybrid_ep.HybridEPBuffer(
        None, 128, num_tokens, 2 * num_local, num_of_hybrid_ep_ranks_per_nvlink_domain=num_ranks
    ) as buffer:
        for is_watched in (False, True):  # the first call makes what later ones use again
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if is_watched and buffer.engine.name == "cuda" else "default")
            try:
                plan = plan_online(counts, num_ranks_per_domain=num_ranks, num_spare=num_local)
                slots = map_online(plan, counts, mine, rank)
                got = dispatch_online(buffer, x, slots, weights, plan, num_rows=num_tokens * num_topk)
                assert got.probs is not None
                y = (got.rows.float() * got.probs.unsqueeze(1)).to(torch.bfloat16)
                out, _ = buffer.combine_with_unpermute(hidden=y, handle=got.handle)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(out, x)
            assert int(got.handle[-1]) == 0
            assert int(got.spare_ends[-1]) == num_tokens * num_topk == got.rows.shape[0]


@every_engine
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_dispatch_along_a_plan_waits_for_no_host(run_gpus: RunRanks, num_ranks: int) -> None:
    if num_ranks > NUM_GPUS:
        pytest.skip(f"{num_ranks} GPUs are needed, {NUM_GPUS} are visible")
    run_gpus(num_ranks, _dispatch_without_sync)


def _layer_with_replicas() -> None:
    """Weights move beside the dispatch; with gradients they are copied, without they go behind the home experts."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = {"hidden": 512, "ffn_hidden": 1024, "num_experts": 4 * num_ranks, "topk": 2, "seed": 1}
    generator = torch.Generator().manual_seed(rank)
    direction = torch.randn(512, generator=torch.Generator().manual_seed(7))
    x = (torch.randn(700, 512, generator=generator) + direction).cuda()
    with (
        hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as buffer,
        hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as other,
    ):
        options: list[dict[str, object]] = [
            {},
            {"balance": "online", "weight_buffer": other},
            {"balance": "online", "weight_buffer": other, "num_spare": 4, "num_rows": 1400},
        ]
        outputs, grads = [], []
        for given in options:
            layer = MoELayer(buffer, **sizes, **given).cuda()  # type: ignore[arg-type]
            layer.experts.to(torch.bfloat16)
            y = layer(x)
            y.float().square().sum().backward()
            for _ in range(3):
                with torch.no_grad():
                    assert torch.equal(layer(x), y)
            outputs.append(y.detach().double())
            grads.append([p.grad.to_local().double() for p in layer.experts.parameters()])  # type: ignore[union-attr]
    for got, grad in zip(outputs[1:], grads[1:], strict=True):
        for a, b in zip((got, *grad), (outputs[0], *grads[0]), strict=True):
            assert (a - b).norm() / b.norm() < 16 * 2.0**-8


@every_engine
def test_a_layer_with_replicas_is_the_layer_without(run_gpus: RunRanks) -> None:
    if NUM_GPUS < 2:
        pytest.skip(f"2 GPUs are needed, {NUM_GPUS} are visible")
    run_gpus(2, _layer_with_replicas)
