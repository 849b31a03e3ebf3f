"""Checks of `HybridEPBuffer`. Each runs on every rank of a group and asserts bit for bit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.checks import MAX_TOPK
from hybrid_ep.core.layout import indices_to_map
from hybrid_ep.quantize import cast_to_fp8
from hybrid_ep.testing.reference import Copy
from tests.battery.cases import Case, expert_row, row_of
from tests.battery.normal import equal, gather_rows, on, returned
from tests.battery.refused_calls import TIMEOUT_S


def make_buffer(case: Case, **options: Any) -> hybrid_ep.HybridEPBuffer:
    return hybrid_ep.HybridEPBuffer(
        dist.group.WORLD,
        case.hidden,
        case.max_tokens,
        case.num_experts // case.num_ranks,
        num_of_hybrid_ep_ranks_per_nvlink_domain=case.num_ranks_per_domain,
        **options,
    )


def routings(case: Case, device: str) -> list[tuple[dict[str, Any], Case]]:
    """The same routing as indices, up to 32 for a token, and as a map, and the case that each of them is."""
    inputs = on(device, case.inputs(dist.get_rank()))
    routing_map, probs = indices_to_map(
        inputs.topk_idx, inputs.topk_weights, inputs.topk_idx.shape[0], case.num_experts
    )
    as_map = ({"routing_map": routing_map, "probs": probs}, case.as_map())
    if case.topk > MAX_TOPK:
        return [as_map]
    as_indices = {"topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights, "num_of_experts": case.num_experts}
    return [(as_indices, case), as_map]


def probs_of(case: Case, rank: int) -> Tensor:
    """``[T, E]`` of any rank."""
    inputs = case.inputs(rank)
    _, probs = indices_to_map(inputs.topk_idx, inputs.topk_weights, inputs.topk_idx.shape[0], case.num_experts)
    assert probs is not None
    return probs


def check_plain(case: Case, device: str = "cpu", *, times: int = 1) -> None:
    """Dispatch and combine without permutation, by indices and by map, then with a cached handle; several times."""
    rank = dist.get_rank()
    inputs, reference = on(device, case.inputs(rank)), case.reference()
    rows = reference.received(rank)
    num_local = case.num_experts // case.num_ranks
    domain = rank // case.per_domain
    first, size = domain * case.per_domain * num_local, case.per_domain * num_local
    sources = [case.inputs(r).x for r in range(case.num_ranks)]
    all_probs = [probs_of(case, r)[:, first : first + size] for r in range(case.num_ranks)]
    maps = [
        indices_to_map(i.topk_idx, None, len(i.x), case.num_experts)[0] for i in map(case.inputs, range(case.num_ranks))
    ]
    with make_buffer(case) as buffer:
        for routing, _ in routings(case, device) * times:
            hidden, probs, scales, handle = buffer.dispatch(inputs.x, **routing)
            assert scales is None
            equal(hidden, gather_rows(case, rows, sources), "hidden")
            equal(probs, gather_rows(case, rows, all_probs), "probs")
            own_experts = slice(rank * num_local - first, (rank + 1) * num_local - first)
            named = gather_rows(case, rows, [chosen[:, first : first + size] for chosen in maps])
            equal(handle[4], named[:, own_experts], "routing map of local experts")
            assert int(handle[3]) == len(rows)
            again, no_probs, _, _ = buffer.dispatch(inputs.x * 2, handle=handle)
            assert no_probs is None
            given = {name: routing[name] for name in ("topk_weights", "probs") if name in routing}
            doubled, probs_again, _, same = buffer.dispatch(inputs.x * 2, handle=handle, **given)
            twice = gather_rows(case, rows, [s * 2 for s in sources])
            equal(again, twice, "hidden of a cached dispatch")
            equal(doubled, twice, "hidden with weights")
            equal(probs_again, gather_rows(case, rows, all_probs), "probs along a handle")
            assert same is handle

            # With a bound that leaves rows free, where all ranks can send more.
            bound = min(len(rows) + 3, case.max_tokens * case.num_ranks)
            bounded, free_probs, _, _ = buffer.dispatch(inputs.x, **routing, num_dispatched_tokens=bound)
            equal(bounded[: len(rows)], hidden.cpu(), "hidden within a bound")
            equal(
                free_probs, torch.cat([probs, probs.new_zeros(bound - len(rows), size)]).cpu(), "probs within a bound"
            )

            # Each rank sends home the probabilities of its own experts, as a training step does.
            own = torch.zeros_like(probs)
            begin = rank * num_local - first
            own[:, begin : begin + num_local] = probs[:, begin : begin + num_local]
            combined, probs_home = buffer.combine(returned(case, rank, rows).to(device), own, handle)
            want = reference.combined(
                rank, case.hidden, lambda dst, src, token: row_of(case.seed, dst, src, token, case.hidden)
            )
            equal(combined, want, "combined hidden")
            equal(probs_home, probs_of(case, rank), "combined probs")


def permuted_rows(copies: list[Copy | None], tensors: list[Tensor]) -> Tensor:
    """Rows of per-rank tensors in permuted order, zero where a pad stands."""
    if not copies:
        return tensors[0][:0]
    zero = torch.zeros(tensors[0].shape[1:], dtype=tensors[0].dtype)
    return torch.stack([zero if c is None else tensors[c.src_rank][c.token] for c in copies])


def expert_rows(case: Case, copies: list[Copy | None]) -> Tensor:
    """What the experts return, pads poisoned: they must not be read."""
    poison = torch.full((case.hidden,), float("nan"), dtype=torch.bfloat16)
    rows = [poison if c is None else expert_row(case, c) for c in copies]
    return torch.stack(rows) if rows else torch.empty(0, case.hidden, dtype=torch.bfloat16)


def expected_unpermuted(
    case: Case, rank: int, bias: tuple[Tensor, ...] = (), dropped: Collection[Copy | None] = ()
) -> Tensor:
    """Copies on one rank are summed by expert, then column, and rounded once; then as a plain combine.

    Copies in `dropped` count as zero.
    """
    reference = case.reference()
    num_local = case.num_experts // case.num_ranks

    def row(dst: int, src: int, token: int) -> Tensor:
        named = reference.topk_idx[src][token].tolist()
        total = torch.zeros(case.hidden)
        for expert in range(dst * num_local, (dst + 1) * num_local):
            for column in (k for k, other in enumerate(named) if other == expert):
                copy = Copy(src, token, column, expert)
                if copy not in dropped:
                    total += expert_row(case, copy).float()
        return total.to(torch.bfloat16)

    return reference.combined(rank, case.hidden, row, bias)


def check_permuted(case: Case, device: str = "cpu", *, fp8: bool = False, times: int = 1, **options: Any) -> None:
    """Permute-fused dispatch and combine, with and without pads, blocking and not; each call several times."""
    rank = dist.get_rank()
    sources = [cast_to_fp8(case.inputs(r).x) if fp8 else (case.inputs(r).x, None) for r in range(case.num_ranks)]
    data, scale = sources[rank]
    given = {"hidden": data.view(torch.uint8).to(device) if fp8 else data.to(device)}
    if fp8:
        assert scale is not None
        given["scaling_factor"] = scale.to(device)
    with make_buffer(case, use_fp8=fp8, **options) as buffer:
        for routing, routed in routings(case, device):
            reference, want_combined = routed.reference(), expected_unpermuted(routed, rank)
            weights = [routed.inputs(r).topk_weights for r in range(case.num_ranks)]
            for pad in (None, 16):
                copies = reference.permuted(rank, pad or 1)
                want_probs = [0.0 if c is None else weights[c.src_rank][c.token, c.column] for c in copies]
                for non_blocking in (False,) * times + (True,) * times:
                    bound = len(copies) + 5 if non_blocking else None
                    hidden, probs, scales, counts, handle = buffer.dispatch_with_permute(
                        **given, **routing, pad_multiple=pad, num_permuted_tokens=bound, non_blocking=non_blocking
                    )
                    n = len(copies)
                    assert hidden.shape[0] == (n if bound is None else bound)
                    want = permuted_rows(copies, [s[0].view(torch.uint8) if fp8 else s[0] for s in sources])
                    equal(hidden[:n], want, "permuted hidden")
                    if fp8:
                        equal(scales[:n], permuted_rows(copies, [s[1] for s in sources]), "permuted scales")
                    # Rows after the last are undefined; their probs are not.
                    want_probs_of_bound = torch.tensor(want_probs + [0.0] * (len(probs) - n), dtype=torch.float32)
                    equal(probs, want_probs_of_bound, "permuted probs")
                    experts = reference.tokens_per_expert(rank)
                    assert counts.tolist() == [-(-e // (pad or 1)) * (pad or 1) for e in experts]
                    assert int(handle[-1].item()) == 0

                    y = torch.full((hidden.shape[0], case.hidden), float("nan"), dtype=torch.bfloat16)
                    y[:n] = expert_rows(case, copies)
                    again, _, again_scales, _, _ = buffer.dispatch_with_permute(**given, handle=handle)
                    equal(again.view(torch.uint8)[:n], hidden.view(torch.uint8)[:n].cpu(), "hidden along the handle")
                    if fp8:
                        equal(again_scales[:n], scales[:n].cpu(), "scales along the handle")
                    combined, probs_home = buffer.combine_with_unpermute(
                        hidden=y.to(device), probs=probs, handle=handle, pad_multiple=pad
                    )
                    equal(combined, want_combined, "combined hidden")
                    equal(probs_home, probs_of(case, rank), "combined probs")


def check_again(case: Case, device: str = "cpu") -> None:
    """`check_plain`, and `check_permuted` of bf16 and of FP8 rows, each with every call made three times."""
    check_plain(case, device, times=3)
    for fp8 in False, True:
        check_permuted(case, device, fp8=fp8, times=3)


def check_sms(case: Case, device: str = "cpu") -> None:
    """Results are the same for every number of SMs."""
    for dispatch, combine, permute, unpermute in ((1, 1, 1, 1), (2, 3, 1000, 7), (24, 2, 3, 1000)):
        check_permuted(
            case,
            device,
            num_sms_dispatch_api=dispatch,
            num_sms_combine_api=combine,
            num_blocks_permute=permute,
            num_blocks_unpermute=unpermute,
        )


def check_permuted_cached(case: Case, device: str = "cpu") -> None:
    """The handle of a permuted dispatch carries other tokens along the same routes."""
    rank = dist.get_rank()
    copies = case.reference().permuted(rank, 8)
    inputs = on(device, case.inputs(rank))
    with make_buffer(case) as buffer:
        routing, _ = routings(case, device)[0]
        *_, handle = buffer.dispatch_with_permute(hidden=inputs.x, **routing, pad_multiple=8)
        hidden, no_probs, _, _, _ = buffer.dispatch_with_permute(hidden=inputs.x * 2, handle=handle)
        assert no_probs is None
        tokens = [case.inputs(r).x * 2 for r in range(case.num_ranks)]
        equal(hidden, permuted_rows(copies, tokens), "permuted hidden")
        # With weights of its own, as indices and as a map have them.
        halved = [0 if c is None else case.inputs(c.src_rank).topk_weights[c.token, c.column] / 2 for c in copies]
        probs_in = probs_of(case, rank).to(device) / 2
        # Of the columns of an expert, the first has what is dense.
        merged = [case.as_map().inputs(r) for r in range(case.num_ranks)]
        kept = [torch.where(m.topk_idx >= 0, m.topk_weights / 2, 0.0) for m in merged]
        dense = [0 if c is None else kept[c.src_rank][c.token, c.column] for c in copies]
        for given, want in (({"topk_weights": inputs.topk_weights / 2}, halved), ({"probs": probs_in}, dense)):
            again = buffer.dispatch_with_permute(hidden=inputs.x * 2, handle=handle, **given)
            equal(again[0], permuted_rows(copies, tokens), "permuted hidden with weights")
            assert again[1] is not None
            equal(again[1], torch.tensor(want, dtype=torch.float32), "permuted probs")
            assert again[4] is handle


def check_overflow(case: Case, device: str = "cpu") -> None:
    """A bound that is too small sets the flag (non-blocking), or every rank raises; what fits is still right.

    What does not fit counts as zero in the combine.
    """
    rank = dist.get_rank()
    copies = case.reference().permuted(rank)
    bound = max(0, len(copies) - 3)
    inputs = on(device, case.inputs(rank))
    with make_buffer(case) as buffer:
        given = {"hidden": inputs.x, **routings(case, device)[0][0], "num_permuted_tokens": bound}
        hidden, _, _, _, handle = buffer.dispatch_with_permute(**given, non_blocking=True)
        assert handle[-1].item() == any(len(case.reference().permuted(r)) > 0 for r in range(case.num_ranks))
        equal(
            hidden, permuted_rows(copies[:bound], [case.inputs(r).x for r in range(case.num_ranks)]), "permuted hidden"
        )
        combined, _ = buffer.combine_with_unpermute(hidden=expert_rows(case, copies[:bound]).to(device), handle=handle)
        of_ranks = [case.reference().permuted(r) for r in range(case.num_ranks)]
        dropped = {copy for of_rank in of_ranks for copy in of_rank[max(0, len(of_rank) - 3) :]}
        equal(combined, expected_unpermuted(case, rank, dropped=dropped), "combined hidden without the dropped rows")
        # Blocking, with too few rows at one rank.
        num_rows = [len(case.reference().permuted(r)) for r in range(case.num_ranks)]
        full = max(range(case.num_ranks), key=num_rows.__getitem__)
        if num_rows[full] == 0:
            return
        given["num_permuted_tokens"] = num_rows[rank] - (rank == full)
        with pytest.raises(
            hybrid_ep.OverflowError, match=rf"at rank {full}; allowed by the bound: {num_rows[full] - 1}$"
        ):
            buffer.dispatch_with_permute(**given)
        given["num_permuted_tokens"] = num_rows[rank]
        hidden, *_ = buffer.dispatch_with_permute(**given)
        equal(hidden, permuted_rows(copies, [case.inputs(r).x for r in range(case.num_ranks)]), "after an overflow")


def check_overflow_of_a_map(case: Case, device: str = "cpu") -> None:
    """More rows than one rank has room for, along a map: every rank is told, at once, and goes on."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    inputs = on(device, case.inputs(rank))
    _, (along_map, as_map) = routings(case, device)
    expected = as_map.reference()
    full = max(range(num_ranks), key=lambda r: len(expected.received(r)))
    num_rows = [len(expected.received(r)) for r in range(num_ranks)]
    bound = num_rows[rank] - (rank == full)
    with make_buffer(case, timeout_s=TIMEOUT_S) as buffer:

        def call(bound: int) -> Tensor:
            rows, *_ = buffer.dispatch(inputs.x, **along_map, num_dispatched_tokens=bound)
            if device == "cuda":
                torch.cuda.synchronize()
            buffer.raise_pending()
            return rows  # type: ignore[no-any-return]

        with pytest.raises(
            hybrid_ep.OverflowError, match=rf"at rank {full}; allowed by the bound: {num_rows[full] - 1}$"
        ):
            call(bound)
        dist.barrier()
        assert len(call(num_rows[rank])) == num_rows[rank]


def check_two_buffers(case: Case, device: str = "cpu") -> None:
    """A handle serves another buffer of the same ranks."""
    rank = dist.get_rank()
    y = expert_rows(case, case.reference().permuted(rank)).to(device)
    inputs = on(device, case.inputs(rank))
    with make_buffer(case) as first, make_buffer(case) as second:
        *_, handle = first.dispatch_with_permute(hidden=inputs.x, **routings(case, device)[0][0])
        # In turns with other rows: sums of the call before must not be taken for those of this one.
        for buffer, sign in ((first, 1), (second, -1), (second, 1), (first, -1)):
            combined, _ = buffer.combine_with_unpermute(hidden=sign * y, handle=handle)
            equal(combined, sign * expected_unpermuted(case, rank), "combined hidden")


def _sum_of_parts(case: Case, rank: int) -> Tensor:
    """What combine makes of tokens with many experts: a sum for each 32 of them, rounded, and then the sum of these."""
    inputs, num_local = case.inputs(rank), case.num_experts // case.num_ranks
    result = torch.zeros(inputs.x.shape, dtype=torch.bfloat16)
    for token, named in enumerate(inputs.topk_idx.tolist()):
        experts = sorted((expert, column) for column, expert in enumerate(named) if expert >= 0)
        whole = torch.zeros(case.hidden)
        for first in range(0, len(experts), MAX_TOPK):
            part = torch.zeros(case.hidden)
            for domain in range(0, case.num_ranks, case.per_domain):
                in_domain = torch.zeros(case.hidden)
                for owner in range(domain, domain + case.per_domain):
                    on_rank = torch.zeros(case.hidden)
                    for expert, column in experts[first : first + MAX_TOPK]:
                        if expert // num_local == owner:
                            on_rank += expert_row(case, Copy(rank, token, column, expert)).float()
                    in_domain += on_rank.to(torch.bfloat16).float()
                part += in_domain.to(torch.bfloat16).float() if case.per_domain < case.num_ranks else in_domain
            whole += part.to(torch.bfloat16).float()
        result[token] = whole.to(torch.bfloat16)
    return result


def check_wide(case: Case, device: str = "cpu") -> None:
    """A dense map with more than 32 experts of a token: blocking, not blocking, along a handle; then the next call."""
    rank = dist.get_rank()
    inputs, reference = on(device, case.inputs(rank)), case.reference()
    num_tokens, tokens = inputs.x.shape[0], [case.inputs(r).x for r in range(case.num_ranks)]
    routing_map, probs = indices_to_map(inputs.topk_idx, inputs.topk_weights, num_tokens, case.num_experts)
    copies = reference.permuted(rank, 8)
    want_probs = [0 if c is None else case.inputs(c.src_rank).topk_weights[c.token, c.column] for c in copies]
    y = torch.full((len(copies), case.hidden), float("nan"), dtype=torch.bfloat16)
    y[:] = expert_rows(case, copies)
    with make_buffer(case, max_experts_per_token=case.topk) as buffer:
        for non_blocking in (False, True):
            given = {"routing_map": routing_map, "probs": probs}
            hidden, row_probs, _, counts, handle = buffer.dispatch_with_permute(
                hidden=inputs.x,
                **given,
                pad_multiple=8,
                num_permuted_tokens=len(copies) if non_blocking else None,
                non_blocking=non_blocking,
            )
            assert counts.tolist() == [-(-e // 8) * 8 for e in reference.tokens_per_expert(rank)]
            assert handle.num_of_tokens_per_rank == num_tokens
            assert int(handle[-1].item()) == 0
            equal(hidden, permuted_rows(copies, tokens), "permuted hidden")
            equal(row_probs, torch.tensor(want_probs, dtype=torch.float32), "permuted probs")
            combined, probs_home = buffer.combine_with_unpermute(hidden=y.to(device), probs=row_probs, handle=handle)
            equal(combined, _sum_of_parts(case, rank), "combined hidden")
            equal(probs_home, probs_of(case, rank), "combined probs")
            again, again_probs, *_ = buffer.dispatch_with_permute(hidden=2 * inputs.x, handle=handle, **given)
            equal(again, permuted_rows(copies, [2 * x for x in tokens]), "hidden along the handle")
            equal(again_probs, torch.tensor(want_probs, dtype=torch.float32), "probs along the handle")
        narrow = case.inputs(rank).topk_idx[:, :2].to(device)
        _, _, _, counts, _ = buffer.dispatch_with_permute(
            hidden=inputs.x, topk_idx=narrow, num_of_experts=case.num_experts
        )
        first, num_local = rank * case.num_experts // case.num_ranks, case.num_experts // case.num_ranks
        chosen = torch.cat([case.inputs(r).topk_idx[:, :2].flatten() for r in range(case.num_ranks)])
        assert counts.tolist() == torch.bincount(chosen, minlength=case.num_experts)[first : first + num_local].tolist()
