"""Checks of a low-latency combine that sends rows as the experts' signals are raised, before all rows are written."""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep.errors import TimeoutError
from tests.battery.cases import Case
from tests.battery.low_latency import as_logfmt, expected_combine, expert_copies, expert_output
from tests.battery.normal import equal, make_buffer, on

# Experts of another process, for combine holds this one: [row's begin, its end, signal] of each block, in bytes.
_LATE_EXPERTS = """
import json, mmap, struct, sys, time
folder, late_s, threshold, blocks = sys.argv[1], *json.loads(sys.argv[2])
rows = open(f"{folder}/rows", "rb").read()
with open(f"{folder}/x", "r+b") as x, open(f"{folder}/signals", "r+b") as signals:
    x, signals = mmap.mmap(x.fileno(), 0), mmap.mmap(signals.fileno(), 0)
time.sleep(late_s)
for begin, end, signal in blocks:
    middle = (begin + end) // 2
    for i in range(threshold):
        x[begin:end] = rows[begin:end] if i + 1 == threshold else rows[begin:middle] + bytes(end - middle)
        struct.pack_into("<i", signals, signal, i + 1)
        time.sleep(0.002)
"""


@contextlib.contextmanager
def late_experts(
    rows: Tensor, num_signals: int, blocks: list[tuple[int, int, int]], threshold: int, late_s: float, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields x, of which no row is written yet, and int32 signals, which experts that run beside raise.

    Args:
        rows: ``[LE, M×R, H]`` bf16, what is written.
        num_signals: how many there are.
        blocks: (first row, last row + 1, signal) over all experts, in the order in which they are written.
        threshold: how often the signal of a block is raised; its rows are right after the last time.
        late_s: when the first is written.
        device: of x.
    """
    if device == "cuda":
        written = rows.to(device).view(-1, rows.shape[2])
        x, signals = torch.full_like(rows, 3.0, device=device), torch.zeros(num_signals, dtype=torch.int32).to(device)
        experts = torch.cuda.Stream()
        # A kernel that is loaded while another one waits for it would never run.
        x.view_as(written)[:1].copy_(written[:1])
        signals[:1].add_(0)
        torch.cuda._sleep(1)
        x.fill_(3.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(experts):
            torch.cuda._sleep(int(late_s * 1e9))
            for begin, end, signal in blocks:
                for _ in range(threshold - 1):
                    signals[signal : signal + 1].add_(1)
                torch.cuda._sleep(100_000)
                x.view_as(written)[begin:end].copy_(written[begin:end])
                signals[signal : signal + 1].add_(1)
        yield x, signals
        torch.cuda.synchronize()
        return
    row_bytes = 2 * rows.shape[2]
    plan = [late_s, threshold, [(row_bytes * begin, row_bytes * end, 4 * signal) for begin, end, signal in blocks]]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "rows").write_bytes(rows.view(torch.uint8).numpy().tobytes())
        Path(folder, "x").write_bytes(torch.full_like(rows, 3.0).view(torch.uint8).numpy().tobytes())
        Path(folder, "signals").write_bytes(bytes(4 * num_signals))
        mapped = []
        for name in ("x", "signals"):
            with open(Path(folder, name), "r+b") as file:
                mapped.append(mmap.mmap(file.fileno(), 0))
        process = subprocess.Popen([sys.executable, "-c", _LATE_EXPERTS, folder, json.dumps(plan)])
        try:
            x = torch.frombuffer(mapped[0], dtype=torch.bfloat16).view(rows.shape)
            yield x, torch.frombuffer(mapped[1], dtype=torch.int32)
        finally:
            assert process.wait(60) == 0


def blocks_of(case: Case, rank: int, block_m: int) -> list[tuple[int, int, int]]:
    """Of `late_experts`: every block that has rows, the last one first."""
    num_rows = case.max_tokens * case.num_ranks
    num_blocks = -(-num_rows // block_m)
    return [
        (e * num_rows + begin, e * num_rows + min(begin + block_m, len(rows)), e * num_blocks + begin // block_m)
        for e, rows in enumerate(expert_copies(case, rank))
        for begin in range(0, len(rows), block_m)
    ][::-1]


def check_signals(kind: str, use_logfmt: bool = False, device: str = "cpu") -> None:
    """Combine waits for the signal of each block of rows that experts still write, on some ranks, by a hook or not."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("signals", num_ranks, 40, hidden=2176, num_experts=4 * num_ranks)
    inputs, capacity, threshold = on(device, case.inputs(rank)), case.max_tokens * case.num_ranks, 2
    cross = as_logfmt if use_logfmt else Tensor.float
    block_m = 12 if kind == "comp_signal" else capacity
    num_signals = case.num_experts // num_ranks * -(-capacity // block_m)
    rows = expert_output(case, rank, capacity)
    with make_buffer(case, low_latency_mode=True) as buffer:
        for call in range(3):
            hooked = call == 1
            _, count, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            back = (inputs.topk_idx, inputs.topk_weights, handle)
            if call == 2 and rank == 0:  # ranks need not agree
                combined, _, _ = buffer.low_latency_combine(rows.to(device), *back, use_logfmt=use_logfmt)
            else:
                blocks = blocks_of(case, rank, block_m)
                with late_experts(rows, num_signals, blocks, threshold, 0.2, device) as (x, signals):
                    options = {"src_signals": signals.view(torch.uint32), "src_signal_expect_value": threshold}
                    if kind == "comp_signal":
                        options = {"comp_signal": signals, "block_m": block_m, "threshold": threshold}
                        options["packed_recv_count"] = count
                    options |= {"use_logfmt": use_logfmt, "return_recv_hook": hooked, "num_sms": 2}
                    combined, _, hook = buffer.low_latency_combine(x, *back, overlap=True, **options)
                    if hook is not None:
                        hook()
                    combined = combined.clone()
            want = expected_combine(case, rank, lambda r, call=call: call != 2 or r != 0, cross)
            equal(combined, want, f"combined_x of call {call}")


def check_missing_signal(timeout_s: float, device: str = "cpu", *, shrinks: bool = True) -> None:
    """A signal that does not come is told at every rank, nobody is masked, and the next call is as any other."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("missing", num_ranks, 8, hidden=128, num_experts=4 * num_ranks)
    inputs, capacity, block_m = on(device, case.inputs(rank)), case.max_tokens * case.num_ranks, 3
    num_blocks = -(-capacity // block_m)
    x = expert_output(case, rank, capacity).to(device)
    missing = min(signal for _, _, signal in blocks_of(case, 1, block_m))
    with make_buffer(case, timeout_s=timeout_s, low_latency_mode=True, enable_shrink=shrinks) as buffer:

        def combine(signals: Tensor) -> Tensor:
            _, _, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            combined, _, _ = buffer.low_latency_combine(
                x,
                inputs.topk_idx,
                inputs.topk_weights,
                handle,
                overlap=True,
                comp_signal=signals,
                block_m=block_m,
                threshold=7,
            )
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.raise_pending()
            return combined

        signals = torch.full((4 * num_blocks,), 7, dtype=torch.int32, device=device)
        raised = signals.clone()
        if rank == 1:
            signals[missing] = 6
        told = rf"rank {rank} waited {timeout_s / 2:g} s: signal {missing} of rank 1's experts was not raised$"
        with pytest.raises(TimeoutError, match=told):
            combine(signals)
        if shrinks:
            status = torch.full((num_ranks,), -1, dtype=torch.int32, device=device)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0] * num_ranks
        equal(combine(raised), expected_combine(case, rank, lambda _: True), "combined_x of the next call")
