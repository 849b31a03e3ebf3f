"""Calls whose numbers pass 2³² − 1, as in a job that runs for years."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.battery.cases import Case
from tests.battery.low_latency import check_low_latency, check_mixed_hooks
from tests.multi_gpu.behaviour import draw, make_buffer, make_hybrid_buffer, round_trip

_LAST_CALL = -3  # 2³² − 3: every kind of call is made at least eight times


def _words(control: Tensor, name: str, count: int, stride: int = 1) -> Tensor:
    from hybrid_ep import _cuda

    return control[_cuda.control_offsets[name] :].view(torch.int32)[: count * stride : stride]


def set_combines(control: Tensor) -> None:
    """Numbers of combines, and flags, as that call has left them; flags that are compared for equality may stay."""
    from hybrid_ep import _cuda

    _words(control, "ready", 2 * 2 * _cuda.max_ranks, 2).fill_(_LAST_CALL)
    _words(control, "combine_epoch", 1).fill_(_LAST_CALL)


def _set_control(control: Tensor) -> None:
    from hybrid_ep import _cuda

    set_combines(control)
    _words(control, "rows_epoch", _cuda.max_ranks).fill_(_LAST_CALL)
    _words(control, "dispatch_epoch", 1).fill_(_LAST_CALL)


def check_past_the_last_number() -> None:
    """Every rank writes its own memory only, between two calls."""
    import torch.distributed as dist

    sent = draw(0, tokens=20, hidden=128)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    given: dict[str, Any] = {"topk_idx": sent.topk_idx[rank], "topk_weights": sent.weights[rank]}
    with make_buffer() as buffer, make_hybrid_buffer(sent) as hybrid:
        for engine in (buffer.engine, hybrid.engine):
            _set_control(engine._control.local)  # type: ignore[attr-defined]
        dist.barrier()
        rows, probs, _, _, handle = hybrid.dispatch_with_permute(hidden=sent.x[rank], **given)
        want, _ = hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        for call in range(8):
            round_trip(buffer, draw(call, tokens=20, hidden=128), f"call {call}")
            # Of rows that no combine has summed the number is 0, which must be no call's.
            handle.permute.state.communicator = None
            again, _ = hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
            assert torch.equal(again, want), f"call {call}"
            hybrid.dispatch_with_permute(hidden=sent.x[rank], handle=handle)
        assert num_ranks > 1


def check_low_latency_past_the_last_number() -> None:
    """The buffers of low-latency calls begin there, whatever makes them."""
    from hybrid_ep.engine.cuda import low_latency
    from hybrid_ep.engine.cuda.symmetric import SymmetricMemory

    allocate = SymmetricMemory.allocate

    def late(*args: Any) -> SymmetricMemory:
        memory = allocate(*args)
        # A buffer of two serves every second call: two of its calls pass the last number.
        low_latency.set_last_call(memory.local, (1 << 32) - 2)
        import torch.distributed as dist

        dist.barrier()
        return memory

    case = Case("late", 2, 40, hidden=256, topk=4, num_experts=8)
    with mock.patch.object(low_latency.SymmetricMemory, "allocate", late):
        check_low_latency(case, "bf16")
        for _ in range(3):
            check_mixed_hooks(case)


def check_low_latency_between_past_the_last_number() -> None:
    """The same between domains."""
    import torch.distributed as dist

    from hybrid_ep.engine.cuda.low_latency_between import LowLatencyBetween
    from hybrid_ep.engine.cuda.low_latency_region import Region, set_last_call

    make_region = LowLatencyBetween._make_region

    def late(*args: Any) -> Region:
        region = make_region(*args)
        set_last_call(region.memory.local, (1 << 32) - 2)
        dist.barrier()
        return region

    case = Case("late", 4, 40, hidden=256, num_ranks_per_domain=2)
    with mock.patch.object(LowLatencyBetween, "_make_region", late):
        check_low_latency(case, "bf16")
        for _ in range(3):
            check_mixed_hooks(case)
