"""Calls that repeat an earlier one, with tensors whose values are not checked, as on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import ConfigError, env, quantize
from tests.battery import elastic, hybrid, low_latency, normal
from tests.battery.cases import Case
from tests.battery.normal import equal, make_buffer, unread_values

__all__ = [
    "check_allocations_let_others_call",
    "check_allocations_let_others_send",
    "check_elastic_calls",
    "check_events",
    "check_faults",
    "check_hooks_at_once",
    "check_hooks_between",
    "check_masks",
    "check_normal_calls",
    "check_permuted_calls",
    "check_refused_launch",
    "check_two_buffers",
]


def _case(name: str) -> Case:
    num_ranks = dist.get_world_size()
    return Case(name, num_ranks, 12, num_experts=4 * num_ranks, num_ranks_per_domain=env.NUM_RANKS_PER_DOMAIN.get())


class _Calls:
    """The calls of one rank."""

    def __init__(self, case: Case, buffer: hybrid_ep.Buffer) -> None:
        self.case, self.buffer, self.rank = case, buffer, dist.get_rank()
        self.inputs = case.inputs(self.rank)
        self.copies = low_latency.expert_copies(case, self.rank)
        self.x = low_latency.expert_output(case, self.rank, case.max_tokens * case.num_ranks)

    def dispatch(self, topk_idx: torch.Tensor | None = None, **options: Any) -> tuple[Any, ...]:
        topk_idx = self.inputs.topk_idx if topk_idx is None else topk_idx
        sizes = self.case.max_tokens, self.case.num_experts
        return self.buffer.low_latency_dispatch(self.inputs.x, topk_idx, *sizes, use_fp8=False, **options)

    def combine(self, handle: Any, **options: Any) -> tuple[Any, ...]:
        tensors = self.x, self.inputs.topk_idx, self.inputs.topk_weights
        return self.buffer.low_latency_combine(*tensors, handle, **options)

    def check(self, received: torch.Tensor, handle: Any, combined: torch.Tensor, *, hooked: bool = False) -> None:
        sent = [self.case.inputs(r).x for r in range(self.case.num_ranks)]
        low_latency.check_packed(self.case, self.copies, sent, received, handle)
        equal(combined, low_latency.expected_combine(self.case, self.rank, lambda _: hooked), "combined_x")

    def check_step(self) -> None:
        received, _, handle, _, _ = self.dispatch()
        self.check(received, handle, self.combine(handle)[0])

    def check_hooked_step(self) -> None:
        received, _, handle, _, receive = self.dispatch(return_recv_hook=True)
        receive()
        combined, _, receive = self.combine(handle, return_recv_hook=True)
        receive()
        self.check(received, handle, combined, hooked=True)

    @property
    def kernels(self) -> Any:
        """What makes the calls of the buffer's engine."""
        engine: Any = self.buffer.engine
        return engine._low_latency_kernels if self.buffer.grid.num_domains > 1 else engine._low_latency

    @property
    def is_open(self) -> bool:
        """Whether the next call can be one call of C++."""
        return bool(self.kernels._repeated.is_open)


def check_refused_launch() -> None:
    """A launch that fails takes no buffer. Its rank calls again."""
    case = _case("refused")
    with unread_values(), make_buffer(case, low_latency_mode=True) as buffer:
        calls = _Calls(case, buffer)
        refuses = mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_REFUSES": "1"})
        for _ in range(3):
            calls.check_step()
        for _ in range(2):
            assert calls.is_open
            if calls.rank == 0:
                with refuses, pytest.raises(RuntimeError, match="cudaLaunchKernelEx"):
                    calls.dispatch()
            received, _, handle, _, _ = calls.dispatch()
            if calls.rank == 0:
                with refuses, pytest.raises(RuntimeError, match="cudaLaunchKernelEx"):
                    calls.combine(handle)
            calls.check(received, handle, calls.combine(handle)[0])


def check_hooks_between() -> None:
    """Calls with hooks come between. A third call without its hook is refused at all ranks, and then all go on."""
    case = _case("hooks")
    with unread_values(), make_buffer(case, low_latency_mode=True) as buffer:
        calls = _Calls(case, buffer)
        for _ in range(3):
            calls.check_step()
            first, second = (calls.dispatch(return_recv_hook=True) for _ in range(2))
            with pytest.raises(ConfigError, match="calls whose hook has not been called are 3"):
                calls.dispatch()
            # A combine without a hook comes between the two halves of another call.
            first[-1]()
            combined, _, _ = calls.combine(first[2])
            calls.check(first[0], first[2], combined)
            second[-1]()
            combined, _, receive = calls.combine(second[2], return_recv_hook=True)
            received, _, handle, _, _ = calls.dispatch()
            receive()
            calls.check(second[0], second[2], combined, hooked=True)
            with pytest.raises(ConfigError, match="hook has not been called"):
                calls.combine(calls.dispatch(return_recv_hook=True)[2])
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
            received, _, handle, _, _ = calls.dispatch()
            calls.check(received, handle, calls.combine(handle)[0])


def check_hooks_at_once() -> None:
    """A hook receives at once. It receives in steps where the path was closed since the send, or opened anew."""
    case = _case("hooks")
    with unread_values(), make_buffer(case, low_latency_mode=True) as buffer:
        calls = _Calls(case, buffer)
        for _ in range(2):
            calls.check_hooked_step()
        in_steps = mock.Mock(wraps=calls.kernels.receive_in_steps)
        calls.kernels.receive_in_steps = in_steps
        for _ in range(3):
            calls.check_hooked_step()
        in_steps.assert_not_called()
        for reopens in (False, True):
            received, _, handle, _, receive = calls.dispatch(return_recv_hook=True)
            calls.kernels._repeated.close()
            if reopens:
                other = calls.dispatch()
                assert calls.is_open
            receive()
            calls.check(received, handle, calls.combine(handle)[0])
            assert in_steps.call_count == 1 + reopens
        calls.check(other[0], other[2], calls.combine(other[2])[0])
        for _ in range(2):
            calls.check_hooked_step()
        assert in_steps.call_count == 2


def check_faults() -> None:
    """A kernel of a repeated call, or of a send, reports an expert that does not exist.

    The call raises it, or the hook, and the rank goes on.
    """
    case = _case("faults")
    with unread_values(), make_buffer(case, low_latency_mode=True) as buffer:
        calls = _Calls(case, buffer)
        wrong = calls.inputs.topk_idx.clone()
        wrong[0, 0] = case.num_experts
        for hooked in (False, True) * 3:
            check_step = calls.check_hooked_step if hooked else calls.check_step
            check_step()
            check_step()
            assert calls.is_open
            receive = calls.dispatch(wrong, return_recv_hook=True)[-1] if hooked else lambda: calls.dispatch(wrong)
            with pytest.raises(ConfigError, match=f"of rank {calls.rank} has {case.num_experts}; allowed"):
                receive()
            assert not calls.is_open


def check_masks() -> None:
    """With masks allowed, calls are one call of C++, too. They are not while the device lacks masks of the host."""
    from hybrid_ep.engine.cuda import low_latency_masks

    case = _case("masks")
    last = case.num_ranks - 1
    with unread_values(), make_buffer(case, low_latency_mode=True, enable_shrink=True) as buffer:
        calls = _Calls(case, buffer)
        for _ in range(2):
            calls.check_step()
            calls.check_hooked_step()
        kernels = calls.kernels
        names = "dispatch_in_steps", "receive_in_steps", "combine"
        with contextlib.ExitStack() as stack:
            for name in names:
                spy = mock.Mock(side_effect=AssertionError(f"{name} was called"))
                stack.enter_context(mock.patch.object(kernels, name, spy))
            calls.check_step()
            calls.check_hooked_step()
            dist.barrier()
            if calls.rank != last:
                buffer.low_latency_update_mask_buffer(last, True)
                _, counts, handle, _, _ = calls.dispatch()
                calls.combine(handle)
                mine = [r for r in range(case.num_ranks) if r != last]
                wanted = sum(
                    int((case.inputs(r).topk_idx // (case.num_experts // case.num_ranks) == calls.rank).sum())
                    for r in mine
                )
                assert int(counts.sum()) == wanted, "rows of the masked rank are left out"
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        calls.check_step()
        assert calls.is_open
        other = (calls.rank + 1) % case.num_ranks
        with mock.patch.object(low_latency_masks, "is_capturing", return_value=True):
            buffer.low_latency_update_mask_buffer(other, True)
        assert not calls.is_open
        buffer.low_latency_clean_mask_buffer()
        dist.barrier()  # or a rank could forget what another one has sent since
        for _ in range(2):
            calls.check_step()
        assert calls.is_open


@contextlib.contextmanager
def _on_stream(number: int) -> Iterator[None]:
    """Makes another stream the current one."""
    stream: Any = torch.cuda.current_stream()
    with mock.patch.object(stream, "cuda_stream", number):
        yield


def _num_done(what: str) -> int:
    """How often events were recorded, or streams have waited for one, in this process."""
    from hybrid_ep import _cuda

    return int(ctypes.CDLL(str(_cuda.__file__))[f"emulated_num_{what}"]())


def check_events() -> None:
    """Each call records the event that a launch on another stream waits for, once there is one. Others wait for it."""
    case = _case("events")
    with unread_values(), make_buffer(case, low_latency_mode=True) as buffer:
        calls = _Calls(case, buffer)
        begin = _num_done("records")
        calls.check_step()
        calls.check_step()
        assert _num_done("records") == begin, "all on one stream"
        for stream in (1, 0):
            begun = _num_done("records"), _num_done("waits")
            with _on_stream(stream):
                calls.check_step()
                assert calls.is_open
                calls.check_step()
            more = 1 if stream == 1 else 0  # no event followed the launches before
            assert (_num_done("records") - begun[0], _num_done("waits") - begun[1]) == (4 + more, 1)
        calls.check_hooked_step()
        begin = _num_done("records")
        calls.check_hooked_step()
        assert _num_done("records") == begin + 4


@contextlib.contextmanager
def _calls_with(meanwhile: Callable[[], None], case: Case) -> Iterator[_Calls]:
    """Calls of a buffer. Whenever torch makes a tensor, `meanwhile` runs first, as another thread could."""
    from hybrid_ep import _cuda

    empty = torch.empty_strided

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        meanwhile()
        return empty(*args, **kwargs)

    with (
        unread_values(),
        mock.patch.object(torch, "empty_strided", make),
        mock.patch.object(_cuda, "NewTensor", functools.partial(_cuda.NewTensor, by_python=True)),
        make_buffer(case, low_latency_mode=True) as buffer,
    ):
        yield _Calls(case, buffer)


def check_allocations_let_others_call() -> None:
    """While torch makes a result of a dispatch, another one is made whole, as by another thread. Each has memory."""
    case = _case("allocations")
    within: list[tuple[Any, ...]] = []  # results of the other dispatches
    wanted = False

    def dispatch_within() -> None:
        nonlocal wanted
        if wanted:
            wanted = False
            within.append(calls.dispatch())

    with _calls_with(dispatch_within, case) as calls:
        calls.check_step()
        results = []
        for i in range(40):
            wanted = i != 20
            results.append(calls.dispatch())
        assert len(within) == 39
        found = set()
        for received, _, handle, _, _ in [*results, *within]:
            low_latency.check_packed(
                case, calls.copies, [case.inputs(r).x for r in range(case.num_ranks)], received, handle
            )
            found.add(handle.state.results)
        assert len(found) == 79
        _, free = calls.kernels._results.take(1, results[0][2].state.stream, alone=False)
        assert free > max(found)


def check_allocations_let_others_send() -> None:
    """While torch makes a result, other calls with hooks take both buffers. The call is refused, all hooks receive."""
    take: list[Any] = []  # the calls to make meanwhile

    def send_within() -> None:
        while take:
            take.pop()()

    with _calls_with(send_within, _case("sends")) as calls:
        for _ in range(3):
            calls.check_step()
            calls.check_hooked_step()
            assert calls.is_open
            sent: list[tuple[Any, ...]] = []

            def send(to: list[tuple[Any, ...]] = sent) -> None:
                to.append(calls.dispatch(return_recv_hook=True))

            take += [send, send]
            with pytest.raises(ConfigError, match="calls whose hook has not been called are 3"):
                calls.dispatch()
            handle = sent[0][2]
            for received, _, its_handle, _, receive in sent:
                receive()
                calls.check(received, its_handle, calls.combine(its_handle)[0])
            sums: list[tuple[Any, ...]] = []

            def send_sums(to: list[tuple[Any, ...]] = sums, handle: Any = handle) -> None:
                to.append(calls.combine(handle, return_recv_hook=True))

            assert calls.is_open
            take += [send_sums, send_sums]
            with pytest.raises(ConfigError, match="calls whose hook has not been called are 3"):
                calls.combine(handle)
            for combined, _, receive in sums:
                receive()
                calls.check(sent[0][0], handle, combined, hooked=True)


def check_two_buffers() -> None:
    """Two buffers take turns on streams of their own: each first call waits for the other buffer's last one."""
    case = _case("turns")
    with (
        unread_values(),
        make_buffer(case, low_latency_mode=True) as one,
        make_buffer(case, low_latency_mode=True) as other,
    ):
        both = [_Calls(case, buffer) for buffer in (one, other)]
        for turn in range(3):
            for stream, calls in enumerate(both):
                begin = _num_done("waits")
                with _on_stream(stream):
                    calls.check_step()
                    calls.check_step()
                assert _num_done("waits") - begin == (turn + stream > 0)


def check_normal_calls() -> None:
    """Normal calls are one call of C++, and each records an event. They take steps on another stream, or in a fault."""
    from hybrid_ep.engine.cuda.route import Chunk

    case = Case("normal", dist.get_world_size(), 12)
    inputs, rank = case.inputs(dist.get_rank()), dist.get_rank()
    want = normal.expected_combine(case, rank)
    with unread_values(), make_buffer(case) as buffer:
        engine: Any = buffer.engine
        bound = 12 * case.num_ranks

        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.topk_idx, case.num_experts)

        def received(topk_idx: torch.Tensor = inputs.topk_idx, bound: int = 0) -> tuple[torch.Tensor, Any]:
            recv_x, *_, handle, _ = buffer.dispatch(
                inputs.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=inputs.topk_weights,
                num_worst_tokens=bound,
            )
            return recv_x, handle

        def check_step() -> None:
            for num_rows in (0, bound):
                recv_x, handle = received(bound=num_rows)
                rows = normal.returned(case, rank, case.reference().received(rank))
                x = torch.cat([rows, torch.zeros(len(recv_x) - len(rows), rows.shape[1], dtype=rows.dtype)])
                buffer.dispatch(inputs.x, handle=handle)
                equal(buffer.combine(x, handle)[0], want, "combined_x")

        steps = [
            mock.patch.object(engine, f"{name}_in_steps", wraps=getattr(engine, f"{name}_in_steps"))
            for name in ("dispatch", "dispatch_cached", "combine")
        ]
        with steps[0] as dispatches, steps[1] as cached, steps[2] as combines:

            def taken() -> list[int]:
                counts = [made.call_count for made in (dispatches, cached, combines)]
                for made in (dispatches, cached, combines):
                    made.reset_mock()
                return counts

            for _ in range(3):
                check_step()
            taken()
            check_step()
            assert taken() == [0, 0, 0]
            with _on_stream(1):  # from now on events are recorded
                check_step()
            taken()
            begin = _num_done("records")
            check_step()
            # Six calls, and the slots of four results.
            assert (taken(), _num_done("records") - begin) == ([0, 0, 0], 10)

            handle = received()[1]
            x = torch.zeros(handle.num_recv, case.hidden, dtype=torch.bfloat16)
            taken()
            with _on_stream(1), mock.patch.object(Chunk, "note_use") as note_use:
                buffer.dispatch(inputs.x, handle=handle)
                buffer.combine(x, handle)
            assert (taken(), note_use.call_count) == ([0, 1, 1], 2)

            wrong = inputs.topk_idx.clone()
            wrong[0, 0] = case.num_experts
            received(wrong, bound)
            with pytest.raises(ConfigError, match=f"has {case.num_experts}; allowed"):
                buffer.combine(x, handle)
            assert taken() == [0, 0, 1]
            check_step()
            engine.num_calls = 2**31 - 2  # of calls, as after days
            check_step()
            assert taken() == [0, 0, 0]
            assert engine.num_calls == 2**31 + 4


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
        names = "dispatch_permuted", "dispatch_permuted_cached", "combine_permuted"
        in_steps = [stack.enter_context(mock.patch.object(engine, name, wraps=getattr(engine, name))) for name in names]

        def taken() -> list[int]:
            counts = [made.call_count for made in in_steps]
            for made in in_steps:
                made.reset_mock()
            return counts

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

        with _on_stream(1), mock.patch.object(Chunk, "note_use") as note_use:
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
        spies = [stack.enter_context(mock.patch.object(engine, name, wraps=getattr(engine, name))) for name in names]

        def num_by_steps() -> int:
            num = sum(spy.call_count for spy in spies)
            for spy in spies:
                spy.reset_mock()
            return num

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
