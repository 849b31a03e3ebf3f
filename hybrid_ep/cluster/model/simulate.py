"""Two uses of the simulation between domains: whether ranks can wait forever, and how long the slowest rank takes.

`check_seed` runs a small grid with small rings. Delays, order of arrivals, counts, and late or slow ranks are random.
`simulate_tail` runs the grid of a question with the engine's rings and the model's rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_ep import _C
from hybrid_ep.checks import require, require_number
from hybrid_ep.cluster.model.predict import predict, rows_of_record
from hybrid_ep.cluster.model.protocol import Protocol, random_batches
from hybrid_ep.cluster.model.protocol_inputs import Faults, Ring, Times
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.traffic import expected_rows, traffic_of
from hybrid_ep.cluster.model.warps import (
    DISPATCH_FORWARD_WARPS,
    DISPATCH_SEND_WARPS,
    DOMAIN_WARPS,
    HOME_WARPS,
    PUSH_WARPS,
    RECORDS_OF_PART,
)

__all__ = ["Tail", "check_seed", "ring_of", "simulate_tail", "times_of"]

_KB_US = 1e3  # bytes per µs at 1 GB/s
_JITTER_US = 1.0
_MOST_TIMES_SLOWER = 1e6  # above it, times of a straggler are no numbers
_EXCHANGES = 2  # of a dispatch: counts, then verdicts


@dataclass(frozen=True)
class Tail:
    """Simulated times of one call over ranks and runs, in µs.

    Attributes:
        call: ``dispatch`` or ``combine``.
        median_us, p99_us, max_us: of the ranks.
        model_us: the model's prediction.
        num_samples: ranks times runs.
    """

    call: str
    median_us: float
    p99_us: float
    max_us: float
    model_us: float
    num_samples: int


def check_seed(seed: int, faults: Faults | None = None) -> int:
    """Runs two dispatches and two combines of a small random grid; returns the number of events.

    Raises:
        DeadlockError: ranks wait forever.
        ProtocolError: a slot was overwritten, or a chunk is not the one waited for.
    """
    random = np.random.default_rng(seed)
    num_domains = int(random.integers(2, 6))
    slots_per_credit = int(random.integers(1, 3))
    ring = Ring(
        num_slots=slots_per_credit * int(random.integers(1, 5)),
        slots_per_credit=slots_per_credit,
        per_chunk=(per_chunk := int(random.integers(1, 8))),
        per_part=int(random.integers(1, per_chunk + 1)),
        num_send_warps=int(random.integers(1, 4)),
        num_forward_warps=int(random.integers(1, 4)),
        num_push_warps=int(random.integers(1, 3)),
        num_domain_warps=int(random.integers(1, 4)),
        num_home_warps=int(random.integers(1, 4)),
        is_alone=bool(random.random() < 0.3),
        num_open=int(random.integers(1, 4)),
    )
    build, forward, push, part, sums, sums_home, agree = random.exponential(1.0, 7).tolist()
    nvlink, own, first_rows = random.exponential(1.0, (3, num_domains)).tolist()
    jitter = float(random.choice([0.0, 2.0, 20.0]))
    times = Times(
        build,
        forward,
        push,
        part,
        sums,
        sums_home,
        nvlink,
        own,
        first_rows,
        (agree, agree),
        latency=1.0,
        jitter=jitter,
        record_bytes=(1.0, 1.0),
        rate=1.0,
    )
    slowdown = np.where(random.random(num_domains) < 0.2, 20.0, 1.0)
    # Some domains are destinations of all tokens, and some of none.
    shares = random.choice([0.0, 0.2, 0.7, 1.0], num_domains)
    batches = random_batches(random, 2, lambda: int(random.integers(0, 24)), shares)
    starts = random.exponential(5.0, (4, num_domains))
    protocol = Protocol(ring, times, num_domains, seed, slowdown, faults)
    protocol.run(batches, starts)
    return protocol.clock.num_events


def ring_of(question: Question) -> Ring:
    """The rings and warps of the engine."""
    _, num_slots, slots_per_credit = _C.between_ring(num_domains=question.num_domains)
    record = traffic_of(question, expected_rows(question), "dispatch").record
    assert record is not None
    return Ring(
        num_slots,
        slots_per_credit,
        record.per_chunk,
        min(RECORDS_OF_PART, record.per_chunk),
        num_send_warps=DISPATCH_SEND_WARPS * question.num_sms,
        num_forward_warps=DISPATCH_FORWARD_WARPS * question.num_sms,
        num_push_warps=PUSH_WARPS * question.num_sms,
        num_domain_warps=DOMAIN_WARPS * question.num_sms,
        num_home_warps=HOME_WARPS * question.num_sms,
        is_alone=question.num_ranks_per_domain == 1,
    )


def times_of(question: Question) -> Times:
    """The steps of the protocol at the model's rates."""
    machine, rows = question.machine, expected_rows(question)
    dispatch, combine = (traffic_of(question, rows, call) for call in ("dispatch", "combine"))
    assert dispatch.record is not None
    assert combine.record is not None
    fanout = rows_of_record(rows)
    byte_us = DISPATCH_SEND_WARPS / (machine.sm_push * _KB_US)
    sum_us = combine.record.num_bytes / (machine.warp_sum * _KB_US)
    # Rows of one source within each domain, over NVLink of the rank that sends or receives most.
    arriving = rows.at_rank * (question.num_ranks_per_domain - 1)
    leaving = rows.at_rank.sum(1, keepdims=True) - rows.at_rank
    fullest = rows.num_tokens * np.maximum(arriving, leaving).max(1)
    own = fullest * dispatch.record.num_bytes / (machine.nvlink_rate * _KB_US)
    one_way = machine.proxy_us + machine.nic_latency_us
    # The model has the messages' way in it.
    counts_us, same_call_us = (one.fixed["domains agree"] for one in predict(question))
    return Times(
        build=dispatch.record.num_bytes * byte_us,
        forward=dispatch.record.num_bytes * byte_us * fanout,
        push=combine.record.num_bytes * PUSH_WARPS / (machine.sm_push * _KB_US),
        part=machine.part_us,
        sum=sum_us * fanout,
        sum_home=sum_us,
        nvlink=(own / (rows.num_tokens * rows.at_domain)).tolist(),
        own=own.tolist(),
        first_rows=(own * combine.record.num_bytes / dispatch.record.num_bytes).tolist(),
        agree=(counts_us / _EXCHANGES - one_way, same_call_us - one_way),
        latency=one_way,
        jitter=_JITTER_US,
        record_bytes=(dispatch.record.num_bytes, combine.record.num_bytes),
        rate=machine.nic_rate * _KB_US,
    )


def simulate_tail(question: Question, num_runs: int, seed: int, *, straggler: float = 1.0) -> list[Tail]:
    """Simulates a dispatch and a combine of a question's grid.

    Args:
        question: several domains, normal calls.
        num_runs: each with a seed of its own.
        seed: of the first.
        straggler: how many times slower one rank's port and warps are.

    Raises:
        ConfigError: there is no network between domains, or calls are not normal; a straggler is below 1.
    """
    require_number("straggler", straggler, minimum=1, maximum=_MOST_TIMES_SLOWER)
    require(question.num_domains > 1, "domains", question.num_domains, "≥ 2 with --simulate")
    require(question.mode == "normal", "mode", question.mode, "normal with --simulate")
    rows, ring, times = expected_rows(question), ring_of(question), times_of(question)
    slowdown = np.ones(question.num_domains)
    slowdown[0] = straggler
    found: tuple[list[float], list[float]] = ([], [])
    for run in range(num_runs):
        random = np.random.default_rng(seed + run)
        batches = random_batches(random, 1, lambda: question.workload.num_tokens, rows.at_domain)
        simulated = Protocol(ring, times, question.num_domains, seed + run, slowdown).run(batches)
        for samples, of_call in zip(found, simulated, strict=True):
            samples += of_call.tolist()
    tails = []
    for prediction, samples in zip(predict(question), found, strict=True):
        # Launch and counting are the same at every rank, and no part of the protocol.
        extra = prediction.fixed["launch"] + prediction.fixed["ranks"]
        median, p99, most = (float(np.quantile(samples, q)) + extra for q in (0.5, 0.99, 1.0))
        tails.append(Tail(prediction.call, median, p99, most, prediction.total_us, len(samples)))
    return tails
