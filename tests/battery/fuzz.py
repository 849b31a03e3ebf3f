"""Differential fuzzing: a seed makes a plan of calls, and each result has the bits of the torch engine's.

Every rank derives the same plan from the seed. A plan is a short list of steps through one buffer: dispatches of shapes
that differ between ranks and calls, further calls along their handles, and results that are freed at any time. The
torch engine runs the plan first, with packed tensors and on one stream. Then the engine under test runs it, with the
layouts, streams and default device that the steps name. `tests/emulation/README.md` says how to run one seed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hybrid_ep
from hybrid_ep.core.config import Config
from hybrid_ep.errors import HybridEPError
from hybrid_ep.quantize import Fp8Format, cast_to_fp8
from hybrid_ep.testing.reference import Reference
from tests.battery.cases import Case
from tests.emulation import engine as emulation
from tests.emulation.streams_and_faults import on_stream

Outcome = list[tuple[str, Any]]  # what a step returns, each with its name; what is undefined is left out
_BLOCK = 25  # seeds of one test
_ROWS_OF_A_SLOT = 110  # of 8192 × bf16, with all that stands beside them, in a slot of 2 MiB
_LAYOUTS = "dense", "dense", "offset", "strided", "transposed", "expanded"
_ROUTINGS = "uniform", "uniform", "hot", "holes", "duplicates", "local", "front", "empty"
_FORMATS = {"fp8": Fp8Format(), "ue8m0": Fp8Format(round_scale=True, ue8m0=True)}
_SLEEP_CYCLES = 2_000_000  # about a millisecond of a GPU, longer than the next call needs to begin


class _Printed:
    """Prints the fields that do not have their default."""

    def __repr__(self) -> str:
        found = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        usual = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        named = [f"{name}={value!r}" for name, value in found.items() if value != usual[name]]
        return f"{type(self).__name__}({', '.join(named)})"


@dataclass(frozen=True, repr=False)
class Step(_Printed):
    """One call at every rank.

    Attributes:
        call: ``dispatch``, ``permute``, ``low_latency``, ``along``, ``combine``, ``receive`` (runs the hook of a
            low-latency step), ``free`` (results of a dispatch) or ``shrink`` (gives memory back).
        of: index of the step whose handle, hook or results it uses.
        tokens: of every rank. This and the next four describe a `Case`.
        hidden: H; a combine has its own.
        topk: K.
        num_experts: E.
        routing: as in `Case`.
        seed: of the values.
        layouts: of the tensors that each rank passes.
        rows: ``bf16``, ``fp8``, or ``ue8m0``: e4m3 with packed scales.
        has_weights: whether top-k weights travel, too.
        by_map: the routing is a dense map (HybridEPBuffer), or the ranks of the tokens alone (Buffer).
        alignment: of the blocks of experts, or of their counts.
        bounds: rows of each rank's result; empty = what arrives. ElasticBuffer has one bound, M × R.
        drops_rows: more rows than the bound are dropped, and are no error.
        expands: rows are by expert (ElasticBuffer).
        num_biases: of a combine.
        num_sms: of the call; 0 = the engine's choice.
        stream: number of the stream that is current.
        is_async: the call returns before its stream waits, or a low-latency call returns a hook.
        is_late: a kernel that takes a while stands before those that read the results.
        overwrites: arguments are overwritten after the call.
        is_held: results are alive until they are freed; otherwise they are dropped at once.
        reads_handle: all attributes of an EPHandle are read, some of which make calls of their own.
        error: class of the error that every rank raises.
    """

    call: str
    of: int = -1
    tokens: tuple[int, ...] = ()
    hidden: int = 0
    topk: int = 0
    num_experts: int = 0
    routing: str = "uniform"
    seed: int = 0
    layouts: tuple[str, ...] = ()
    rows: str = "bf16"
    has_weights: bool = False
    by_map: bool = False
    alignment: int = 1
    bounds: tuple[int, ...] = ()
    drops_rows: bool = False
    expands: bool = False
    num_biases: int = 0
    num_sms: int = 0
    stream: int = 0
    is_async: bool = False
    is_late: bool = False
    overwrites: bool = False
    is_held: bool = False
    reads_handle: bool = False
    error: str = ""

    def topk_idx(self, rank: int) -> Tensor:
        """``[T, K]`` int64; where it is expanded, each token has the experts of the first one."""
        sizes = len(self.tokens), self.tokens, self.hidden, self.topk, self.num_experts
        with torch.device("cpu"):
            indices = Case("fuzz", *sizes, routing=self.routing, seed=self.seed).topk_idx(rank)
        return indices[:1].expand_as(indices).contiguous() if self.layouts[rank] == "expanded" else indices

    @property
    def is_permuted(self) -> bool:
        return self.call == "permute" or self.expands

    @property
    def max_tokens(self) -> int:
        return max(1, *self.tokens)


@dataclass(frozen=True, repr=False)
class Plan(_Printed):
    """The calls of one buffer.

    Attributes:
        seed: it was made from.
        interface: ``Buffer``, ``HybridEPBuffer``, ``ElasticBuffer`` or ``EPBuffer``.
        num_ranks_per_domain: of the buffer.
        has_small_slots: slots begin with 2 MiB.
        has_default_device: tensors that are made without a device land on another one than those of the calls; on a GPU
            they land there.
        steps: the calls.
    """

    seed: int
    interface: str
    num_ranks_per_domain: int
    has_small_slots: bool
    has_default_device: bool
    steps: tuple[Step, ...]


@functools.lru_cache(256)
def _reference(dispatch: Step) -> Reference:
    ranks = range(len(dispatch.tokens))
    return Reference([dispatch.topk_idx(rank) for rank in ranks], dispatch.num_experts, len(ranks))


@functools.lru_cache(1024)
def _num_rows(dispatch: Step, rank: int) -> int:
    """The rows that arrive at a rank, padding included."""
    reference = _reference(dispatch)
    return len(reference.permuted(rank, dispatch.alignment) if dispatch.is_permuted else reference.received(rank))


def draw_plan(seed: int, num_ranks: int) -> Plan:
    """The plan of a seed."""
    return _Draw(seed, num_ranks).plan()


class _Draw:
    """Draws a plan. Its dispatches are of few kinds and sizes: a rank repeats a shape while another has a new one."""

    def __init__(self, seed: int, num_ranks: int) -> None:
        self.random = draw = random.Random(seed)
        self.seed, self.num_ranks = seed, num_ranks
        self.interface = draw.choice(("Buffer", "HybridEPBuffer", "HybridEPBuffer", "ElasticBuffer", "EPBuffer"))
        self.is_large = draw.random() < 0.4  # more rows than a slot of 2 MiB holds
        self.is_packed = draw.random() < 0.5
        self.hiddens = (
            (8192, draw.choice((4096, 8192))) if self.is_large else draw.choices((8, 128, 256, 264, 640), k=2)
        )
        self.sizes = draw.choices((0, 9, 70, 140, 200) if self.is_large else (0, 1, 7, 20, 33, 50), k=3)
        self.kinds = [self._kind() for _ in range(draw.randint(1, 3))]
        self.steps: list[Step] = []
        self.handles: list[int] = []  # steps whose handles may be used
        self.held: list[int] = []  # steps whose results are alive
        self.low_latency_sizes: set[tuple[Any, ...]] = set()  # of earlier calls
        self.hooks: list[int] = []  # steps whose hooks have not run
        self.overlaps = False  # whether a low-latency call was made since the oldest of them

    def _kind(self) -> Step:
        """A dispatch without its sizes."""
        draw = self.random
        calls = {"Buffer": ("dispatch", "low_latency"), "HybridEPBuffer": ("dispatch", "permute", "permute")}
        call = draw.choice(calls.get(self.interface, ("dispatch",)))
        hidden = draw.choice(self.hiddens)
        num_experts = self.num_ranks * draw.choice((1, 2, 3, 8))
        by_map = call != "low_latency" and self.interface in ("Buffer", "HybridEPBuffer") and draw.random() < 0.25
        return Step(
            call,
            hidden=hidden,
            topk=draw.randint(1, min(num_experts, 2 if self.is_large else 8)),
            num_experts=num_experts,
            rows=self._rows(hidden),
            has_weights=draw.random() < 0.7 and not (by_map and self.interface == "Buffer"),
            by_map=by_map,
            alignment=draw.choice((1, 1, 8, 16)) if call != "low_latency" else 1,
            drops_rows=call == "permute" and draw.random() < 0.6,
            expands=self.interface in ("ElasticBuffer", "EPBuffer") and draw.random() < 0.5,
            num_sms=draw.choice((0, 0, 1, 2, 7, 24)),
        )

    def plan(self) -> Plan:
        draw = self.random
        sizes = [n for n in range(1, self.num_ranks + 1) if self.num_ranks % n == 0]
        per_domain = self.num_ranks if draw.random() < 0.6 else draw.choice(sizes)
        for _ in range(draw.randint(6, 18)):
            self.steps += self._step()
        while self.hooks:
            self.steps.append(self._receive())
        has_small_slots, has_default_device = draw.random() < 0.8, draw.random() < 0.1
        return Plan(self.seed, self.interface, per_domain, has_small_slots, has_default_device, tuple(self.steps))

    def _step(self) -> list[Step]:
        draw = self.random
        kind = draw.random()
        if self.hooks and (kind < 0.4 or self.overlaps):
            return [self._receive()]
        if not self.handles or kind < 0.4:
            return [self._dispatch()]
        if kind < 0.55 and (along := self._along()):
            return along
        if kind < 0.7 and self.held:
            freed = self.held.pop(draw.randrange(len(self.held)))
            return [Step("free", freed, stream=draw.randrange(3))]
        if kind < 0.73:
            return [Step("shrink")] if not self.hooks else []
        return self._combine()

    def _receive(self) -> Step:
        of = self.hooks.pop(self.random.randrange(len(self.hooks)))
        self.overlaps = self.overlaps and bool(self.hooks)
        if self.steps[of].call == "low_latency":
            self.handles.append(of)
        return Step("receive", of, stream=self.steps[of].stream)

    def _rows(self, hidden: int) -> str:
        formats = ("fp8",) if self.interface == "HybridEPBuffer" else ("fp8", "ue8m0")
        return self.random.choice(formats) if hidden % 128 == 0 and self.random.random() < 0.35 else "bf16"

    def _common(self) -> dict[str, Any]:
        draw = self.random
        return {
            "layouts": tuple("dense" if self.is_packed else draw.choice(_LAYOUTS) for _ in range(self.num_ranks)),
            "seed": draw.randrange(1000),
            "stream": draw.choice((0, 0, 0, 1, 2)),
            "is_async": draw.random() < 0.2,
            "is_late": draw.random() < 0.3,
            "overwrites": draw.random() < 0.3,
            "is_held": draw.random() < 0.4,
            "reads_handle": draw.random() < 0.3,
        }

    def _dispatch(self) -> Step:
        draw = self.random
        kind, routing = draw.choice(self.kinds), draw.choice(_ROUTINGS)
        # A map has a weight for each expert of a token.
        routing = "merged" if kind.by_map and routing == "duplicates" else routing
        tokens = tuple(draw.choice(self.sizes) for _ in range(self.num_ranks))
        step = self._bounded(replace(kind, tokens=tokens, routing=routing, **self._common()))
        size = step.bounds, step.hidden, step.topk, step.num_experts, step.rows
        if step.call == "low_latency" and size not in self.low_latency_sizes:
            # Its memory may have to grow, which is refused while a hook has not been called.
            while self.hooks:
                self.steps.append(self._receive())
            self.low_latency_sizes.add(size)
        index = len(self.steps)
        self.overlaps = bool(self.hooks) and (self.overlaps or step.call == "low_latency")
        if step.call == "low_latency" and step.is_async:
            self.hooks.append(index)
        elif not step.error:
            self.handles.append(index)
        if step.is_held and not step.error:
            self.held.append(index)
        return step

    def _bounded(self, step: Step) -> Step:
        """Adds bounds, and the error of those that are too small."""
        draw = self.random
        change, ranks = functools.partial(replace, step), range(self.num_ranks)
        most = step.max_tokens * self.num_ranks
        if step.call == "low_latency":
            reference = _reference(step)
            copies = max(0, *(max(reference.tokens_per_expert(rank)) for rank in ranks))
            # An expert has room for a row of each token; columns that repeat it may be more.
            capacity = max(step.max_tokens + draw.randrange(5), -(-copies // self.num_ranks))
            return change(bounds=(capacity,) * self.num_ranks)
        if draw.random() < 0.5 and not step.drops_rows:
            return step
        if self.interface in ("ElasticBuffer", "EPBuffer"):
            return change(bounds=(most,) * self.num_ranks)
        needed = [_num_rows(step, rank) for rank in ranks]
        if step.call == "permute" and self.is_large and draw.random() < 0.6:
            # A slot of 2 MiB holds up to 127 rows of 8192 × bf16, and 240 of 8192 × e4m3.
            bounds = [draw.choice((draw.randint(60, 127), draw.randint(128, 240))) for _ in ranks]
            if not step.drops_rows:
                bounds = [max(pair) for pair in zip(bounds, needed, strict=True)]
            return change(bounds=self._alike_where_slots_grow(bounds))
        if step.drops_rows:
            bounds = [int(n * 1.2 * draw.random() ** 2) + draw.randrange(3) for n in needed]
            return change(bounds=self._alike_where_slots_grow(bounds))
        is_short = max(needed) > 1 and draw.random() < 0.2
        bounds = [n + draw.choice((0, 1, 9, n // 2)) for n in needed]
        if is_short:
            longest = needed.index(max(needed))
            bounds[longest] = needed[longest] - draw.randint(1, 1 + needed[longest] // 3)
        if self.interface == "Buffer":
            bounds = [max(1, min(bounds) if is_short else max(bounds))] * self.num_ranks
            is_short = bounds[0] < max(needed)
        if step.call == "dispatch" and self.interface == "HybridEPBuffer":
            bounds = [min(bound, most) for bound in bounds]
        return change(bounds=tuple(bounds), error="OverflowError" if is_short else "")

    def _alike_where_slots_grow(self, bounds: list[int]) -> tuple[int, ...]:
        """Bounds of rows by expert may differ between ranks unless slots must grow for one of them."""
        grows = self.is_large and max(bounds) > _ROWS_OF_A_SLOT
        return (max(bounds),) * self.num_ranks if grows else tuple(bounds)

    def _along(self) -> list[Step]:
        draw = self.random
        found = [index for index in self.handles if self.steps[index].call != "low_latency"]
        if not found:
            return []
        of = draw.choice(found)
        dispatch = self.steps[of]
        has_weights = self.interface != "Buffer" and dispatch.has_weights and draw.random() < 0.4
        sizes: dict[str, Any] = {"hidden": dispatch.hidden, "num_sms": dispatch.num_sms}
        along = Step("along", of, rows=self._rows(dispatch.hidden), has_weights=has_weights, **sizes, **self._common())
        if along.is_held:
            self.held.append(len(self.steps))
        return [along]

    def _combine(self) -> list[Step]:
        draw = self.random
        of = draw.choice(self.handles)
        dispatch = self.steps[of]
        is_low_latency = dispatch.call == "low_latency"
        common = self._common()
        self.overlaps = bool(self.hooks) and (self.overlaps or is_low_latency)
        if is_low_latency and common["is_async"]:
            self.hooks.append(len(self.steps))
        hidden = dispatch.hidden if is_low_latency else draw.choice((dispatch.hidden, *self.hiddens))
        num_biases = draw.choice((0, 0, 1, 2)) if self.interface != "HybridEPBuffer" and not is_low_latency else 0
        has_weights = dispatch.has_weights and draw.random() < 0.6
        sizes: dict[str, Any] = {"hidden": hidden, "num_sms": dispatch.num_sms}
        return [Step("combine", of, has_weights=has_weights, num_biases=num_biases, **sizes, **common)]


def seed_blocks(num_blocks: int, num_slow: int) -> pytest.MarkDecorator:
    """Parameter `seeds` of a test: blocks of seeds, the last ones marked slow; with FUZZ_SEED, that one alone."""
    blocks = [range(first, first + _BLOCK) for first in range(0, _BLOCK * (num_blocks + num_slow), _BLOCK)]
    marks = [()] * num_blocks + [(pytest.mark.slow,)] * num_slow
    if "FUZZ_SEED" in os.environ:
        seed = int(os.environ["FUZZ_SEED"])
        blocks, marks = [range(seed, seed + 1)], [()]
    named = [
        pytest.param(seeds, id=f"{seeds[0]}_to_{seeds[-1]}", marks=m) for seeds, m in zip(blocks, marks, strict=True)
    ]
    return pytest.mark.parametrize("seeds", named)


def check_seeds(seeds: range, device: str = "cpu") -> None:
    """Runs the plans of seeds on the engine of HYBRID_EP_ENGINE, and compares the results with the torch engine's.

    Args:
        seeds: of the plans.
        device: of the tensors.
    """
    for seed in seeds:
        plan = draw_plan(seed, dist.get_world_size())
        wanted = _Run(plan, device, None).run()
        wrong = _Run(plan, device, wanted).run()
        assert not wrong, f"{wrong[0]}\n{len(wrong)} differences at rank {dist.get_rank()} in {plan}"


class _Run:
    """A plan on one engine, at this rank.

    Args:
        plan: of the calls.
        device: of the tensors.
        wanted: outcomes of all steps, or None: run on the torch engine, and return them.
    """

    def __init__(self, plan: Plan, device: str, wanted: list[Any] | None) -> None:
        self.plan, self.wanted, self.rank = plan, wanted, dist.get_rank()
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.handles: dict[int, Any] = {}
        self.received: dict[int, Tensor] = {}  # local experts of received rows
        self.held: dict[int, tuple[Outcome, Outcome]] = {}  # results, and copies of them
        self.hooks: dict[int, tuple[Callable[[], None], Callable[[], Outcome]]] = {}
        self.kept: dict[int, list[Tensor]] = {}  # what must not be written to before a combine
        self.streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
        self.wrong: list[str] = []

    def run(self) -> list[Any]:
        """Returns the outcomes of the torch engine, or what differs from them."""
        outcomes: list[Outcome] = []
        with contextlib.ExitStack() as stack:
            if self.wanted is not None:
                self._set_up(stack)
            buffer = stack.enter_context(self._make_buffer())
            for index, step in enumerate(self.plan.steps):
                try:
                    outcomes.append(self._outcome(buffer, index, step))
                except Exception as error:
                    name = "the torch engine" if self.wanted is None else "the engine"
                    raise AssertionError(f"{name}, step {index}, {step}: {error!r}\n{self.plan}") from error
                if self.wanted is not None and self.device.type == "cpu":
                    self._compare(outcomes[-1], index)
            self._wait()
            for index in list(self.held):
                self._free(index)
            try:
                buffer.raise_pending()
            except HybridEPError as error:
                self.wrong.append(f"after the last step: {error!r}")
            if self.wanted is None:
                return [[(name, _on_host(value)) for name, value in outcome] for outcome in outcomes]
            if self.device.type == "cuda":
                for index, outcome in enumerate(outcomes):
                    self._compare(outcome, index)
        return self.wrong

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        if self.plan.has_small_slots:
            with contextlib.suppress(ImportError):
                from hybrid_ep.engine.cuda import arena

                stack.enter_context(mock.patch.object(arena, "_INITIAL_SLOT_BYTES", 1))
        if self.plan.has_default_device:
            other = "cuda" if self.device.type == "cuda" else "meta"
            torch.set_default_device(other)
            stack.callback(torch.set_default_device, None)

    def _make_buffer(self) -> Any:
        plan, dispatches = self.plan, [step for step in self.plan.steps if step.tokens]
        engine = "torch" if self.wanted is None else None
        per_domain, group = plan.num_ranks_per_domain, dist.group.WORLD
        if plan.interface == "Buffer":
            return hybrid_ep.Buffer(group, low_latency_mode=True, num_ranks_per_domain=per_domain, engine=engine)
        if plan.interface == "HybridEPBuffer":
            num_sms = dispatches[0].num_sms or None
            return hybrid_ep.HybridEPBuffer(
                group,
                dispatches[0].hidden,
                max(step.max_tokens for step in dispatches),  # where the ranks give bounds, they know it alike
                1,
                num_sms_dispatch_api=num_sms,
                num_sms_combine_api=num_sms,
                num_of_hybrid_ep_ranks_per_nvlink_domain=per_domain,
                engine=engine,
            )
        return getattr(hybrid_ep, plan.interface)(group, num_ranks_per_domain=per_domain, engine=engine)

    def _outcome(self, buffer: Any, index: int, step: Step) -> Outcome:
        """Makes a call and returns copies of its results, or the error that was expected."""
        with self._stream(step.stream):
            if self.streams and step.of >= 0 and step.call not in ("free", "shrink"):
                made = self.plan.steps[step.of]
                torch.cuda.current_stream().wait_stream(self._stream_of(made.stream))
            if step.call == "free":
                self._free(step.of)
                return []
            if step.call == "shrink":
                buffer.empty_cache()
                return []
            if step.call == "receive":
                receive, read = self.hooks.pop(step.of)
                receive()
                return self._copied(step.of, read(), is_late=self.plan.steps[step.of].is_late)
            try:
                results = getattr(self, f"_{self._name_of(step)}")(buffer, index, step)
                if step.error:
                    self._wait()
                    buffer.raise_pending()
            except HybridEPError as error:
                if type(error).__name__ != step.error:
                    raise
                # The engines have other words for what they count.
                return [("error", (type(error).__name__, re.findall(r"\d+", str(error))))]
            return self._copied(index, results, is_late=step.is_late)

    def _name_of(self, step: Step) -> str:
        """Of the method that makes the call."""
        dispatch = step if step.of < 0 else self.plan.steps[step.of]
        interface = self.plan.interface
        kind = {"Buffer": "normal", "HybridEPBuffer": "hybrid"}.get(interface, "elastic")
        if dispatch.call in ("low_latency", "permute"):
            kind = dispatch.call
        return f"{kind}_{'dispatch' if step.call in ('low_latency', 'permute') else step.call}"

    # Buffer

    def _normal_dispatch(self, buffer: Any, index: int, step: Step) -> Outcome:
        x, topk_idx, weights = self._inputs(index, step)
        layout = buffer.get_dispatch_layout(topk_idx, step.num_experts)
        per_rank, per_domain, per_expert, in_rank, _ = layout
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=None if step.by_map else topk_idx,
            topk_weights=weights,
            expert_alignment=step.alignment,
            num_worst_tokens=step.bounds[0] if step.bounds else 0,
            **self._options(step),
        )
        event.current_stream_wait()
        self.handles[index] = handle
        n = _num_rows(step, self.rank)
        if recv_idx is not None:
            self.received[index] = recv_idx.clone()
        self._overwrite(step, x, topk_idx, weights)
        return [
            *((f"layout {i}", part) for i, part in enumerate(layout[:4])),
            *_rows_of(recv_x, n),
            ("recv_topk_idx", recv_idx),
            ("recv_topk_weights", None if recv_weights is None else recv_weights[:n]),
            ("counts", counts),
            ("rank prefix", handle.dispatch.rank_prefix_matrix),
        ]

    def _normal_along(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch = self.plan.steps[step.of]
        x, _, _ = self._inputs(index, step, dispatch)
        recv_x, *_, event = buffer.dispatch(x, handle=self.handles[step.of], **self._options(step))
        event.current_stream_wait()
        self._overwrite(step, x)
        return _rows_of(recv_x, _num_rows(dispatch, self.rank))

    def _normal_combine(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch, handle = self.plan.steps[step.of], self.handles[step.of]
        y = self._returned(index, step, handle.num_recv)
        weights, biases = self._returned_weights(index, step, dispatch), self._biases(index, step, dispatch)
        combined, home, event = buffer.combine(y, handle, weights, bias=_bias(biases), **self._options(step))
        event.current_stream_wait()
        self._overwrite(step, y, weights, *biases)
        return [("combined", combined), ("combined weights", home)]

    # HybridEPBuffer

    def _hybrid_dispatch(self, buffer: Any, index: int, step: Step) -> Outcome:
        rows, routing = self._hybrid_inputs(index, step, step)
        bound = step.bounds[self.rank] if step.bounds else None
        hidden, probs, scales, handle = buffer.dispatch(
            **rows, **routing, num_of_experts=step.num_experts, num_dispatched_tokens=bound
        )
        self.handles[index] = handle
        n = _num_rows(step, self.rank)
        self._overwrite(step, *rows.values(), *routing.values())
        return [("hidden", hidden[:n]), ("probs", _first(probs, n)), ("scales", _first(scales, n))]

    def _hybrid_along(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch = self.plan.steps[step.of]
        rows, routing = self._hybrid_inputs(index, step, dispatch)
        hidden, probs, scales, _ = buffer.dispatch(**rows, **routing, handle=self.handles[step.of])
        n = _num_rows(dispatch, self.rank)
        self._overwrite(step, *rows.values(), *routing.values())
        return [("hidden", hidden[:n]), ("probs", _first(probs, n)), ("scales", _first(scales, n))]

    def _hybrid_combine(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch, handle = self.plan.steps[step.of], self.handles[step.of]
        num_rows = dispatch.bounds[self.rank] if dispatch.bounds else _num_rows(dispatch, self.rank)
        y, probs = self._returned(index, step, num_rows), None
        if step.has_weights:
            num_experts = dispatch.num_experts // len(dispatch.tokens) * self.plan.num_ranks_per_domain
            probs = self._random(index, 3, num_rows, num_experts)
            probs[_num_rows(dispatch, self.rank) :] = float("nan")
            probs = self._placed(probs, step, expands=False)
        combined, home = buffer.combine(y, probs, handle)
        self._overwrite(step, y, probs)
        return [("combined", combined), ("combined probs", home)]

    def _permute_dispatch(self, buffer: Any, index: int, step: Step) -> Outcome:
        rows, routing = self._hybrid_inputs(index, step, step)
        bound = step.bounds[self.rank] if step.bounds else None
        hidden, probs, scales, counts, handle = buffer.dispatch_with_permute(
            **rows,
            **routing,
            num_of_experts=step.num_experts,
            pad_multiple=step.alignment,
            num_permuted_tokens=bound,
            non_blocking=step.drops_rows,
        )
        self.handles[index] = handle
        n = self._num_kept(step)
        self._overwrite(step, *rows.values(), *routing.values())
        return [
            ("hidden", hidden[:n]),
            ("probs", probs),
            ("scales", _first(scales, n)),
            ("counts", counts),
            ("overflow", handle[-1]),
        ]

    def _permute_along(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch = self.plan.steps[step.of]
        rows, routing = self._hybrid_inputs(index, step, dispatch)
        hidden, probs, scales, counts, _ = buffer.dispatch_with_permute(
            **rows, **routing, handle=self.handles[step.of], non_blocking=step.is_async
        )
        n = self._num_kept(dispatch)
        self._overwrite(step, *rows.values(), *routing.values())
        return [("hidden", hidden[:n]), ("probs", probs), ("scales", _first(scales, n)), ("counts", counts)]

    def _permute_combine(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch, handle = self.plan.steps[step.of], self.handles[step.of]
        y, probs = self._returned_by_expert(index, step, dispatch, handle.num_permuted)
        combined, home = buffer.combine_with_unpermute(
            hidden=y, probs=probs, handle=handle, pad_multiple=dispatch.alignment
        )
        self._overwrite(step, y, probs)
        return [("combined", combined), ("combined probs", home)]

    # ElasticBuffer and EPBuffer

    def _elastic_dispatch(self, buffer: Any, index: int, step: Step) -> Outcome:
        x, topk_idx, weights = self._inputs(index, step)
        stats = torch.zeros(step.num_experts // len(step.tokens), dtype=torch.int32, device=self.device)
        received, recv_idx, recv_weights, handle, event = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=weights,
            cumulative_local_expert_recv_stats=stats,
            num_experts=step.num_experts,
            num_max_tokens_per_rank=step.max_tokens,
            expert_alignment=step.alignment,
            do_cpu_sync=not step.bounds,
            do_expand=step.expands,
            num_sms=step.num_sms,
            async_with_compute_stream=step.is_async,
        )
        event.current_stream_wait()
        self.handles[index] = handle
        n = _num_rows(step, self.rank)
        if recv_idx is not None:
            self.received[index] = recv_idx.clone()
        copies = self.plan.interface == "ElasticBuffer"
        self.kept[index] = [topk_idx]
        self._overwrite(step, x, topk_idx if copies else None, weights)
        return [
            *_rows_of(received, n),
            ("recv_topk_idx", recv_idx),
            ("recv_topk_weights", recv_weights if step.expands else _first(recv_weights, n)),
            ("stats", stats),
            *((name, getattr(handle, name)) for name in _HANDLE_FIELDS[: None if step.reads_handle else -2]),
        ]

    def _elastic_along(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch = self.plan.steps[step.of]
        x, _, weights = self._inputs(index, step, dispatch)
        received, recv_idx, recv_weights, _, event = buffer.dispatch(
            x,
            topk_weights=weights,
            handle=self.handles[step.of],
            do_expand=dispatch.expands,
            num_sms=step.num_sms,
            async_with_compute_stream=step.is_async,
        )
        event.current_stream_wait()
        self._overwrite(step, x, weights)
        n = _num_rows(dispatch, self.rank)
        return [
            *_rows_of(received, n),
            ("recv_topk_idx", recv_idx),
            ("recv_topk_weights", recv_weights if dispatch.expands else _first(recv_weights, n)),
        ]

    def _elastic_combine(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch, handle = self.plan.steps[step.of], self.handles[step.of]
        if dispatch.expands:
            y, weights = self._returned_by_expert(index, step, dispatch, handle.num_rows)
        else:
            y = self._returned(index, step, handle.num_rows)
            weights = self._returned_weights(index, step, dispatch)
        biases = self._biases(index, step, dispatch)
        combined, home, event = buffer.combine(
            y,
            handle,
            weights,
            bias=_bias(biases),
            num_sms=step.num_sms,
            async_with_compute_stream=step.is_async,
        )
        event.current_stream_wait()
        self._overwrite(step, y, weights, *biases)
        return [("combined", combined), ("combined weights", home)]

    # Low latency

    def _low_latency_dispatch(self, buffer: Any, index: int, step: Step) -> Outcome:
        x, topk_idx, weights = self._inputs(index, replace(step, rows="bf16", has_weights=True))
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x,
            topk_idx,
            step.bounds[0],
            step.num_experts,
            use_fp8=step.rows != "bf16",
            round_scale=step.rows == "ue8m0",
            use_ue8m0=step.rows == "ue8m0",
            return_recv_hook=step.is_async,
        )
        assert weights is not None
        self.handles[index], self.kept[index] = handle, [x, topk_idx, weights]
        copies = [len(block) for block in self._blocks(step)]
        parts = rows if isinstance(rows, tuple) else (rows,)
        outcome = [("counts", counts)]
        for e, n in enumerate(copies):
            outcome += [(f"expert {e}, part {i}", part[e, :n]) for i, part in enumerate(parts)]
        outcome.append(("layout", handle[1]))
        return self._now_or_later(index, hook, outcome)

    def _low_latency_combine(self, buffer: Any, index: int, step: Step) -> Outcome:
        dispatch, handle = self.plan.steps[step.of], self.handles[step.of]
        _, topk_idx, weights = self.kept[step.of]
        blocks = self._blocks(dispatch)
        capacity = dispatch.bounds[0] * len(dispatch.tokens)
        y = torch.full((len(blocks), capacity, step.hidden), float("nan"), dtype=torch.bfloat16, device="cpu")
        values = _wide(self._random(index, 2, sum(map(len, blocks)), step.hidden))
        for block, part in zip(y, values.split([len(block) for block in blocks]), strict=True):
            block[: len(part)] = part
        placed = self._placed(y, step, expands=False)
        combined, _, hook = buffer.low_latency_combine(
            placed, topk_idx, weights, handle, return_recv_hook=step.is_async
        )
        self.kept[index] = [placed]
        return self._now_or_later(index, hook, [("combined", combined)])

    def _now_or_later(self, index: int, hook: Callable[[], None] | None, outcome: Outcome) -> Outcome:
        if hook is None:
            return outcome
        self.hooks[index] = hook, lambda: outcome
        return []

    def _blocks(self, dispatch: Step) -> list[list[Any]]:
        """The copies of each local expert."""
        copies, num_local = _reference(dispatch).copies(self.rank), dispatch.num_experts // len(dispatch.tokens)
        return [[c for c in copies if c.expert == self.rank * num_local + e] for e in range(num_local)]

    # Inputs

    def _random(self, index: int, part: int, *shape: int) -> Tensor:
        """On the CPU, the same for both engines."""
        seed = ((self.plan.seed * 100 + index) * 10 + part) * 100 + self.rank
        return torch.rand(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")

    def _placed(self, tensor: Tensor, step: Step, *, expands: bool = True) -> Tensor:
        """The tensor on the device, in the layout of this rank; the torch engine gets it packed."""
        layout, tensor = step.layouts[self.rank], tensor.to(self.device)
        if layout == "expanded" and expands and len(tensor):
            tensor = tensor[:1].expand_as(tensor)
        if self.wanted is None:
            return tensor.clone(memory_format=torch.contiguous_format)
        return _laid_out(tensor, layout if expands or layout != "expanded" else "dense")

    def _inputs(self, index: int, step: Step, along: Step | None = None) -> tuple[Any, Tensor, Tensor | None]:
        """Rows, indices and weights of a dispatch, or of one along another."""
        dispatch = along or step
        num_tokens = dispatch.tokens[self.rank]
        x: Any = (self._random(index, 0, num_tokens, step.hidden) - 0.5).to(torch.bfloat16)
        if step.rows != "bf16":
            data, scales = cast_to_fp8(x, _FORMATS[step.rows])
            x = self._placed(data, step), self._placed(scales, step)
        else:
            x = self._placed(x, step)
        weights = None
        if step.has_weights:
            weights = self._placed(self._random(index, 1, num_tokens, dispatch.topk), step)
        return x, self._placed(dispatch.topk_idx(self.rank), step, expands=along is None), weights

    def _hybrid_inputs(self, index: int, step: Step, dispatch: Step) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rows and routing of a HybridEPBuffer's call. Along a handle, a routing is given only with weights."""
        x, topk_idx, weights = self._inputs(index, step, None if step is dispatch else dispatch)
        rows = {"hidden": x[0], "scaling_factor": x[1]} if step.rows != "bf16" else {"hidden": x}
        if step is not dispatch and weights is None:
            return rows, {}
        if not dispatch.by_map:
            return rows, {"topk_idx": topk_idx, "topk_weights": weights}
        routing_map, probs = hybrid_ep.indices_to_map(topk_idx, weights, topk_idx.shape[0], dispatch.num_experts)
        return rows, {
            "routing_map": self._placed(routing_map, step, expands=False),
            "probs": None if probs is None else self._placed(probs, step, expands=False),
        }

    def _returned(self, index: int, step: Step, num_rows: int) -> Tensor:
        """What experts return for rows by source; nothing reads those after the last."""
        y = _wide(self._random(index, 2, num_rows, step.hidden))
        y[_num_rows(self.plan.steps[step.of], self.rank) :] = float("nan")
        return self._placed(y, step, expands=False)

    def _returned_weights(self, index: int, step: Step, dispatch: Step) -> Tensor | None:
        if not step.has_weights:
            return None
        experts = self.received[step.of].cpu()
        weights = torch.where(experts >= 0, self._random(index, 3, *experts.shape), 0.0)
        weights[_num_rows(dispatch, self.rank) :] = float("nan")
        return self._placed(weights, step, expands=False)

    def _returned_by_expert(
        self, index: int, step: Step, dispatch: Step, num_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Likewise for rows by expert; nothing reads padding."""
        copies = _reference(dispatch).permuted(self.rank, dispatch.alignment)[:num_rows]
        is_row = torch.tensor([c is not None for c in copies] + [False] * (num_rows - len(copies)), device="cpu").bool()
        y = _wide(self._random(index, 2, num_rows, step.hidden))
        y[~is_row] = float("nan")
        probs = None
        if step.has_weights:
            probs = self._random(index, 3, num_rows)
            probs[~is_row] = float("nan")
            probs = self._placed(probs, step, expands=False)
        return self._placed(y, step, expands=False), probs

    def _biases(self, index: int, step: Step, dispatch: Step) -> list[Tensor]:
        shape = dispatch.tokens[self.rank], step.hidden
        drawn = (self._random(index, 4 + i, *shape).to(torch.bfloat16) for i in range(step.num_biases))
        return [self._placed(bias, step) for bias in drawn]

    def _options(self, step: Step) -> dict[str, Any]:
        return {"config": Config(step.num_sms) if step.num_sms else None, "async_finish": step.is_async}

    # Results

    def _num_kept(self, dispatch: Step) -> int:
        n = _num_rows(dispatch, self.rank)
        return min(n, dispatch.bounds[self.rank]) if dispatch.bounds else n

    def _copied(self, index: int, results: Outcome, *, is_late: bool) -> Outcome:
        """Copies of the results, which stay alive with them where the step says so."""
        if self.streams and is_late and self.wanted is not None:
            torch.cuda._sleep(_SLEEP_CYCLES)
        copies = [(name, value.clone() if isinstance(value, Tensor) else value) for name, value in results]
        if self.plan.steps[index].is_held:
            self.held[index] = results, copies
        return copies

    def _free(self, index: int) -> None:
        """Drops results; on a CPU, after a look whether they are still as they were."""
        results, copies = self.held.pop(index, ([], []))
        if self.device.type == "cpu":
            for (name, value), (_, copy) in zip(results, copies, strict=True):
                if (difference := _difference(value, copy)) is not None:
                    self.wrong.append(f"step {index}: {name} was overwritten before it was freed: {difference}")

    def _overwrite(self, step: Step, *tensors: Any) -> None:
        """A caller may write to arguments after a call."""
        if not step.overwrites or self.wanted is None or step.layouts[self.rank] == "expanded":
            return
        for tensor in tensors:
            for part in tensor if isinstance(tensor, tuple) else (tensor,):
                if part is not None:
                    (part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part).fill_(1)

    def _compare(self, outcome: Outcome, index: int) -> None:
        assert self.wanted is not None
        step, wanted = self.plan.steps[index], self.wanted[index]
        names = [name for name, _ in outcome]
        if names != [name for name, _ in wanted]:
            self.wrong.append(f"step {index}, {step}: {outcome}, expected {wanted}")
            return
        for (name, value), (_, want) in zip(outcome, wanted, strict=True):
            if (difference := _difference(_on_host(value), want)) is not None:
                self.wrong.append(f"step {index}, {step}: {name}: {difference}")

    # Streams

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _stream_of(self, number: int) -> torch.cuda.Stream:
        return self.streams[number - 1] if number else torch.cuda.default_stream()

    @contextlib.contextmanager
    def _stream(self, number: int) -> Iterator[None]:
        """Makes a stream the current one; on a CPU only the emulator has some, by their numbers."""
        is_emulated = bool(emulation._installed)
        if self.wanted is None or not (self.streams or is_emulated):
            yield
        elif self.streams:
            with torch.cuda.stream(self._stream_of(number)):
                yield
        else:
            with on_stream(number):
                yield


_HANDLE_FIELDS = (
    "num_recv_tokens",
    "num_recv_tokens_per_expert_list",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)


def _first(tensor: Tensor | None, num_rows: int) -> Tensor | None:
    return None if tensor is None else tensor[:num_rows]


def _rows_of(received: Any, num_rows: int) -> Outcome:
    """The rows that arrived, and their scales."""
    parts = received if isinstance(received, tuple) else (received,)
    return [(name, part[:num_rows]) for name, part in zip(("rows", "scales"), parts, strict=False)]


def _bias(terms: list[Tensor]) -> Any:
    return None if not terms else terms[0] if len(terms) == 1 else tuple(terms)


def _wide(values: Tensor) -> Tensor:
    """bf16 rows from numbers between 0 and 1. Half become ±2^24: a sum in another order then has other bits."""
    rows = values - 0.5
    rows[values < 0.25] = 2.0**24
    rows[values > 0.75] = -(2.0**24)
    return rows.to(torch.bfloat16)


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides or another offset."""
    if tensor.dtype == torch.float8_e4m3fn:
        return _laid_out(tensor.view(torch.uint8), layout).view(torch.float8_e4m3fn)
    if layout == "expanded":
        return tensor  # it is already
    *outer, width = tensor.shape
    if layout == "offset":
        placed = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    elif layout == "strided":
        placed = tensor.new_empty(*outer, width + 3)[..., :width] if outer else tensor.new_empty(2 * width)[::2]
    elif layout == "transposed":
        placed = tensor.new_empty(tensor.shape[::-1]).permute(*reversed(range(tensor.dim())))
    else:
        placed = tensor.new_empty(tensor.shape)
    return placed.copy_(tensor)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _difference(got: Any, want: Any) -> str | None:
    """What differs, bit for bit; None if nothing does."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return None if type(got) is type(want) and got == want else f"{got}, expected {want}"
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    if got.numel() == 0:
        return None
    width = got.shape[-1] if got.dim() > 1 else 1
    # A copy, because a tensor with one column may have any stride there.
    bits = [torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t).view(torch.uint8) for t in (got, want)]
    if torch.equal(*bits):
        return None
    got_bits, want_bits = (part.reshape(got.numel() // width, -1) for part in bits)
    rows = (got_bits != want_bits).any(1).nonzero().flatten().tolist()
    return f"{len(rows)} of {got.numel() // width} rows differ, first {rows[:5]}"
