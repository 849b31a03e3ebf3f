"""The simulation between domains: no rank waits forever, no chunk is lost, and each mistake on purpose is noticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hybrid_ep.cluster.model.events import Clock, DeadlockError, Gate, Process
from hybrid_ep.cluster.model.protocol import Protocol, ProtocolError, Ring, Times, random_batches
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.simulate import ring_of, simulate_tail, times_of
from hybrid_ep.workload import Workload


def question(num_domains: int, size: int, num_tokens: int = 4096) -> Question:
    num_experts = -(-256 // (num_domains * size)) * num_domains * size
    return Question(Workload(num_tokens, 7168, 8, num_experts), num_domains, size)


def check_seed(seed: int, *faults: str) -> int:
    """Runs two dispatches and two combines of a small random grid with small rings; returns the number of events.

    Delays, order of arrivals, counts, and late or slow ranks are random.

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
    protocol = Protocol(ring, times, num_domains, seed, slowdown, frozenset(faults))
    protocol.run(batches, starts)
    return protocol.clock.num_events


def verdicts(seeds: range, *faults: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            check_seed(seed, *faults)
            found["fine"] += 1
        except (DeadlockError, ProtocolError) as error:
            found[type(error).__name__] += 1
    return found


def test_the_clock_runs_processes_in_order_and_finds_who_waits_for_ever() -> None:
    clock, gate, seen = Clock(), Gate("a word"), []

    def early() -> Process:
        yield 1.0
        seen.append(("early", clock.now))
        clock.open(gate)

    def late() -> Process:
        yield gate
        seen.append(("late", clock.now))
        yield 2.0
        seen.append(("end", clock.now))

    clock.start(late())
    clock.start(early())
    clock.run()
    assert seen == [("early", 1.0), ("late", 1.0), ("end", 3.0)]
    clock.start(late())
    with pytest.raises(DeadlockError, match="1 processes wait forever: a word"):
        clock.run()


def test_no_rank_waits_for_ever() -> None:
    assert sum(check_seed(seed) for seed in range(300)) > 300_000


@pytest.mark.slow
def test_no_rank_waits_for_ever_in_10_000_seeds() -> None:
    assert sum(check_seed(seed) for seed in range(10_000)) > 10_000_000


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("loses_credits", "DeadlockError"),
        ("ignores_credits", "ProtocolError"),
        ("forwards_by_domain", "DeadlockError"),
        ("holds_and_waits", "DeadlockError"),
        ("claims_without_slot", "DeadlockError"),
    ],
)
def test_what_is_broken_on_purpose_is_noticed(fault: str, error: str) -> None:
    found = verdicts(range(100), fault)
    assert found[error] >= 5
    assert set(found) <= {error, "fine"}


@pytest.mark.parametrize("in_order", [False, True])
def test_ranks_that_are_alone_take_parts_of_any_domain_whose_slot_is_free(in_order: bool) -> None:
    """Tokens are sorted: the first ones of each rank go to the next domain, the others to the one after it. Each home
    needs the chunks of one peer, while those of the other one fill their ring.
    """
    asked = replace(question(3, 1), num_sms=1)
    ring = ring_of(asked)._replace(num_slots=4, slots_per_credit=1)
    goes = [np.zeros((1024, 3), dtype=bool) for _ in range(3)]
    for r in range(3):
        goes[r][:512, (r + 1) % 3] = goes[r][512:, (r + 2) % 3] = True
    protocol = Protocol(ring, times_of(asked), 3, 0, faults=frozenset({"sends_in_order"} if in_order else ()))
    if in_order:
        with pytest.raises(DeadlockError, match=r"rank 0: chunk in slot \d from 1"):
            protocol.run([goes])
    else:
        protocol.run([goes])


def test_a_deadlock_says_what_is_waited_for() -> None:
    with pytest.raises(DeadlockError, match=r"rank \d: (credit of group \d from|chunk in slot \d from)"):
        check_seed(0, "loses_credits")


def test_one_seed_gives_one_result() -> None:
    assert check_seed(7) == check_seed(7)
    first, second = simulate_tail(question(2, 2, 256), 1, 3), simulate_tail(question(2, 2, 256), 1, 3)
    assert first == second


@pytest.mark.parametrize(("num_domains", "size"), [(2, 4), (2, 8), (4, 8)])
def test_the_model_is_near_the_simulation(num_domains: int, size: int) -> None:
    dispatch, combine = simulate_tail(question(num_domains, size), 1, 0)
    assert dispatch.median_us == pytest.approx(dispatch.model_us, rel=0.06)
    assert combine.median_us == pytest.approx(combine.model_us, rel=0.15)
    assert dispatch.max_us >= dispatch.p99_us >= dispatch.median_us


def test_a_slow_rank_delays_those_that_wait_for_it() -> None:
    asked = question(4, 2, 512)
    ring, times = ring_of(asked), times_of(asked)
    batches = [[np.ones((512, 4), dtype=bool)] * 4]
    even = Protocol(ring, times, 4, 0).run(batches)
    slowdown = np.array([1.0, 1.0, 4.0, 1.0])
    late = Protocol(ring, times, 4, 0, slowdown).run(batches)
    assert (late[0] > 2 * even[0]).all()


def test_incast_takes_as_long_as_the_port_of_the_one_that_all_want() -> None:
    asked = question(8, 1, 512)
    ring, times = ring_of(asked), times_of(asked)
    goes = np.zeros((512, 8), dtype=bool)
    goes[:, 3] = True
    dispatch, _ = Protocol(ring, times, 8, 0).run([[goes] * 8])
    port_us = 7 * 512 * times.record_bytes[0] / times.rate
    assert port_us < dispatch[3] < 1.3 * port_us
