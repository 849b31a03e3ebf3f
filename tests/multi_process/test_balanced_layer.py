"""`MoELayer` with replicas of experts: the same mixture, forwards and backwards, and equal work for all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import hybrid_ep
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.core.event import EventOverlap
from hybrid_ep.errors import ConfigError
from hybrid_ep.nn import DispatchedTokens, GroupedTokens, MoELayer
from hybrid_ep.nn.experts import _mesh_of
from tests.conftest import RunRanks

BF16_STEP = 2.0**-8  # half the distance between neighbouring bf16 values, relative
NUM_RANKS, HIDDEN, WIDTH, EXPERTS, TOPK, TOKENS = 4, 32, 48, 8, 2, 40
SIZES = {"hidden": HIDDEN, "ffn_hidden": WIDTH, "num_experts": EXPERTS, "topk": TOPK, "seed": 3}
MEAN = 3 * TOKENS * TOPK // NUM_RANKS  # copies of a rank; one rank has no tokens
LOADS = torch.tensor([[9.0, 1, 1, 1, 8, 1, 1, 1], [1.0] * 8])


def placement(num_ranks_per_domain: int) -> ExpertPlacement:
    return ExpertPlacement.from_loads(LOADS, 16, NUM_RANKS, num_ranks_per_domain=num_ranks_per_domain)


POLICIES: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (4, {}),
    "placement": (4, {"balance": placement(4)}),
    "placement of layer 1": (4, {"balance": placement(4), "layer": 1}),
    "placement, two domains": (2, {"balance": placement(2)}),
    "online, 2 spare slots": (4, {"balance": "online"}),
    "online, weights beside the dispatch": (4, {"balance": "online", "has_weight_buffer": True}),
    "placement, weights beside the dispatch": (2, {"balance": placement(2), "has_weight_buffer": True}),
    "online, 1 spare slot": (4, {"balance": "online", "num_spare": 1}),
    "online, no spare slot": (4, {"balance": "online", "num_spare": 0}),
    "online, more spare slots than experts": (4, {"balance": "online", "num_spare": 3}),
    "online, a tolerance": (4, {"balance": "online", "tolerance": 0.5, "num_rows": MEAN * 3 // 2}),
    "online, two domains": (2, {"balance": "online"}),
    "none, static shapes": (4, {"num_rows": 4 * TOKENS * TOPK}),
    "placement, static shapes": (4, {"balance": placement(4), "num_rows": 4 * TOKENS * TOPK}),
    "placement, two domains, static shapes": (2, {"balance": placement(2), "num_rows": 4 * TOKENS * TOPK}),
    # As many as the mean: not one row is left over.
    "online, static shapes": (4, {"balance": "online", "num_rows": MEAN}),
    "online, no spare slot, static shapes": (4, {"balance": "online", "num_spare": 0, "num_rows": 4 * TOKENS * TOPK}),
    "none, static shapes, bf16": (4, {"num_rows": 4 * TOKENS * TOPK, "dtype": torch.bfloat16}),
    "online, static shapes, bf16": (4, {"balance": "online", "num_rows": MEAN, "dtype": torch.bfloat16}),
    "online, two domains, static shapes": (2, {"balance": "online", "num_rows": 4 * TOKENS * TOPK}),
}


def tokens(rank: int) -> Tensor:
    """Tokens that lean towards one direction, so that some experts get most of them; rank 2 has none."""
    num_tokens = 0 if rank == 2 else TOKENS
    noise = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(50 + rank))
    return (noise + 2 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))).bfloat16().float()


def pull(rank: int) -> Tensor:
    return torch.randn(len(tokens(rank)), HIDDEN, generator=torch.Generator().manual_seed(90 + rank))


def _run(per_domain: int, options: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    x = tokens(rank).requires_grad_()
    received = []
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    with (
        hybrid_ep.Buffer(num_ranks_per_domain=per_domain) as buffer,
        hybrid_ep.Buffer(num_ranks_per_domain=per_domain) as other,
    ):
        if options.pop("has_weight_buffer", False):
            options["weight_buffer"] = other
        layer = MoELayer(buffer, **SIZES, **options)
        layer.experts.to(dtype)
        layer.dispatch.register_forward_hook(lambda module, given, got: received.append(_num_copies(got)))
        y = layer(x)
        (y * pull(rank)).sum().backward()
        again = layer(x.detach())
        with torch.no_grad():
            inferred = [layer(x.detach()) for _ in range(2)]
    assert all(torch.equal(one, y) for one in (again, *inferred))
    grads = {name: _local(parameter.grad) for name, parameter in layer.named_parameters()}
    shapes = {name: tuple(_local(value).shape) for name, value in layer.state_dict().items()}
    return {"y": y.detach(), "x": x.grad, "copies": received[0], "shapes": shapes, **grads}


def _num_copies(got: DispatchedTokens | GroupedTokens) -> int:
    return int(got.ends[-1] if isinstance(got, GroupedTokens) else (got.topk_idx >= 0).sum())


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def dense() -> dict[str, Tensor]:
    """The same on one process in float64."""
    with hybrid_ep.Buffer(None) as alone:
        layer = MoELayer(alone, **SIZES).double()  # type: ignore[arg-type]
    x = torch.cat([tokens(rank) for rank in range(NUM_RANKS)]).double().requires_grad_()
    probs = F.softmax(x @ layer.router.t(), dim=-1)
    weights, topk_idx = probs.topk(TOPK, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    outputs = torch.stack([F.gelu(x @ layer.experts.up[e].t()) @ layer.experts.down[e].t() for e in range(EXPERTS)])
    y = (outputs[topk_idx, torch.arange(len(x)).unsqueeze(1)] * weights.unsqueeze(-1)).sum(1)
    (y * torch.cat([pull(rank) for rank in range(NUM_RANKS)]).double()).sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for name in ("experts.up", "experts.down"):
        grads[name] = grads[name] / NUM_RANKS  # type: ignore[operator]  # of the mean of the ranks' losses
    load = torch.bincount(topk_idx.flatten(), minlength=EXPERTS)
    return {"y": y.detach(), "x": x.grad, "load": load, **grads}  # type: ignore[dict-item]


def _compile(options: dict[str, Any]) -> None:
    """Two passes forwards, then both backwards, so that the first one fetches its replicas again: the same bits."""
    rank, results = dist.get_rank(), []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with hybrid_ep.Buffer(num_ranks_per_domain=NUM_RANKS) as buffer:
        for is_compiled in (False, True):
            layer = MoELayer(buffer, **SIZES, **options)
            call = torch.compile(layer, backend="aot_eager") if is_compiled else layer
            inputs = [(sign * tokens(rank)).requires_grad_() for sign in (1, -1)]
            outputs = [call(x) for x in inputs]
            for y in outputs:
                (y * pull(rank)).sum().backward()
            grads = [_local(parameter.grad) for parameter in layer.parameters()]
            results.append([*(y.detach() for y in outputs), *(x.grad for x in inputs), *grads])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2, "what precedes the plan, and what follows it"
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("policy", ["online, static shapes", "placement, static shapes"])
def test_a_compiled_layer_gives_the_same_bits(run_ranks: RunRanks, policy: str) -> None:
    run_ranks(NUM_RANKS, _compile, POLICIES[policy][1])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_the_dense_mixture(run_ranks: RunRanks, policy: str) -> None:
    per_domain, options = POLICIES[policy]
    results = run_ranks(NUM_RANKS, _run, per_domain, options)
    truth = dense()
    # In bf16, what is between an expert's two layers is rounded, too, and so are its gradients.
    steps = 16 if "dtype" in options else 8
    for name in ("y", "x", "experts.up", "experts.down"):
        got, want = torch.cat([result[name] for result in results]).double(), truth[name]
        assert ((got - want).norm() / want.norm()).item() < steps * BF16_STEP, name
    router = sum(result["router"] for result in results).double()
    assert ((router - truth["router"]).norm() / truth["router"].norm()).item() < steps * BF16_STEP
    num_local = EXPERTS // NUM_RANKS
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "experts.up": (num_local, WIDTH, HIDDEN),
        "experts.down": (num_local, HIDDEN, WIDTH),
    }
    assert all(result["shapes"] == shapes for result in results)


def test_online_gives_ranks_equal_work_where_a_skewed_router_does_not(run_ranks: RunRanks) -> None:
    most = {
        policy: max(result["copies"] for result in run_ranks(NUM_RANKS, _run, *POLICIES[policy]))
        for policy in ("none", "online, 2 spare slots", "online, static shapes", "online, a tolerance")
    }
    assert most["none"] > 1.5 * MEAN
    assert most["online, 2 spare slots"] == most["online, static shapes"] == MEAN
    assert MEAN < most["online, a tolerance"] <= 1.5 * MEAN


@pytest.mark.parametrize(
    "options",
    [{"balance": "online"}, {"balance": placement(4)}, {"balance": "online", "num_rows": MEAN}],
    ids=["online", "placement", "online, static shapes"],
)
def test_gradients_are_the_same_each_time(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    first, again = (run_ranks(NUM_RANKS, _run, 4, options) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("y", "x", "experts.up", "experts.down", "router"))


@pytest.mark.parametrize("has_weight_buffer", [False, True])
def test_weights_move_beside_the_dispatch_and_experts_wait(
    monkeypatch: pytest.MonkeyPatch, has_weight_buffer: bool
) -> None:
    steps: list[str] = []
    with hybrid_ep.Buffer(None) as buffer, hybrid_ep.Buffer(None) as other:
        options = {"weight_buffer": other} if has_weight_buffer else {}
        layer = MoELayer(buffer, **SIZES, balance="online", **options)  # type: ignore[arg-type]
        mover, wait = other if has_weight_buffer else buffer, EventOverlap.current_stream_wait

        def note_copy(given: hybrid_ep.Buffer, *args: Any) -> None:
            assert given is mover
            steps.append("copy")

        def note_wait(event: EventOverlap) -> Any:
            steps.append("wait for the copies" if event.event is not None else "nothing to wait for")
            return wait(event)

        monkeypatch.setattr("hybrid_ep.nn.replicas.copy_weights", note_copy)
        monkeypatch.setattr(EventOverlap, "current_stream_wait", note_wait)
        layer.dispatch.register_forward_pre_hook(lambda *given: steps.append("dispatch"))
        layer.experts.register_forward_pre_hook(lambda *given: steps.append("experts"))
        layer(tokens(0))
    waits = "wait for the copies" if has_weight_buffer else "nothing to wait for"
    assert steps == ["copy", "dispatch", waits, "experts"]


@pytest.mark.parametrize("has_gradients", [False, True])
def test_replicas_go_behind_the_weights(has_gradients: bool) -> None:
    """No call but the first copies a weight, and parameters are those of home experts as before."""
    with hybrid_ep.Buffer(None) as buffer:
        layer = MoELayer(buffer, **SIZES, balance="online", num_spare=3)  # type: ignore[arg-type]
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        computed_with: list[int] = []
        layer.experts.register_forward_pre_hook(lambda _, given: computed_with.extend(w.data_ptr() for w in given[1:]))
        with torch.set_grad_enabled(has_gradients):
            y = layer(tokens(0)).detach()
            first = layer.experts.slots(3, buffer)
            assert torch.equal(layer(tokens(0)), y)
        assert computed_with == 2 * [parameter.data_ptr() for parameter in layer.experts.parameters()]
        assert [one.shape for one in first] == [(EXPERTS + 3, WIDTH, HIDDEN), (EXPERTS + 3, HIDDEN, WIDTH)]
        second = layer.experts.slots(3, buffer)
        for slots, again, parameter in zip(first, second, layer.experts.parameters(), strict=True):
            assert slots.data_ptr() == again.data_ptr() == parameter.data_ptr()
        copied = copy.deepcopy(layer)
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
        with torch.no_grad():
            copied.experts.up.zero_()
            assert torch.equal(layer(tokens(0)), y)
            assert not torch.equal(copied(tokens(0)), y)
        layer.experts.to(torch.bfloat16)  # replaces the parameters
        slots, _ = layer.experts.slots(3, buffer)
        assert slots.dtype == torch.bfloat16
        assert slots.data_ptr() == layer.experts.up.data_ptr()


def test_parameters_that_are_replaced_move_into_the_same_memory() -> None:
    """Ranks need not meet for that. A backward pass of earlier weights is refused."""
    with hybrid_ep.Buffer(None) as buffer:
        layer = MoELayer(buffer, **SIZES, balance="online", num_spare=3)  # type: ignore[arg-type]
        early = layer(tokens(0)).sum()
        memory = layer.experts.slots(3, buffer)[0].data_ptr()
        layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()}, assign=True)
        assert layer.experts.up.data_ptr() != memory
        layer(tokens(0)).sum().backward()
        assert layer.experts.slots(3, buffer)[0].data_ptr() == layer.experts.up.data_ptr() == memory
        with pytest.raises(hybrid_ep.ConfigError, match="weights have changed"):
            early.backward()


def _kinds_of_meshes() -> list[str]:
    with hybrid_ep.Buffer() as buffer:
        meshes = [_mesh_of(buffer, None, torch.device(kind)) for kind in ("cpu", "cuda")]
    return [mesh.device_type for mesh in meshes if mesh is not None]


def test_the_mesh_of_weights_is_of_their_devices(run_ranks: RunRanks) -> None:
    """Over gloo, too: a DTensor moves its weights to the devices of its mesh."""
    assert run_ranks(2, _kinds_of_meshes) == 2 * [["cpu", "cuda"]]


@pytest.mark.parametrize("has_weight_buffer", [False, True])
def test_two_forward_passes_before_their_backward_passes(run_ranks: RunRanks, has_weight_buffer: bool) -> None:
    run_ranks(2, _run_two_batches, has_weight_buffer)


def _run_two_batches(has_weight_buffer: bool) -> None:
    """Each has its own replicas: gradients are those of one batch after the other."""
    noise = [torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(70 + i)) for i in range(2)]
    # The second batch leans the other way, so that other experts have replicas.
    batches = [sign * tokens(1) + one for sign, one in zip((1, -1), noise, strict=True)]
    with hybrid_ep.Buffer(num_ranks_per_domain=2) as buffer, hybrid_ep.Buffer(num_ranks_per_domain=2) as other:
        options = {"weight_buffer": other} if has_weight_buffer else {}
        grads = []
        for is_at_once in (True, False):
            layer = MoELayer(buffer, **SIZES, balance="online", **options)  # type: ignore[arg-type]
            with torch.no_grad():
                layer(batches[0])
            losses = []
            for x in batches:
                losses.append(layer(x).sum())
                if not is_at_once:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
            grads.append([_local(parameter.grad) for parameter in layer.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_weight_that_changes_before_the_backward_pass_is_told(run_ranks: RunRanks) -> None:
    run_ranks(2, _change_a_weight)


def _change_a_weight() -> None:
    with hybrid_ep.Buffer(num_ranks_per_domain=2) as buffer:
        layer = MoELayer(buffer, **SIZES, balance="online")  # type: ignore[arg-type]
        loss = layer(tokens(0)).sum()
        with torch.no_grad():
            layer.experts.up.mul_(2)
        with pytest.raises(ConfigError, match="weights have changed since the forward pass; allowed: "):
            loss.backward()


def test_a_weight_buffer_is_another_one_of_these_ranks() -> None:
    with hybrid_ep.Buffer(None) as buffer:
        for wrong, words in ((buffer, "the same as buffer"), ("other", "str")):
            with pytest.raises(ConfigError, match=f"weight_buffer is {words}; allowed: "):
                MoELayer(buffer, **SIZES, balance="online", weight_buffer=wrong)  # type: ignore[arg-type]


def _refuse_other_ranks() -> list[str]:
    pair = dist.new_group([0, 1])
    other_pair = dist.new_group([1, 2])  # as large, with rank 1 in both
    told = []
    if dist.get_rank() < 2:
        with hybrid_ep.Buffer(pair, num_ranks_per_domain=2) as buffer:
            given = [hybrid_ep.Buffer(pair, num_ranks_per_domain=1)]
            given += [hybrid_ep.Buffer(other_pair, num_ranks_per_domain=2)] if dist.get_rank() == 1 else []
            for weight_buffer in given:
                with pytest.raises(ConfigError) as refused:
                    MoELayer(buffer, **SIZES, balance="online", weight_buffer=weight_buffer)  # type: ignore[arg-type]
                told.append(str(refused.value))
                weight_buffer.close()
    elif dist.get_rank() == 2:
        hybrid_ep.Buffer(other_pair, num_ranks_per_domain=2).close()
    return told


def test_a_weight_buffer_of_other_ranks_or_domains_is_refused(run_ranks: RunRanks) -> None:
    first, second, *_ = run_ranks(3, _refuse_other_ranks)
    of_domains = "ranks and ranks per domain of weight_buffer is ([0, 1], 1); allowed: ([0, 1], 2), as of buffer"
    assert first == [of_domains]
    assert second == [of_domains, of_domains.replace("([0, 1], 1)", "([1, 2], 2)")]


def _two_layers(buffer: hybrid_ep.Buffer, weight_buffers: list[hybrid_ep.Buffer]) -> list[MoELayer]:
    widths = (WIDTH, 2 * WIDTH)
    return [
        MoELayer(buffer, **{**SIZES, "ffn_hidden": width}, balance="online", weight_buffer=other)  # type: ignore[arg-type]
        for width, other in zip(widths, weight_buffers, strict=True)
    ]


def _share_a_weight_buffer() -> None:
    """Two layers, one after the other, forwards and backwards, as with a weight buffer each."""
    with hybrid_ep.Buffer() as buffer, hybrid_ep.Buffer() as one, hybrid_ep.Buffer() as another:
        results = []
        for weight_buffers in ([one, one], [one, another]):
            layers = _two_layers(buffer, weight_buffers)
            y = tokens(dist.get_rank())
            for layer in layers:
                y = layer(y)
            y.sum().backward()
            results.append([y, *(_local(p.grad) for layer in layers for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_layers_share_a_weight_buffer(run_ranks: RunRanks) -> None:
    run_ranks(2, _share_a_weight_buffer)


def _call_layers_in_another_order() -> str:
    """Sizes of the layers differ, so that the first exchange of weights sees it: its rows are parts of weights."""
    rank = dist.get_rank()
    with hybrid_ep.Buffer(timeout_s=5) as buffer, hybrid_ep.Buffer(timeout_s=5) as other:
        layers = _two_layers(buffer, [other, other])
        with pytest.raises(ConfigError) as refused:
            layers[rank](tokens(0))
        told = str(refused.value)
        for layer in layers:
            layer(tokens(0))
    return told


def test_layers_in_another_order_are_told(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _call_layers_in_another_order) == [
        "hidden is 3072 at rank 0 and 4096 at rank 1; allowed: the same on every rank",
        "hidden is 4096 at rank 1 and 3072 at rank 0; allowed: the same on every rank",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "offline"}, "balance is 'offline'"),
        ({"balance": "online", "num_spare": -1}, "num_spare is -1"),
        ({"num_rows": -1}, "num_rows is -1"),
        ({"balance": placement(4)}, "experts, ranks and ranks per domain of balance"),
        ({"balance": ExpertPlacement.contiguous(1, EXPERTS, 1), "layer": 1}, "layer is 1"),
    ],
)
def test_what_is_not_allowed(options: dict[str, Any], message: str) -> None:
    with hybrid_ep.Buffer(None) as buffer, pytest.raises(ConfigError, match=message):
        MoELayer(buffer, **SIZES, **options)
