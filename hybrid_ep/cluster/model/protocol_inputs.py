"""What a simulation of the protocol is given: the shape of its rings, the times of its steps, mistakes on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Faults", "Ring", "Times"]


@dataclass(frozen=True)
class Ring:
    """Shape of a stream's ring.

    Attributes:
        num_slots, slots_per_credit: S, and slots of a group.
        per_chunk, per_part: records of a chunk, and of the part of it that a warp takes.
        num_send_warps, num_forward_warps: of a rank, in dispatch.
        num_push_warps, num_domain_warps, num_home_warps: of a rank, in combine.
        is_alone: every rank is alone in its domain.
        num_open: tokens that a warp at home holds.
    """

    num_slots: int
    slots_per_credit: int
    per_chunk: int
    per_part: int
    num_send_warps: int
    num_forward_warps: int
    num_push_warps: int
    num_domain_warps: int
    num_home_warps: int
    is_alone: bool = False
    num_open: int = 2


@dataclass(frozen=True)
class Times:
    """The times of steps in µs, and rates in bytes per µs.

    Attributes:
        build, forward: of a record by a warp, in dispatch.
        push: of a record by a warp that is alone in its domain, in combine.
        part: of a warp that sums for domains, for each part of a chunk.
        sum, sum_home: of a record by a warp, in combine.
        nvlink: by domain: of a record's rows on their way within it, where one is at a time.
        own: by domain: of all of a rank's own rows that stay there.
        first_rows: by domain: of a combine, until the rows for one domain are at the rank that sums them.
        agree: what a rank does after each exchange of control chunks, in dispatch and in combine.
        latency: of a message, without its bytes.
        jitter: up to so much more, drawn for each message.
        record_bytes: of dispatch and of combine.
        rate: of the port.
    """

    build: float
    forward: float
    push: float
    part: float
    sum: float
    sum_home: float
    nvlink: Sequence[float]
    own: Sequence[float]
    first_rows: Sequence[float]
    agree: tuple[float, float]
    latency: float
    jitter: float
    record_bytes: tuple[float, float]
    rate: float


@dataclass(frozen=True)
class Faults:
    """Mistakes made on purpose, to see that the simulation notices them.

    Attributes:
        loses_credits: no credit is returned.
        ignores_credits: senders do not wait for them.
        forwards_by_domain: a rank forwards all chunks of a domain before it looks at the next one's.
        holds_and_waits: a warp at home waits while it holds rows.
        claims_without_slot: warps of combine claim parts whose slot is not free, the last domain's first, and wait.
        sends_in_order: a rank that is alone in its domain sends parts in one order, and waits for their slots.
    """

    loses_credits: bool = False
    ignores_credits: bool = False
    forwards_by_domain: bool = False
    holds_and_waits: bool = False
    claims_without_slot: bool = False
    sends_in_order: bool = False
