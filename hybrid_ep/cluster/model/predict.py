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
from hybrid_ep.cluster.model.machine import Machine
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.traffic import CallTraffic, Rows, expected_rows, traffic_of
from hybrid_ep.cluster.model.warps import (
    DISPATCH_SEND_WARPS,
    DISPATCH_THREADS,
    DOMAIN_WARPS,
    HOME_WARPS,
    PUSH_WARPS,
    RECORDS_OF_PART,
)

__all__ = ["Prediction", "predict"]

_KB_US = 1e3  # bytes per µs at 1 GB/s
_WORK_REQUESTS_PER_CHUNK = 2  # the chunk and its flag


@dataclass(frozen=True)
class Prediction:
    """The time of one call, in µs.

    Attributes:
        call: ``dispatch`` or ``combine``.
        traffic: what it moves.
        fixed: steps that do not overlap with rows, by name.
        rows: what rows need, by hop; the slowest counts.
        serial: whether the hops come one after the other instead of at once.
    """

    call: str
    traffic: CallTraffic
    fixed: dict[str, float]
    rows: dict[str, float]
    serial: bool

    @property
    def rows_us(self) -> float:
        return sum(self.rows.values()) if self.serial else max(self.rows.values())

    @property
    def total_us(self) -> float:
        return sum(self.fixed.values()) + self.rows_us

    @property
    def bottleneck(self) -> str:
        """The hop that takes longest, or ``fixed time`` where all hops together take less."""
        slowest = max(self.rows, key=self.rows.__getitem__)
        return slowest if self.rows[slowest] >= sum(self.fixed.values()) else "fixed time"


def predict(question: Question) -> tuple[Prediction, Prediction]:
    """Predicts a dispatch and the combine after it."""
    rows = expected_rows(question)
    predict_call = _low_latency if question.mode == "low-latency" else _normal
    dispatch, combine = (predict_call(question, rows, call) for call in ("dispatch", "combine"))
    return dispatch, combine


def _normal(question: Question, rows: Rows, call: str) -> Prediction:
    machine, traffic = question.machine, traffic_of(question, rows, call)
    is_dispatch = call == "dispatch"
    own_us = machine.combine_us
    if is_dispatch:
        own_us = machine.cached_us if question.is_cached else machine.dispatch_us
    fixed = {"launch": machine.launch_us, "ranks": own_us + machine.rank_us * question.num_ranks_per_domain}
    hops = _nvlink(machine, traffic)
    if question.mode == "permute":
        copied_us = traffic.copied / (machine.memory_rate * _KB_US)
        # Copies follow the rows, and sums run beside them.
        (fixed if is_dispatch else hops)["local memory"] = copied_us
    num_sms = question.num_sms
    if is_dispatch:
        hops["SMs"] = max(traffic.pushed, traffic.forwarded) / (num_sms * machine.sm_push * _KB_US)
    elif question.num_domains == 1:
        # Each row is sent once and summed once.
        moved = traffic.hops["NVLink out"].most + traffic.pushed
        hops["SMs"] = moved / (num_sms * machine.sm_sum * _KB_US)
    else:
        hops["SMs"] = _sums(question, rows, traffic, max(_nvlink(machine, traffic).values()))
    if question.num_domains > 1:
        assert traffic.record is not None
        chunk_bytes = min(traffic.record.per_chunk * traffic.record.num_bytes, traffic.to_peer)
        one_way = machine.proxy_us + machine.nic_latency_us
        # Warps build the parts of a chunk, and others read it.
        build, read = _touch(question, rows, traffic, is_dispatch)
        transit = one_way + chunk_bytes / (machine.nic_rate * _KB_US)
        fixed["domains agree"] = _agreement(question, is_dispatch, one_way)
        fixed["first chunk"] = build + transit
        fixed["last chunk"] = read
        hops |= _network(machine, traffic)
        requests = _WORK_REQUESTS_PER_CHUNK * traffic.messages + traffic.credits
        hops["messages"] = requests * machine.post_us
        # To one peer: a window of chunks for each round trip of chunk, reading and credit.
        hops["credits"] = traffic.to_peer / traffic.in_flight * (build + transit + read + one_way)
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
    nvlink = _nvlink(machine, traffic)
    slower = max(nvlink, key=nvlink.__getitem__)
    hops = {"cast": traffic.cast / (machine.cast * _KB_US)} if traffic.cast > 0 else {}
    hops |= {slower: nvlink[slower], "local memory": traffic.copied / (local_rate * _KB_US)}
    if question.num_domains > 1:
        network = _network(machine, traffic)
        slower = max(network, key=network.__getitem__)
        hops[slower] = network[slower]
        fixed["link"] = machine.proxy_us + machine.nic_latency_us
        hops["messages"] = _WORK_REQUESTS_PER_CHUNK * traffic.messages * machine.post_us
    return Prediction(call, traffic, fixed, hops, serial=True)


def rows_of_record(rows: Rows) -> float:
    """Rows that a record is the sum of, in its domain."""
    return float(rows.at_rank.sum() / rows.at_domain.sum())


def _touch(question: Question, rows: Rows, traffic: CallTraffic, is_dispatch: bool) -> tuple[float, float]:
    """Returns how long a warp takes to build a part of a chunk, and to read what has arrived."""
    machine = question.machine
    assert traffic.record is not None
    part_bytes = min(RECORDS_OF_PART, traffic.record.per_chunk) * traffic.record.num_bytes
    if is_dispatch:
        part_us = min(part_bytes, traffic.to_peer) / (machine.sm_push / DISPATCH_SEND_WARPS * _KB_US)
        return part_us, part_us
    row_us = traffic.record.num_bytes / (machine.warp_sum * _KB_US)
    home_us = float(rows.at_domain.sum()) * row_us  # one row of each domain
    if question.num_ranks_per_domain == 1:
        return part_bytes / (machine.sm_push / PUSH_WARPS * _KB_US), home_us
    return machine.part_us + rows_of_record(rows) * part_bytes / (machine.warp_sum * _KB_US), home_us


def _sums(question: Question, rows: Rows, traffic: CallTraffic, pushed_us: float) -> float:
    """Returns how long the warps of a combine between domains take, which share its work by roles.

    A warp with no work left in its role goes on to the next one: from pushing rows, which takes `pushed_us`, to the
    sums for each domain, and from these to the sums at home. No warp goes back.
    """
    machine, num_sms = question.machine, question.num_sms
    assert traffic.record is not None
    warp_rate = machine.warp_sum * _KB_US
    home_us = rows.num_tokens * float(rows.at_domain.sum()) * traffic.record.num_bytes / warp_rate
    if question.num_ranks_per_domain == 1:
        pushed_us = traffic.hops["network out"].most / (num_sms * machine.sm_push * _KB_US)
        return max(pushed_us, home_us / (num_sms * (DOMAIN_WARPS + HOME_WARPS)))
    num_records = rows.num_tokens * rows.num_domains * float(rows.at_domain.max())
    domain_us = (traffic.pushed + traffic.forwarded) / warp_rate
    domain_us += num_records / min(RECORDS_OF_PART, traffic.record.per_chunk) * machine.part_us
    pushers, summers = PUSH_WARPS * num_sms, DOMAIN_WARPS * num_sms
    summed_us = domain_us / summers
    if summed_us > pushed_us:
        summed_us = (domain_us + pushers * pushed_us) / (pushers + summers)
    num_warps = pushers + summers + HOME_WARPS * num_sms
    return max(summed_us, (domain_us + home_us + pushers * pushed_us) / num_warps)


def _nvlink(machine: Machine, traffic: CallTraffic) -> dict[str, float]:
    return {name: traffic.hops[name].most / (machine.nvlink_rate * _KB_US) for name in ("NVLink out", "NVLink in")}


def _network(machine: Machine, traffic: CallTraffic) -> dict[str, float]:
    return {name: traffic.hops[name].most / (machine.nic_rate * _KB_US) for name in ("network out", "network in")}


def _agreement(question: Question, is_dispatch: bool, one_way: float) -> float:
    """Returns the time for all ranks to agree before rows move: on counts and verdicts, or that combines are equal."""
    machine = question.machine
    header, columns = _C.between_told_words(
        num_domains=question.num_domains, ranks_per_domain=question.num_ranks_per_domain
    )
    num_peers, num_ranks = question.num_domains - 1, question.num_ranks
    post = _WORK_REQUESTS_PER_CHUNK * num_peers * machine.post_us
    if not is_dispatch:
        return one_way + post
    # The words that the busiest thread reads one after the other: headers, counts of its ranks, and of an expert.
    rounds = -(-num_ranks // DISPATCH_THREADS)
    words = rounds * (header + question.num_ranks_per_domain)
    if not question.is_cached:
        words += -(-question.workload.num_experts // num_ranks // DISPATCH_THREADS) * num_ranks
        words += rounds * num_ranks if columns == num_ranks else 0
    return 2 * (one_way + post) + words * machine.word_us
