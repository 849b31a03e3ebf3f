"""Calls on several streams, after faults and beside other calls, with tensors whose values are not read."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep import ConfigError, env
from hybrid_ep.buffers import v1_arguments
from tests.battery import low_latency, normal
from tests.battery.cases import Case
from tests.battery.normal import equal, make_buffer, unread_values

__all__ = [
    "check_allocations_let_others_call",
    "check_allocations_let_others_send",
    "check_events",
    "check_faults",
    "check_hooks_between",
    "check_masks",
    "check_normal_calls",
    "check_refusal_after_a_barrier",
    "check_refused_launch",
    "check_sizes_of_kernels",
    "check_transforms",
    "check_two_buffers",
    "on_stream",
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
        return engine._low_latency


def check_refused_launch() -> None:
    """A launch that fails takes no buffer. Its rank calls again."""
    case = _case("refused")
    with unread_values(), make_buffer(case, low_latency_mode=True) as buffer:
        calls = _Calls(case, buffer)
        refuses = mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_REFUSES": "1"})
        for _ in range(3):
            calls.check_step()
        for _ in range(2):
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


def check_refusal_after_a_barrier() -> None:
    """Calls of a rank without which the others go on are refused at once, also where only a barrier has found that."""
    with unread_values(), make_buffer(_case("refusal"), low_latency_mode=True, enable_shrink=True) as buffer:
        calls = _Calls(_case("refusal"), buffer)
        for _ in range(3):
            calls.check_step()
        refusal = hybrid_ep.TransportError("the others go on", calls.rank, None, "without this rank")
        with mock.patch.object(calls.kernels._losses, "report", return_value=refusal):
            buffer.engine.leave_out((calls.rank + 1) % calls.case.num_ranks)  # as a barrier does that fails
        with pytest.raises(hybrid_ep.TransportError, match="without this rank"):
            calls.dispatch()


def check_transforms() -> None:
    """A call inside a transform of torch.func is refused, also after calls outside of it."""
    case = _case("transforms")
    inputs = case.inputs(dist.get_rank())
    with unread_values(), make_buffer(case) as buffer:
        for _ in range(3):
            rows = normal.dispatch(buffer, case, inputs)[0]

        def dispatch(x: torch.Tensor) -> torch.Tensor:
            received: torch.Tensor = normal.dispatch(buffer, case, inputs, x)[0]
            return received

        with pytest.raises(ConfigError, match="without memory of its own"):
            torch.func.functionalize(dispatch)(inputs.x)
        equal(dispatch(inputs.x), rows, "after a refusal")


def check_faults() -> None:
    """A kernel of a call, or of a send, reports an expert that does not exist.

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
            receive = calls.dispatch(wrong, return_recv_hook=True)[-1] if hooked else lambda: calls.dispatch(wrong)
            with pytest.raises(ConfigError, match=f"of rank {calls.rank} has {case.num_experts}; allowed"):
                receive()


def check_masks() -> None:
    """Rows of a rank that is masked are left out. A mask that a capture could not upload, the next call uploads."""
    from hybrid_ep.engine.cuda import low_latency

    case = _case("masks")
    last = case.num_ranks - 1
    with unread_values(), make_buffer(case, low_latency_mode=True, enable_shrink=True) as buffer:
        calls = _Calls(case, buffer)

        def num_rows_from(ranks: Iterable[int]) -> int:
            num_local = case.num_experts // case.num_ranks
            return sum(int((case.inputs(r).topk_idx // num_local == calls.rank).sum()) for r in ranks)

        for _ in range(2):
            calls.check_step()
            calls.check_hooked_step()
        dist.barrier()
        if calls.rank != last:
            buffer.low_latency_update_mask_buffer(last, True)
            _, counts, handle, _, _ = calls.dispatch()
            calls.combine(handle)
            assert int(counts.sum()) == num_rows_from(range(last)), "rows of the masked rank are left out"
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        calls.check_step()
        other = (calls.rank + 1) % case.num_ranks
        with mock.patch.object(low_latency, "is_capturing", return_value=True):
            buffer.low_latency_update_mask_buffer(other, True)
        assert int(calls.dispatch()[1].sum()) == num_rows_from([calls.rank])
        buffer.low_latency_clean_mask_buffer()
        dist.barrier()  # or a rank could forget what another one has sent since
        for _ in range(2):
            calls.check_step()


@contextlib.contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Makes another stream the current one."""
    stream: Any = torch.cuda.current_stream()
    with mock.patch.object(stream, "cuda_stream", number):
        yield


def _num_done(what: str) -> int:
    """How often events were recorded, or streams have waited for one, in this process."""
    from hybrid_ep import _cuda

    return int(ctypes.CDLL(str(_cuda.__file__))[f"emulated_num_{what}"]())


def check_sizes_of_kernels() -> None:
    """What the kernels do not take is refused at all ranks, whatever the memory covers, and the buffer goes on."""
    case = _case("sizes")
    with unread_values(), make_buffer(case, low_latency_mode=True) as buffer:
        calls = _Calls(case, buffer)
        x, topk_idx, experts = calls.inputs.x, calls.inputs.topk_idx, case.num_experts
        calls.check_step()
        for sizes, told in (
            (
                (x[:, :100], topk_idx, 1, experts),
                r"row of 100 × torch.bfloat16 has 200 bytes.*; allowed: .* 16 up to",
            ),
            ((x, topk_idx, 65536, experts), r"per_rank is 65536.*; allowed with the cuda engine: ≤ 65535$"),
            ((x, topk_idx, 12, 2050), r"num_experts is 2050.*; allowed with the cuda engine: ≤ 2048$"),
        ):
            with pytest.raises(ConfigError, match=told):
                buffer.low_latency_dispatch(sizes[0][: sizes[2]], topk_idx[: sizes[2]], *sizes[2:], use_fp8=False)
            calls.check_step()


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
            with on_stream(stream):
                calls.check_step()
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

    def patched(name: str) -> Any:
        empty = getattr(torch, name)

        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            meanwhile()
            made: torch.Tensor = empty(*args, **kwargs)
            return made

        return mock.patch.object(torch, name, make)

    with (
        unread_values(),
        patched("empty_strided"),
        patched("empty"),
        mock.patch.object(_cuda, "LowLatencyCalls", functools.partial(_cuda.LowLatencyCalls, by_python=True)),
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
        num_bytes = 4 * results[0][2].state.plan.num_ints
        assert all(after - before >= num_bytes for before, after in itertools.pairwise(sorted(found)))


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
                with on_stream(stream):
                    calls.check_step()
                    calls.check_step()
                assert _num_done("waits") - begin == (turn + stream > 0)


def check_normal_calls() -> None:
    """Each normal call records an event once streams have changed. Another stream than the route's is noted."""
    from hybrid_ep.engine.cuda.route import Chunk

    case = Case("normal", dist.get_world_size(), 12)
    inputs, rank = case.inputs(dist.get_rank()), dist.get_rank()
    want = normal.expected_combine(case, rank)
    with unread_values(), make_buffer(case) as buffer:
        engine: Any = buffer.engine
        bound = 12 * case.num_ranks

        def received(topk_idx: torch.Tensor = inputs.topk_idx, bound: int = 0) -> tuple[torch.Tensor, Any]:
            per_rank, _, per_expert, in_rank, _ = layout
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

        layout = buffer.get_dispatch_layout(inputs.topk_idx, case.num_experts)
        check_step()
        with on_stream(1):  # from now on events are recorded
            check_step()
        begin = _num_done("records")
        check_step()
        assert _num_done("records") - begin == 10, "six calls, and the slots of four results"

        handle = received()[1]
        x = torch.zeros(handle.num_recv, case.hidden, dtype=torch.bfloat16)
        with on_stream(1), mock.patch.object(Chunk, "note_use") as note_use:
            buffer.dispatch(inputs.x, handle=handle)
            buffer.combine(x, handle)
        assert note_use.call_count == 2

        wrong = inputs.topk_idx.clone()
        wrong[0, 0] = case.num_experts
        layout_of_right = SimpleNamespace(is_token_in_rank=layout[3])
        with mock.patch.object(v1_arguments, "compute_layout", return_value=layout_of_right):
            received(wrong, bound)
        with pytest.raises(ConfigError, match=f"has {case.num_experts}; allowed"):
            buffer.combine(x, handle)
        check_step()
        engine.num_calls = 2**31 - 2  # of calls, as after days
        check_step()
        assert engine.num_calls == 2**31 + 4
