"""Checks of `ElasticBuffer` and `EPBuffer`: the calls that TorchTitan, vLLM and SGLang make, and every argument.

Each runs on every rank of a group and asserts bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.quantize import Fp8Format, cast_to_fp8, cast_to_nvfp4
from hybrid_ep.testing.reference import Copy
from tests.battery.cases import Case, Inputs, row_of
from tests.battery.hybrid import expected_unpermuted, expert_rows, permuted_rows
from tests.battery.normal import (
    equal,
    expected_combine,
    expected_weight_sum,
    expected_weights,
    gather_rows,
    on,
    returned,
)

ALIGNMENTS = (1, 8)


def make_buffer(case: Case, kind: type[Any] = hybrid_ep.ElasticBuffer, **options: Any) -> Any:
    return kind(
        dist.group.WORLD,
        num_max_tokens_per_rank=case.max_tokens,
        hidden=case.hidden,
        num_topk=case.topk,
        num_ranks_per_domain=case.num_ranks_per_domain,
        **options,
    )


def received_inputs(case: Case, rank: int) -> tuple[list[Tensor], Tensor]:
    """The tokens of all ranks, and what `rank` receives of them."""
    sources = [case.inputs(r).x for r in range(case.num_ranks)]
    return sources, gather_rows(case, case.reference().received(rank), sources)


def rounded(counts: list[int], alignment: int) -> list[int]:
    return [-(-count // alignment) * alignment for count in counts]


def bias_of(case: Case, rank: int) -> Tensor:
    return row_of(case.seed, rank, 0, 0, case.hidden * case.tokens_of(rank)).view(-1, case.hidden)


def expected_psum_of_ranks(case: Case, rank: int) -> list[int]:
    """Running sum of the rows by the rank within a domain that they come from."""
    by_peer = [0] * case.per_domain
    for src, _ in case.reference().received(rank):
        by_peer[src % case.per_domain] += 1
    return torch.tensor(by_peer).cumsum(0).tolist()


def check_handle(case: Case, handle: hybrid_ep.EPHandle, alignment: int, syncs: bool) -> None:
    """What both layouts have in common."""
    rank = dist.get_rank()
    reference = case.reference()
    counts, rows = reference.tokens_per_expert(rank), reference.received(rank)
    assert (handle.num_experts, handle.expert_alignment) == (case.num_experts, alignment)
    assert handle.num_max_tokens_per_rank == case.max_tokens
    assert handle.num_recv_tokens == (len(rows) if syncs else case.max_tokens * case.num_ranks)
    assert handle.num_recv_tokens_per_expert_list == (rounded(counts, alignment) if syncs else [])
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == expected_psum_of_ranks(case, rank)
    assert handle.psum_num_recv_tokens_per_scaleup_rank.is_contiguous()
    metadata = handle.recv_src_metadata
    assert metadata.shape == (handle.num_recv_tokens, case.topk + 2)
    assert metadata[: len(rows), 0].tolist() == [src * case.max_tokens + token for src, token in rows]
    assert metadata[: len(rows), 1].tolist() == list(range(len(rows)))
    assert bool((metadata[len(rows) :] == -1).all())
    slots = handle.dst_buffer_slot_idx.tolist()
    for token, experts in enumerate(case.inputs(rank).topk_idx.tolist()):
        for column, expert in enumerate(experts):
            there = -1
            if expert >= 0:
                there = reference.received(expert // (case.num_experts // case.num_ranks)).index((rank, token))
            assert slots[token][column] == there


def check_compact(
    case: Case, device: str = "cpu", kind: type[Any] = hybrid_ep.ElasticBuffer, *, times: int = 1
) -> None:
    """Rows by source: with and without a host sync, along a handle without and with weights; combine with biases."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    sources, want = received_inputs(case, rank)
    n, stats = want.shape[0], torch.zeros(case.num_experts // case.num_ranks, dtype=torch.int32, device=device)
    y = returned(case, rank, reference.received(rank))
    with make_buffer(case, kind) as buffer:
        assert buffer.get_physical_domain_size() == (case.num_ranks // case.per_domain, case.per_domain)
        for num_calls, (alignment, syncs) in enumerate(((1, True), (8, True), (8, False)) * times, 1):
            received, recv_idx, recv_weights, handle, event = buffer.dispatch(
                inputs.x,
                topk_idx=inputs.topk_idx,
                topk_weights=inputs.topk_weights,
                cumulative_local_expert_recv_stats=stats,
                num_experts=case.num_experts,
                expert_alignment=alignment,
                do_cpu_sync=None if syncs else False,
            )
            assert event.event is None
            assert received.shape[0] == recv_idx.shape[0] == recv_weights.shape[0] == handle.num_recv_tokens
            equal(received[:n], want, "recv_x")
            equal(recv_idx[:n], reference.received_topk(rank), "recv_topk_idx")
            assert bool((recv_idx[n:] == -1).all())
            equal(recv_weights[:n], expected_weights(case, rank), "recv_topk_weights")
            check_handle(case, handle, alignment, syncs)
            counts = reference.tokens_per_expert(rank)
            assert stats.tolist() == [num_calls * count for count in counts]
            ends = torch.tensor(rounded(counts, alignment)).cumsum(0).tolist()
            assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
            assert handle.do_expand is False
            assert handle.num_expanded_tokens == 0

            recv_idx.fill_(77)  # callers write to it
            for factor, weights in ((2.0, None), (0.5, None), (-3.0, inputs.topk_weights * 2)):
                again, idx_again, weights_again, same, _ = buffer.dispatch(
                    inputs.x * factor, topk_weights=weights, handle=handle
                )
                assert same is handle
                scaled = gather_rows(case, reference.received(rank), [x * factor for x in sources])
                equal(again[:n], scaled, "recv_x of a cached dispatch")
                equal(idx_again[:n], reference.received_topk(rank), "recv_topk_idx of a cached dispatch")
                idx_again.fill_(77)
                assert (weights_again is None) == (weights is None)
                if weights is not None:
                    equal(weights_again[:n], expected_weights(case, rank) * 2, "other weights")

            sent = torch.full((received.shape[0], case.hidden), float("nan"), dtype=torch.bfloat16)
            sent[:n] = y
            combined, home, _ = buffer.combine(sent.to(device), handle, recv_weights)
            equal(combined, expected_combine(case, rank), "combined_x")
            equal(home, expected_weight_sum(case, rank), "combined_topk_weights")
        bias = bias_of(case, rank)
        for biases in ((bias,), (bias, bias.neg() * 0.5)):
            placed = tuple(term.to(device) for term in biases)
            combined, none, _ = buffer.combine(sent.to(device), handle, bias=placed if len(placed) > 1 else placed[0])
            assert none is None
            equal(combined, expected_combine(case, rank, biases), f"combined_x with {len(biases)} biases")


def weights_by_expert(case: Case, copies: list[Copy | None]) -> Tensor:
    weights = [0.0 if c is None else case.inputs(c.src_rank).topk_weights[c.token, c.column].item() for c in copies]
    return torch.tensor(weights, dtype=torch.float32)


def dispatch_expanded(buffer: Any, case: Case, inputs: Inputs, alignment: int, syncs: bool) -> Any:
    return buffer.dispatch(
        inputs.x,
        topk_idx=inputs.topk_idx,
        topk_weights=inputs.topk_weights,
        num_experts=case.num_experts,
        num_max_tokens_per_rank=case.max_tokens,
        expert_alignment=alignment,
        do_cpu_sync=syncs,
        do_expand=True,
        do_zero_padding=True,
    )


def check_expanded(
    case: Case, device: str = "cpu", kind: type[Any] = hybrid_ep.ElasticBuffer, *, times: int = 1
) -> None:
    """Rows by expert: likewise; weights and sums of a row each."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    sources, _ = received_inputs(case, rank)
    counts = reference.tokens_per_expert(rank)
    bias = bias_of(case, rank)
    with make_buffer(case, kind) as buffer:
        for alignment in ALIGNMENTS:
            copies = reference.permuted(rank, alignment)
            p = len(copies)
            for syncs in (True, False) * times:
                received, none, recv_weights, handle, _ = dispatch_expanded(buffer, case, inputs, alignment, syncs)
                assert none is None
                assert received.shape[0] == recv_weights.shape[0] == handle.num_expanded_tokens
                assert (received.shape[0] == p) if syncs else (received.shape[0] >= p)
                equal(received[:p], permuted_rows(copies, sources), "recv_x by expert")
                assert not bool(received[p:].view(torch.uint8).any())
                equal(recv_weights[:p], weights_by_expert(case, copies), "recv_topk_weights by expert")
                check_handle(case, handle, alignment, syncs)
                begins = [0, *torch.tensor(rounded(counts, alignment)).cumsum(0).tolist()]
                ends = [begin + count for begin, count in zip(begins, counts, strict=False)]
                assert handle.psum_num_recv_tokens_per_expert.tolist() == ends

                # As DeepEP's own test reads it: which row by expert each column of a row's top-k has.
                places, topk = handle.recv_src_metadata[:, 2:].cpu(), reference.received_topk(rank)
                for row, (src, token) in enumerate(reference.received(rank)):
                    for column, expert in enumerate(topk[row].tolist()):
                        place = int(places[row, column])
                        assert (place >= 0) == (expert >= 0)
                        if place >= 0:
                            copy = copies[place]
                            assert copy is not None
                            local = copy.expert - rank * (case.num_experts // case.num_ranks)
                            assert (copy.src_rank, copy.token, local) == (src, token, expert)

                again, _, weights_again, _, _ = buffer.dispatch(inputs.x * 2, handle=handle, do_expand=True)
                assert weights_again is None
                doubled = permuted_rows(copies, [x * 2 for x in sources])
                equal(again[:p], doubled, "recv_x along the handle")
                again, _, weights_again, same, _ = buffer.dispatch(
                    inputs.x * 2, topk_weights=inputs.topk_weights * 2, handle=handle, do_expand=True
                )
                assert same is handle
                equal(again[:p], doubled, "recv_x with other weights")
                equal(weights_again[:p], weights_by_expert(case, copies) * 2, "other weights by expert")

                sent = torch.full((received.shape[0], case.hidden), float("nan"), dtype=torch.bfloat16)
                sent[:p] = expert_rows(case, copies)
                combined, home, _ = buffer.combine(sent.to(device), handle, recv_weights)
                equal(combined, expected_unpermuted(case, rank), "combined_x by expert")
                equal(home, expected_weight_sum(case, rank), "combined_topk_weights by expert")
                combined, no_weights, _ = buffer.combine(sent.to(device), handle, bias=bias.to(device))
                assert no_weights is None
                equal(combined, expected_unpermuted(case, rank, (bias,)), "combined_x by expert with a bias")


def check_scales(case: Case, device: str = "cpu") -> None:
    """e4m3 rows with opaque 4-byte scales of any width, row-major and as TMA loads them."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows, copies = reference.received(rank), reference.permuted(rank, 8)
    per_128 = [cast_to_fp8(case.inputs(r).x) for r in range(case.num_ranks)]
    ue8m0 = [cast_to_fp8(case.inputs(r).x, Fp8Format(round_scale=True, ue8m0=True)) for r in range(case.num_ranks)]
    # MXFP8: a byte for each 32 channels, four to a word; the words themselves are of no interest here.
    mxfp8 = [
        (data, torch.arange(data.numel() // 128, dtype=torch.int32).view(data.shape[0], -1) * 7919 + r)
        for r, (data, _) in enumerate(per_128)
    ]
    # NVFP4: two channels in a byte, four scales of blocks in a word.
    nvfp4 = []
    for r in range(case.num_ranks):
        packed, blocks, _ = cast_to_nvfp4(case.inputs(r).x, torch.tensor(400.0))
        nvfp4.append((packed, blocks.view(torch.int32)))
    with make_buffer(case, use_fp8_dispatch=True) as buffer:
        for sources in (per_128, ue8m0, mxfp8, nvfp4):
            data = [source[0].view(torch.uint8) for source in sources]
            scales = [source[1] for source in sources]
            x = sources[rank][0].to(device), scales[rank].t().contiguous().t().to(device)
            for column_major in (False, True):
                given = {
                    "topk_idx": inputs.topk_idx,
                    "num_experts": case.num_experts,
                    "use_tma_aligned_col_major_sf": column_major,
                }
                by_source, _, _, handle, _ = buffer.dispatch(x, **given)
                along, *_ = buffer.dispatch(x, handle=handle, use_tma_aligned_col_major_sf=column_major)
                by_expert, *_ = buffer.dispatch(x, **given, do_expand=True, expert_alignment=8)
                for (got, got_scales), want, want_scales in (
                    (by_source, gather_rows(case, rows, data), gather_rows(case, rows, scales)),
                    (along, gather_rows(case, rows, data), gather_rows(case, rows, scales)),
                    (by_expert, permuted_rows(copies, data), permuted_rows(copies, scales)),
                ):
                    assert got.dtype == x[0].dtype
                    equal(got.view(torch.uint8), want, "recv_x")
                    equal(got_scales, want_scales, "scales")
                    strides = (1, -(-got.shape[0] // 4) * 4) if column_major else (got_scales.shape[1], 1)
                    assert got_scales.stride() == strides or got.shape[0] == 0


def check_gradients(case: Case, device: str = "cpu") -> None:
    """TorchTitan's training step: the backward of dispatch is combine, with the gradients of scores; and vice versa."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows = reference.received(rank)
    group, sizes = dist.group.WORLD, (case.max_tokens, case.hidden)
    hint = hybrid_ep.ElasticBuffer.get_buffer_size_hint(group, *sizes, num_topk=case.topk, use_fp8_dispatch=False)
    with make_buffer(case, num_bytes=hint, explicitly_destroy=True) as buffer:
        assert buffer.group == group
        assert buffer.num_bytes >= hint
        num_sms = buffer.get_theoretical_num_sms(case.num_experts, case.topk)
        _, recv_idx, recv_scores, handle, _ = buffer.dispatch(
            inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=case.max_tokens,
            num_sms=num_sms,
            do_expand=False,
            do_cpu_sync=True,
        )
        assert handle.num_sms == num_sms
        mask = recv_idx != -1
        assert handle.num_recv_tokens_per_expert_list == recv_idx[mask].bincount(
            minlength=case.num_experts // case.num_ranks
        ).tolist()  # fmt: skip
        y = returned(case, rank, rows).to(device)
        combined, _, event = buffer.combine(y, handle=handle, topk_weights=None, async_with_compute_stream=True)
        event.current_stream_wait()
        equal(combined, expected_combine(case, rank), "combined_x")
        grad_y, _, _, _, _ = buffer.dispatch(inputs.x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
        equal(grad_y, received_inputs(case, rank)[1], "gradient of combine")
        grad_x, grad_scores, _ = buffer.combine(y, handle=handle, topk_weights=recv_scores.float())
        equal(grad_x, expected_combine(case, rank), "gradient of dispatch")
        equal(grad_scores, expected_weight_sum(case, rank), "gradient of the scores")


def check_other_values(case: Case, device: str = "cpu", kind: type[Any] = hybrid_ep.ElasticBuffer) -> None:
    """Calls of both layouts, three times through one buffer."""
    check_compact(case, device, kind, times=3)
    check_expanded(case, device, kind, times=3)


def check_masked_decode(case: Case, device: str = "cpu") -> None:
    """Decode steps: vLLM's (rows by source, M a power of two) and SGLang's (by expert); no host sync in either."""
    rank = dist.get_rank()
    reference, inputs = case.reference(), on(device, case.inputs(rank))
    rows, copies = reference.received(rank), reference.permuted(rank, 128)
    most = 1 << (case.max_tokens - 1).bit_length()
    num_local = case.num_experts // case.num_ranks
    with make_buffer(case, prefer_overlap_with_compute=False, sl_idx=0, allow_hybrid_mode=False) as buffer:
        received, recv_idx, _, handle, event = buffer.dispatch(
            x=inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=most,
            do_expand=False,
            do_cpu_sync=False,
            async_with_compute_stream=False,
        )
        assert event.event is None
        assert received.shape[0] == most * case.num_ranks
        assert handle.psum_num_recv_tokens_per_scaleup_rank.shape == (case.num_ranks,)
        num_recv = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        assert num_recv == len(rows)
        # It makes the local experts global ones, in place.
        is_real = (recv_idx >= 0) & (torch.arange(recv_idx.shape[0], device=recv_idx.device) < num_recv).unsqueeze(1)
        recv_idx.copy_(torch.where(is_real, recv_idx + rank * num_local, -1))
        y = torch.zeros_like(received)
        y[:num_recv] = returned(case, rank, rows).to(device)
        combined, _, event = buffer.combine(
            x=y, handle=handle, topk_weights=None, async_with_compute_stream=True, allocate_on_comm_stream=True
        )
        event.current_stream_wait()
        equal(combined, expected_combine(case, rank), "combined_x of a decode step")

        num_sms = buffer.get_theoretical_num_sms(case.num_experts, case.topk)
        num_qps = buffer.get_theoretical_num_qps(num_sms)
        received, none, weights, handle, _ = buffer.dispatch(
            inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=case.max_tokens,
            expert_alignment=128,
            num_sms=num_sms,
            num_qps=num_qps,
            use_tma_aligned_col_major_sf=False,
            do_cpu_sync=False,
            do_expand=True,
        )
        assert none is None
        ends = handle.psum_num_recv_tokens_per_expert.tolist()
        begins = [0, *(-(-end // 128) * 128 for end in ends)]
        counts = [end - begin for begin, end in zip(begins, ends, strict=False)]
        assert counts == reference.tokens_per_expert(rank)
        y = torch.zeros_like(received)
        y[: len(copies)] = expert_rows(case, copies).to(device).nan_to_num()
        combined, _, _ = buffer.combine(y, handle=handle, topk_weights=None, num_sms=num_sms, num_qps=num_qps)
        equal(combined, expected_unpermuted(case, rank), "combined_x of a decode step by expert")
        equal(weights[: len(copies)], weights_by_expert(case, copies), "weights by expert")


def check_streams(case: Case, device: str = "cpu") -> None:
    """Events in either form, waited for by name, by a block, by a call and by a hook."""
    rank = dist.get_rank()
    inputs, reference = on(device, case.inputs(rank)), case.reference()
    y = returned(case, rank, reference.received(rank)).to(device)
    _, want = received_inputs(case, rank)
    with make_buffer(case) as buffer:
        for previous in (buffer.capture(), hybrid_ep.EventOverlap(buffer.capture()), None):
            received, _, _, handle, event = buffer.dispatch(
                inputs.x,
                topk_idx=inputs.topk_idx,
                num_experts=case.num_experts,
                previous_event=previous,
                previous_event_before_epilogue=buffer.capture(),
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
            )
            with event(release_handle=True):
                pass
            assert event.event is None
            equal(received, want, "recv_x")
            combined, _, event = buffer.combine(
                y,
                handle,
                previous_event=previous,
                previous_event_before_epilogue=buffer.capture(),
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
            )
            event.register_hook_after_wait(lambda: "done")
            assert event.current_stream_wait(release_handle=True) == "done"
            equal(combined, expected_combine(case, rank), "combined_x")
        buffer.barrier(use_comm_stream=False, with_cpu_sync=True)


def check_deferred(case: Case, device: str = "cpu") -> None:
    """DeepEP 2.5's deferred epilogues: the event gives the results."""
    rank = dist.get_rank()
    inputs, reference = on(device, case.inputs(rank)), case.reference()
    y = returned(case, rank, reference.received(rank)).to(device)
    with make_buffer(case, hybrid_ep.EPBuffer) as buffer:
        event = buffer.dispatch(
            inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=case.num_experts,
            async_with_compute_stream=True,
            defer_epilogue=True,
        )
        received, recv_idx, _, handle = event.current_stream_wait()
        assert handle.topk_idx.data_ptr() == inputs.topk_idx.data_ptr()
        equal(received, received_inputs(case, rank)[1], "recv_x")
        equal(recv_idx, reference.received_topk(rank), "recv_topk_idx")
        event = buffer.combine(y, handle, async_with_compute_stream=True, defer_epilogue=True)
        combined, none = event.wait()
        assert none is None
        equal(combined, expected_combine(case, rank), "combined_x")


def check_other_most_tokens(case: Case, device: str = "cpu") -> None:
    """One rank allows more tokens of a rank than the others: every rank is told, whatever the call waits for."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs, most = on(device, case.inputs(rank)), case.max_tokens
    with make_buffer(case) as buffer:

        def call(most: int, **options: Any) -> Any:
            made = buffer.dispatch(
                inputs.x,
                topk_idx=inputs.topk_idx,
                num_experts=case.num_experts,
                num_max_tokens_per_rank=most,
                **options,
            )
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.raise_pending()
            return made

        for do_expand in (False, True):
            for do_cpu_sync in (True, False):
                with pytest.raises(
                    hybrid_ep.ConfigError, match=r"^num_max_tokens_per_rank is .*; allowed: the same on every"
                ):
                    call(most + 5 * (rank == last), do_expand=do_expand, do_cpu_sync=do_cpu_sync)
        received, *_ = call(most)
        equal(received, received_inputs(case, rank)[1], "recv_x of the next call")


def check_other_handles(case: Case, device: str = "cpu") -> None:
    """One rank dispatches with weights along another handle: every rank is told, whatever the call waits for."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs = on(device, case.inputs(rank))
    with make_buffer(case) as buffer:

        def along(handle: hybrid_ep.EPHandle) -> Tensor:
            received, *_ = buffer.dispatch(
                inputs.x, topk_weights=inputs.topk_weights, handle=handle, do_expand=handle.do_expand
            )
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.raise_pending()
            return received  # type: ignore[no-any-return]

        for do_expand in (False, True):
            for do_cpu_sync in (True, False):
                options = {"num_experts": case.num_experts, "do_expand": do_expand, "do_cpu_sync": do_cpu_sync}
                first = buffer.dispatch(inputs.x, topk_idx=inputs.topk_idx, **options)[3]
                second = buffer.dispatch(inputs.x, topk_idx=inputs.topk_idx.flip(0), **options)[3]
                with pytest.raises(
                    hybrid_ep.ConfigError, match=r"^number of the handle's dispatch is .*; allowed: the same on every"
                ):
                    along(second if rank == last else first)
                received = along(first)
                if not do_expand:
                    want = received_inputs(case, rank)[1]
                    equal(received[: want.shape[0]], want, "recv_x of the next call")


def check_too_many_tokens(case: Case, device: str = "cpu") -> None:
    """One rank has more tokens than the call allows: every rank is told, whatever the call waits for, and goes on."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    inputs, most = on(device, case.inputs(rank)), case.max_tokens
    num_tokens = most + 3 if rank == num_ranks - 1 else inputs.x.shape[0]
    x = torch.ones(num_tokens, case.hidden, dtype=torch.bfloat16, device=device)
    topk_idx = torch.zeros(num_tokens, case.topk, dtype=torch.int64, device=device)
    told = rf"rows of x is {most + 3} at rank {num_ranks - 1}; allowed: ≤ num_max_tokens_per_rank = {most}$"
    with make_buffer(case) as buffer:
        for do_expand in (False, True):
            for do_cpu_sync in (True, False):
                options = {"num_experts": case.num_experts, "do_expand": do_expand, "do_cpu_sync": do_cpu_sync}

                def call(given: Tensor, experts: Tensor, options: dict[str, Any] = options) -> Tensor:
                    received, *_ = buffer.dispatch(given, topk_idx=experts, **options)
                    if device == "cuda":
                        torch.cuda.synchronize()
                    buffer.raise_pending()
                    return received  # type: ignore[no-any-return]

                with pytest.raises(hybrid_ep.ConfigError, match=told):
                    call(x, topk_idx)
                received = call(inputs.x, inputs.topk_idx)
                if not do_expand:
                    want = received_inputs(case, rank)[1]
                    equal(received[: want.shape[0]], want, "recv_x of the next call")
