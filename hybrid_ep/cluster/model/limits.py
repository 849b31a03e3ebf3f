"""The limits of the design: sizes that it does not support, and what becomes the bottleneck as domains are added."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep import _C
from hybrid_ep.cluster.model.predict import Prediction, predict
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.traffic import expected_rows
from hybrid_ep.report.units import format_bytes

__all__ = ["Excess", "Stop", "SweepPoint", "find_excesses", "find_stops", "sweep_domains"]

_PEER_BITS = 8  # of a command of the proxy: csrc/transport/command.h
_NOTED_SHARE = 0.1  # of a call, from which on a wait is worth a word


@dataclass(frozen=True)
class Excess:
    """A size beyond a limit.

    Attributes:
        name: of the size.
        value: asked for.
        limit: allowed.
        change: what more would take.
    """

    name: str
    value: int
    limit: int
    change: str


@dataclass(frozen=True)
class SweepPoint:
    """One number of domains.

    Attributes:
        num_domains: D.
        remote_domains: other domains that a token goes to.
        dispatch, combine: of this many domains.
    """

    num_domains: int
    remote_domains: float
    dispatch: Prediction
    combine: Prediction


@dataclass(frozen=True)
class Stop:
    """Something that becomes worse from a number of domains on.

    Attributes:
        num_domains: the least number of domains.
        what: becomes worse.
    """

    num_domains: int
    what: str


def find_excesses(question: Question) -> list[Excess]:
    """Returns the sizes that the engine refuses, with what it would take to allow them."""
    workload, num_domains = question.workload, question.num_domains
    link = format_bytes(_C.between_link_bytes(num_domains=num_domains)) if num_domains > 1 else "0 B"
    commands = "fits" if num_domains <= 1 << _PEER_BITS else f"takes at most {1 << _PEER_BITS} domains, and must grow"
    row_bytes = max(workload.row_bytes, workload.combine_row_bytes)
    sizes = [
        (
            "domains",
            num_domains,
            _C.max_domains,
            f"kMaxDomains in csrc/layout/limits.h: each lane of a combine at home then reads {-(-num_domains // 32)} "
            f"domains; {link} of rings a rank, for a ring has 4 slots at least; the peer number of a proxy's command "
            f"{commands}",
        ),
        (
            "ranks of a domain",
            question.num_ranks_per_domain,
            _C.max_ranks,
            "kMaxRanks in csrc/layout/limits.h, by which control memory grows; more would need an NVLink domain "
            "larger than NVL72",
        ),
        (
            "ranks",
            question.num_ranks,
            _C.max_experts,
            "kMaxExperts in csrc/layout/limits.h, for each rank has an expert: counts per rank, and 12 bits for an "
            "expert in low-latency routes; beyond 65,536 ranks also the 16 bits of a destination",
        ),
        ("experts", workload.num_experts, _C.max_experts, "kMaxExperts in csrc/layout/limits.h"),
        ("tokens", workload.num_tokens, _C.max_tokens, "several calls; a destination has 16 bits for a token's index"),
        ("bytes of a row", row_bytes, _C.max_row_bytes, "larger stages in shared memory, or a row in parts"),
    ]
    return [Excess(*size) for size in sizes if size[1] > size[2]]


def sweep_domains(question: Question) -> list[SweepPoint]:
    """Predicts 1, 2, 4, … domains, up to what the engine takes or what was asked."""
    points = []
    most = max(question.num_domains, _C.max_domains)
    numbers = {1 << i for i in range(most.bit_length())} | {question.num_domains}
    for num_domains in sorted(numbers):
        num_ranks = num_domains * question.num_ranks_per_domain
        if num_ranks > max(_C.max_experts, question.num_ranks):
            continue
        asked = question.with_domains(num_domains)
        rows = expected_rows(asked)
        remote = float(rows.sent_between.mean()) / rows.num_tokens
        points.append(SweepPoint(num_domains, remote, *predict(asked)))
    return points


def find_stops(points: list[SweepPoint]) -> list[Stop]:
    """Returns what changes for the worse along a sweep, each where it first does."""
    stops: dict[str, Stop] = {}

    def note(key: str, num_domains: int, what: str) -> None:
        stops.setdefault(key, Stop(num_domains, what))

    for point in points:
        dispatch, record = point.dispatch, point.dispatch.traffic.record
        if record is None:
            continue
        n = point.num_domains
        for prediction in (dispatch, point.combine):
            slowest = max(prediction.rows, key=prediction.rows.__getitem__)
            if slowest.startswith("network"):
                note("network", n, "the network, not NVLink, sets the time")
            if slowest == "messages":
                note("messages", n, f"the proxy's thread cannot post {prediction.traffic.messages} chunks in time")
            if slowest == "credits":
                note("credits", n, "a ring holds less than a round trip of chunk and credit to the most loaded peer")
        if dispatch.traffic.to_peer < record.per_chunk * record.num_bytes and not dispatch.serial:
            note("chunks", n, f"a peer gets less than a chunk of {record.per_chunk} records: more messages a byte")
        share = dispatch.fixed.get("domains agree", 0.0) / dispatch.total_us
        if share > _NOTED_SHARE:
            note("agreement", n, f"counts and verdicts are {100 * share:.0f} % of a dispatch")
        if n > _C.max_domains:
            note("limit", n, f"the engine takes {_C.max_domains} domains")
    return sorted(stops.values(), key=lambda stop: stop.num_domains)
