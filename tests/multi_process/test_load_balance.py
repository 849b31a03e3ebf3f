"""`lb_prefetch_weights` and `lb_reduce_grads`: the right bits in the right slots, and sums in the stated order."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.buffers import expert_moves
from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.buffers.expert_moves import CountExchange
from hybrid_ep.engine.calls import Dispatched, DispatchRequest
from hybrid_ep.errors import ConfigError
from tests.battery.refused_calls import TIMEOUT_S
from tests.conftest import RunRanks

NUM_RANKS, NUM_LOCAL, NUM_SPARE = 4, 3, 3
SHAPES = {  # of one expert; sizes that divide into rows, that do not, and that are less than one
    "one row": ((16, 8), torch.float32),
    "rows": ((96, 128), torch.bfloat16),
    "odd": ((5, 7), torch.float32),
    "odd rows": ((101, 211), torch.bfloat16),
    "bytes": ((3,), torch.uint8),
    "fp8": ((64, 64), torch.float8_e4m3fn),
}


def weights(rank: int, name: str) -> Tensor:
    """``[LE, *shape]``: random bits."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(100 * rank + list(SHAPES).index(name))
    flat = torch.randint(0, 256, (NUM_LOCAL, torch.Size(shape).numel() * dtype.itemsize), generator=generator)
    return flat.to(torch.uint8).view(dtype).view(NUM_LOCAL, *shape)


def mapping_of(domain: int, per_domain: int) -> Tensor:
    """Other experts in each domain; the last expert also on its own, the last rank, behind another one's replica."""
    num_experts = per_domain * NUM_LOCAL
    mapping = torch.arange(per_domain * NUM_SPARE).mul(5).add(4 + domain).remainder(num_experts).view(per_domain, -1)
    mapping[0] = torch.tensor([num_experts - 1, 0, 4])
    mapping[1] = torch.tensor([1, 1, 4])  # one expert in two slots
    mapping[-1] = torch.tensor([num_experts - 1, -1, 0])
    return mapping.to(torch.int32)


def _prefetch(per_domain: int) -> None:
    rank = dist.get_rank()
    first = rank // per_domain * per_domain
    mapping = mapping_of(rank // per_domain, per_domain)
    with hybrid_ep.Buffer(num_ranks_per_domain=per_domain) as buffer:
        experts = [weights(rank, name) for name in SHAPES]
        spare = [torch.ones(NUM_SPARE, *shape).to(dtype) for shape, dtype in SHAPES.values()]
        event = buffer.lb_prefetch_weights(spare, experts, mapping, num_sms=8, previous_event=buffer.capture())
        event.current_stream_wait()
    for name, got in zip(SHAPES, spare, strict=True):
        for slot, expert in enumerate(mapping[rank - first].tolist()):
            home = weights(first + expert // NUM_LOCAL, name)[expert % NUM_LOCAL] if expert >= 0 else None
            want = torch.ones(got.shape[1:]).to(got.dtype) if home is None else home
            assert torch.equal(got[slot].view(torch.uint8), want.view(torch.uint8)), (name, slot)


@pytest.mark.parametrize("per_domain", [4, 2])
def test_spare_slots_get_the_bits_of_their_experts(run_ranks: RunRanks, per_domain: int) -> None:
    run_ranks(NUM_RANKS, _prefetch, per_domain)


def _in_parts(per_domain: int) -> None:
    """With so few rows in a dispatch that tensors are cut."""
    with mock.patch.object(expert_moves, "_MAX_ROWS", 3):
        assert len(expert_moves._parts_of([weights(0, name) for name in SHAPES], NUM_LOCAL)) == 13
        _prefetch(per_domain)
    with mock.patch.multiple(expert_moves, _MAX_ROWS=12, _MAX_ROW_BYTES=32):
        _reduce(per_domain)


def test_tensors_of_more_rows_than_a_dispatch_takes(run_ranks: RunRanks) -> None:
    run_ranks(NUM_RANKS, _in_parts, 4)


def gradients(rank: int, num: int) -> Tensor:
    """Values of very different sizes: another order of additions gives another sum."""
    generator = torch.Generator().manual_seed(rank + 10 * num)
    return torch.randn(num, 37, generator=generator) * 10 ** (6 * torch.rand(num, 37, generator=generator))


def _reduce(per_domain: int) -> None:
    rank = dist.get_rank()
    first = rank // per_domain * per_domain
    mapping = mapping_of(rank // per_domain, per_domain)
    got = gradients(rank, NUM_LOCAL)
    with hybrid_ep.Buffer(num_ranks_per_domain=per_domain) as buffer:
        buffer.lb_reduce_grads(gradients(rank, NUM_SPARE), got, mapping)
    want = gradients(rank, NUM_LOCAL)
    others = [r for r in range(per_domain) if r + first != rank]
    for source in [rank - first, *others]:
        for slot, expert in enumerate(mapping[source].tolist()):
            if expert >= 0 and expert // NUM_LOCAL == rank - first:
                want[expert % NUM_LOCAL] += gradients(first + source, NUM_SPARE)[slot]
    assert torch.equal(got, want)
    assert not torch.equal(got, gradients(rank, NUM_LOCAL)) or not bool((mapping // NUM_LOCAL == rank - first).any())


@pytest.mark.parametrize("per_domain", [4, 2])
def test_gradients_are_added_home_first_then_by_rank(run_ranks: RunRanks, per_domain: int) -> None:
    run_ranks(NUM_RANKS, _reduce, per_domain)


def check_other_slots() -> None:
    """Domains with other numbers of spare slots: every rank is told, none waits, and all go on."""
    rank = dist.get_rank()
    told = pytest.raises(hybrid_ep.ConfigError, match=r"^spare slots of a rank is .* allowed: the same on every rank")
    with hybrid_ep.Buffer(num_ranks_per_domain=2, timeout_s=TIMEOUT_S) as buffer:

        def call(move: Callable[[Tensor, Tensor, Tensor], object], num_slots: int) -> None:
            mapping = torch.zeros(2, num_slots, dtype=torch.int32)
            move(torch.zeros(num_slots, 24), torch.zeros(NUM_LOCAL, 24), mapping)
            buffer.raise_pending()

        for move in (buffer.lb_prefetch_weights, buffer.lb_reduce_grads):
            with told:
                call(move, 2 if rank < 2 else 3)
            dist.barrier()
            call(move, 2)


def test_domains_with_other_numbers_of_slots_are_told_so(run_ranks: RunRanks) -> None:
    run_ranks(NUM_RANKS, check_other_slots)


def _about_mapping(engine: str, first: int, entry: str, ours: int, theirs: int) -> str:
    """What an error says if the last rank has another mapping than rank `first`, as a regular expression.

    Args:
        engine: the torch engine names the first entry that differs, the others a checksum.
        first: rank.
        entry: as the torch engine names it.
        ours: expert in it, at rank `first`.
        theirs: at the last rank.
    """
    last, allowed = dist.get_world_size() - 1, "; allowed: the same on every rank"
    if engine == "torch":
        return re.escape(f"the expert in {entry} is {ours} at rank {first} and {theirs} at rank {last}{allowed}")
    return rf"(?=.* at rank {last}\b)checksum of redundancy_mapping is \d+ at rank \d+ and \d+ at rank \d+{allowed}"


def check_other_mappings(per_domain: int, device: str = "cpu") -> None:
    """The last rank has another mapping than its domain, or than all ranks: every rank is told, and all go on.

    Nothing is added then, also of rows that an earlier call has left in memory.
    """
    num_ranks, last = dist.get_world_size(), dist.get_world_size() - 1
    rank = dist.get_rank()
    with hybrid_ep.Buffer(dist.group.WORLD, num_ranks_per_domain=per_domain) as buffer:

        def of_domain(move: Callable[..., object], values: list[Tensor], mapping: Tensor) -> None:
            move(*values, mapping)

        def of_all(move: Callable[..., object], values: list[Tensor], mapping: Tensor) -> None:
            if move == buffer.lb_prefetch_weights:
                expert_moves.copy_weights(buffer, mapping, values[:1], values[1:])
            else:
                routes = expert_moves.route_replicas(buffer, mapping, NUM_LOCAL)
                expert_moves.add_gradients(buffer, routes, mapping.tolist(), values[:1], values[1:])

        def until_told(call: Callable[..., object], *args: object) -> None:
            call(*args)
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.raise_pending()

        for call, mapped in ((of_domain, per_domain), (of_all, num_ranks)):
            first = num_ranks - mapped
            right = torch.ones(mapped, 2, dtype=torch.int64, device=device)
            one = right.clone()
            one[1, 0] = 0
            two = right.clone()
            two[0] = torch.tensor([4, 0])
            wrongs = ((one, 1, 0), (two, 0, 4), (torch.full_like(right, -1), 0, -1))  # and the first entry that differs
            for move in (buffer.lb_prefetch_weights, buffer.lb_reduce_grads):
                for wrong, of_rank, expert in wrongs:
                    values = [torch.full((2, 24), 5.0, device=device), torch.zeros(NUM_LOCAL, 24, device=device)]
                    call(move, values, right)
                    kept = values[1].clone()
                    with pytest.raises(hybrid_ep.ConfigError) as refused:
                        until_told(call, move, values, wrong if rank == last else right)
                    told, about = str(refused.value), (move.__name__, mapped, wrong.tolist())
                    entry = f"slot 0 of rank {first + of_rank}"
                    want = _about_mapping(buffer.engine.name, first, entry, 1, expert)
                    assert re.fullmatch(want, told), (told, about)
                    assert torch.equal(values[1], kept), about
                    call(move, values, right)


@pytest.mark.parametrize("per_domain", [4, 2])
def test_ranks_with_other_mappings_are_told_so(run_ranks: RunRanks, per_domain: int) -> None:
    run_ranks(NUM_RANKS, check_other_mappings, per_domain)


def _counts() -> list[list[int]]:
    with hybrid_ep.Buffer() as buffer:
        copies = torch.arange(5).repeat_interleave(torch.arange(5) + dist.get_rank())
        result: list[list[int]] = CountExchange(buffer, 5).gather(copies.view(-1, 1)).tolist()
    return result


def test_counts_of_all_ranks(run_ranks: RunRanks) -> None:
    for result in run_ranks(3, _counts):
        assert result == [[rank + i for i in range(5)] for rank in range(3)]


def _to_many() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    spare = torch.zeros(1, 8)
    experts, mapping = torch.full((1, 8), float(rank)), torch.full((num_ranks, 1), 1, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch, hybrid_ep.Buffer() as buffer:
        patch.setattr(expert_moves, "MAX_TOPK", 3)
        buffer.lb_prefetch_weights(spare, experts, mapping)
        counts = CountExchange(buffer, 1).gather(torch.zeros(rank, 1, dtype=torch.int64))
        assert counts.flatten().tolist() == list(range(num_ranks))
    assert torch.equal(spare, torch.full((1, 8), 1.0))


def test_more_ranks_than_a_row_may_go_to(run_ranks: RunRanks) -> None:
    run_ranks(4, _to_many)


BAD = {
    "redundancy_mapping is 3": {"redundancy_mapping": torch.full((1, 1), 3, dtype=torch.int32)},
    "redundancy_mapping.dtype": {"redundancy_mapping": torch.zeros(1, 1)},
    r"redundancy_mapping.shape is \[2, 1\]": {"redundancy_mapping": torch.zeros(2, 1, dtype=torch.int32)},
    "tensors of spare slots is 2": {"redundant_expert_weights": [torch.zeros(1, 4)] * 2},
    "shape, dtype and device of a tensor of spare slots": {"redundant_expert_weights": torch.zeros(1, 5)},
    "redundant_expert_weights is int": {"redundant_expert_weights": [1]},
    "strides of expert_weights": {"expert_weights": torch.zeros(4, 3).t()},
    "num_sms is -1": {"num_sms": -1},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit(message: str) -> None:
    given = {
        "redundant_expert_weights": torch.zeros(1, 4),
        "expert_weights": torch.zeros(3, 4),
        "redundancy_mapping": torch.zeros(1, 1, dtype=torch.int32),
    }
    with hybrid_ep.Buffer(None) as buffer, pytest.raises(ConfigError, match=message):
        buffer.lb_prefetch_weights(**(given | BAD[message]))  # type: ignore[arg-type]


def test_gradients_must_be_float32() -> None:
    half = torch.zeros(1, 4, dtype=torch.bfloat16)
    with hybrid_ep.Buffer(None) as buffer, pytest.raises(ConfigError, match=r"dtype of gradients is torch.bfloat16"):
        buffer.lb_reduce_grads(half, half, torch.zeros(1, 1, dtype=torch.int32))


def _dispatches(monkeypatch: pytest.MonkeyPatch, buffer: BaseBuffer) -> list[int | None]:
    """The bounds of the dispatches from now on, None where the host waits for the number of rows."""
    bounds: list[int | None] = []
    dispatch = buffer.engine.dispatch

    def note(request: DispatchRequest) -> Dispatched:
        bounds.append(request.bound)
        return dispatch(request)

    monkeypatch.setattr(buffer.engine, "dispatch", note)
    return bounds


@pytest.mark.parametrize("kind", [hybrid_ep.Buffer, hybrid_ep.HybridEPBuffer])
def test_weights_of_all_tensors_go_in_one_dispatch(monkeypatch: pytest.MonkeyPatch, kind: type[BaseBuffer]) -> None:
    experts = [torch.ones(3, 4), torch.full((3, 5), 2.0), torch.full((3, 1), 3, dtype=torch.uint8)]
    spare = [torch.zeros(2, *one.shape[1:], dtype=one.dtype) for one in experts]
    sizes = {"hidden_dim": 8, "max_num_of_tokens_per_rank": 1, "num_local_experts": 3}
    with kind(None, **({} if kind is hybrid_ep.Buffer else sizes)) as buffer:
        bounds = _dispatches(monkeypatch, buffer)
        buffer.lb_prefetch_weights(spare, experts, torch.tensor([[2, -1]]))
    assert bounds == [2]  # a row for each slot
    assert [one[0].tolist() for one in spare] == [one[2].tolist() for one in experts]
    assert not any(bool(one[1].any()) for one in spare)


@pytest.mark.parametrize(("mapping", "want"), [([2, -1, 2], [2]), ([-1, -1, -1], [0])])
def test_gradients_of_all_ranks_have_a_known_number(
    monkeypatch: pytest.MonkeyPatch, mapping: list[int], want: list[int]
) -> None:
    grads = torch.zeros(3, 4)
    with hybrid_ep.Buffer(None) as buffer:
        bounds = _dispatches(monkeypatch, buffer)
        buffer.lb_reduce_grads(torch.ones(3, 4), grads, torch.tensor([mapping]))
    assert bounds == want
    assert grads.sum(1).tolist() == [0, 0, 4 * mapping.count(2)]
