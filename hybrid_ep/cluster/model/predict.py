"""The time of a call: fixed times, and the slowest of the hops that rows pass at the same time.

    one domain        launch + calls agree + max(NVLink out, NVLink in, SMs)
    several domains   launch + calls agree + first chunk on its way + max(those, network out, network in, messages,
                      credits) + last chunk read

A permuted dispatch copies its rows afterwards, and a combine sums copies meanwhile: `local memory`.
Low-latency calls do one thing after the other: rows are cast, cross, and are copied or summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep import _C
from hybrid_ep.cluster.model import warps
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.traffic import CallTraffic, Rows, expected_rows, traffic_of

_WORK_REQUESTS_PER_CHUNK = 2  # the chunk and its flag


@dataclass(frozen=True)
class Prediction:
    """The time of one call, in µs."""

    call: str  # "dispatch" or "combine"
    traffic: CallTraffic
    fixed: dict[str, float]  # steps that do not overlap with rows, by name
    rows: dict[str, float]  # what rows need, by hop; the slowest counts
    serial: bool  # whether the hops come one after the other instead of at once

    @property
    def total_us(self) -> float:
        return sum(self.fixed.values()) + (sum(self.rows.values()) if self.serial else max(self.rows.values()))

    @property
    def slowest(self) -> str:
        return max(self.rows, key=self.rows.__getitem__)

    @property
    def bottleneck(self) -> str:
        """The hop that takes longest, or ``fixed time`` where all hops together take less."""
        return self.slowest if self.rows[self.slowest] >= sum(self.fixed.values()) else "fixed time"


def predict(question: Question) -> tuple[Prediction, Prediction]:
    """Predicts a dispatch and the combine after it."""
    rows = expected_rows(question)
    predict_call = _low_latency if question.mode == "low-latency" else _normal
    dispatch, combine = (predict_call(question, rows, call) for call in ("dispatch", "combine"))
    return dispatch, combine


def _normal(question: Question, rows: Rows, call: str) -> Prediction:
    machine, traffic, num_sms = question.machine, traffic_of(question, rows, call), question.num_sms
    is_dispatch = call == "dispatch"
    own_us = machine.combine_us
    if is_dispatch:
        own_us = machine.cached_us if question.is_cached else machine.dispatch_us
    fixed = {"launch": machine.launch_us, "ranks": own_us + machine.rank_us * question.num_ranks_per_domain}
    hops = _times(traffic, "NVLink", machine.nvlink_rate)
    pushed_us = max(hops.values())
    if question.mode == "permute":
        # Copies follow the rows, and sums run beside them.
        (fixed if is_dispatch else hops)["local memory"] = traffic.copied / machine.memory_rate
    if is_dispatch:
        hops["SMs"] = max(traffic.pushed, traffic.forwarded) / (num_sms * machine.sm_push * 1e3)
    elif question.num_domains == 1:
        # Each row is sent once and summed once.
        hops["SMs"] = (traffic.hops["NVLink out"].most + traffic.pushed) / (num_sms * machine.sm_sum * 1e3)
    else:
        hops["SMs"] = _sums(question, rows, traffic, pushed_us)
    if question.num_domains > 1:
        link = traffic.link
        one_way = machine.proxy_us + machine.nic_latency_us
        # Warps build the parts of a chunk, and others read it.
        build, read = _touch(question, rows, traffic, is_dispatch)
        transit = one_way + min(link.records_per_chunk * link.record_bytes, traffic.to_peer) / machine.nic_rate
        fixed |= {
            "domains agree": _agreement(question, is_dispatch, one_way),
            "first chunk": build + transit,
            "last chunk": read,
        }
        hops |= _times(traffic, "network", machine.nic_rate)
        hops["messages"] = (_WORK_REQUESTS_PER_CHUNK * link.chunks + link.credits) * machine.post_us
        # To one peer: a window of chunks for each round trip of chunk, reading and credit.
        hops["credits"] = traffic.to_peer / link.in_flight_bytes_per_peer * (build + transit + read + one_way)
    return Prediction(call, traffic, fixed, hops, serial=False)


def _low_latency(question: Question, rows: Rows, call: str) -> Prediction:
    machine, traffic = question.machine, traffic_of(question, rows, call)
    own_us, local_rate = machine.low_latency_combine_us, machine.low_latency_sum_rate
    if call == "dispatch":
        own_us, local_rate = machine.low_latency_dispatch_us, machine.memory_rate
    launch_us, rank_us = machine.launch_us, machine.rank_us
    if question.in_graph:
        launch_us, rank_us = machine.graph_launch_us, machine.graph_rank_us
    fixed = {"launch": launch_us, "ranks": own_us + rank_us * question.num_ranks_per_domain}
    hops = {"cast": traffic.cast / (machine.cast * 1e3)} if traffic.cast > 0 else {}
    hops |= _slower(_times(traffic, "NVLink", machine.nvlink_rate))
    hops |= {"local memory": traffic.copied / local_rate}
    if question.num_domains > 1:
        hops |= _slower(_times(traffic, "network", machine.nic_rate))
        fixed["link"] = machine.proxy_us + machine.nic_latency_us
        hops["messages"] = _WORK_REQUESTS_PER_CHUNK * traffic.link.chunks * machine.post_us
    return Prediction(call, traffic, fixed, hops, serial=True)


def _times(traffic: CallTraffic, kind: str, rate: float) -> dict[str, float]:
    """Returns the times of both directions of ``NVLink`` or of the ``network``."""
    return {name: hop.most / rate for name, hop in traffic.hops.items() if name.startswith(kind)}


def _slower(hops: dict[str, float]) -> dict[str, float]:
    name = max(hops, key=hops.__getitem__)
    return {name: hops[name]}


def _touch(question: Question, rows: Rows, traffic: CallTraffic, is_dispatch: bool) -> tuple[float, float]:
    """Returns how long a warp takes to build a part of a chunk, and to read what has arrived."""
    machine, record_bytes = question.machine, traffic.link.record_bytes
    part_bytes = min(warps.RECORDS_OF_PART, traffic.link.records_per_chunk) * record_bytes
    if is_dispatch:
        part_us = min(part_bytes, traffic.to_peer) / (machine.sm_push / warps.SEND * 1e3)
        return part_us, part_us
    home_us = float(rows.at_domain.sum()) * (record_bytes / machine.warp_sum_rate)  # one row of each domain
    if question.num_ranks_per_domain == 1:
        return part_bytes / (machine.sm_push / warps.PUSH * 1e3), home_us
    return machine.part_us + rows.of_record * part_bytes / machine.warp_sum_rate, home_us


def _sums(question: Question, rows: Rows, traffic: CallTraffic, pushed_us: float) -> float:
    """Returns how long the warps of a combine between domains take, which share its work by roles.

    A warp with no work left in its role goes on to the next one: from pushing rows, which takes `pushed_us`, to the
    sums for each domain, and from these to the sums at home. No warp goes back.
    """
    machine, num_sms, link = question.machine, question.num_sms, traffic.link
    home_us = rows.num_tokens * float(rows.at_domain.sum()) * link.record_bytes / machine.warp_sum_rate
    if question.num_ranks_per_domain == 1:
        pushed_us = traffic.hops["network out"].most / (num_sms * machine.sm_push * 1e3)
        return max(pushed_us, home_us / (num_sms * (warps.DOMAIN + warps.HOME)))
    num_records = rows.num_tokens * question.num_domains * float(rows.at_domain.max())
    domain_us = (traffic.pushed + traffic.forwarded) / machine.warp_sum_rate
    domain_us += num_records / min(warps.RECORDS_OF_PART, link.records_per_chunk) * machine.part_us
    pushers, summers = warps.PUSH * num_sms, warps.DOMAIN * num_sms
    summed_us = domain_us / summers
    if summed_us > pushed_us:
        summed_us = (domain_us + pushers * pushed_us) / (pushers + summers)
    num_warps = pushers + summers + warps.HOME * num_sms
    return max(summed_us, (domain_us + home_us + pushers * pushed_us) / num_warps)


def _agreement(question: Question, is_dispatch: bool, one_way: float) -> float:
    """Returns the time for all ranks to agree before rows move: on counts and verdicts, or that combines are equal."""
    machine, num_ranks, size = question.machine, question.num_ranks, question.num_ranks_per_domain
    message_us = one_way + _WORK_REQUESTS_PER_CHUNK * (question.num_domains - 1) * machine.post_us
    if not is_dispatch:
        return message_us
    header, columns = _C.between_told_words(num_domains=question.num_domains, ranks_per_domain=size)
    # The words that the busiest thread reads one after the other: headers, counts of its ranks, and of an expert.
    num_threads = 32 * (warps.SEND + warps.FORWARD)
    rounds = -(-num_ranks // num_threads)
    words = rounds * (header + size)
    if not question.is_cached:
        words += -(-question.workload.num_experts // num_ranks // num_threads) * num_ranks
        words += rounds * num_ranks if columns == num_ranks else 0
    return 2 * message_us + words * machine.word_us
