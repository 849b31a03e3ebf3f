"""The time of a call: fixed times, and the slowest of the hops that rows pass at the same time.

    one domain        launch + calls agree + max(NVLink out, NVLink in, SMs)
    several domains   launch + calls agree + first chunk on its way + max(those, network out, network in, messages,
                      credits) + last chunk read

A permuted dispatch copies its rows afterwards, and a combine sums copies meanwhile: `local memory`.
Low-latency calls do one thing after the other: rows cross, then they are copied or summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep import _C
from hybrid_ep.model.machine import Machine
from hybrid_ep.model.question import Question
from hybrid_ep.model.traffic import CallTraffic, Rows, expected_rows, traffic_of

__all__ = ["Prediction", "predict"]

_PUSH_WARPS = 3  # three that take whole chunks stand for the eight of a CTA, which take parts of them
_DISPATCH_THREADS = 512  # of a CTA of dispatch_between, whose warps publish and read
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
        copied_us = traffic.copied / (machine.local_copy * _KB_US)
        # Copies follow the rows, and sums run beside them.
        (fixed if is_dispatch else hops)["local memory"] = copied_us
    num_sms = question.num_sms
    if is_dispatch:
        hops["SMs"] = max(traffic.pushed, traffic.forwarded) / (num_sms * machine.sm_push * _KB_US)
    else:
        # Each row is sent once and summed once; between domains the sums are sent, and summed again at home.
        moved = traffic.hops["NVLink out"].most + traffic.pushed + traffic.forwarded
        moved += traffic.hops["network out"].most + traffic.hops["network in"].most
        hops["SMs"] = moved / (num_sms * machine.sm_sum * _KB_US)
    if question.num_domains > 1:
        assert traffic.record is not None
        chunk_bytes = min(traffic.record.per_chunk * traffic.record.num_bytes, traffic.to_peer)
        one_way = machine.proxy_us + machine.nic_latency_us
        # A warp builds a chunk, and another one reads it.
        touch = chunk_bytes / (machine.sm_push / _PUSH_WARPS * _KB_US)
        transit = one_way + chunk_bytes / (machine.nic_rate * _KB_US)
        fixed["domains agree"] = _agreement(question, is_dispatch, one_way)
        fixed["first chunk"] = touch + transit
        fixed["last chunk"] = touch
        hops |= _network(machine, traffic)
        requests = _WORK_REQUESTS_PER_CHUNK * traffic.messages + traffic.credits
        hops["messages"] = requests * machine.post_us
        # To one peer: a window of chunks for each round trip of chunk, reading and credit.
        hops["credits"] = traffic.to_peer / traffic.in_flight * (transit + touch + one_way)
    return Prediction(call, traffic, fixed, hops, serial=False)


def _low_latency(question: Question, rows: Rows, call: str) -> Prediction:
    machine, traffic = question.machine, traffic_of(question, rows, call)
    own_us = machine.low_latency_dispatch_us if call == "dispatch" else machine.low_latency_combine_us
    fixed = {"launch": machine.launch_us, "ranks": own_us + machine.rank_us * question.num_ranks_per_domain}
    nvlink = _nvlink(machine, traffic)
    slower = max(nvlink, key=nvlink.__getitem__)
    hops = {slower: nvlink[slower], "local memory": traffic.copied / (machine.local_copy * _KB_US)}
    if question.num_domains > 1:
        network = _network(machine, traffic)
        slower = max(network, key=network.__getitem__)
        hops[slower] = network[slower]
        fixed["link"] = machine.proxy_us + machine.nic_latency_us
        hops["messages"] = _WORK_REQUESTS_PER_CHUNK * traffic.messages * machine.post_us
    return Prediction(call, traffic, fixed, hops, serial=True)


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
    rounds = -(-num_ranks // _DISPATCH_THREADS)
    words = rounds * (header + question.num_ranks_per_domain)
    if not question.is_cached:
        words += -(-question.workload.num_experts // num_ranks // _DISPATCH_THREADS) * num_ranks
        words += rounds * num_ranks if columns == num_ranks else 0
    return 2 * (one_way + post) + words * machine.word_us
