"""What trainers do with a `MoELayer`: each against a dense mixture on one process, or a typed error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hybrid_ep
from hybrid_ep import Buffer, ConfigError
from hybrid_ep.nn import MoECombine, MoEDispatch, MoELayer, expert_parameters
from tests.battery import grouped
from tests.conftest import RunRanks
from tests.multi_process import torchtitan, trainers
from tests.multi_process.trainers import Model

BF16_STEP = 2.0**-8  # half the distance between neighbouring bf16 values, relative

TRAINERS: dict[str, tuple[int, Callable[..., dict[str, Tensor]], tuple[Any, ...]]] = {
    "a loop by hand": (2, trainers.by_hand, ()),
    "three dimensions": (2, trainers.in_three_dimensions, ()),
    "plain DDP": (2, trainers.plain_ddp, ()),
    "DDP of the layer": (2, trainers.ddp_of_the_layer, ()),
    "FSDP2, experts ignored": (2, trainers.fsdp_without_experts, ()),
    "FSDP2, experts over replicas": (4, trainers.fsdp_over_replicas, ()),
    "experts sharded as by TorchTitan": (4, torchtitan.sharded_experts, ()),
    "checkpoint": (2, trainers.under_checkpoint, ("plain",)),
    "checkpoint, reentrant": (2, trainers.under_checkpoint, ("reentrant",)),
    "checkpoint, selective": (2, trainers.under_checkpoint, ("selective",)),
    "compiled": (2, trainers.compiled, ("aot_eager",)),
    "bf16": (2, trainers.in_dtype, (torch.bfloat16,)),
    "half": (2, trainers.in_dtype, (torch.float16,)),
    "autocast": (2, trainers.under_autocast, ()),
}
# In bf16 all weights and the dense layer before the router are rounded, too.
STEPS = {"bf16": 48, "autocast": 48}


def compare(results: list[dict[str, Tensor]], steps: int) -> None:
    """Holds the ranks' outputs and gradients to a dense mixture."""
    truth = trainers.dense(len(results))
    got = {**results[0], "y": torch.cat([result["y"] for result in results])}
    assert got.keys() == truth.keys()
    for key, want in truth.items():
        error = ((got[key].double() - want).norm() / want.norm()).item()
        assert error < steps * BF16_STEP, f"{key}: relative error {error:.2e}"
    for result in results[1:]:
        assert all(torch.equal(result[key], got[key]) for key in truth if key != "y"), "ranks have other gradients"


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_get_the_gradients_of_a_dense_mixture(run_ranks: RunRanks, name: str) -> None:
    num_ranks, trainer, args = TRAINERS[name]
    compare(run_ranks(num_ranks, trainers.on_each_rank, trainer, *args), STEPS.get(name, 8))


def test_an_exported_layer_is_the_layer(run_ranks: RunRanks) -> None:
    assert run_ranks(2, trainers.exported) == [0.0, 0.0]


def test_clipping_is_that_of_the_whole_model(run_ranks: RunRanks) -> None:
    truth = trainers.dense(2)
    del truth["y"]
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in truth.values()]))
    for result in run_ranks(2, trainers.clipped, 0.5):
        assert abs(result["norm"].item() / norm.item() - 1) < 8 * BF16_STEP
        for key, grad in truth.items():
            want = grad * (0.5 / norm)
            assert ((result[key].double() - want).norm() / want.norm()).item() < 8 * BF16_STEP, key


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_checkpoint_is_loaded_by_any_number_of_ranks(run_ranks: RunRanks, tmp_path: Path, num_ranks: int) -> None:
    saved = run_ranks(2, trainers.save, str(tmp_path))[0]
    assert len(saved) == 10
    for loaded in run_ranks(num_ranks, trainers.load, str(tmp_path)):
        assert loaded.keys() == saved.keys()
        for key, want in saved.items():
            assert torch.equal(loaded[key], want), key
            assert bool(want.any()), key


def _refused() -> dict[str, str]:
    """What each wrong way says."""
    told = {}
    world = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    groups = [dist.new_group([rank]) for rank in range(2)]

    def attempt(name: str, wrong: Callable[[], Any]) -> None:
        try:
            wrong()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
        else:
            told[name] = "nothing"

    with Buffer() as buffer, Buffer(groups[dist.get_rank()]) as alone:
        one = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
        attempt("DDP over more ranks", lambda: DistributedDataParallel(Model(alone)))
        whole = Model(buffer)
        attempt("FSDP2 of everything", lambda: fully_shard(whole, mesh=world))
        assert not any(isinstance(weight, DTensor) for weight in whole.inner.parameters()), "something was sharded"
        attempt("FSDP2 of the experts", lambda: fully_shard(Model(buffer).moe.experts, mesh=world))
        attempt("another mesh", lambda: Model(buffer, mesh=one["ep"]))
        attempt("no mesh", lambda: Model(buffer, mesh="ep"))
        attempt("torch's clipping", lambda: _clip(Model(buffer)))
        model = Model(buffer)
        fully_shard(model, mesh=world, ignored_params=set(expert_parameters(model).values()))
        trainers.loss_of(model(trainers.tokens(dist.get_rank())), dist.get_rank()).backward()
        attempt("router averaged twice", model.moe.sync_router_gradients)
    return told


def _clip(model: nn.Module) -> None:
    trainers.loss_of(model(trainers.tokens(dist.get_rank())), dist.get_rank()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_what_would_be_wrong_is_refused(run_ranks: RunRanks) -> None:
    different = "fully_shard shards over ranks [0, 1], and ranks [0, 1] have different experts"
    wanted = {
        "DDP over more ranks": "ConfigError: DistributedDataParallel averages over ranks [0, 1], and ranks [0] share",
        "FSDP2 of everything": f"ConfigError: {different} 'moe.experts'; allowed: ignored_params=set(hybrid_ep.nn.",
        "FSDP2 of the experts": f"ConfigError: {different} ''; allowed: ignored_params=set(hybrid_ep.nn.expert_",
        "another mesh": "ConfigError: mesh is DeviceMesh(",
        "no mesh": "ConfigError: mesh is str; allowed: a DeviceMesh",
        "torch's clipping": "RuntimeError: aten._foreach_norm.Scalar got mixed torch.Tensor and DTensor",  # torch's
        "router averaged twice": "ConfigError: the router is sharded over ranks [0, 1] of the buffer; allowed: no call",
    }
    told = run_ranks(2, _refused)[0]
    assert told.keys() == wanted.keys()
    for name, words in wanted.items():
        assert told[name].startswith(words), f"{name}: {told[name]}"


def _sharded_over_replicas() -> tuple[str, str]:
    """What `fully_shard` of everything over two groups of experts says, and after the experts over replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ep"))
    with Buffer(mesh["ep"].get_group()) as buffer:
        told = []
        for shards_experts in (False, True):
            model = Model(buffer, mesh=mesh["ep"])
            if shards_experts:
                fully_shard(model.moe.experts, mesh=mesh["replica"])
            try:
                fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
            except ConfigError as error:
                told.append(str(error))
            else:
                told.append("nothing")
    return told[0], told[1]


def test_experts_of_several_groups_are_sharded_over_their_replicas(run_ranks: RunRanks) -> None:
    for rank, (refused, accepted) in enumerate(run_ranks(4, _sharded_over_replicas)):
        shared = [0, 1] if rank < 2 else [2, 3]
        assert refused == (
            f"fully_shard shards over ranks [0, 1, 2, 3], and ranks {shared} have different experts 'moe.experts'; "
            "allowed: fully_shard(…experts, mesh=…) before, over ranks that have the same experts"
        )
        assert accepted == "nothing"


def test_float64_tokens_are_refused_because_rows_cross_in_bf16() -> None:
    with Buffer(None) as buffer:
        layer = MoELayer(buffer, hidden=16, ffn_hidden=8, num_experts=2, topk=1).double()
        x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
        words = r"x \(whose rows cross in bf16\).dtype is torch.float64; allowed: torch.float32 or"
        with pytest.raises(ConfigError, match=words):
            torch.autograd.gradcheck(layer, (x,))
        y = layer(x.detach().float())  # weights may be float64
        y.sum().backward()
        assert layer.router.grad is not None
        assert layer.router.grad.dtype == torch.float64


def test_gradients_have_no_gradients_of_their_own() -> None:
    with Buffer(None) as buffer:
        x = torch.randn(4, 16).bfloat16().requires_grad_()
        weights = torch.rand(4, 2).requires_grad_()
        received = MoEDispatch(buffer, 4)(x, torch.tensor([[0, 1]] * 4), weights)
        y = MoECombine(buffer)(received.x * received.topk_weights.sum(1, keepdim=True).bfloat16(), received.handle)
        (grad,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_a_handle_lives_as_long_as_its_tensor() -> None:
    with Buffer(None) as buffer:
        x, topk_idx, weights = torch.ones(4, 16).bfloat16(), torch.tensor([[0]] * 4), torch.ones(4, 1)
        received = MoEDispatch(buffer, 2)(x, topk_idx, weights)
        rows, route = received.x, received.handle
        copied = route._replace(handle=route.handle.clone())
        combine = MoECombine(buffer)
        assert torch.equal(combine(rows, copied), x)
        del received, route
        with pytest.raises(ConfigError, match=r"handle is number \d+, which is gone; allowed: the tensor that"):
            combine(rows, copied)


def test_a_handle_of_the_buffer_combines() -> None:
    with Buffer(None) as buffer:
        x, topk_idx = torch.ones(4, 16).bfloat16(), torch.tensor([[0]] * 4)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, topk_idx, torch.ones(4, 1)
        )
        assert isinstance(handle, hybrid_ep.BufferHandle)
        assert torch.equal(MoECombine(buffer)(recv_x, handle), x)


class _SavesItsHandle(torch.autograd.Function):
    """A dispatch that saves every entry of its handle, as xtuner does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, topk_idx: torch.Tensor, buffer: Buffer) -> Any:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        received, _, _, _, handle, event = buffer.dispatch(x, topk_idx=topk_idx, **layout, async_finish=True)
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        event.current_stream_wait()
        return received, handle

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        handle = ctx.saved_tensors
        again = ctx.buffer.dispatch(ctx.buffer.combine(grad, handle)[0], handle)[0]
        assert torch.equal(again, grad)
        return ctx.buffer.combine(grad, handle)[0], None, None


@pytest.mark.parametrize("ranks_per_domain", [2, 1])
def test_the_tensors_of_a_handle_may_be_saved(run_ranks: RunRanks, ranks_per_domain: int) -> None:
    run_ranks(2, _save_handles, ranks_per_domain)


def _save_handles(ranks_per_domain: int) -> None:
    with Buffer(num_ranks_per_domain=ranks_per_domain) as buffer:
        x = torch.ones(4, 16).bfloat16().requires_grad_()
        received, handle = _SavesItsHandle.apply(x, torch.tensor([[0], [1], [1], [-1]]), buffer)
        number = len(handle)
        del handle
        received.sum().backward()
        assert number == (6 if ranks_per_domain == 2 else 10)
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("options", [{}, {"num_rows": 8}], ids=["by source", "by expert"])
def test_saved_tensors_may_be_copied(options: dict[str, int]) -> None:
    """As hooks do that offload activations into pinned memory."""
    with Buffer(None) as buffer:
        layer = MoELayer(buffer, hidden=16, ffn_hidden=8, num_experts=4, topk=2, **options)  # type: ignore[arg-type]
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
        layer(x).square().sum().backward()
        grads = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            y = layer(x)
        y.square().sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.parameters(), grads, strict=True))  # type: ignore[arg-type]


def test_a_layer_that_has_run_can_be_copied() -> None:
    with Buffer(None) as buffer:
        layer = MoELayer(buffer, hidden=16, ffn_hidden=8, num_experts=2, topk=1)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
        y = layer(x)
        copied = copy.deepcopy(layer)
        assert torch.equal(copied(x), y)
        copied(x).sum().backward()
        assert layer.experts.up.grad is None


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_bound_that_is_too_small_is_told(run_ranks: RunRanks, num_ranks: int) -> None:
    run_ranks(num_ranks, grouped.check_too_few_rows)
