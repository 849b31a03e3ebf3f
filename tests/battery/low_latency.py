"""Checks of the low-latency calls. Each runs on every rank of a group and asserts bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import env
from hybrid_ep.core.logfmt import cast_from_logfmt, cast_to_logfmt
from hybrid_ep.engine.calls import MIN_TOKENS_TO_SUM
from hybrid_ep.errors import ConfigError, OverflowError
from hybrid_ep.quantize import (
    Fp8Format,
    Nvfp4Format,
    RowFormat,
    block_scales_of,
    cast_from_fp8,
    cast_to_fp8,
    cast_to_nvfp4,
)
from hybrid_ep.testing.reference import Copy
from tests.battery.cases import Case, expert_row
from tests.battery.normal import equal, make_buffer, on

FORMATS: dict[str, RowFormat | None] = {
    "bf16": None,
    "fp8": Fp8Format(),
    "fp8_rounded": Fp8Format(round_scale=True),
    "fp8_ue8m0": Fp8Format(round_scale=True, ue8m0=True),
    "nvfp4": Nvfp4Format(),
    "nvfp4_ue8m0": Nvfp4Format(ue8m0=True),
}
GLOBAL_SCALE = torch.tensor([390.5])


def arguments_of(fmt: RowFormat | None, device: str) -> dict[str, object]:
    """Arguments of `low_latency_dispatch`."""
    if isinstance(fmt, Nvfp4Format):
        return {"use_nvfp4": True, "use_ue8m0_for_sf": fmt.ue8m0, "x_global_scale": GLOBAL_SCALE.to(device)}
    if fmt is None:
        return {"use_fp8": False, "x_global_scale": torch.ones(3)}  # which has no effect without NVFP4
    return {"use_fp8": True, "round_scale": fmt.round_scale, "use_ue8m0": fmt.ue8m0}


def quantised(x: Tensor, fmt: RowFormat | None) -> Tensor | tuple[Tensor, Tensor]:
    """``[T, H]`` as it arrives."""
    if fmt is None:
        return x
    return cast_to_nvfp4(x, GLOBAL_SCALE, fmt)[:2] if isinstance(fmt, Nvfp4Format) else cast_to_fp8(x, fmt)


def expert_copies(case: Case, rank: int, lost: Collection[int] = ()) -> list[list[Copy]]:
    """For each local expert of `rank`, its copies by source rank, then token; none of ranks in `lost`."""
    num_local = case.num_experts // case.num_ranks
    copies = [c for c in case.reference().copies(rank) if c.src_rank not in lost]
    return [[c for c in copies if c.expert == rank * num_local + e] for e in range(num_local)]


def expert_output(case: Case, rank: int, capacity: int, lost: Collection[int] = ()) -> Tensor:
    """``[LE, M×R, H]``: what the experts return, poisoned where no row stands."""
    copies = expert_copies(case, rank, lost)
    y = torch.full((len(copies), capacity, case.hidden), float("nan"), dtype=torch.bfloat16)
    for e, rows in enumerate(copies):
        for place, c in enumerate(rows):
            y[e, place] = expert_row(case, c)
    return y


def expected_combine(
    case: Case,
    rank: int,
    is_hooked: Callable[[int], bool],
    cross: Callable[[Tensor], Tensor] = Tensor.float,
    lost: Collection[int] = (),
) -> Tensor:
    """Σ_k weight × row in float32, in top-k order, rounded once.

    Of enough tokens, terms of experts on one rank of the own domain that has no hook are first summed and rounded.
    `cross` is what becomes of a bf16 row on its way. Rows of experts of ranks in `lost` do not count.
    """
    per_domain = case.num_ranks_per_domain or env.NUM_RANKS_PER_DOMAIN.get() or case.num_ranks
    inputs, num_local = case.inputs(rank), case.num_experts // case.num_ranks
    has_enough = inputs.x.shape[0] >= MIN_TOKENS_TO_SUM
    result = torch.zeros(inputs.x.shape, dtype=torch.bfloat16)
    for token, experts in enumerate(inputs.topk_idx.tolist()):
        groups: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        for column, expert in enumerate(experts):
            if expert >= 0 and expert // num_local not in lost:
                row = expert_row(case, Copy(rank, token, column, expert))
                term = row, inputs.topk_weights[token, column]
                owner = expert // num_local
                is_sum = has_enough and not is_hooked(owner) and owner // per_domain == rank // per_domain
                group = ("rank", owner) if is_sum else ("column", column)
                groups.setdefault(group, []).append(term)
        total = torch.zeros(case.hidden)
        for terms in groups.values():
            if len(terms) == 1:
                ((row, weight),) = terms
                total += cross(row) * weight
            else:
                partial = sum((row.float() * weight for row, weight in terms), torch.zeros(case.hidden))
                total += cross(partial.to(torch.bfloat16))
        result[token] = total.to(torch.bfloat16)
    return result


def check_low_latency(case: Case, format_name: str, device: str = "cpu") -> None:
    """Dispatch and combine, at once, with hooks and asynchronously, with statistics and the caller's buffers."""
    rank, fmt = dist.get_rank(), FORMATS[format_name]
    inputs = on(device, case.inputs(rank))
    sent = [quantised(case.inputs(r).x, fmt) for r in range(case.num_ranks)]
    copies = expert_copies(case, rank)
    num_tokens, capacity = case.max_tokens, case.max_tokens * case.num_ranks
    stats = torch.ones(len(copies), dtype=torch.int32, device=device)
    waited = torch.full((case.num_ranks,), 1 << 40, dtype=torch.int64, device=device)  # is added to, not overwritten
    with make_buffer(case, low_latency_mode=True) as buffer:
        for hooked, async_finish in [(False, False), (True, False), (False, True)]:
            received, count, handle, event, hook = buffer.low_latency_dispatch(
                inputs.x,
                inputs.topk_idx,
                num_tokens,
                case.num_experts,
                cumulative_local_expert_recv_stats=stats,
                dispatch_wait_recv_cost_stats=waited,
                **arguments_of(fmt, device),
                async_finish=async_finish,
                return_recv_hook=hooked,
            )
            assert (hook is not None) == hooked
            assert (event.event is not None) == async_finish
            event.current_stream_wait()
            if hook is not None:
                hook()
            equal(count, torch.tensor([len(rows) for rows in copies], dtype=torch.int32), "packed_recv_count")
            check_packed(case, copies, sent, received, handle)

            x = expert_output(case, rank, capacity).to(device)
            out = torch.empty_like(inputs.x) if hooked else None
            if hooked:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(x)
            combined, event, hook = buffer.low_latency_combine(
                x,
                inputs.topk_idx,
                inputs.topk_weights,
                handle,
                zero_copy=hooked,
                async_finish=async_finish,
                return_recv_hook=hooked,
                out=out,
                combine_wait_recv_cost_stats=waited,
            )
            event.current_stream_wait()
            if hook is not None:
                hook()
                assert combined is out
            equal(combined, expected_combine(case, rank, lambda _, hooked=hooked: hooked), "combined_x")
        equal(stats, 1 + 3 * torch.tensor([len(rows) for rows in copies], dtype=torch.int32), "receive statistics")
        assert bool((waited >= 1 << 40).all()), waited


def as_logfmt(row: Tensor) -> Tensor:
    return cast_from_logfmt(*cast_to_logfmt(row))


def check_logfmt(case: Case, device: str = "cpu") -> None:
    """Combine with rows as LogFMT-10, at once and with hooks: bit for bit, and within the bound that is documented."""
    rank = dist.get_rank()
    inputs = on(device, case.inputs(rank))
    x = expert_output(case, rank, case.max_tokens * case.num_ranks).to(device)

    def bound(row: Tensor) -> Tensor:
        size = row.float().abs()
        largest = size.unflatten(-1, (-1, 128)).amax(-1).repeat_interleave(128, -1)
        return torch.maximum(0.0218 * size, 1.01 * 2**-33 * largest)

    with make_buffer(case, low_latency_mode=True) as buffer:
        for hooked in (False, True):
            _, _, handle, _, hook = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, return_recv_hook=hooked
            )
            if hook is not None:
                hook()
            combined, _, hook = buffer.low_latency_combine(
                x, inputs.topk_idx, inputs.topk_weights, handle, use_logfmt=True, return_recv_hook=hooked
            )
            if hook is not None:
                hook()

            def is_hooked(_: int, hooked: bool = hooked) -> bool:
                return hooked

            equal(combined, expected_combine(case, rank, is_hooked, as_logfmt), "combined_x")
            exact, most = (expected_combine(case, rank, is_hooked, way) for way in (Tensor.float, bound))
            error = (combined.cpu().float() - exact.float()).abs()
            assert bool((error <= most.float().abs() * 1.01 + exact.float().abs() * 2**-7).all())


def check_packed(case: Case, copies: list[list[Copy]], sent: list, received: object, handle: tuple) -> None:
    """Rows, scales, source indices and ranges of every local expert."""
    data, scales = received if isinstance(received, tuple) else (received, None)
    if data.dtype == torch.uint8:  # NVFP4
        assert scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
        data, scales = data.permute(2, 0, 1), block_scales_of(scales).view(torch.uint8)
        assert data.is_contiguous()
    elif scales is not None:
        assert scales.stride(-2) == 1, f"scales have strides {scales.stride()}, expected column-major"
    for e, rows in enumerate(copies):
        for place, c in enumerate(rows):
            source = sent[c.src_rank]
            want = source[0] if isinstance(source, tuple) else source
            as_bytes = data[e, place].view(torch.uint8).cpu(), want[c.token].view(torch.uint8)
            assert torch.equal(*as_bytes), f"expert {e}, row {place}: not that of {c}"
            if scales is not None and isinstance(source, tuple):
                want = source[1][c.token]
                want = want.view(torch.uint8) if scales.dtype == torch.uint8 else want
                assert torch.equal(scales[e, place].cpu(), want), f"expert {e}, row {place}: scales"
        tokens = torch.tensor([c.token for c in rows], dtype=torch.int32)
        equal(handle[0][e, : len(rows)], tokens, "handle[0]")
        for src in range(case.num_ranks):
            begin, count = divmod(int(handle[1][e, src]), 1 << 32)
            assert [c.src_rank for c in rows[begin : begin + count]] == [src] * count
            assert count == sum(c.src_rank == src for c in rows)


def check_values_that_are_not_finite(format_name: str, device: str = "cpu") -> None:
    """A NaN or an infinity spoils its block of channels, as `cast_to_fp8` has it, and no other block."""
    case = Case("not_finite", dist.get_world_size(), 3)
    fmt = FORMATS[format_name]
    assert isinstance(fmt, Fp8Format)

    def sent_by(rank: int) -> Tensor:
        x = case.inputs(rank).x
        x[0, 5], x[1, 140], x[2, 7] = torch.nan, torch.inf, -torch.inf
        return x

    rank = dist.get_rank()
    inputs = on(device, case.inputs(rank)._replace(x=sent_by(rank)))
    with make_buffer(case, low_latency_mode=True) as buffer:
        received, _, _, _, _ = buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, **arguments_of(fmt, device)
        )
        assert isinstance(received, tuple)
        for e, copies in enumerate(expert_copies(case, rank)):
            rows = cast_from_fp8(*(part[e, : len(copies)].cpu() for part in received))
            for row, c in zip(rows, copies, strict=True):
                want = cast_from_fp8(*cast_to_fp8(sent_by(c.src_rank)[c.token], fmt))
                assert torch.equal(row.isnan(), want.isnan()), f"NaNs of token {c.token}"
                assert torch.equal(row.nan_to_num(), want.nan_to_num()), f"channels of token {c.token}"


def check_overlapping_batches(case: Case, device: str = "cpu") -> None:
    """Two micro-batches are in flight at once."""
    rank = dist.get_rank()
    inputs = on(device, case.inputs(rank))
    x = expert_output(case, rank, case.max_tokens * case.num_ranks).to(device)
    with make_buffer(case, low_latency_mode=True) as buffer:
        send = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        _, _, first, _, receive_1 = buffer.low_latency_dispatch(*send, use_fp8=False, return_recv_hook=True)
        _, _, second, _, receive_2 = buffer.low_latency_dispatch(*send, use_fp8=False, return_recv_hook=True)
        assert receive_1 is not None
        assert receive_2 is not None
        receive_1()
        receive_2()
        back = (x, inputs.topk_idx, inputs.topk_weights)
        out_1, _, hook_1 = buffer.low_latency_combine(*back, first, return_recv_hook=True)
        out_2, _, hook_2 = buffer.low_latency_combine(*back, second, return_recv_hook=True)
        assert hook_1 is not None
        assert hook_2 is not None
        hook_1()
        hook_2()
        equal(out_1, expected_combine(case, rank, lambda _: True), "first batch")
        equal(out_2, expected_combine(case, rank, lambda _: True), "second batch")


def check_dispatches_ahead(case: Case, device: str = "cpu") -> None:
    """Each rank sends a dispatch ahead of the one that it receives, and the last rank receives late."""
    rank = dist.get_rank()
    pending: list[tuple[Case, object, tuple, Callable[[], None] | None]] = []

    def receive() -> None:
        drawn, received, handle, hook = pending.pop(0)
        if rank == case.num_ranks - 1:
            time.sleep(0.3)
        assert hook is not None
        hook()
        sent = [drawn.inputs(r).x for r in range(case.num_ranks)]
        check_packed(drawn, expert_copies(drawn, rank), sent, received, handle)

    with make_buffer(case, low_latency_mode=True) as buffer:
        for seed in range(6):
            if len(pending) == 2:
                receive()
            drawn = replace(case, seed=seed)
            inputs = on(device, drawn.inputs(rank))
            received, _, handle, _, hook = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False, return_recv_hook=True
            )
            pending.append((drawn, received, handle, hook))
        while pending:
            receive()


def check_cleaned(case: Case, device: str = "cpu") -> None:
    """After the buffers were cleaned, calls count from one again, and nothing of before is taken for theirs."""
    rank = dist.get_rank()
    with make_buffer(case, low_latency_mode=True) as buffer:
        for seed in range(12):
            drawn = replace(case, seed=seed)
            inputs = on(device, drawn.inputs(rank))
            sent = [drawn.inputs(r).x for r in range(case.num_ranks)]
            copies = expert_copies(drawn, rank)
            received, count, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            equal(count, torch.tensor([len(rows) for rows in copies], dtype=torch.int32), f"counts of call {seed}")
            check_packed(drawn, copies, sent, received, handle)
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)


def check_cleaned_often(case: Case, device: str = "cpu") -> None:
    """Rows of a call are not taken for those of a later one, however many cleanings lie between them."""
    rank = dist.get_rank()
    with make_buffer(case, low_latency_mode=True, enable_shrink=True) as buffer:
        for seed, num_cleanings in enumerate((0, 1, 128)):
            for _ in range(num_cleanings):
                buffer.low_latency_clean_mask_buffer()
            dist.barrier()
            if rank > 0:
                time.sleep(0.5)  # the first rank waits for rows
            drawn = replace(case, seed=seed)
            inputs = on(device, drawn.inputs(rank))
            received, _, handle, _, _ = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            sent = [drawn.inputs(r).x for r in range(case.num_ranks)]
            check_packed(drawn, expert_copies(drawn, rank), sent, received, handle)


def check_unreceived(device: str = "cpu") -> None:
    """What a hook has not received cannot be combined; and after a cleaning, the hook would wait for nobody's rows."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("unreceived", num_ranks, 12, num_experts=8 * num_ranks)
    inputs = on(device, case.inputs(rank))
    x = expert_output(case, rank, case.max_tokens * case.num_ranks).to(device)
    with make_buffer(case, low_latency_mode=True) as buffer:
        send = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        back = (x, inputs.topk_idx, inputs.topk_weights)
        for _ in range(2):
            *_, handle, _, hook = buffer.low_latency_dispatch(*send, return_recv_hook=True)
            with pytest.raises(ConfigError, match="whose hook has not been called"):
                buffer.low_latency_combine(*back, handle)
            assert hook is not None
            hook()
            *_, forgotten = buffer.low_latency_dispatch(*send, return_recv_hook=True)
            *_, lost = buffer.low_latency_combine(*back, handle, return_recv_hook=True)
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
            for stale in (forgotten, lost):
                assert stale is not None
                with pytest.raises(ConfigError, match="clean_low_latency_buffer since a hook's call is 1; allowed: 0"):
                    stale()
            combined, _, _ = buffer.low_latency_combine(*back, handle)
            equal(combined, expected_combine(case, rank, lambda _: False), "combined_x after a cleaning")


def check_too_many_rows(device: str = "cpu") -> None:
    """Tokens that name one expert in every column have more rows than places: every rank is told, and goes on."""
    rank, num_ranks, num_tokens, topk = dist.get_rank(), dist.get_world_size(), 4, 3
    case = Case("too_many", num_ranks, num_tokens, hidden=128, topk=topk, num_experts=4 * num_ranks)
    inputs = on(device, case.inputs(rank))
    expert = torch.full_like(inputs.topk_idx, 1)
    x = expert_output(case, rank, num_tokens * num_ranks).to(device)
    signals = torch.ones(case.num_experts // num_ranks, dtype=torch.int32, device=device)
    with make_buffer(case, low_latency_mode=True) as buffer:

        def step(topk_idx: Tensor, is_hooked: bool, overlap: bool) -> tuple[Tensor, Tensor]:
            *_, count, handle, _, hook = buffer.low_latency_dispatch(
                inputs.x, topk_idx, num_tokens, case.num_experts, use_fp8=False, return_recv_hook=is_hooked
            )
            if hook is not None:
                hook()
            if device == "cuda":
                torch.cuda.synchronize()
            signalled = {"overlap": True, "src_signals": signals, "src_signal_expect_value": 1} if overlap else {}
            combined, _, hook = buffer.low_latency_combine(
                x, topk_idx, inputs.topk_weights, handle, return_recv_hook=is_hooked, **signalled
            )
            if hook is not None:
                hook()
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.raise_pending()
            return count, combined

        rows, places = num_ranks * num_tokens * topk, num_ranks * num_tokens
        for is_hooked, overlap in ((False, False), (True, False), (False, True)):
            with pytest.raises(OverflowError, match=rf"rows: {rows} at rank 0; allowed by the bound: {places}$"):
                step(expert, is_hooked, overlap)
            count, combined = step(inputs.topk_idx, is_hooked, overlap)
            want = torch.tensor([len(rows) for rows in expert_copies(case, rank)], dtype=torch.int32)
            equal(count, want, "packed_recv_count after an overflow")
            equal(combined, expected_combine(case, rank, lambda _: True), "combined_x after an overflow")


def check_other_values(case: Case, device: str = "cpu") -> None:
    """Calls whose arguments differ from those of earlier ones in their values only, and in where tensors begin.

    Calls of a larger size between them replace the memory that the first ones used.
    """
    rank = dist.get_rank()
    inputs = on(device, case.inputs(rank))
    copies, counts = expert_copies(case, rank), torch.zeros(case.num_experts // case.num_ranks, dtype=torch.int32)
    stats = counts.clone().to(device)
    moved = torch.empty(inputs.x.numel() + 1, dtype=inputs.x.dtype, device=device)[1:].view_as(inputs.x)
    sent = [case.inputs(r).x for r in range(case.num_ranks)]
    with make_buffer(case, low_latency_mode=True) as buffer:

        def step(x: Tensor, scale: int, most: int) -> None:
            x.copy_(scale * inputs.x)
            received, count, handle, _, _ = buffer.low_latency_dispatch(
                x, inputs.topk_idx, most, case.num_experts, stats, use_fp8=False
            )
            check_packed(case, copies, [scale * one for one in sent], received, handle)
            y = expert_output(case, rank, most * case.num_ranks).to(device)
            combined, _, _ = buffer.low_latency_combine(y, inputs.topk_idx, inputs.topk_weights, handle)
            equal(combined, expected_combine(case, rank, lambda _: False), "combined_x")
            counts.add_(count.cpu())

        mine = torch.empty_like(inputs.x)
        for most in (case.max_tokens, case.max_tokens, 4 * case.max_tokens, case.max_tokens):
            step(mine, 1, most)
            step(mine, 2, most)
            step(moved, 4, most)
        equal(stats, counts, "receive statistics")
        with pytest.raises(ConfigError, match="use_fp8 is 2"):
            buffer.low_latency_dispatch(mine, inputs.topk_idx, case.max_tokens, case.num_experts, stats, use_fp8=2)


def check_varying_sizes(device: str = "cpu") -> None:
    """Calls of one buffer whose numbers of tokens, hidden sizes, top-k, formats and M differ from one to the next."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    random = Random(0)  # the same at every rank
    with make_buffer(Case("varying", num_ranks, 16), low_latency_mode=True) as buffer:
        for i in range(20):
            case = Case(
                f"call {i}",
                num_ranks,
                tuple(random.randint(0, 16) for _ in range(num_ranks)),
                hidden=random.choice([128, 384, 1024]),
                topk=random.randint(1, 6),
                num_experts=num_ranks * random.randint(6, 9),
                seed=i,
            )
            most, format_name = case.max_tokens + random.randint(0, 3), random.choice(list(FORMATS))
            fmt, hooked = FORMATS[format_name], random.random() < 0.4
            inputs, copies = on(device, case.inputs(rank)), expert_copies(case, rank)
            received, count, handle, _, hook = buffer.low_latency_dispatch(
                inputs.x,
                inputs.topk_idx,
                most,
                case.num_experts,
                **arguments_of(fmt, device),
                return_recv_hook=hooked,
            )
            if hook is not None:
                hook()
            equal(count, torch.tensor([len(rows) for rows in copies], dtype=torch.int32), f"counts of {case.id}")
            check_packed(case, copies, [quantised(case.inputs(r).x, fmt) for r in range(num_ranks)], received, handle)
            y = expert_output(case, rank, most * num_ranks).to(device)
            combined, _, hook = buffer.low_latency_combine(
                y, inputs.topk_idx, inputs.topk_weights, handle, return_recv_hook=hooked
            )
            if hook is not None:
                hook()
            equal(combined, expected_combine(case, rank, lambda _, hooked=hooked: hooked), f"sums of {case.id}")


def check_mixed_hooks(case: Case, device: str = "cpu") -> None:
    """Every rank decides by itself whether it takes a hook, and so whether it sums what it sends."""
    rank = dist.get_rank()
    inputs = on(device, case.inputs(rank))
    x = expert_output(case, rank, case.max_tokens * case.num_ranks).to(device)
    with make_buffer(case, low_latency_mode=True) as buffer:
        for call in range(4):

            def is_hooked(r: int, call: int = call) -> bool:
                return (r + call) % 2 == 0

            _, _, handle, _, hook = buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, return_recv_hook=is_hooked(rank)
            )
            if hook is not None:
                hook()
            combined, _, hook = buffer.low_latency_combine(
                x, inputs.topk_idx, inputs.topk_weights, handle, return_recv_hook=is_hooked(rank)
            )
            if hook is not None:
                hook()
            equal(combined, expected_combine(case, rank, is_hooked), f"combined_x of call {call}")


def check_sums_over_rows(case: Case, device: str = "cpu") -> None:
    """A combine writes its sums over the rows that it sends."""
    with make_buffer(case, low_latency_mode=True) as buffer:
        inputs = on(device, case.inputs(dist.get_rank()))
        args = (inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(*args, use_fp8=False)
        want, _, _ = buffer.low_latency_combine(rows, inputs.topk_idx, inputs.topk_weights, handle)
        out = rows.view(-1, case.hidden)[: len(inputs.x)]
        got, _, _ = buffer.low_latency_combine(rows, inputs.topk_idx, inputs.topk_weights, handle, out=out)
        equal(got, want.cpu(), "sums over the rows")
