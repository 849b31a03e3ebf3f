"""Checks of `Buffer`'s dispatch and combine. Each runs on every rank of a group and asserts bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.buffers import arguments
from hybrid_ep.quantize import Fp8Format, Nvfp4Format, cast_to_fp8, cast_to_nvfp4
from tests.battery.cases import Case, Inputs, row_of


def make_buffer(case: Case, **options: Any) -> hybrid_ep.Buffer:
    group = _group(case.num_ranks)
    return hybrid_ep.Buffer(group, num_ranks_per_domain=case.num_ranks_per_domain, **options)


def _group(num_ranks: int) -> dist.ProcessGroup | None:
    assert dist.get_world_size() == num_ranks
    return dist.group.WORLD


def on(device: str, inputs: Inputs) -> Inputs:
    return Inputs(*(tensor.to(device) for tensor in inputs))


def dispatch(buffer: hybrid_ep.Buffer, case: Case, inputs: Inputs, x: Any = None, **options: Any) -> tuple[Any, ...]:
    """Layout and dispatch of a case."""
    per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, case.num_experts)
    return buffer.dispatch(
        inputs.x if x is None else x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_domain,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=inputs.topk_idx,
        topk_weights=inputs.topk_weights,
        **options,
    )


def equal(got: Tensor, want: Tensor, what: str) -> None:
    """Asserts the same dtype, shape and values."""
    got = got.cpu()
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: {list(got.shape)}, expected {list(want.shape)}"
    if got.dtype == torch.float8_e4m3fn:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    if not torch.equal(got, want):
        wrong = (got != want).reshape(got.shape[0], -1).any(1).nonzero().flatten()
        raise AssertionError(f"{what}: {wrong.numel()} of {got.shape[0]} rows differ, first {wrong[:5].tolist()}")


def gather_rows(case: Case, rows: list[tuple[int, int]], tensors: list[Tensor]) -> Tensor:
    """Rows (source rank, token) of per-rank tensors, stacked."""
    if not rows:
        return tensors[0][:0]
    return torch.stack([tensors[src][token] for src, token in rows])


def returned(case: Case, rank: int, rows: list[tuple[int, int]]) -> Tensor:
    """What this rank's experts return for its received rows."""
    made = [row_of(case.seed, rank, src, token, case.hidden) for src, token in rows]
    return torch.stack(made) if made else torch.empty(0, case.hidden, dtype=torch.bfloat16)


def expected_weights(case: Case, rank: int) -> Tensor:
    """``[N, K]``: weights of the received rows, 0 where the expert lives elsewhere."""
    reference = case.reference()
    topk = reference.received_topk(rank)
    all_weights = [case.inputs(r).topk_weights for r in range(case.num_ranks)]
    return torch.where(topk >= 0, gather_rows(case, reference.received(rank), all_weights), 0.0)


def check_round_trip(case: Case, device: str = "cpu") -> None:
    """Dispatch, then combine with weights and with biases; twice, so that a buffer is used again."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows = reference.received(rank)
    sources = [case.inputs(r) for r in range(case.num_ranks)]
    sent = torch.zeros(case.num_ranks, case.num_ranks, dtype=torch.int32)
    for dst in range(case.num_ranks):
        for src, _ in reference.received(dst):
            sent[src, dst] += 1
    with make_buffer(case) as buffer:
        for alignment in (1, 8):
            recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(
                buffer, case, inputs, expert_alignment=alignment
            )
            equal(recv_x, gather_rows(case, rows, [s.x for s in sources]), "recv_x")
            equal(recv_idx, reference.received_topk(rank), "recv_topk_idx")
            equal(recv_weights, expected_weights(case, rank), "recv_topk_weights")
            assert counts == [-(-n // alignment) * alignment for n in reference.tokens_per_expert(rank)]
            saved = tuple(handle)
            check_entries(case, rank, saved, sent.cumsum(0, dtype=torch.int32))

        y = returned(case, rank, rows).to(device)
        combined, weights, _ = buffer.combine(y, saved, recv_weights)
        equal(combined, expected_combine(case, rank), "combined_x")
        equal(buffer.dispatch(inputs.x, saved)[0], recv_x.cpu(), "along the handle's tensors")
        equal(weights, expected_weight_sum(case, rank), "combined_topk_weights")
        bias = row_of(case.seed, rank, 0, 0, case.hidden * case.tokens_of(rank)).view(-1, case.hidden)
        for biases in ((bias,), (bias, bias.neg() * 0.5)):
            on_device = tuple(b.to(device) for b in biases)
            combined, none, _ = buffer.combine(y, handle, bias=on_device[0] if len(biases) == 1 else on_device)
            assert none is None
            equal(combined, expected_combine(case, rank, biases), f"combined_x with {len(biases)} biases")


def check_entries(case: Case, rank: int, entries: tuple[Tensor, ...], sent_up_to: Tensor) -> None:
    """The entries of a handle that have values, by their positions in one domain or between domains."""
    per_domain, reference = case.per_domain, case.reference()
    rows = reference.received(rank)
    if per_domain == case.num_ranks:
        assert len(entries) == 6
        equal(entries[0], sent_up_to, "rank_prefix_matrix")
        equal(entries[3], torch.tensor([token for _, token in rows], dtype=torch.int32), "recv_src_idx")
        return
    assert len(entries) == 10
    equal(entries[-4], sent_up_to[:, rank], "recv_gbl_rank_prefix_sum")
    first = rank // per_domain * per_domain
    here = [set(reference.received(first + i)) for i in range(per_domain)]
    meta = [
        (src // per_domain, sum(1 << i for i in range(per_domain) if (src, token) in here[i])) for src, token in rows
    ]
    equal(entries[7].view(torch.int32), torch.tensor(meta, dtype=torch.int32).view(-1, 2), "recv_src_meta")


def expected_combine(case: Case, rank: int, bias: tuple[Tensor, ...] = ()) -> Tensor:
    return case.reference().combined(
        rank, case.hidden, lambda dst, src, token: row_of(case.seed, dst, src, token, case.hidden), bias
    )


def expected_weight_sum(case: Case, rank: int) -> Tensor:
    """Each weight comes home once; entries without an expert are 0."""
    inputs = case.inputs(rank)
    return torch.where(inputs.topk_idx >= 0, inputs.topk_weights, 0.0)


def check_cached(case: Case, device: str = "cpu") -> None:
    """A handle is used again, for other tokens, several times; and combine still works with it."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows = reference.received(rank)
    with make_buffer(case) as buffer:
        *_, handle, _ = dispatch(buffer, case, inputs)
        for factor in (2.0, -3.0):
            received, *nothing, _ = buffer.dispatch(inputs.x * factor, handle=handle)
            assert nothing == [None] * 4
            sources = [case.inputs(r).x * factor for r in range(case.num_ranks)]
            equal(received, gather_rows(case, rows, sources), "recv_x of a cached dispatch")
        combined, _, _ = buffer.combine(returned(case, rank, rows).to(device), handle)
        equal(combined, expected_combine(case, rank), "combined_x")


def check_bound(case: Case, device: str = "cpu") -> None:
    """`num_worst_tokens`: that many rows, the tail marked; combine takes them; a bound that is too small raises."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows = reference.received(rank)
    bound = max(1, sum(case.tokens_of(r) for r in range(case.num_ranks)))
    with make_buffer(case) as buffer:
        recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(buffer, case, inputs, num_worst_tokens=bound)
        assert (handle[3 if len(handle) == 6 else 7][len(rows) :].view(torch.int32) == -1).all()
        assert counts == []
        assert recv_x.shape == (bound, case.hidden)
        n = len(rows)
        equal(recv_x[:n], gather_rows(case, rows, [case.inputs(r).x for r in range(case.num_ranks)]), "recv_x")
        equal(recv_idx[:n], reference.received_topk(rank), "recv_topk_idx")
        assert bool((recv_idx[n:] == -1).all())
        assert bool((recv_weights[n:] == 0).all())
        y = torch.full((bound, case.hidden), float("nan"), dtype=torch.bfloat16)
        y[:n] = returned(case, rank, rows)
        combined, _, _ = buffer.combine(y.to(device), handle)
        equal(combined, expected_combine(case, rank), "combined_x")
        cached, *_ = buffer.dispatch(inputs.x, handle=handle)
        equal(cached[:n], recv_x[:n].cpu(), "recv_x of a cached dispatch")


@contextlib.contextmanager
def unread_values() -> Iterator[None]:
    """Inside, buffers read no value of a tensor, as with tensors on a GPU."""
    with mock.patch.object(torch.Tensor, "is_cuda", True), mock.patch.object(arguments, "require_expert_indices"):
        yield


def check_fp8(case: Case, device: str = "cpu") -> None:
    """FP8 rows with float32 scales (row- and column-major) and with packed UE8M0 scales; along a handle; bounded."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows = reference.received(rank)
    n, bound = len(rows), max(1, sum(case.tokens_of(r) for r in range(case.num_ranks)))
    with make_buffer(case) as buffer:
        for fmt in (Fp8Format(), Fp8Format(round_scale=True, ue8m0=True)):
            sources = [cast_to_fp8(case.inputs(r).x, fmt) for r in range(case.num_ranks)]
            data, scales = (part.to(device) for part in sources[rank])
            column_major = scales.t().contiguous().t()
            for given in (scales, column_major):
                received, recv_idx, _, _, handle, _ = dispatch(buffer, case, inputs, x=(data, given))
                equal(recv_idx, reference.received_topk(rank), "recv_topk_idx")
                cached, *_ = buffer.dispatch((data, given), handle=handle)
                bounded, *_ = dispatch(buffer, case, inputs, x=(data, given), num_worst_tokens=bound)
                as_bytes = [source[0].view(torch.uint8) for source in sources]
                for recv_x, recv_scales in (received, cached, bounded):
                    equal(recv_x.view(torch.uint8)[:n], gather_rows(case, rows, as_bytes), "recv_x")
                    equal(recv_scales[:n], gather_rows(case, rows, [source[1] for source in sources]), "recv scales")


def check_nvfp4(case: Case, device: str = "cpu") -> None:
    """NVFP4 rows with e4m3 and UE8M0 scales of blocks, row- and column-major, at any byte; along a handle; bounded."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows = reference.received(rank)
    n, bound = len(rows), max(1, sum(case.tokens_of(r) for r in range(case.num_ranks)))
    global_scale = torch.tensor([400.0])
    with make_buffer(case) as buffer:
        for fmt in (Nvfp4Format(), Nvfp4Format(ue8m0=True)):
            sources = [cast_to_nvfp4(case.inputs(r).x, global_scale, fmt) for r in range(case.num_ranks)]
            data, scales, scale = (part.to(device) for part in sources[rank])
            want = gather_rows(case, rows, [source[0] for source in sources])
            want_scales = gather_rows(case, rows, [source[1].view(torch.uint8) for source in sources])
            as_bytes = scales.view(torch.uint8)
            column_major = as_bytes.t().contiguous().t().view(scales.dtype)
            not_at_a_word = torch.cat([as_bytes.new_zeros(1), as_bytes.flatten()])[1:].view(scales.shape)
            for given in (scales, column_major, not_at_a_word.view(scales.dtype)):
                x = data, given, scale
                received, recv_idx, _, _, handle, _ = dispatch(buffer, case, inputs, x=x)
                equal(recv_idx, reference.received_topk(rank), "recv_topk_idx")
                cached, *_ = buffer.dispatch(x, handle=handle)
                bounded, *_ = dispatch(buffer, case, inputs, x=x, num_worst_tokens=bound)
                for recv_x, recv_scales, recv_scale in (received, cached, bounded):
                    equal(recv_x[:n], want, "recv_x")
                    assert recv_scales.dtype == scales.dtype
                    equal(recv_scales[:n].view(torch.uint8), want_scales, "recv scales")
                    assert recv_scale is scale
            # In words, with a scale of each row.
            of_rows = [
                torch.rand(case.tokens_of(r), 1, generator=torch.Generator().manual_seed(r))
                for r in range(case.num_ranks)
            ]
            for scale in (of_rows[rank].to(device), of_rows[rank][:, 0].to(device)):
                x = data.view(torch.int32), as_bytes.view(torch.int32), scale
                recv_x, recv_scales, recv_scale = dispatch(buffer, case, inputs, x=x, num_worst_tokens=bound)[0]
                equal(recv_x[:n].view(torch.uint8), want, "recv_x in words")
                equal(recv_scales[:n].contiguous().view(torch.uint8), want_scales, "recv scales in words")
                assert recv_scale.dim() == scale.dim()
                equal(recv_scale[:n].view(-1, 1), gather_rows(case, rows, of_rows), "recv scale of each row")


def check_two_buffers(case: Case, device: str = "cpu") -> None:
    """Calls on two buffers take turns."""
    rank = dist.get_rank()
    inputs = on(device, case.inputs(rank))
    rows = case.reference().received(rank)
    y = returned(case, rank, rows).to(device)
    with make_buffer(case) as first, make_buffer(case) as second:
        *_, handle_1, _ = dispatch(first, case, inputs)
        *_, handle_2, _ = dispatch(second, case, inputs)
        for buffer, handle in ((first, handle_1), (second, handle_2), (second, handle_1)):
            combined, _, _ = buffer.combine(y, handle)
            equal(combined, expected_combine(case, rank), "combined_x")


# Of one buffer, with rows of every format.
CHECKS_OF_BF16 = [check_round_trip, check_cached, check_bound]
CHECKS = [*CHECKS_OF_BF16, check_fp8, check_nvfp4]
