"""The limits of the design: memory, sizes that it does not support, and what becomes the bottleneck at more domains."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from hybrid_ep import _C
from hybrid_ep.cluster.model.predict import Prediction, predict
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.traffic import Rows, expected_rows
from hybrid_ep.report.units import format_bytes

_PEER_BITS = 8  # of a command of the proxy: csrc/transport/command.h
_NOTED_SHARE = 0.1  # of a call, from which on a wait is worth a word


class Excess(NamedTuple):
    """A size beyond a limit, and what it would take to allow it."""

    name: str
    value: int
    limit: int
    change: str


class SweepPoint(NamedTuple):
    """A number of domains, to how many others a token goes, and the times of both calls."""

    num_domains: int
    remote_domains: float
    dispatch: Prediction
    combine: Prediction


class Stop(NamedTuple):
    """Something that becomes worse from a number of domains on."""

    num_domains: int
    what: str


def memory_of(question: Question, rows: Rows) -> dict[str, int]:
    """Returns bytes of the most loaded rank by part, by the formulas that the engine allocates with.

    Args:
        question: the grid and the workload.
        rows: the numbers of rows that are expected.
    """
    workload, num_domains, num_tokens = question.workload, question.num_domains, question.workload.num_tokens
    sizes = {"num_experts": workload.num_experts, "num_topk": workload.num_topk}
    grid = {"num_domains": num_domains, "ranks_per_domain": question.num_ranks_per_domain}
    memory = {"control": _C.control_bytes}
    if num_domains > 1:
        memory["control"] += _C.between_control_bytes(**grid)
        memory["rings of the link"] = _C.between_link_bytes(num_domains=num_domains)
    if question.mode == "low-latency":
        memory["low-latency region"] = _C.low_latency_region_bytes(
            num_ranks=question.num_ranks, hidden=workload.hidden, max_tokens=num_tokens, **sizes
        )
        return memory
    # In one domain rows arrive by expert; between domains torch sorts them.
    arrive_by_expert = question.mode == "permute" and num_domains == 1
    memory["rows of a dispatch"] = _C.slot_bytes(
        rows=workload.row_bytes - workload.scale_bytes,
        experts=8 * workload.num_topk,
        weights=0 if arrive_by_expert else 4 * workload.num_topk,
        scales=workload.scale_bytes,
        num_rows=ceil((rows.copies if arrive_by_expert else rows.received).max()),
    )
    if question.mode == "permute":
        if num_domains > 1:
            memory["rows by expert"] = ceil(rows.copies.max()) * workload.row_bytes
        memory["sums of experts"] = ceil(rows.received.max()) * workload.combine_row_bytes
    memory["rows of a combine"] = _C.slot_bytes(
        rows=workload.combine_row_bytes, experts=0, weights=0, scales=0, num_rows=ceil((rows.within - rows.kept).max())
    )
    if num_domains > 1:
        held = max(min(num_domains - 1, workload.num_topk) * num_tokens, ceil(rows.held.max()))
        ints = _C.between_route_ints(num_tokens=num_tokens, held_capacity=held, **grid, **sizes)
        memory["a handle"] = 4 * ints
        memory["sums of a combine"] = num_tokens * workload.combine_row_bytes
    return memory


def find_excesses(question: Question) -> list[Excess]:
    """Returns the sizes that the engine refuses."""
    workload, num_domains, limits = question.workload, question.num_domains, "csrc/layout/limits.h"
    link = format_bytes(_C.between_link_bytes(num_domains=num_domains)) if num_domains > 1 else "0 B"
    commands = "fits" if num_domains <= 1 << _PEER_BITS else f"takes at most {1 << _PEER_BITS} domains, and must grow"
    row_bytes = max(workload.row_bytes, workload.combine_row_bytes)
    domains_change = (
        f"kMaxDomains in {limits}: each lane of a combine at home then reads {-(-num_domains // 32)} domains; {link} "
        f"of rings a rank, for a ring has 4 slots at least; the peer number of a proxy's command {commands}"
    )
    size_change = (
        f"kMaxRanks in {limits}, by which control memory grows; more would need an NVLink domain larger than NVL72"
    )
    ranks_change = (
        f"kMaxExperts in {limits}, for each rank has an expert: counts per rank, and 12 bits for an expert in "
        "low-latency routes; beyond 65,536 ranks also the 16 bits of a destination"
    )
    tokens_change = "several calls; a destination has 16 bits for a token's index"
    sizes = [
        Excess("domains", num_domains, _C.max_domains, domains_change),
        Excess("ranks of a domain", question.num_ranks_per_domain, _C.max_ranks, size_change),
        Excess("ranks", question.num_ranks, _C.max_experts, ranks_change),
        Excess("experts", workload.num_experts, _C.max_experts, f"kMaxExperts in {limits}"),
        Excess("tokens", workload.num_tokens, _C.max_tokens, tokens_change),
        Excess("bytes of a row", row_bytes, _C.max_row_bytes, "larger stages in shared memory, or a row in parts"),
    ]
    return [size for size in sizes if size.value > size.limit]


def sweep_domains(question: Question) -> list[SweepPoint]:
    """Predicts 1, 2, 4, … domains, up to what the engine takes or what was asked, and the number that was asked."""
    most_domains = max(question.num_domains, _C.max_domains)
    most_ranks = max(question.num_ranks, _C.max_experts)
    points = []
    for num_domains in sorted({1 << i for i in range(most_domains.bit_length())} | {question.num_domains}):
        if num_domains * question.num_ranks_per_domain <= most_ranks:
            asked = question.with_domains(num_domains)
            points.append(SweepPoint(num_domains, expected_rows(asked).remote_domains, *predict(asked)))
    return points


def find_stops(points: list[SweepPoint]) -> list[Stop]:
    """Returns what changes for the worse along a sweep, each where it first does."""
    stops: dict[str, Stop] = {}
    for n, _, dispatch, combine in points:
        if n == 1:
            continue
        link = dispatch.traffic.link
        worse = {}
        for call in (dispatch, combine):
            if call.slowest.startswith("network"):
                worse["network"] = "the network, not NVLink, sets the time"
            if call.slowest == "messages":
                worse.setdefault(
                    "messages", f"the proxy's thread cannot post {call.traffic.link.chunks} chunks in time"
                )
            if call.slowest == "credits":
                worse["credits"] = "a ring holds less than a round trip of chunk and credit to the most loaded peer"
        if dispatch.traffic.to_peer < link.records_per_chunk * link.record_bytes and not dispatch.serial:
            worse["chunks"] = f"a peer gets less than a chunk of {link.records_per_chunk} records: more messages a byte"
        share = dispatch.fixed.get("domains agree", 0.0) / dispatch.total_us
        if share > _NOTED_SHARE:
            worse["agreement"] = f"counts and verdicts are {100 * share:.0f} % of a dispatch"
        if n > _C.max_domains:
            worse["limit"] = f"the engine takes {_C.max_domains} domains"
        for key, what in worse.items():
            stops.setdefault(key, Stop(n, what))
    return sorted(stops.values(), key=lambda stop: stop.num_domains)
