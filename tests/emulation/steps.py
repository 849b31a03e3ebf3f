"""The steps of combine, of the protocols between domains and of copies of experts. Each can be left out, to see that a
test fails without it.

One build has all of them: it replaces each step by C++ that performs the step or not. A process that runs
`check_without` leaves one step out.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.battery.cases import Case

_STREAM = "kernels/between/chunk_stream.cuh"
_EXCHANGE = "kernels/dispatch_between/exchange.cuh"
_DISPATCH = "kernels/dispatch_between/dispatch_between.cu"
_DOMAIN_SUMS = "kernels/combine_between/domain_sums.cuh"
_HOME_SUMS = "kernels/combine_between/home_sums.cuh"
_COMBINE = "kernels/combine_between/combine_between.cu"
_SENDERS = "kernels/combine_between/senders.cuh"
_SEND_HOME = "kernels/combine/send_runs.cuh"
_PEER = "kernels/low_latency_between/peer_chunk.cuh"
_HOME = "kernels/low_latency_between/combine.cu"
_EXPERTS = "kernels/balance/copy_experts.cu"
_PUSHED_EXPERTS = "kernels/balance/push_experts.cu"
_WITHIN, _REPORT = "kernels/dispatch/exchange.cuh", "kernels/dispatch/report.cuh"

_COPIES = (4, "emulation.experts.check_copies")
_OTHER_MAPPINGS = "multi_process.test_load_balance.check_other_mappings"
_ZERO_ROWS = "clear_rows(slot + params.slot.rows, static_cast<int64_t>(params.row_limit) * params.row_bytes);"

_SOME_CHUNKS = 40  # of a call to a peer, fewer than slots

_WRITE_ROWS = (
    "if (!stream.write_rows(record.chunk, record.part_size(), num_rows, num_rows * layout.num_bytes)) return false;"
)

_ROUND_TRIP = "battery.normal.check_round_trip"
_MANY = (2, _ROUND_TRIP, Case("many_chunks", 2, (4400, 3), hidden=16, num_ranks_per_domain=1))
_FOUR = (4, _ROUND_TRIP, Case("2x2", 4, 40, num_ranks_per_domain=2))
_ONE_SIDED = Case("rows_for_one_rank", 2, 140, hidden=8192, topk=1, routing="hot", num_ranks_per_domain=1)
_SLOW = "emulation.faulty_links.check_on_slow_link"
_SLOW_MANY = (2, _SLOW, *_MANY[1:2], 0, *_MANY[2:])
_IN_DOMAINS = "emulation.domains.check_in_domains"
_MIXED_HOOKS = "battery.low_latency.check_mixed_hooks"
_TWO_BY_TWO = Case("2x2", 4, 36, num_ranks_per_domain=2)
_ONE_DOMAIN = (4, _ROUND_TRIP, Case("one_domain", 4, 120, hidden=2048, num_experts=4, topk=4))
_SLOW_FOUR = (4, _SLOW, *_FOUR[1:2], 0, *_FOUR[2:])


def _in_domains(check: str, *args: Any) -> tuple[Any, ...]:
    return 2, _IN_DOMAINS, 1, check, *args


def _by_kernels(num_ranks: int, check: str, *args: Any) -> tuple[Any, ...]:
    return num_ranks, "emulation.domains.check_by_kernels", check, *args


@dataclass(frozen=True)
class Step:
    """A step of the protocol.

    Attributes:
        name: what is left out.
        file: below csrc.
        code: an expression, or statements, that stand once in the file.
        without: what stands there if the step is left out.
        check: that must fail then: number of ranks, name and arguments.
    """

    name: str
    file: str
    code: str
    without: str
    check: tuple[Any, ...]

    def either(self) -> str:
        """C++ that does the one or the other."""
        asks = f'emulated::leaves_out("{self.name}")'
        if self.code.endswith(";"):
            return f"if ({asks}) {{ {self.without} }} else {{ {self.code} }}"
        return f"({asks} ? ({self.without}) : ({self.code}))"


STEPS = [
    Step("wait for a free slot", _STREAM, "place.lap == 0", "true", _SLOW_MANY),
    Step("wait for a chunk", _STREAM, "is_here(chunk)", "true", _SLOW_FOUR),
    Step(
        "lap of a flag",
        _STREAM,
        "link_.poll(kStreamRing, domain_, slot_of(place)) >> 16 == place.lap + 1",
        "link_.poll(kStreamRing, domain_, slot_of(place)) != 0",
        _SLOW_MANY,
    ),
    Step(
        "credit",
        _STREAM,
        "link_.credit(kStreamRing, domain_, group, place.lap + 1, gives_up())",
        "true",
        _MANY,
    ),
    Step(
        "credit only for a whole group",
        _STREAM,
        "ptx::add_acq_rel_gpu(slots_read, 1) + 1 < shape_.slots_per_credit",
        "false",
        _SLOW_MANY,
    ),
    Step(
        "rows stand in a chunk before it leaves",
        _DISPATCH,
        f"mover.finish();\n      {_WRITE_ROWS}",
        _WRITE_ROWS,
        _FOUR,
    ),
    Step(
        "a chunk leaves only with all rows",
        _STREAM,
        "ptx::add_acq_rel_gpu(rows_written, num_written) + num_written < static_cast<uint32_t>(num_rows)",
        "false",
        _FOUR,
    ),
    Step(
        "wait for the rows of the domain",
        _DISPATCH,
        "waiter.until_epoch(&own.rows_epoch[r], epoch, r, WaitTag::kRows);",
        ";",
        _SLOW_FOUR,
    ),
    Step(
        "streams move on behind a dispatch",
        _DISPATCH,
        "call.num_control[d] + (is_sent ? num_chunks(params.record, call.num_sent[d]) : 0)",
        "0",
        _FOUR,
    ),
    Step(
        "lack of capacity in other domains",
        _EXCHANGE,
        "atomicMax(&call.verdict.lacks_capacity, theirs.lacks_capacity);",
        ";",
        (2, "emulation.small_slots.check_with_small_slots", _ROUND_TRIP, _ONE_SIDED),
    ),
    Step(
        "overflow in other domains",
        _EXCHANGE,
        "atomicMin(&call.verdict.overflowing, theirs.overflowing);",
        ";",
        _in_domains("multi_gpu.late_errors.check_overflow"),
    ),
    Step(
        "what others have refused",
        _EXCHANGE,
        "same &= accepts_call(params, header, source);",
        ";",
        _in_domains("multi_gpu.refusals.check_bad_expert"),
    ),
    Step(
        "whether dispatches are the same",
        _EXCHANGE,
        "same &= makes_same_call(params, waiter, epoch, header, source, &ok);",
        ";",
        _in_domains("battery.other_calls.check_other_calls"),
    ),
    Step(
        "whether combines are the same",
        _COMBINE,
        "compare(theirs.call, grid.peer_in(d));",
        ";",
        _in_domains("battery.other_calls.check_other_calls"),
    ),
    Step(
        "wait for partial rows",
        _DOMAIN_SUMS,
        "!is_new || ptx::load_acquire_system(word) == epoch_",
        "true",
        _FOUR,
    ),
    Step(
        "each run of partial rows has a flag",
        _DOMAIN_SUMS,
        "index_of_destination(static_cast<uint32_t>(destination)) / run_rows_",
        "0",
        (4, _ROUND_TRIP, Case("2x2_long", 4, 160, hidden=2048, num_experts=4, topk=4, num_ranks_per_domain=2)),
    ),
    Step(
        "records without partial rows end in order",
        _DOMAIN_SUMS,
        "walk.is_done() && num_open_ > 0",
        "false",
        (4, _IN_DOMAINS, 2, "multi_gpu.late_errors.check_overflow"),
    ),
    Step(
        "wait for own sums",
        _HOME_SUMS,
        "ptx::load_acquire_gpu(own_epoch_ + chunk) == epoch_",
        "true",
        _FOUR,
    ),
    Step(
        "streams move on behind a combine",
        _COMBINE,
        "kControlChunks + sent_chunks(params.route[params.parts.num_records + d])",
        "0",
        _FOUR,
    ),
    Step(
        "wait for a peer's chunk",
        _PEER,
        "link_.poll(ring_, domain_, slot()) == peer_word(epoch_, session_)",
        "true",
        _by_kernels(4, _SLOW, _MIXED_HOOKS, 0, _TWO_BY_TWO),
    ),
    Step(
        "wait until a peer has forwarded",
        _PEER,
        "has_reached_epoch(static_cast<uint32_t>(credit >> 32), previous_epoch(epoch_))",
        "true",
        _by_kernels(2, "battery.low_latency.check_dispatches_ahead", Case("2x1", 2, 20, num_ranks_per_domain=1)),
    ),
    Step(
        "credit of a peer's chunk",
        _PEER,
        "link_.credit(ring_, domain_, slot(), peer_word(epoch_, session_), gives_up())",
        "true",
        _by_kernels(4, _MIXED_HOOKS, _TWO_BY_TWO),
    ),
    Step(
        "number of the last barrier",
        _PEER,
        "between_control(params, params.domain.rank).session",
        "0u",
        _by_kernels(4, _SLOW, "battery.low_latency.check_cleaned", 0, Case("2x2", 4, 12, num_ranks_per_domain=2)),
    ),
    Step(
        "first number after a cleaning",
        _PEER,
        "epoch_ == first_epoch_",
        "epoch_ == 1",
        _by_kernels(2, _IN_DOMAINS, 1, "battery.low_latency_masks.check_late_rank_comes_back", 8.0),
    ),
    Step(
        "ranks that NVLink joins",
        _PEER,
        "!peers.is_near(d)",
        "d != peers.grid.domain_idx()",
        _by_kernels(4, "battery.low_latency_masks.check_masked", _TWO_BY_TWO, "bf16", (1,)),
    ),
    Step(
        "own memory is free again",
        _PEER,
        "own.free_epoch[r] = epoch;",
        ";",
        _by_kernels(4, _MIXED_HOOKS, _TWO_BY_TWO),
    ),
    Step(
        "rows that stay in the domain",
        _HOME,
        "is_own(i / per_rank) ? params.row_of[i] : -1",
        "params.row_of[i]",
        _by_kernels(4, _MIXED_HOOKS, _TWO_BY_TWO),
    ),
    Step(
        "rows that were too many",
        _HOME,
        "value = kTooManyRowsBit | num_too_many;",
        ";",
        _by_kernels(4, _IN_DOMAINS, 2, "battery.low_latency.check_too_many_rows"),
    ),
    Step(
        "a signal that was not raised",
        _HOME,
        "value = of_own;",
        ";",
        _by_kernels(2, _IN_DOMAINS, 1, "emulation.domains.check_missing_signal", 8.0),
    ),
    Step(
        "a chunk of partial rows is written before it is reported",
        _SEND_HOME,
        "if (kIsPaced || num_sent == kBeforeReport) ptx::bulk_wait_written<kBeforeReport>();",
        ";",
        _ONE_DOMAIN,
    ),
    Step(
        "the last chunk of partial rows is written before it is reported",
        _SEND_HOME,
        "ptx::bulk_wait_written<0>();\n    report();",
        "report();",
        _ONE_DOMAIN,
    ),
    Step(
        "look for a chunk of an expert",
        _EXPERTS,
        "ptx::load_acquire_system(flag_of(chunk)) == epoch_",
        "true",
        _COPIES,
    ),
    Step(
        "wait for a chunk of an expert",
        _EXPERTS,
        "waiter_.until_equal(flag_of(chunk), epoch_, chunk.peer, WaitTag::kExperts)",
        "true",
        _COPIES,
    ),
    Step(
        "a chunk of an expert is written before it is reported",
        _EXPERTS,
        "ptx::bulk_wait_written<kPushWindow>();",
        "{}",
        _COPIES,
    ),
    Step(
        "wait until experts may be staged",
        _EXPERTS,
        "wait_until_ready(domain, KernelName::kCopyExperts, call, waiter, epoch, reports, &is_same)",
        "true",
        (3, "emulation.experts.check_copies_in_turn"),
    ),
    Step(
        "the last chunk of an expert is written before it is reported",
        _EXPERTS,
        "ptx::bulk_wait_written<0>();\n    if (has_sent_) report();",
        "if (has_sent_) report();",
        _COPIES,
    ),
    Step(
        "wait until spare slots may be written",
        _PUSHED_EXPERTS,
        "wait_until_ready(domain, KernelName::kCopyExperts, call, waiter, epoch, reports, &is_same)",
        "true",
        (3, "emulation.pushed_experts.check_pushes_in_turn"),
    ),
    Step(
        "experts are written before peers are told",
        _PUSHED_EXPERTS,
        "ptx::bulk_wait_written<0>();",
        "{}",
        (4, "emulation.pushed_experts.check_pushes"),
    ),
    Step(
        "wait for the experts of the peers",
        _PUSHED_EXPERTS,
        "end_waiter.until_equal(&own.chunk_epoch[r][0], epoch, r, WaitTag::kExperts)",
        "true",
        (4, "emulation.pushed_experts.check_pushes"),
    ),
    Step(
        "ranks compare where spare slots are",
        _PUSHED_EXPERTS,
        "kCopiesExperts | params.sizes",
        "kCopiesExperts",
        (3, "emulation.pushed_experts.check_ranks_that_disagree"),
    ),
    Step(
        "ranks compare sizes of experts",
        _EXPERTS,
        "kCopiesExperts | params.sizes",
        "kCopiesExperts",
        (3, "emulation.experts.check_ranks_that_disagree"),
    ),
    Step(
        "ranks compare mappings",
        _EXPERTS,
        "replicas.checksum >> 1",
        "0u",
        (3, "emulation.experts.check_ranks_that_disagree"),
    ),
    Step(
        "ranks of a dispatch compare mappings",
        _WITHIN,
        "is_checksum ? static_cast<int>(*params.mapping_checksum) : params.call[column]",
        "params.call[column]",
        (2, _OTHER_MAPPINGS, 2),
    ),
    Step("no row of experts is left in memory", _REPORT, _ZERO_ROWS, ";", (2, _OTHER_MAPPINGS, 2)),
    Step(
        "ranks of several domains compare mappings",
        _EXCHANGE,
        "if (!has_same_mapping(params, waiter, epoch, header, source, ok)) return false;",
        ";",
        (4, _OTHER_MAPPINGS, 2),
    ),
    Step("no row of experts is left in memory between domains", _DISPATCH, _ZERO_ROWS, ";", (4, _OTHER_MAPPINGS, 2)),
]

_END = "emulated::end_process()"
_TELL = "stream.send(0, (4 * num_values + 15) / 16 * 16, 1)"
_HEADERS = "receive_headers(params, waiter, epoch, call, &is_same)"
_BASES = "find_dispatch_bases_between(params, waiter, epoch, call, base, totals)"
_VERDICT = "stream.send(1, (sizeof(Verdict) + 15) / 16 * 16, 1)"
_AGREE = "agree(params, waiter, link, call, num_control_read)"
_SLOT = "stream.wait_free(record.chunk)"
_FREE = "stream(domain).is_free(chunk)"


def _end(name: str, *places: tuple[str, str, str]) -> list[Step]:
    return [Step(name, *place, ()) for place in places]


# Where the process of a rank may end.
ENDS = [
    *_end(
        "has told its domain",
        (_EXCHANGE, _TELL, "true"),
        (_DISPATCH, _HEADERS, f"(leads ? {_END} : {_HEADERS})"),
    ),
    *_end(
        "has told one other domain",
        (_EXCHANGE, _TELL, f"(i > 1 || {_TELL})"),
        (_DISPATCH, _BASES, f"(leads ? {_END} : {_BASES})"),
    ),
    *_end(
        "has sent one verdict",
        (_EXCHANGE, _VERDICT, f"(i > 1 || {_VERDICT})"),
        (_DISPATCH, _AGREE, f"({_AGREE} && {_END})"),
    ),
    *_end("has sent some records", (_DISPATCH, _SLOT, f"(record.chunk > {_SOME_CHUNKS} ? {_END} : {_SLOT})")),
    *_end("has agreed on a combine", (_COMBINE, "shared_status == kSent && warp < kSendWarps", _END)),
    *_end("has sent some rows home", (_SENDERS, _FREE, f"(chunk > {_SOME_CHUNKS} ? {_END} : {_FREE})")),
]


def can_leave_out(file: str, source: str) -> str:
    """Returns a source of csrc in which every step of STEPS may be left out, and a rank may end at a place of ENDS."""
    for step in (*STEPS, *ENDS):
        if step.file == file:
            assert source.count(step.code) == 1, (
                f"{file} has {source.count(step.code)} times {step.code!r}; expected: once"
            )
            source = source.replace(step.code, step.either())
    return source


def without(name: str) -> AbstractContextManager[Any]:
    """Kernels that are launched in this context leave out a step of STEPS, or end the process at a place of ENDS."""
    return mock.patch.dict(os.environ, {"HYBRID_EP_EMULATION_WITHOUT": name})


def check_without(name: str, check: str, *args: Any) -> None:
    """Runs a check of tests/ with one step left out; none has the name ""."""
    module, function = check.rsplit(".", 1)
    with without(name):
        getattr(importlib.import_module(f"tests.{module}"), function)(*args)
