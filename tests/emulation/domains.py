"""Checks that know nothing of domains, with buffers of several domains."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_ep.engine.calls import Rows
from hybrid_ep.engine.select import make_engine
from hybrid_ep.errors import ConfigError, TimeoutError, TransportError
from tests.battery import low_latency, signals
from tests.battery.cases import Case
from tests.battery.normal import dispatch, equal, make_buffer, on
from tests.rank_pool import variables_over


def check_in_domains(num_ranks_per_domain: int, check: str, *args: Any) -> None:
    """Runs a check of tests/, as ``battery.other_calls.check_other_calls``."""
    module, name = check.rsplit(".", 1)
    with mock.patch.dict(os.environ, {"HYBRID_EP_NUM_RANKS_PER_DOMAIN": str(num_ranks_per_domain)}):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_over(transport: str, check: str, *args: Any) -> None:
    """Runs a check of tests/ over a transport."""
    module, name = check.rsplit(".", 1)
    with mock.patch.dict(os.environ, variables_over(transport)):
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def check_by_kernels(check: str, *args: Any) -> None:
    """Runs a check of tests/ whose low-latency calls the kernels between domains serve, as nothing is asked for."""
    assert _num_by_kernels(check, *args) > 0


def check_by_torch(check: str, *args: Any) -> None:
    """The same of calls that the torch engine serves, although nothing asks for it."""
    assert _num_by_kernels(check, *args) == 0


def check_torch_asked_for(check: str, *args: Any) -> None:
    """The same of calls that the torch engine serves because it is asked for."""
    assert _num_by_kernels(check, *args, asked="torch") == 0


def _num_by_kernels(check: str, *args: Any, asked: str | None = None) -> int:
    """Runs a check of tests/; returns how many dispatches the kernels have served.

    Args:
        asked: HYBRID_EP_LOW_LATENCY_BETWEEN; None = it is not set.
    """
    from hybrid_ep.engine.cuda.low_latency_between import LowLatencyBetween

    name_of_choice = "HYBRID_EP_LOW_LATENCY_BETWEEN"
    module, name = check.rsplit(".", 1)
    with (
        mock.patch.dict(os.environ, {} if asked is None else {name_of_choice: asked}),
        mock.patch.object(LowLatencyBetween, "dispatch", autospec=True, side_effect=LowLatencyBetween.dispatch) as sent,
    ):
        if asked is None:
            os.environ.pop(name_of_choice, None)
        getattr(importlib.import_module(f"tests.{module}"), name)(*args)
    num_calls: int = sent.call_count
    return num_calls


def check_other_choice() -> None:
    """One rank asks for the kernels, the others do not."""
    rank = dist.get_rank()
    chosen = {"HYBRID_EP_LOW_LATENCY_BETWEEN": "cuda" if rank == 1 else "torch"}
    with mock.patch.dict(os.environ, chosen), pytest.raises(ConfigError, match=r"^low_latency_between is '") as told:
        make_buffer(Case("choice", 2, 4, num_ranks_per_domain=1))
    assert "allowed: the same on every rank" in str(told.value)


def check_other_shrink() -> None:
    """One rank may go on without lost ranks, the others may not: the first call tells all."""
    rank = dist.get_rank()
    case = Case("shrink", 4, 4, num_ranks_per_domain=2)
    inputs = case.inputs(rank)
    told = pytest.raises(ConfigError, match=r"is 2 at rank 0 and 1 at rank 2; allowed: .* enable_shrink makes it 1")
    with make_buffer(case, low_latency_mode=True, enable_shrink=rank == 2) as buffer, told:
        buffer.low_latency_dispatch(inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False)


def check_refused_launch() -> None:
    """A kernel with commands for the proxy is refused. A cleaning waits until all calls of the proxy have ended."""
    from hybrid_ep import _cuda

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("refused", num_ranks, 12, num_experts=4 * num_ranks)
    inputs = case.inputs(rank)
    with make_buffer(case, low_latency_mode=True) as buffer:
        sizes = case.max_tokens, case.num_experts
        *_, handle, _, _ = buffer.low_latency_dispatch(inputs.x, inputs.topk_idx, *sizes, use_fp8=False)
        region = buffer.engine._low_latency._regions[-1].native  # type: ignore[attr-defined]
        call = _cuda.LowLatencyCombine(buffer_idx=2, results=0, topk_idx=0, topk_weights=0, num_tokens=0, rows=0, out=0)
        with pytest.raises(ValueError, match="buffer_idx"):
            region.combine(handle.state.plan, call, _cuda.Halves.SEND, 0)
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        low_latency.check_low_latency(case, "bf16")


def check_late_rank_is_named(timeout_s: float) -> None:
    """A rank comes too late for a dispatch; the others name it, all meet again, and the calls that follow are right."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case("late", num_ranks, 12, num_experts=4 * num_ranks)
    inputs, late = case.inputs(rank), num_ranks - 1
    x = low_latency.expert_output(case, rank, case.max_tokens * num_ranks)
    with make_buffer(case, timeout_s=timeout_s, low_latency_mode=True) as buffer:

        def dispatch() -> tuple[Any, ...]:
            return buffer.low_latency_dispatch(
                inputs.x, inputs.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )

        def check_step() -> None:
            *_, handle, _, _ = dispatch()
            combined, _, _ = buffer.low_latency_combine(x, inputs.topk_idx, inputs.topk_weights, handle)
            equal(combined, low_latency.expected_combine(case, rank, lambda _: False), "combined_x")

        for num_steps in (1, 4):
            for _ in range(num_steps):
                check_step()
            if rank == late:
                time.sleep(1.5 * timeout_s)
                dispatch()  # what the others have sent is there
            else:
                with pytest.raises(TimeoutError) as told:
                    dispatch()
                assert told.value.peer == late, told.value
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
        check_step()


def check_rank_that_others_have_given_up(timeout_s: float) -> None:
    """A rank comes when one rank of its domain has given it up, and the ranks of the other domain have not.

    Of these the peer of the rank that has given up sends nothing. So no rank has all its rows, and all raise.
    """
    case = Case("late", 4, 40, num_ranks_per_domain=2)
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    begin_s = (0.0, timeout_s + 2.0, timeout_s - 2.0, timeout_s - 2.0)
    with make_buffer(case, timeout_s=timeout_s) as buffer:

        def call() -> None:
            dispatch(buffer, case, inputs)
            buffer.raise_pending()

        call()
        dist.barrier()
        time.sleep(begin_s[rank])
        try:
            with pytest.raises(TransportError):
                call()
        finally:
            dist.barrier()


def check_missing_signal(timeout_s: float, device: str = "cpu") -> None:
    """Over the link that joins domains, and over the one that joins all ranks."""
    for shrinks in (False, True):
        signals.check_missing_signal(timeout_s, device, shrinks=shrinks)


def check_auto() -> None:
    """`auto` takes the kernels between domains, and says what joins them."""
    from hybrid_ep.engine.cuda.between import CudaBetween

    engine = make_engine(dist.group.WORLD, num_ranks_per_domain=1, asked="auto")
    assert isinstance(engine, CudaBetween)
    engine.close()


def check_link_alone(case: Case) -> None:
    """Chunks without rows, more of them than slots, leave the streams as calls of any kind expect them."""
    inputs = case.inputs(dist.get_rank())
    with make_buffer(case) as buffer:
        want, *_, handle, _ = dispatch(buffer, case, inputs)
        engine: Any = buffer.engine
        for chunk in engine.chunks_of(Rows(inputs.x), case.topk, case.num_experts):
            engine.stream_chunks(75, chunk[1])
            again, *_ = dispatch(buffer, case, inputs)
            assert torch.equal(again, want)
            combined, *_ = buffer.combine(want, handle)
            assert torch.equal(combined, buffer.combine(again, handle)[0])


def check_sums_in_other_orders(timeout_s: float) -> None:
    """A domain fills the slots towards one peer, which reads other chunks first: the other peer gets its chunks.

    Tokens of a rank first go to the next rank, then to the one after it. More tokens go to each than slots hold.
    """
    rank, num_each = dist.get_rank(), 2200
    case = Case("orders", 3, 2 * num_each, hidden=16, topk=1, num_experts=3, num_ranks_per_domain=1)
    order = torch.tensor([(rank + 1) % 3, (rank + 2) % 3]).repeat_interleave(num_each)
    inputs = case.inputs(rank)._replace(topk_idx=order[:, None])
    with make_buffer(case, timeout_s=timeout_s) as buffer:
        for _ in range(2):
            received, *_, handle, _ = dispatch(buffer, case, inputs)
            combined, _, _ = buffer.combine(received, handle)
            buffer.raise_pending()
            equal(combined, inputs.x, "combined")


def check_scratch_of_combine(case: Case, num_tensors: int) -> None:
    """A combine makes so many tensors of a row for each token: its output, and scratch for sums over a domain."""
    from hybrid_ep.engine.cuda import between

    inputs = case.inputs(dist.get_rank())
    with make_buffer(case) as buffer:
        recv, *_, handle, _ = dispatch(buffer, case, inputs)
        with mock.patch.object(between.torch, "empty", side_effect=torch.empty) as made:
            buffer.combine(recv, handle)
    assert len([call for call in made.call_args_list if case.hidden in call.args]) == num_tensors


def lose_a_rank() -> int:
    """As `multi_gpu.lost_ranks.call_until_lost`; over tcp, the transport may notice the loss first."""
    from tests.multi_gpu import lost_ranks

    peer: int | None
    try:
        return lost_ranks.call_until_lost()
    except TransportError as error:
        peer = error.peer
    assert peer is not None
    return peer


def check_rate(case: Case, gbytes_per_s: float, device: str = "cpu") -> None:
    """Calls over a link with a rate give the same results, and take at least as long as their bytes need."""
    inputs = on(device, case.inputs(dist.get_rank()))
    with mock.patch.dict(os.environ, {"HYBRID_EP_LOOPBACK_RATE": str(gbytes_per_s)}):
        buffer = make_buffer(case)
    dispatch(buffer, case, inputs)  # memory
    begin = time.monotonic()
    with_rate = dispatch(buffer, case, inputs)[0].cpu()  # waits for a GPU
    seconds = time.monotonic() - begin
    num_bytes = buffer.traffic.between_domains / 2
    buffer.close()
    assert seconds >= num_bytes / gbytes_per_s / 1e9
    with make_buffer(case) as buffer:
        equal(dispatch(buffer, case, inputs)[0], with_rate, "rows")


def check_too_many_mapped_domains() -> None:
    """Kernels that write mapped windows take fewer domains. All ranks get the same error."""
    from hybrid_ep import _cuda

    expected = r"^num_domains is 2; allowed: 2 … 1 over loopback on one host; tcp takes more$"
    with mock.patch.object(_cuda, "max_mapped_domains", 1), pytest.raises(ConfigError, match=expected):
        make_buffer(Case("mapped", 2, 4, num_ranks_per_domain=1))
