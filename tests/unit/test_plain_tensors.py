"""Calls read tensors by address: a subclass, a transform or a trace gets a typed error in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hybrid_ep
from hybrid_ep import Buffer, ConfigError, ElasticBuffer, HybridEPBuffer
from hybrid_ep.balance import ExpertPlacement, LoadMonitor
from hybrid_ep.balance.online import map_online, plan_online
from hybrid_ep.nn import MoEDispatch
from tests.multi_process.small_calls import TOPK, WEIGHTS, E, H, T, X, handle_of, layout_of

SPARE = torch.zeros(1, 4)
COUNTS = torch.zeros(1, E, dtype=torch.int64)
REPLICAS = ExpertPlacement.contiguous(1, E, 1).on("cpu", 0)


class Buffers:
    """One of each class, and handles of their dispatches."""

    def __init__(self) -> None:
        self.normal = Buffer(None, low_latency_mode=True, engine="torch")
        self.hybrid = HybridEPBuffer(None, H, T, E, engine="torch")
        self.elastic = ElasticBuffer(None, num_max_tokens_per_rank=T, hidden=H, engine="torch")
        self.handle = handle_of(self.normal)
        self.rows, _, self.low_latency_handle, *_ = self.normal.low_latency_dispatch(X, TOPK, T, E, use_fp8=False)
        routing = {"topk_idx": TOPK, "topk_weights": WEIGHTS, "num_of_experts": E}
        self.hybrid_handle = self.hybrid.dispatch(hidden=X, **routing)[3]
        self.permuted, *_, self.permuted_handle = self.hybrid.dispatch_with_permute(hidden=X, **routing)
        self.elastic_handle = self.elastic.dispatch(X, TOPK, WEIGHTS, num_experts=E)[3]

    def close(self) -> None:
        for buffer in (self.normal, self.hybrid, self.elastic):
            buffer.close()


@pytest.fixture(scope="module")
def buffers() -> Iterator[Buffers]:
    made = Buffers()
    yield made
    made.close()


# name: (an argument, the call with it)
ENTRIES: dict[str, tuple[Tensor, Callable[[Buffers, Tensor], Any]]] = {
    "layout": (TOPK, lambda b, t: b.normal.get_dispatch_layout(t, E)),
    "dispatch x": (X, lambda b, t: b.normal.dispatch(t, **layout_of(b.normal), topk_idx=TOPK)),
    "dispatch topk_idx": (TOPK, lambda b, t: b.normal.dispatch(X, **layout_of(b.normal), topk_idx=t)),
    "dispatch along": (X, lambda b, t: b.normal.dispatch(t, b.handle)),
    "combine": (X, lambda b, t: b.normal.combine(t, b.handle)),
    "combine bias": (X, lambda b, t: b.normal.combine(X, b.handle, bias=t)),
    "low-latency dispatch": (X, lambda b, t: b.normal.low_latency_dispatch(t, TOPK, T, E)),
    "low-latency topk_idx": (TOPK, lambda b, t: b.normal.low_latency_dispatch(X, t, T, E)),
    "low-latency combine": (
        WEIGHTS,
        lambda b, t: b.normal.low_latency_combine(b.rows, TOPK, t, b.low_latency_handle),  # type: ignore[arg-type]
    ),
    "hybrid dispatch": (X, lambda b, t: b.hybrid.dispatch(hidden=t, topk_idx=TOPK, num_of_experts=E)),
    "hybrid combine": (X, lambda b, t: b.hybrid.combine(hidden=t, handle=b.hybrid_handle)),
    "permute": (TOPK, lambda b, t: b.hybrid.dispatch_with_permute(hidden=X, topk_idx=t, num_of_experts=E)),
    "permute a map": (
        torch.ones(T, E, dtype=torch.bool),
        lambda b, t: b.hybrid.dispatch_with_permute(hidden=X, routing_map=t),
    ),
    "unpermute": (X, lambda b, t: b.hybrid.combine_with_unpermute(hidden=t, handle=b.permuted_handle)),
    "elastic dispatch": (TOPK, lambda b, t: b.elastic.dispatch(X, t, num_experts=E)),
    "elastic expand": (X, lambda b, t: b.elastic.dispatch(t, TOPK, num_experts=E, do_expand=True)),
    "elastic combine": (X, lambda b, t: b.elastic.combine(t, b.elastic_handle)),
    "weights of replicas": (SPARE, lambda b, t: b.normal.lb_prefetch_weights(t, torch.ones(E, 4), COUNTS[:, :1])),
    "indices to map": (TOPK, lambda b, t: hybrid_ep.indices_to_map(t, None, T, E)),
    "map of a placement": (TOPK, lambda b, t: REPLICAS.map_topk(0, t)),
}
# What is made of operators of torch takes a tracer's tensors, but no other subclass.
TRACED: dict[str, tuple[Tensor, Callable[[Buffers, Tensor], Any]]] = {
    "plan": (COUNTS, lambda b, t: plan_online(t, num_ranks_per_domain=1, num_spare=1)),
    "map": (
        COUNTS,
        lambda b, t: map_online(plan_online(COUNTS, num_ranks_per_domain=1, num_spare=1), t, TOPK, 0),
    ),
    "module": (X, lambda b, t: MoEDispatch(b.normal, E)(t, TOPK, WEIGHTS)),
    "monitor": (
        torch.zeros(E, dtype=torch.int64),
        lambda b, t: LoadMonitor(1, E, rank=0, num_ranks=1, window=2).record(0, t),
    ),
}
every_entry = pytest.mark.parametrize("name", ENTRIES)


class Shard(Tensor):
    """A subclass as DTensor is: without memory of its own."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Shard:
        return Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)  # type: ignore[attr-defined, no-any-return]

    def to_local(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("an operator was called")


class Named(Tensor):
    """A subclass with memory, which is refused, too: what its operators do is its own matter."""


@pytest.mark.parametrize("name", [*ENTRIES, *TRACED])
def test_a_subclass_is_refused(buffers: Buffers, name: str) -> None:
    tensor, call = (ENTRIES | TRACED)[name]
    with pytest.raises(ConfigError, match=r"is Shard; allowed: a plain torch.Tensor: pass `.to_local\(\)`"):
        call(buffers, Shard(tensor))
    with pytest.raises(ConfigError, match=r"is Named; allowed: a plain torch.Tensor or torch.nn.Parameter"):
        call(buffers, tensor.as_subclass(Named))


@every_entry
def test_transforms_are_refused(buffers: Buffers, name: str) -> None:
    tensor, call = ENTRIES[name]
    for transform in (torch.func.functionalize, torch.func.vmap):
        batch = tensor if transform is torch.func.functionalize else tensor.unsqueeze(0)
        with pytest.raises(ConfigError, match="without memory of its own"):
            transform(lambda given: call(buffers, given))(batch)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
@every_entry
def test_traces_are_refused(buffers: Buffers, name: str) -> None:
    tensor, call = ENTRIES[name]

    def run(given: Tensor) -> Tensor:
        call(buffers, given)
        return given

    with pytest.raises(ConfigError, match="which would record this call's result as a constant"):
        torch.jit.trace(run, tensor)
    with pytest.raises(ConfigError, match="which would record this call's result as a constant"):
        make_fx(run)(tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ConfigError, match=r"is traced|is FakeTensor"):
        call(buffers, tensor)


def test_lazy_tensors_are_refused(buffers: Buffers) -> None:
    with pytest.raises(ConfigError, match="weights is a tensor without memory of its own"):
        buffers.elastic.dispatch(X, TOPK, torch._neg_view(WEIGHTS), num_experts=E)
    with pytest.raises(ConfigError, match="weights is a tensor without memory of its own"):
        buffers.elastic.dispatch(X, TOPK, torch._efficientzerotensor(WEIGHTS.shape), num_experts=E)


def test_parameters_are_taken(buffers: Buffers) -> None:
    parameter = torch.nn.Parameter(X, requires_grad=False)
    assert torch.equal(buffers.normal.combine(parameter, buffers.handle)[0], X)


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
def test_compiled_programs_call_methods_of_buffers() -> None:
    """Dynamo leaves the calls to Python, with the buffer that they are methods of."""
    with Buffer(None, engine="torch") as buffer, HybridEPBuffer(None, H, T, E, engine="torch") as hybrid:

        def step(x: Tensor) -> Tensor:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(TOPK, E)
            received, *_, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=TOPK,
                topk_weights=WEIGHTS,
            )
            rows, *_, permuted = hybrid.dispatch_with_permute(hidden=x, topk_idx=TOPK, num_of_experts=E)
            again = hybrid.combine_with_unpermute(hidden=rows, handle=permuted)[0]
            return buffer.combine(2 * received, handle)[0] + again

        torch._dynamo.reset()
        assert torch.equal(torch.compile(step, backend="eager")(X), step(X))
