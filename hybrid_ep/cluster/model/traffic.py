"""Rows and bytes of a call, hop by hop: expected values, each token once per rank and once per remote domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_ep import _C
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.spread import touched

HOPS = ("NVLink out", "NVLink in", "network out", "network in")
_Array = NDArray[np.float64]
_WORD_BYTES = 4
_COLUMN_BYTES = 8 + 4  # of a row that arrives: int64 expert and float32 weight for each column of top-k
_COMBINE_CONTROL_BYTES = 16


@dataclass(frozen=True)
class Rows:
    """Expected rows of one dispatch at each rank, ``[D, G]``."""

    num_tokens: int  # T
    at_rank: _Array  # share of a rank's tokens that go to this one
    at_domain: _Array  # share of them that go to a domain, [D]
    copies: _Array  # of all ranks' tokens for this rank's experts, one for each expert
    received: _Array  # that arrive, including those of this rank's tokens
    within: _Array  # that a rank pushes to all ranks of its domain, for its own tokens and its peers'
    kept: _Array  # that a rank pushes to itself; a part of `within`
    sent_between: _Array  # tokens that a rank sends to its peers
    held: _Array  # tokens that a rank forwards for its peers

    @property
    def remote_domains(self) -> float:
        """Other domains that a token goes to, mean over the ranks."""
        return float(self.sent_between.mean()) / self.num_tokens

    @property
    def of_record(self) -> float:
        """Rows that a record is the sum of, in its domain."""
        return float(self.at_rank.sum() / self.at_domain.sum())


class Hop(NamedTuple):
    """Bytes of one hop in one direction: at the mean rank, and at the most loaded."""

    mean: float
    most: float


class LinkTraffic(NamedTuple):
    """Messages between domains, by the names of the JSON document; all 0 in one domain."""

    record_bytes: int = 0  # a record is a token on its way between domains
    records_per_chunk: int = 0
    chunks_to_fullest_peer: int = 0  # without those of control
    chunks: int = 0  # that the most loaded rank sends, those of control included
    credits: int = 0  # that it returns
    control_bytes: int = 0  # that a rank sends beside records
    in_flight_bytes_per_peer: int = 0  # that need no further credit


@dataclass(frozen=True)
class CallTraffic:
    """The traffic of a call: bytes at the most loaded rank."""

    hops: dict[str, Hop]  # by name of `HOPS`
    link: LinkTraffic
    to_peer: float  # of records to the peer that gets most
    pushed: float  # of rows that SMs push for tokens of this domain
    forwarded: float  # of rows that SMs forward from records, or sum for their sources
    copied: float  # that low-latency and permuted calls write or sum in local memory
    cast: int  # of BF16 rows that a low-latency dispatch casts


def expected_rows(question: Question) -> Rows:
    """Computes how many rows go where."""
    workload, num_domains, num_tokens = question.workload, question.num_domains, question.workload.num_tokens
    shape = (num_domains, question.num_ranks_per_domain)
    at_expert = touched(workload, workload.num_experts)
    at_rank, at_domain = touched(workload, question.num_ranks).reshape(shape), touched(workload, num_domains)
    here = at_domain[:, None]
    return Rows(
        num_tokens,
        at_rank,
        at_domain,
        copies=num_tokens * question.num_ranks * at_expert.reshape(*shape, -1).sum(2),
        received=num_tokens * question.num_ranks * at_rank,
        within=num_tokens * num_domains * np.broadcast_to(at_rank.sum(1, keepdims=True), shape),
        kept=num_tokens * num_domains * at_rank,
        sent_between=np.broadcast_to(num_tokens * (at_domain.sum() - here), shape),
        held=np.broadcast_to(num_tokens * (num_domains - 1) * here, shape),
    )


def traffic_of(question: Question, rows: Rows, call: str) -> CallTraffic:
    """Computes what ``dispatch`` or ``combine`` moves."""
    workload, num_domains, low_latency = question.workload, question.num_domains, question.mode == "low-latency"
    is_dispatch = call == "dispatch"
    row_bytes = workload.row_bytes if is_dispatch else workload.combine_row_bytes
    landed_bytes = row_bytes + (_COLUMN_BYTES * workload.num_topk if is_dispatch and not low_latency else 0)
    pushed, arriving, copied = rows.within - rows.kept, rows.received - rows.kept, rows.copies
    if question.mode == "permute":
        # The first copy of a row is where it arrives. A combine reads all copies, and writes a sum for each row.
        copied = rows.copies - rows.received if is_dispatch else rows.copies + rows.received
    elif low_latency and not is_dispatch and workload.num_tokens >= _C.low_latency_min_tokens_to_sum:
        copied = rows.copies + rows.within / num_domains
    elif low_latency and not is_dispatch:
        # Each expert's row crosses.
        own = rows.copies / rows.at_rank.size * num_domains
        arriving, pushed = rows.copies - own, workload.num_tokens * workload.num_topk - own
        copied = pushed + own
    of_nvlink = (pushed, arriving) if is_dispatch else (arriving, pushed)
    of_network = (rows.sent_between, rows.held) if is_dispatch else (rows.held, rows.sent_between)
    link = _link_of(question, rows, is_dispatch, *of_network) if num_domains > 1 else LinkTraffic()
    bytes_of_hops = (landed_bytes, landed_bytes, link.record_bytes, link.record_bytes)
    hops = {
        name: Hop(float(of_hop.mean()) * num_bytes, float(of_hop.max()) * num_bytes)
        for name, of_hop, num_bytes in zip(HOPS, (*of_nvlink, *of_network), bytes_of_hops, strict=True)
    }
    return CallTraffic(
        hops,
        link,
        to_peer=float(rows.at_domain.max()) * workload.num_tokens * link.record_bytes,
        pushed=float((rows.within / num_domains).max()) * landed_bytes,
        forwarded=float((rows.within * (1 - 1 / num_domains)).max()) * landed_bytes,
        copied=float(copied.max()) * row_bytes,
        cast=workload.num_tokens * workload.combine_row_bytes
        if low_latency and is_dispatch and workload.scale_bytes
        else 0,
    )


def _link_of(question: Question, rows: Rows, is_dispatch: bool, sent: _Array, held: _Array) -> LinkTraffic:
    workload, num_domains, num_peers = question.workload, question.num_domains, question.num_domains - 1
    columns, scale_bytes = (workload.num_topk, workload.scale_bytes) if is_dispatch else (0, 0)
    record_bytes, per_chunk = _C.between_record(
        row_bytes=(workload.row_bytes if is_dispatch else workload.combine_row_bytes) - scale_bytes,
        num_scales=scale_bytes // _WORD_BYTES,
        num_destinations=columns,
        num_experts=columns,
        num_weights=columns,
    )
    slot_bytes, num_slots, slots_per_credit = _C.between_ring(num_domains=num_domains)
    if question.mode == "low-latency":
        return LinkTraffic(record_bytes, per_chunk, 1, num_peers, num_peers, 0, num_slots * slot_bytes)

    def chunks(num_records: float, records_per_chunk: int = per_chunk) -> int:
        return -int(-num_records // records_per_chunk)

    control_bytes, control_chunks = _COMBINE_CONTROL_BYTES, 1
    if is_dispatch:
        # Counts and verdicts.
        grid = {"num_domains": num_domains, "ranks_per_domain": question.num_ranks_per_domain}
        words = sum(_C.between_told_words(**grid)) + workload.num_experts // num_domains + _C.between_verdict_words
        control_bytes, control_chunks = _WORD_BYTES * words, 2
    return LinkTraffic(
        record_bytes,
        per_chunk,
        chunks(float(rows.at_domain.max()) * workload.num_tokens),
        num_peers * (chunks(sent.max() / num_peers) + control_chunks),
        num_peers * chunks(held.max() / num_peers, per_chunk * slots_per_credit),
        num_peers * control_bytes,
        (num_slots - slots_per_credit + 1) * per_chunk * record_bytes,
    )
