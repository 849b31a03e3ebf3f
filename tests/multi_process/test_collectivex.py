"""The adapter for CollectiveX passes an oracle as the harness has it: what arrived, and what combine makes of it."""

from __future__ import annotations

import abc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.collectivex import make_backend
from hybrid_ep.testing.batch import make_batch
from hybrid_ep.workload import Workload
from tests.conftest import RunRanks

T, H, K, E, MOST = 64, 256, 3, 8, 64  # from 32 tokens on a low-latency combine without a hook sums before it sends
RELATIVE = 8 * 2.0**-8  # what the harness allows a combine: 0.03125
FLOOR = 2e-2  # of magnitudes, below which that is absolute


ASKED = ("create_buffer", "dispatch", "stage", "combine", "recv_tokens", "inspect_dispatch", "combine_transformed")


class _Driven:
    """The harness's base class, as far as it asks and is asked something."""

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: Any) -> None:
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
        self.mode, self.precision, self._codec = args.mode, args.precision, None
        self.num_quantised = 0  # by what the timed dispatch calls

    def _enable_fp8(self, dispatch_dtype: str, quantize: Any, dequantize: Any) -> None:
        self.dispatch_dtype, self._codec = dispatch_dtype, (quantize, dequantize)

    def _quant(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantises rows, as the function does that the harness compiles."""
        assert self._codec is not None
        self.num_quantised += 1
        return self._codec[0](x)  # type: ignore[no-any-return]

    def semantic_payload(self, x: Tensor) -> Tensor:
        return x if self._codec is None else self._codec[1](*self._codec[0](x))  # type: ignore[no-any-return]

    def make_problem(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> SimpleNamespace:
        oracle_x = self.semantic_payload(x)
        return SimpleNamespace(
            T=len(x), x=x, dispatch_x=x, topk_idx=topk_idx, topk_weights=topk_weights, oracle_x=oracle_x
        )

    def finalize(self, rc: int) -> int:
        return rc


Base = abc.ABCMeta("Base", (_Driven,), {name: abc.abstractmethod(lambda *_: None) for name in ASKED})


def _expert(rows: Tensor, expert: Tensor) -> Tensor:
    """Stands for an expert: an affine map of its own."""
    scale, offset = (1 + expert % 5).unsqueeze(1) / 4, (expert % 7 - 3).unsqueeze(1) / 16
    return rows.float() * scale + offset


def _folded(rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Σ over the experts of each row, weighted, in bf16."""
    total = torch.zeros(rows.shape)
    for k in range(experts.shape[1]):
        gate = torch.where(experts[:, k] >= 0, weights[:, k], 0.0).unsqueeze(1)
        total += gate * _expert(rows, experts[:, k].clamp_min(0))
    return total.to(torch.bfloat16)


def check_oracle(mode: str, precision: str, spoils: str = "") -> None:
    """Compares payload, experts, weights, counts and the combined rows with what they must be."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    args = SimpleNamespace(mode=mode, precision=precision, experts=E, hidden=H, topk=K)
    backend: Any = make_backend(Base)(args, rank, num_ranks, rank, torch.device("cpu"))
    backend.create_buffer(SimpleNamespace(max_tokens_per_rank=MOST))
    batches = [make_batch(Workload(T, H, K, E, seed=5), r) for r in range(num_ranks)]
    problem = backend.make_problem(*batches[rank])
    handle = backend.dispatch(problem)
    assert backend.num_quantised == (precision == "fp8" and mode == "normal")
    backend.stage(problem, handle)
    assert backend.combine(problem, handle).shape == (T, H)
    view = backend.inspect_dispatch(problem, handle)
    if spoils == "payload":
        view.payload[0] += 1

    # By source rank, then token; in low latency by expert first.
    num_local = E // num_ranks
    x = torch.cat([backend.semantic_payload(batch.x) for batch in batches])
    topk_idx, weights = (torch.cat([batch[i] for batch in batches]) for i in (1, 2))
    is_here = topk_idx // num_local == rank
    counts = torch.bincount(topk_idx[is_here] - rank * num_local, minlength=num_local)
    assert torch.equal(view.local_expert_counts, counts)
    if mode == "low-latency":
        pairs = [(e, t) for e in range(E) for t in torch.nonzero((topk_idx == e).any(1))[:, 0].tolist()]
        want = [(e, t) for e, t in pairs if e // num_local == rank]
        token = torch.tensor([t for _, t in want])
        assert view.expert_ids.tolist() == [e for e, _ in want]
        transformed = _expert(view.payload, view.expert_ids).to(torch.bfloat16)
    else:
        token = torch.nonzero(is_here.any(1))[:, 0]
        assert torch.equal(view.expert_ids.sort(1).values, torch.where(is_here, topk_idx, -1)[token].sort(1).values)
        assert torch.equal(view.weights.sum(1), torch.where(is_here, weights, 0.0)[token].sum(1))
        transformed = _folded(view.payload, view.expert_ids, view.weights)
    assert backend.recv_tokens(handle) == len(token)
    assert torch.equal(view.payload, x[token]), "payload"

    combined = backend.combine_transformed(problem, handle, transformed)
    if spoils == "combine":
        combined = combined * 1.1
    experts, gates, mine = problem.topk_idx, problem.topk_weights, problem.oracle_x
    want = torch.zeros(T, H)
    for r in range(num_ranks):  # a row of each rank, rounded before it is sent
        want += _folded(mine, torch.where(experts // num_local == r, experts, -1), gates).float()
    if mode == "low-latency":  # of each expert, and the gate is applied where it arrives
        one_by_one = [_expert(mine, experts[:, k]).to(torch.bfloat16).float() * gates[:, k : k + 1] for k in range(K)]
        want = torch.stack(one_by_one).sum(0)
    limit = 2.0**-8 if mode == "low-latency" else RELATIVE  # there the result alone is rounded
    error = (combined.float() - want).abs() / want.abs().clamp_min(FLOOR)
    assert float(error.max()) < limit, "combine"
    assert backend.finalize(0) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_oracle(run_ranks: RunRanks, mode: str, precision: str) -> None:
    run_ranks(2, check_oracle, mode, precision)


@pytest.mark.parametrize("spoils", ["payload", "combine"])
def test_the_oracle_notices(run_ranks: RunRanks, spoils: str) -> None:
    with pytest.raises(Exception, match=spoils):
        run_ranks(2, check_oracle, "normal", "bf16", spoils)


def test_what_the_harness_reads() -> None:
    kind: Any = make_backend(Base)
    assert not kind.__abstractmethods__
    assert kind.name == "hybrid-ep"
    assert kind.SUPPORTED_MODES == ("normal", "low-latency")
    assert kind.SUPPORTED_PRECISIONS == ("bf16", "fp8")
    made = kind(SimpleNamespace(mode="low-latency", precision="fp8", experts=E, hidden=H), 0, 2, 0, None)
    assert (made.receive_layout, made.combine_weight_semantics) == ("token-expert", "weighted-kernel-sum")
    assert made.dispatch_dtype == "fp8-e4m3fn"
    assert not made.requires_fresh_pair
