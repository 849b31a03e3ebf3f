"""Rows and bytes of a call, hop by hop: expected values, each token once per rank and once per remote domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_ep import _C
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.spread import touched

__all__ = ["HOPS", "CallTraffic", "Hop", "Record", "Rows", "expected_rows", "traffic_of"]

_Array = NDArray[np.float64]
_WORD_BYTES = 4
_EXPERT_BYTES, _WEIGHT_BYTES = 8, 4  # of a row that arrives: int64 and float32 for each column of top-k


class Record(NamedTuple):
    """The record of a token, which crosses between domains.

    Attributes:
        num_bytes: of a record.
        per_chunk: records of a chunk.
    """

    num_bytes: int
    per_chunk: int


@dataclass(frozen=True)
class Rows:
    """Expected rows of one dispatch at each rank, ``[D, G]``.

    Attributes:
        num_tokens: T.
        at_rank: share of a rank's tokens that go to this one.
        at_domain: share of them that go to a domain, ``[D]``.
        copies: copies of all ranks' tokens for this rank's experts, one for each expert.
    """

    num_tokens: int
    at_rank: _Array
    at_domain: _Array
    copies: _Array

    @property
    def num_domains(self) -> int:
        return int(self.at_rank.shape[0])

    @property
    def received(self) -> _Array:
        """Rows that arrive, including those of this rank's tokens."""
        return self.num_tokens * self.at_rank.size * self.at_rank

    @property
    def within(self) -> _Array:
        """Rows that a rank pushes to all ranks of its domain: its own tokens, and those of its peers."""
        return (
            self.num_tokens * self.num_domains * np.broadcast_to(self.at_rank.sum(1, keepdims=True), self.at_rank.shape)
        )

    @property
    def kept(self) -> _Array:
        """Rows that a rank pushes to itself; a part of `within`."""
        return self.num_tokens * self.num_domains * self.at_rank

    @property
    def sent_between(self) -> _Array:
        """Tokens that a rank sends to its peers."""
        away = self.at_domain.sum() - self.at_domain
        return np.broadcast_to(self.num_tokens * away[:, None], self.at_rank.shape)

    @property
    def held(self) -> _Array:
        """Tokens that a rank forwards for its peers."""
        here = self.num_tokens * (self.num_domains - 1) * self.at_domain
        return np.broadcast_to(here[:, None], self.at_rank.shape)


class Hop(NamedTuple):
    """Bytes of one hop in one direction: at the mean rank, and at the most loaded."""

    mean: float
    most: float

    @classmethod
    def of(cls, rows: _Array, num_bytes: float) -> Hop:
        return cls(float(rows.mean()) * num_bytes, float(rows.max()) * num_bytes)


HOPS = ("NVLink out", "NVLink in", "network out", "network in")


@dataclass(frozen=True)
class CallTraffic:
    """The traffic of a call.

    Attributes:
        hops: bytes by name of `HOPS`.
        own: bytes that the most loaded rank writes for itself.
        pushed: bytes of rows that SMs push for tokens of this domain, at the most loaded rank.
        forwarded: bytes of rows that SMs forward from records, or sum for their sources, at the most loaded rank.
        record: of the link; None in one domain.
        chunks: to the peer that gets most, without those of control.
        messages: chunks that the most loaded rank sends, those of control included.
        credits: that it returns.
        control_bytes: that a rank sends over the network, beside records.
        in_flight: bytes to one peer that need no further credit.
        to_peer: bytes of records to the peer that gets most.
        copied: bytes that low-latency and permuted calls write or sum in local memory, at the most loaded rank.
        cast: bytes of BF16 rows that a low-latency dispatch casts.
    """

    hops: dict[str, Hop]
    own: float
    pushed: float
    forwarded: float
    record: Record | None
    chunks: int
    messages: int
    credits: int
    control_bytes: int
    in_flight: int
    to_peer: float
    copied: float
    cast: int


def expected_rows(question: Question) -> Rows:
    """Computes how many rows go where."""
    workload, num_domains = question.workload, question.num_domains
    shape = (num_domains, question.num_ranks_per_domain)
    at_expert = touched(workload, workload.num_experts)
    copies = workload.num_tokens * question.num_ranks * at_expert.reshape(*shape, -1).sum(2)
    return Rows(
        workload.num_tokens,
        touched(workload, question.num_ranks).reshape(shape),
        touched(workload, num_domains),
        copies,
    )


def traffic_of(question: Question, rows: Rows, call: str) -> CallTraffic:
    """Computes what ``dispatch`` or ``combine`` moves."""
    workload, low_latency = question.workload, question.mode == "low-latency"
    is_dispatch = call == "dispatch"
    scales = workload.row_bytes - workload.hidden if workload.dtype == "fp8" and is_dispatch else 0
    row_bytes = workload.row_bytes if is_dispatch else workload.combine_row_bytes
    landed_bytes = row_bytes
    if is_dispatch and not low_latency:
        landed_bytes += (_EXPERT_BYTES + _WEIGHT_BYTES) * workload.num_topk
    pushed, own = rows.within - rows.kept, rows.kept
    arriving = rows.received - rows.kept
    copied = rows.copies
    if low_latency and not is_dispatch:
        if workload.num_tokens < _C.low_latency_min_tokens_to_sum:
            # Each expert's row crosses.
            own = rows.copies / rows.at_rank.size * rows.num_domains
            arriving = rows.copies - own
            pushed = np.full_like(arriving, workload.num_tokens * workload.num_topk) - own
            copied = pushed + own
        else:
            copied = rows.copies + rows.within / rows.num_domains
    out, into = (pushed, arriving) if is_dispatch else (arriving, pushed)
    hops = {"NVLink out": Hop.of(out, landed_bytes), "NVLink in": Hop.of(into, landed_bytes)}
    if question.mode == "permute":
        # The first copy of a row is where it arrives. A combine reads all copies, and writes a sum for each row.
        copied = rows.copies - rows.received if is_dispatch else rows.copies + rows.received
    record, to_peer, chunks, messages, credits, control, in_flight = None, 0.0, 0, 0, 0, 0, 0
    if question.num_domains > 1:
        columns = workload.num_topk if is_dispatch else 0
        record = Record(
            *_C.between_record(
                row_bytes=row_bytes - scales,
                num_scales=scales // _WORD_BYTES,
                num_destinations=columns,
                num_experts=columns,
                num_weights=columns,
            )
        )
        sent, held = (rows.sent_between, rows.held) if is_dispatch else (rows.held, rows.sent_between)
        hops["network out"], hops["network in"] = Hop.of(sent, record.num_bytes), Hop.of(held, record.num_bytes)
        num_peers = question.num_domains - 1
        most = float(rows.at_domain.max()) * workload.num_tokens
        to_peer = most * record.num_bytes
        slot_bytes, num_slots, slots_per_credit = _C.between_ring(num_domains=question.num_domains)
        if low_latency:
            chunks, in_flight = 1, num_slots * slot_bytes
            messages = credits = num_peers
        else:
            chunks = -int(-most // record.per_chunk)
            each = -(-sent.max() / num_peers // record.per_chunk)
            control_chunks = 2 if is_dispatch else 1
            messages = int(num_peers * (each + control_chunks))
            credits = int(num_peers * -(-held.max() / num_peers // (record.per_chunk * slots_per_credit)))
            in_flight = (num_slots - slots_per_credit + 1) * record.per_chunk * record.num_bytes
            control = num_peers * (_told_bytes(question) if is_dispatch else 16)
    else:
        hops["network out"] = hops["network in"] = Hop(0.0, 0.0)
    tokens_pushed, tokens_forwarded = rows.within / rows.num_domains, rows.within * (1 - 1 / rows.num_domains)
    return CallTraffic(
        hops=hops,
        own=float(own.max()) * landed_bytes,
        pushed=float(tokens_pushed.max()) * landed_bytes,
        forwarded=float(tokens_forwarded.max()) * landed_bytes,
        record=record,
        chunks=chunks,
        messages=messages,
        credits=credits,
        control_bytes=control,
        in_flight=in_flight,
        to_peer=to_peer,
        copied=float(copied.max()) * row_bytes,
        cast=workload.num_tokens * workload.combine_row_bytes if low_latency and scales > 0 else 0,
    )


def _told_bytes(question: Question) -> int:
    """Bytes of counts and verdict that a rank sends to each peer."""
    header, columns = _C.between_told_words(
        num_domains=question.num_domains, ranks_per_domain=question.num_ranks_per_domain
    )
    words = header + columns + question.workload.num_experts // question.num_domains
    return _WORD_BYTES * (words + _C.between_verdict_words)
