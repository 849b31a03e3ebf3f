"""Calls of `HybridEPBuffer` and of `ElasticBuffer` that repeat an earlier one: see repeated_calls.py."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import ConfigError, quantize
from tests.battery import elastic, hybrid
from tests.battery.cases import Case
from tests.battery.normal import equal, unread_values
from tests.emulation.engine import local_kernels
from tests.emulation.repeated_calls import on_stream

__all__ = ["check_elastic_calls", "check_fields_of_handles", "check_permuted_calls", "check_plain_calls"]


def _steps(stack: contextlib.ExitStack, engine: Any, *names: str) -> Callable[[], list[int]]:
    """Returns a function that says how often each of these methods of an engine was called since it was last asked."""
    spies = [stack.enter_context(mock.patch.object(engine, name, wraps=getattr(engine, name))) for name in names]

    def taken() -> list[int]:
        counts = [spy.call_count for spy in spies]
        for spy in spies:
            spy.reset_mock()
        return counts

    return taken


def check_permuted_calls() -> None:
    """Calls that permute are one call of C++, of any form of rows. They take steps where one call cannot make them."""
    from hybrid_ep.engine.cuda.route import Chunk

    case = Case("permuted", dist.get_world_size(), 12, hidden=256)
    inputs, rank, bound = case.inputs(dist.get_rank()), dist.get_rank(), 40 * case.num_ranks
    sent, scales = quantize.cast_to_fp8(inputs.x)
    want = hybrid.expected_unpermuted(case, rank)
    copies = case.reference().permuted(rank, 4)
    y = torch.zeros(bound, case.hidden, dtype=torch.bfloat16)
    y[: len(copies)] = hybrid.expert_rows(case, copies)
    with unread_values(), hybrid.make_buffer(case) as buffer, contextlib.ExitStack() as stack:
        engine: Any = buffer.engine
        taken = _steps(stack, engine, "dispatch_permuted", "dispatch_permuted_cached", "combine_permuted")

        def dispatch(**options: Any) -> tuple[Any, ...]:
            given = {"hidden": inputs.x, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
            options = {"num_of_experts": case.num_experts, "pad_multiple": 4} | given | options
            return buffer.dispatch_with_permute(**options)

        def step(*, is_bounded: bool, **form: Any) -> tuple[Any, ...]:
            limit = {"num_permuted_tokens": bound, "non_blocking": True} if is_bounded else {}
            rows, probs, row_scales, counts, handle = dispatch(**form, **limit)
            along = buffer.dispatch_with_permute(
                hidden=form.get("hidden", inputs.x), scaling_factor=form.get("scaling_factor"), handle=handle
            )
            n = len(copies)
            for mine, again in (rows, along[0]), (row_scales, along[2]):
                if mine is not None:
                    equal(again[:n].view(torch.uint8), mine[:n].view(torch.uint8), "along the handle")
            assert (along[1], along[3], along[4]) == (None, counts, handle)
            combined, dense = buffer.combine_with_unpermute(hidden=y[: len(rows)], probs=probs, handle=handle)
            equal(combined, want, "combined hidden")
            assert counts.dtype == torch.int64
            facts = [
                None if t is None else (t.shape, t.dtype, t.stride(), t.device)
                for t in (rows, probs, row_scales, counts, dense, along[0], along[2])
            ]
            return *facts, handle[0].tolist(), handle[9], len(handle), counts.tolist()

        forms: list[dict[str, Any]] = [
            {},
            {"topk_weights": None},
            {"hidden": sent, "scaling_factor": scales},
            {"hidden": sent.view(torch.uint8), "scaling_factor": scales},
        ]
        for form in forms:
            for is_bounded in (False, True):
                facts = step(is_bounded=is_bounded, **form)
                assert taken()[0] == 1  # the others may be like those of an earlier form
                for _ in range(2):
                    assert step(is_bounded=is_bounded, **form) == facts
                assert taken() == [0, 0, 0]
        # The rest is left to steps: scales of bf16 rows, scales by columns, and calls that wait for the rows.
        for form in (
            {"scaling_factor": scales},
            {"hidden": sent, "scaling_factor": scales.t().contiguous().t()},
            {"num_permuted_tokens": bound},
        ):
            for _ in range(2):
                dispatch(**form)
            assert taken()[0] == 2
        # Another routing than that of the handle, although its tensors are alike.
        overwritten = inputs.topk_idx.clone()
        handle = dispatch(topk_idx=overwritten)[4]
        overwritten.fill_(-1)
        assert handle[0].tolist() == inputs.topk_idx.tolist()
        taken()

        with on_stream(1), mock.patch.object(Chunk, "note_use") as note_use:
            buffer.dispatch_with_permute(hidden=inputs.x, handle=handle)
            buffer.combine_with_unpermute(hidden=y[: handle.num_permuted], handle=handle)
        assert (taken(), note_use.call_count) == ([0, 1, 1], 4)
        held = [dispatch()[0] for _ in range(4)]  # more than there are slots
        assert taken()[0] > 0
        del held
        wrong = inputs.topk_idx.clone()
        wrong[0, 0] = case.num_experts
        dispatch(topk_idx=wrong, num_permuted_tokens=bound, non_blocking=True)
        taken()
        with pytest.raises(ConfigError, match=f"has {case.num_experts}; allowed"):
            buffer.combine_with_unpermute(hidden=y[: handle.num_permuted], handle=handle)
        assert taken() == [0, 0, 1]
        step(is_bounded=False)
        with hybrid.make_buffer(case) as other:  # whose combines are numbered anew

            def combine(by: hybrid_ep.HybridEPBuffer) -> None:
                combined, _ = by.combine_with_unpermute(hidden=y[: handle.num_permuted], handle=handle)
                equal(combined, want, "combined hidden")

            combine(buffer)
            for _ in range(2):
                other.dispatch_with_permute(hidden=inputs.x, handle=handle)
                combine(other)
            assert not other._repeats, "a repeated call would know a handle of another buffer by its address"
            taken()
            combine(buffer)
            assert taken() == [0, 0, 1], "the sums of the other buffer's combines are forgotten first"
            combine(buffer)
            assert taken() == [0, 0, 0]


def check_plain_calls() -> None:
    """Plain calls of `HybridEPBuffer`, of any form of rows, with probabilities and without."""
    from hybrid_ep.engine.cuda.route import Chunk

    case = Case("plain", dist.get_world_size(), 12, hidden=256)
    inputs, num_ranks = case.inputs(dist.get_rank()), case.num_ranks
    sent, scales = quantize.cast_to_fp8(inputs.x)
    routing = {"topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights, "num_of_experts": case.num_experts}
    with unread_values(), local_kernels(), hybrid.make_buffer(case) as buffer, contextlib.ExitStack() as stack:
        engine: Any = buffer.engine
        taken = _steps(stack, engine, "dispatch", "dispatch_cached", "combine")

        def step(by: hybrid_ep.HybridEPBuffer = buffer, **options: Any) -> list[Any]:
            rows, probs, row_scales, handle = by.dispatch(**({"hidden": inputs.x} | routing | options))
            form = {name: options[name] for name in ("hidden", "scaling_factor") if name in options}
            along = by.dispatch(**({"hidden": inputs.x} | form), handle=handle)
            assert along[1] is None
            assert along[3] is handle
            y = torch.ones(len(rows), case.hidden, dtype=torch.bfloat16)
            home = *by.combine(y, handle=handle), *by.combine(y, probs, handle)
            num_arrived = int(handle[3])
            cut = [None if t is None else t[:num_arrived] for t in (rows, row_scales, along[0], along[2])]
            entries = [handle[i] for i in (0, 1, 4)]
            found = [*cut, probs, *home, *entries, handle[5], handle[6], len(handle), len(rows)]
            return [part.clone() if isinstance(part, torch.Tensor) else part for part in found]  # holds no slot

        def compare(found: list[Any], want: list[Any]) -> None:
            for i, (one, other) in enumerate(zip(found, want, strict=True)):
                if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                    facts = [(t.dtype, t.stride(), t.device, t.shape) for t in (one, other)]
                    assert facts[0] == facts[1], i
                    equal(one.view(torch.uint8), other.view(torch.uint8), f"entry {i}")
                else:
                    assert one == other, i

        forms: list[dict[str, Any]] = [
            {},
            {"topk_weights": None},
            {"hidden": sent, "scaling_factor": scales},
            {"hidden": sent.view(torch.uint8), "scaling_factor": scales},
        ]
        for form in forms:
            for bound in ({}, {"num_dispatched_tokens": case.max_tokens * num_ranks}):
                want = step(**form, **bound)
                assert taken()[0] == 1
                for _ in range(2):
                    compare(step(**form, **bound), want)
                assert taken() == [0, 0, 0]
        # The rest is left to steps: scales of bf16 rows, a bound in a tensor, maps, and weights along a handle.
        bound = {"num_dispatched_tokens_tensor": torch.tensor([case.max_tokens * num_ranks])}
        routing_map, dense = hybrid_ep.indices_to_map(inputs.topk_idx, inputs.topk_weights, 12, case.num_experts)
        for form in routing | {"scaling_factor": scales}, routing | bound, {"routing_map": routing_map, "probs": dense}:
            for _ in range(2):
                buffer.dispatch(inputs.x, **form)
            assert taken()[0] == 2
        *_, row_scales, handle = buffer.dispatch(sent, scales, **routing)
        by_columns = scales.t().contiguous().t()
        for _ in range(2):
            equal(buffer.dispatch(sent, by_columns, handle=handle)[2], row_scales, "scales along a handle")
        assert taken()[1] == 2
        del row_scales, handle
        for _ in range(2):
            _, received, _, handle = buffer.dispatch(inputs.x, **routing)
            _, again, _, _ = buffer.dispatch(inputs.x, handle=handle, topk_weights=inputs.topk_weights)
            equal(again, received, "probs along a handle")
        assert taken()[0] == 2, "those along a handle"
        # A handle keeps the routing, and names rows of its own.
        overwritten = inputs.topk_idx.clone()
        rows, probs, _, handle = buffer.dispatch(inputs.x, **(routing | {"topk_idx": overwritten}))
        want = buffer.combine(rows, probs, handle)
        overwritten.fill_(-1)
        compare(list(buffer.combine(rows, probs, handle)), list(want))
        # More results than there are slots; another stream than that of the handle.
        held = [buffer.dispatch(inputs.x, **routing)[0] for _ in range(4)]
        assert taken()[0] > 0
        del held
        with on_stream(1), mock.patch.object(Chunk, "note_use"):
            compare(list(buffer.combine(rows, probs, handle)), list(want))
        assert taken() == [0, 0, 1]
        # Sizes that have grown since.
        del rows, probs, handle
        for _ in range(2):
            handle = buffer.dispatch(inputs.x, topk_idx=inputs.topk_idx)[3]
            assert handle.num_experts == case.num_experts
        permuted = {"hidden": inputs.x, "topk_idx": inputs.topk_idx}
        for _ in range(2):
            assert len(buffer.dispatch_with_permute(**permuted)[3]) == case.num_experts // num_ranks
        buffer.update_template_config(num_local_experts=2 * case.num_experts // num_ranks)
        assert len(buffer.dispatch_with_permute(**permuted)[3]) == case.num_experts // num_ranks
        assert buffer.dispatch(inputs.x, topk_idx=inputs.topk_idx)[3].num_experts == case.num_experts
        step(num_dispatched_tokens=case.max_tokens * num_ranks)
        taken()
        buffer.update_template_config(num_of_tokens_per_rank=160)
        step(num_dispatched_tokens=case.max_tokens * num_ranks)
        assert taken()[0] == 1, "ranks agree on slots for the largest that any sends"
        with hybrid.make_buffer(case) as other:
            handle = buffer.dispatch(inputs.x, **routing)[3]
            other.dispatch(inputs.x, handle=handle)
            other.combine(torch.zeros(handle.num_recv, case.hidden, dtype=torch.bfloat16), handle=handle)
            assert not other._repeats, "a repeated call would know a handle of another buffer by its address"


def check_fields_of_handles() -> None:
    """C++ makes handles by position. It refuses classes whose fields have another order."""
    from hybrid_ep.engine.cuda import repeated

    case = Case("fields", dist.get_world_size(), 12, hidden=256)
    inputs = case.inputs(dist.get_rank())

    def dispatch(*, by_expert: bool) -> None:
        with hybrid.make_buffer(case) as buffer:
            call = buffer.dispatch_with_permute if by_expert else buffer.dispatch
            call(hidden=inputs.x, topk_idx=inputs.topk_idx, num_of_experts=case.num_experts)

    with unread_values(), local_kernels():
        for by_expert in False, True:
            for kind in repeated.Route, repeated.DispatchHandle, *((repeated.PermuteHandle,) if by_expert else ()):
                name, (first, *others) = kind.__name__, kind._fields
                other = collections.namedtuple(name, (*others, first))
                types = tuple(other if one is kind else one for one in repeated._TYPES)
                with (
                    mock.patch.object(repeated, name, other),
                    mock.patch.object(repeated, "_TYPES", types),
                    pytest.raises(ValueError, match=rf"the fields of {name} are \('{others[0]}', "),
                ):
                    dispatch(by_expert=by_expert)
            dispatch(by_expert=by_expert)


def check_elastic_calls() -> None:
    """Calls of both layouts are one call of C++. Their counts are computed when they are read, and then kept."""
    case = Case("elastic", dist.get_world_size(), 12, hidden=256)
    inputs, rank = case.inputs(dist.get_rank()), dist.get_rank()
    bias = torch.ones(12, case.hidden, dtype=torch.bfloat16)
    per_expert = case.reference().tokens_per_expert(rank)
    with unread_values(), elastic.make_buffer(case) as buffer, contextlib.ExitStack() as stack:
        engine: Any = buffer.engine
        names = "dispatch", "dispatch_permuted", "dispatch_cached", "dispatch_permuted_cached", "combine"
        names = *names, "combine_permuted", "tokens_per_expert"
        taken = _steps(stack, engine, *names)

        def num_by_steps() -> int:
            return sum(taken())

        def step(**options: Any) -> list[Any]:
            received, _, weights, handle, _ = buffer.dispatch(
                inputs.x, inputs.topk_idx, inputs.topk_weights, num_experts=case.num_experts, **options
            )
            buffer.dispatch(inputs.x, handle=handle, do_expand=handle.do_expand)
            x = torch.zeros_like(received)
            bias_of = {} if handle.do_expand else {"bias": bias}
            combined = buffer.combine(x, handle, weights, **bias_of)
            assert handle.num_unaligned_recv_tokens_per_expert.tolist() == per_expert
            assert handle.num_unaligned_recv_tokens_per_expert is handle.num_unaligned_recv_tokens_per_expert
            copied = handle.topk_idx.data_ptr() != inputs.topk_idx.data_ptr()
            equal(handle.topk_idx, inputs.topk_idx, "top-k indices of the handle")
            return [*combined[:2], copied, handle.num_sms, handle.num_recv_tokens_per_expert_list]

        for do_expand in False, True:
            for options in (
                {"do_cpu_sync": False},
                {"do_cpu_sync": False, "do_handle_copy": False, "num_sms": 3},
                {"expert_alignment": 4, "do_cpu_sync": True},
            ):
                want = step(do_expand=do_expand, **options)
                assert num_by_steps() > 0
                got = step(do_expand=do_expand, **options)
                assert num_by_steps() == 0
                for part, wanted in zip(got, want, strict=True):
                    equal(part, wanted, "repeated") if isinstance(part, torch.Tensor) else None
                assert [p for p in got if not isinstance(p, torch.Tensor)] == want[2:]
        # The rest is left to steps: events, scales by columns, and weights along a handle.
        sent, scales = quantize.cast_to_fp8(inputs.x)
        handle = buffer.dispatch((sent, scales), inputs.topk_idx, num_experts=case.num_experts)[3]
        for call in (
            lambda: buffer.dispatch(inputs.x, handle=handle, previous_event=buffer.capture()),
            lambda: buffer.dispatch(inputs.x, handle=handle, async_with_compute_stream=True)[4].current_stream_wait(),
            lambda: buffer.dispatch(inputs.x, topk_weights=inputs.topk_weights, handle=handle),
            lambda: buffer.dispatch((sent, scales), handle=handle, use_tma_aligned_col_major_sf=True),
            lambda: buffer.dispatch((sent, scales.t().contiguous().t()), handle=handle),
        ):
            for _ in range(2):
                num_by_steps()
                call()
                assert num_by_steps() == 1
        with elastic.make_buffer(case) as other:
            x = torch.zeros(handle.num_recv_tokens, case.hidden, dtype=torch.bfloat16)
            other.dispatch(inputs.x, handle=handle)
            other.combine(x, handle)
            assert not other._repeats, "a repeated call would know a handle of another buffer by its address"
        # Counts are computed once for each stream. In a graph they are computed at each replay, and not for others.
        later = buffer.dispatch((sent, scales), inputs.topk_idx, num_experts=case.num_experts)[3]
        on_gpu = mock.patch.object(torch.Tensor, "device", torch.device("cuda", 0))

        def ends(*, stream: int = 0, capturing: bool = False) -> torch.Tensor:
            with (
                on_gpu,
                mock.patch("hybrid_ep.buffers.elastic_handle.is_capturing", return_value=capturing),
                mock.patch("hybrid_ep.buffers.elastic_handle.current_raw_stream", return_value=stream),
            ):
                return later.psum_num_recv_tokens_per_expert

        in_graph = ends(capturing=True)
        first = ends()
        assert ends() is first
        assert first is not in_graph
        other = ends(stream=1)
        assert ends(stream=1) is other
        assert other is not first
        assert ends() is first
        for computed in in_graph, other:
            equal(computed, first, "psum_num_recv_tokens_per_expert")
