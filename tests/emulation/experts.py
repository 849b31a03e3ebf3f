"""The kernel that copies experts to spare slots: bit for bit what the mapping asks for, and errors at all ranks.

What compares copies runs on GPUs too, and with every engine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.buffers import expert_moves
from tests.battery.normal import equal
from tests.battery.refused_calls import TIMEOUT_S
from tests.emulation.late_epochs import set_combines
from tests.multi_gpu.behaviour import draw, round_trip

_UNTOUCHED = 7
# Bytes of an expert in each tensor: several chunks and a part of one, whole chunks, less than a vector, odd ones.
_SIZES = (3 * 16384 + 4096 + 16, 2 * 16384, 12, 1, 16384 + 5, 36)


def draw_experts(rank: int, num_local: int, sizes: tuple[int, ...], call: int) -> list[Tensor]:
    """The experts of a rank, ``[LE, size]`` uint8 each."""
    generator = torch.Generator().manual_seed(100 * rank + call)
    return [torch.randint(0, 256, (num_local, size), generator=generator).to(torch.uint8) for size in sizes]


def shifted(tensor: Tensor, shift: int, device: torch.device) -> Tensor:
    """The same on a device, `shift` bytes behind a multiple of 16."""
    memory = torch.empty(tensor.numel() + shift + 16, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % 16 + shift
    return memory[begin : begin + tensor.numel()].view(tensor.shape).copy_(tensor)


def _copy(
    buffer: hybrid_ep.Buffer,
    mapping: Tensor,
    num_local: int,
    *,
    sizes: tuple[int, ...] = _SIZES,
    shift: int = 0,
    call: int = 0,
) -> None:
    """Copies experts, and compares the spare slots with what the home ranks have."""
    spare, _ = begin_copy(buffer, mapping, num_local, sizes, shift, call)
    buffer.raise_pending()
    compare_copies(mapping, spare, [draw_experts(r, num_local, sizes, call) for r in range(len(mapping))], call)


def begin_copy(
    buffer: hybrid_ep.Buffer, mapping: Tensor, num_local: int, sizes: tuple[int, ...], shift: int, call: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Copies, on a GPU if there is one; returns the spare slots and the experts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts = [shifted(one, shift, device) for one in draw_experts(dist.get_rank(), num_local, sizes, call)]
    spare = [torch.full_like(one[:1], _UNTOUCHED).repeat(mapping.shape[1] + 1, 1)[1:] for one in experts]
    mapping = mapping.to(experts[0].device)
    buffer.lb_prefetch_weights(spare, experts, mapping, num_sms=random.Random(call).choice([0, 1, 3]))
    return spare, experts


def compare_copies(mapping: Tensor, spare: list[Tensor], everyone: list[list[Tensor]], call: int) -> None:
    """Compares ``[B, size]`` spare slots with the experts of their home ranks, which are given by rank. Local."""
    num_local = len(everyone[0][0])
    for i, tensor in enumerate(spare):
        got = tensor.cpu()
        for slot, expert in enumerate(mapping[dist.get_rank()].tolist()):
            want = torch.full_like(got[slot], _UNTOUCHED)
            if expert >= 0:
                want = everyone[expert // num_local][i][expert % num_local]
            equal(got[slot], want, f"call {call}: tensor {i}, slot {slot} with expert {expert}")


def draw_mapping(call: int, num_local: int, num_slots: int) -> Tensor:
    """Random, with holes: all ranks get expert 0, and in every second call the last rank none."""
    num_ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(call)
    mapping = torch.randint(-1, num_ranks * num_local, (num_ranks, num_slots), generator=generator)
    mapping[:, call % num_slots] = 0
    if call % 2:
        mapping[-1] = -1
    return mapping


def _routed() -> Any:
    """Notes whether the experts go as rows of a dispatch."""
    return mock.patch.object(expert_moves, "route_replicas", wraps=expert_moves.route_replicas)


def check_copies(num_slots: int = 2) -> None:
    """Tensors of all sizes and alignments, in turn with other calls that use the same memory and numbers."""
    num_ranks, num_local = dist.get_world_size(), 3
    routing = draw(0, tokens=20, hidden=128)
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as buffer, _routed() as routed:
        _copy(buffer, torch.full((num_ranks, num_slots), -1), num_local)
        for call, shift in enumerate((0, dist.get_rank(), 4, 0)):  # ranks may differ in that
            _copy(buffer, draw_mapping(call, num_local, num_slots), num_local, shift=shift, call=call)
            round_trip(buffer, routing, f"behind call {call}")
        assert routed.called == (buffer.engine.name != "cuda")


def check_copies_in_turn() -> None:
    """Calls that follow each other at once: ranks that have less to copy are ahead of the others."""
    num_ranks, sizes = dist.get_world_size(), (90000, 12)
    mappings = [torch.full((num_ranks, 2), -1) for _ in range(32)]
    for call, mapping in enumerate(mappings):
        mapping[call // 2 % num_ranks] = (torch.arange(2) + call // 2 % 2 * num_ranks) % (2 * num_ranks)
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as buffer:
        begun = [begin_copy(buffer, mapping, 2, sizes, 0, call)[0] for call, mapping in enumerate(mappings)]
        buffer.raise_pending()
    for call, (mapping, spare) in enumerate(zip(mappings, begun, strict=True)):
        compare_copies(mapping, spare, [draw_experts(rank, 2, sizes, call) for rank in range(num_ranks)], call)


def check_copies_past_the_last_number() -> None:
    num_ranks = dist.get_world_size()
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as buffer:
        set_combines(buffer.engine._control.local)  # type: ignore[attr-defined]
        dist.barrier()
        for call in range(6):
            _copy(buffer, draw_mapping(call, 2, 2), 2, sizes=(40000, 12), call=call)


def check_several_launches() -> None:
    """More tensors than a launch takes, more chunks than are staged; and more slots, which rows of a dispatch fill."""
    from hybrid_ep import _cuda

    num_ranks = dist.get_world_size()
    for num_slots, has_kernel in (
        (_cuda.max_replicas // num_ranks, True),
        (_cuda.max_replicas // num_ranks + 1, False),
    ):
        mapping = torch.full((num_ranks, num_slots), -1)
        mapping[:, -1], mapping[0, 0] = 3, 1
        with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks) as buffer, _routed() as routed:
            _copy(buffer, mapping, 2, sizes=(*range(16, 16 + 17), 17000))
        assert routed.called != has_kernel


def _call(buffer: hybrid_ep.Buffer, call: Callable[[], object]) -> None:
    """Calls; the buffer tells what the kernel has found behind it."""
    call()
    buffer.raise_pending()


def check_ranks_that_disagree() -> None:
    """Other mappings, other sizes, and a combine at one of the ranks: all are told, and nobody waits for long."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_last = rank == num_ranks - 1
    # The second mapping differs in three slots, of which a sum by slot number would not tell.
    others = {"redundancy_mapping": [1, 1, 0], "of redundancy_mapping": [0, 0, 1]}
    for what in (*others, "sizes of experts", "call is"):
        with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks, timeout_s=4.0) as buffer:
            x = torch.zeros(4, 128, dtype=torch.bfloat16)
            idx = torch.zeros(4, 1, dtype=torch.int64)
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_ranks)
            rows, _, _, _, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=torch.ones(4, 1),
            )
            assert isinstance(rows, Tensor)
            mapping = torch.tensor([[2], [1], [0]])
            experts = [torch.zeros(1, 64)]
            if is_last and what in others:
                mapping[:, 0] = torch.tensor(others[what])
            if is_last and what == "sizes of experts":
                experts = [torch.zeros(1, 68)]
            call = functools.partial(buffer.lb_prefetch_weights, [one.clone() for one in experts], experts, mapping)
            if is_last and what == "call is":
                call = functools.partial(buffer.combine, rows, handle)
            with pytest.raises(hybrid_ep.ConfigError, match=what):
                _call(buffer, call)
            dist.barrier()


def check_other_numbers_of_launches() -> None:
    """One rank has more tensors than a launch takes: all are told, and its further launches wait for nobody."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mapping = torch.zeros(num_ranks, 1, dtype=torch.int64)
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks, timeout_s=TIMEOUT_S) as buffer:
        experts = [torch.zeros(1, 64) for _ in range(40 if rank == num_ranks - 1 else 1)]
        spare = [one.clone() for one in experts]
        with pytest.raises(hybrid_ep.ConfigError, match="sizes of experts"):
            _call(buffer, lambda: buffer.lb_prefetch_weights(spare, experts, mapping))
        dist.barrier()
        round_trip(buffer, draw(0, tokens=20, hidden=128), "after other numbers of launches")
        _copy(buffer, mapping, 2, sizes=(*range(16, 16 + 17), 17000))


def check_copies_that_grow_memory() -> None:
    """A copy for which memory must grow, at one rank only; then at all ranks. For slots that begin small."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mapping = torch.zeros(num_ranks, 1, dtype=torch.int64)
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks, timeout_s=TIMEOUT_S) as buffer:
        for is_other in (rank == num_ranks - 1, rank != num_ranks - 1):
            experts = [torch.zeros(1, 4 << 20 if is_other else 64, dtype=torch.uint8)]
            spare = [one.clone() for one in experts]
            with pytest.raises(hybrid_ep.ConfigError, match="sizes of experts"):
                _call(buffer, lambda spare=spare, experts=experts: buffer.lb_prefetch_weights(spare, experts, mapping))
            dist.barrier()
        _copy(buffer, mapping, 2, sizes=(4 << 20, 12))
        round_trip(buffer, draw(0, tokens=20, hidden=128), "in memory that has grown")


def check_missing_rank(has_expert: bool, has_plan: bool) -> None:
    """A rank that does not come is named in time: by who would get its expert, and by who would send it one."""
    rank, num_ranks, timeout_s = dist.get_rank(), dist.get_world_size(), 2.0
    lost = num_ranks - 1
    mapping = torch.zeros(num_ranks, 1, dtype=torch.int64)
    if has_expert:
        mapping[0] = lost
    with hybrid_ep.Buffer(num_ranks_per_domain=num_ranks, timeout_s=timeout_s) as buffer:
        spare = torch.zeros(1, 20000)
        if has_plan:
            plan = hybrid_ep.BufferAllocator()
            spare = plan.allocate(spare.shape, spare.dtype)
            plan.materialize(buffer)
        dist.barrier()
        if rank != lost:
            with pytest.raises(hybrid_ep.TimeoutError, match="copy of experts") as told:
                _call(buffer, lambda: buffer.lb_prefetch_weights(spare, torch.ones(1, 20000), mapping))
            assert told.value.peer == lost
        dist.barrier()
