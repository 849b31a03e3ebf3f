"""How long the slowest rank takes: the simulation between domains with the engine's rings and the model's rates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_ep import _C
from hybrid_ep.checks import require, require_number
from hybrid_ep.cluster.model import warps
from hybrid_ep.cluster.model.predict import predict
from hybrid_ep.cluster.model.protocol import Plane, Protocol
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.traffic import expected_rows, traffic_of

_JITTER_US = 1.0
_MOST_TIMES_SLOWER = 1e6  # above it, times of a straggler are no numbers
_EXCHANGES = 2  # of a dispatch: counts, then verdicts


class Tail(NamedTuple):
    """Simulated times of one call over ranks and runs, in µs, and the model's; a sample is one rank in one run."""

    call: str
    median_us: float
    p99_us: float
    max_us: float
    model_us: float
    num_samples: int


def plane_of(question: Question) -> Plane:
    """The rings and warps of the engine, and the steps of the protocol at the model's rates."""
    machine, rows, num_sms = question.machine, expected_rows(question), question.num_sms
    is_alone = question.num_ranks_per_domain == 1
    _, num_slots, slots_per_credit = _C.between_ring(num_domains=question.num_domains)
    links = [traffic_of(question, rows, call).link for call in ("dispatch", "combine")]
    dispatch_bytes, combine_bytes = (link.record_bytes for link in links)
    build_us = dispatch_bytes * (warps.SEND / (machine.sm_push * 1e3))
    sum_us = combine_bytes / machine.warp_sum_rate
    push_us = combine_bytes * warps.PUSH / (machine.sm_push * 1e3)
    # Rows of one source within each domain, over NVLink of the rank that sends or receives most.
    arriving = rows.at_rank * (question.num_ranks_per_domain - 1)
    leaving = rows.at_rank.sum(1, keepdims=True) - rows.at_rank
    fullest = rows.num_tokens * np.maximum(arriving, leaving).max(1)
    own = fullest * dispatch_bytes / machine.nvlink_rate
    one_way = machine.proxy_us + machine.nic_latency_us
    # The model has the messages' way in it.
    counts_us, same_call_us = (one.fixed["domains agree"] for one in predict(question))
    return Plane(
        num_slots,
        slots_per_credit,
        per_chunk=links[0].records_per_chunk,
        per_part=min(warps.RECORDS_OF_PART, links[0].records_per_chunk),
        send_warps=warps.SEND * num_sms,
        forward_warps=warps.FORWARD * num_sms,
        push_warps=warps.PUSH * num_sms,
        domain_warps=warps.DOMAIN * num_sms,
        home_warps=warps.HOME * num_sms,
        is_alone=is_alone,
        build=build_us,
        forward=build_us * rows.of_record,
        part=0.0 if is_alone else machine.part_us,
        sum=push_us if is_alone else sum_us * rows.of_record,
        sum_home=sum_us,
        nvlink=(own / (rows.num_tokens * rows.at_domain)).tolist(),
        own=own.tolist(),
        first_rows=(own * combine_bytes / dispatch_bytes).tolist(),
        agree=(counts_us / _EXCHANGES - one_way, same_call_us - one_way),
        latency=one_way,
        jitter=_JITTER_US,
        record_bytes=(dispatch_bytes, combine_bytes),
        rate=machine.nic_rate,
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
    plane, num_domains, shares = plane_of(question), question.num_domains, expected_rows(question).at_domain
    slowdown = np.array([straggler] + [1.0] * (num_domains - 1))

    def run(run_seed: int) -> NDArray[np.float64]:
        random = np.random.default_rng(run_seed)
        tokens = [random.random((question.workload.num_tokens, num_domains)) < shares for _ in range(num_domains)]
        return Protocol(plane, num_domains, run_seed, slowdown).run([tokens])

    samples = np.concatenate([run(seed + i) for i in range(num_runs)], axis=1)
    tails = []
    for prediction, of_call in zip(predict(question), samples, strict=True):
        # Launch and counting are the same at every rank, and no part of the protocol.
        extra = prediction.fixed["launch"] + prediction.fixed["ranks"]
        median, p99, most = (float(us) + extra for us in np.quantile(of_call, (0.5, 0.99, 1.0)))
        tails.append(Tail(prediction.call, median, p99, most, prediction.total_us, len(of_call)))
    return tails
