"""A combine in which some CTAs stop waiting for a rank, while others still send to it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import hybrid_ep
from tests.multi_gpu.exact import MAX_TOKENS, draw_exact, finish_round_trip, start_round_trip

_TIMEOUT_S = 6.0  # above the longest call of ranks that share two cores
_UNTOUCHED = 0x55


def check_dropped_rows(num_trials: int) -> None:
    """Rank 1 frees slots for rank 0's rows about when rank 0's CTAs stop to wait; it is told of all rows or of none."""
    from hybrid_ep import _cuda

    rank, sent, all_bytes = dist.get_rank(), draw_exact(0, 2, hidden=128), -1
    combine = _cuda.low_latency_buffers * _cuda.low_latency_channel_bytes
    free, told = (combine + _cuda.low_latency_channel_offsets[name] for name in ("free_epoch", "sent"))
    with hybrid_ep.Buffer(dist.group.WORLD, low_latency_mode=True, engine="cuda", timeout_s=_TIMEOUT_S) as buffer:
        for trial in range(num_trials):
            buffer.clean_low_latency_buffer(MAX_TOKENS, 128, sent.num_experts)
            for _ in range(2):
                started = start_round_trip(buffer, sent)
                finish_round_trip(buffer, sent, started)
            region = buffer.engine._low_latency._regions[-1]  # type: ignore[attr-defined]
            here, rows = region.memory.local, region.memory.local[region.capacity.epochs_bytes :]
            free_slots = region.memory.handle[0][free + 4 :][:4].view(torch.int32)  # at rank 0, by rank 1
            dist.barrier()
            if rank == 0:
                free_slots.zero_()
            else:
                rows.fill_(_UNTOUCHED)
            dist.barrier()
            begin = time.monotonic()
            if rank == 0:
                buffer.low_latency_combine(
                    started.packed, sent.topk_idx[0], sent.weights[0], started.handle, return_recv_hook=True
                )
            else:
                # At first in time; then at the end of what a send waits, and a millisecond later every time.
                if trial:
                    time.sleep(max(0.0, begin + _TIMEOUT_S / 2 + 0.001 * trial - time.monotonic()))
                free_slots.fill_(1)
            dist.barrier()
            if rank == 1:
                num_bytes = int((rows != _UNTOUCHED).sum())
                all_bytes = max(all_bytes, num_bytes)
                is_told = int(here[told:][:4].view(torch.int32)) == 2
                assert is_told or trial, "nothing was sent although slots were free"
                assert not is_told or num_bytes == all_bytes, f"{num_bytes} bytes came instead of {all_bytes}"
            buffer.engine._communicator.take_fault()  # type: ignore[attr-defined]
