"""Experts that are pushed into spare slots of a `BufferAllocator`: bit for bit, in turn, and errors at all ranks.

The checks run on GPUs too, and with every engine.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from tests.battery.refused_calls import TIMEOUT_S
from tests.emulation.experts import compare_copies, draw_experts, draw_mapping, shifted
from tests.emulation.late_epochs import set_combines
from tests.multi_gpu.behaviour import draw, round_trip

# Bytes of an expert in each tensor: several chunks and a part of one, whole chunks, a vector.
_SIZES = (3 * 4096 + 2048 + 16, 2 * 4096, 16)
_NUM_LOCAL, _NUM_SLOTS = 3, 2


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _buffer(timeout_s: float = 60.0) -> hybrid_ep.Buffer:
    return hybrid_ep.Buffer(num_ranks_per_domain=dist.get_world_size(), timeout_s=timeout_s)


def _spare(buffer: hybrid_ep.Buffer, sizes: tuple[int, ...] = _SIZES, num_slots: int = _NUM_SLOTS) -> list[Tensor]:
    """``[B, size]`` for each size, which peers can write on the cuda engine; behind memory that is not used."""
    plan = hybrid_ep.BufferAllocator()
    plan.allocate([3], torch.uint8)
    spare = [plan.allocate([num_slots, size], torch.uint8) for size in sizes]
    plan.materialize(buffer)
    return spare


def _push(
    buffer: hybrid_ep.Buffer, spare: list[Tensor], mapping: Tensor, call: int, *, shift: int = 0, num_sms: int = 2
) -> list[Tensor]:
    """Copies the experts of a call; returns them, of all ranks."""
    sizes = tuple(one.shape[1] for one in spare)
    everyone = [draw_experts(rank, _NUM_LOCAL, sizes, call) for rank in range(dist.get_world_size())]
    experts = [shifted(one, shift, _device()) for one in everyone[dist.get_rank()]]
    for one in spare:
        one.fill_(7)
    buffer.lb_prefetch_weights(spare, experts, mapping.to(_device()), num_sms)
    return everyone


def check_pushes() -> None:
    """Random mappings, sources of any alignment, in turn with other calls that use the same flags and numbers."""
    num_ranks = dist.get_world_size()
    routing = draw(0, tokens=20, hidden=128)
    with _buffer() as buffer:
        spare = _spare(buffer)
        for call, (shift, num_sms) in enumerate(((0, 1), (dist.get_rank(), 3), (4, 2), (0, 0))):
            mapping = draw_mapping(call, _NUM_LOCAL, _NUM_SLOTS) if call else torch.full((num_ranks, _NUM_SLOTS), -1)
            everyone = _push(buffer, spare, mapping, call, shift=shift, num_sms=num_sms)
            buffer.raise_pending()
            compare_copies(mapping, spare, everyone, call)
            round_trip(buffer, routing, f"behind call {call}")


def check_pushes_in_turn() -> None:
    """Calls that follow each other at once, into the same slots: no rank writes what another one still reads."""
    num_ranks, sizes, num_calls = dist.get_world_size(), (40000, 16), 32
    mappings = [torch.full((num_ranks, _NUM_SLOTS), -1) for _ in range(num_calls)]
    for call, mapping in enumerate(mappings):
        mapping[call // 2 % num_ranks] = (torch.arange(2) + call // 2 % 2 * num_ranks) % (2 * num_ranks)
    everyone = [[draw_experts(rank, 2, sizes, call) for rank in range(num_ranks)] for call in range(num_calls)]
    mine = [[one.to(_device()) for one in experts[dist.get_rank()]] for experts in everyone]
    found = []
    with _buffer() as buffer:
        spare = _spare(buffer, sizes)
        for call, (experts, mapping) in enumerate(zip(mine, mappings, strict=True)):
            buffer.lb_prefetch_weights(spare, experts, mapping.to(_device()), 2)
            if call % num_ranks == dist.get_rank():
                time.sleep(0.02)  # late to read; on a GPU the stream is not
            found.append([one.clone() for one in spare])
        buffer.raise_pending()
    for call, (mapping, got) in enumerate(zip(mappings, found, strict=True)):
        is_filled = mapping[dist.get_rank()] >= 0
        compare_copies(mapping[:, is_filled], [one[is_filled.to(one.device)] for one in got], everyone[call], call)


def check_pushes_past_the_last_number() -> None:
    with _buffer() as buffer:
        set_combines(buffer.engine._control.local)  # type: ignore[attr-defined]
        dist.barrier()
        spare = _spare(buffer, (40000, 16))
        for call in range(6):
            mapping = draw_mapping(call, _NUM_LOCAL, _NUM_SLOTS)
            everyone = _push(buffer, spare, mapping, call)
            buffer.raise_pending()
            compare_copies(mapping, spare, everyone, call)


def check_several_launches() -> None:
    """More tensors than a launch takes."""
    with _buffer() as buffer:
        spare = _spare(buffer, (*range(16, 16 * 18, 16), 16384 + 16))
        mapping = draw_mapping(1, _NUM_LOCAL, _NUM_SLOTS)
        everyone = _push(buffer, spare, mapping, 1)
        buffer.raise_pending()
        compare_copies(mapping, spare, everyone, 1)


def _push_and_look(buffer: hybrid_ep.Buffer, spare: Tensor, experts: Tensor, mapping: Tensor) -> None:
    """Copies, and raises what the kernel has found."""
    buffer.lb_prefetch_weights(spare, experts, mapping.to(_device()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    buffer.raise_pending()


def check_ranks_that_disagree() -> None:
    """One rank has its slots elsewhere in the memory, in ordinary memory, or has another mapping: all are told."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_last = rank == num_ranks - 1
    for what in ("redundancy_mapping", "another place", "ordinary memory"):
        with _buffer(timeout_s=TIMEOUT_S) as buffer:
            if what != "redundancy_mapping" and buffer.engine.name != "cuda":
                continue  # where slots are makes no difference
            first, second = _spare(buffer, (64, 64), 1)
            mapping = torch.arange(1, num_ranks + 1).remainder(num_ranks).view(-1, 1)
            if is_last and what == "redundancy_mapping":
                mapping[0] = 0
            if is_last and what == "another place":
                first = second
            if is_last and what == "ordinary memory":
                first = torch.zeros_like(first)
            experts = torch.full((1, 64), rank + 1, dtype=torch.uint8, device=_device())
            message = "redundancy_mapping|expert in slot" if what == "redundancy_mapping" else "where the slots are"
            with pytest.raises(hybrid_ep.ConfigError, match=message):
                _push_and_look(buffer, first, experts, mapping)
            assert not first.any(), "something was written"
            dist.barrier()
            round_trip(buffer, draw(0, tokens=20, hidden=128), f"behind a call with {what}")


def check_other_plans() -> None:
    """Plans of other sizes are refused at all ranks, and the buffer goes on."""
    with _buffer(timeout_s=10.0) as buffer:
        plan = hybrid_ep.BufferAllocator()
        plan.allocate([dist.get_rank() + 1, 128], torch.uint8)
        with pytest.raises(hybrid_ep.ConfigError, match="bytes of symmetric memory"):
            plan.materialize(buffer)
        assert not plan.materialized
        dist.barrier()
        round_trip(buffer, draw(0, tokens=20, hidden=128), "behind other plans")
