"""The simulation between domains: no rank waits forever, no chunk is lost, and each mistake on purpose is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_ep.cluster.model.events import Clock, DeadlockError, Process
from hybrid_ep.cluster.model.protocol import Plane, Protocol, ProtocolError, Stream
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.simulate import plane_of, simulate_tail
from hybrid_ep.workload import Workload


def question(num_domains: int, size: int, num_tokens: int = 4096) -> Question:
    num_experts = -(-256 // (num_domains * size)) * num_domains * size
    return Question(Workload(num_tokens, 7168, 8, num_experts), num_domains, size)


def check_seed(seed: int) -> int:
    """Runs two dispatches and two combines of a small random grid with small rings; returns the number of events.

    Delays, order of arrivals, counts, and late or slow ranks are random.

    Raises:
        DeadlockError: ranks wait forever.
        ProtocolError: a slot was overwritten, or a chunk is not the one waited for.
    """
    random = np.random.default_rng(seed)
    num_domains = int(random.integers(2, 6))
    slots_per_credit = int(random.integers(1, 3))
    num_slots = slots_per_credit * int(random.integers(1, 5))
    per_chunk = int(random.integers(1, 8))
    per_part = int(random.integers(1, per_chunk + 1))
    send_warps, forward_warps, push_warps, domain_warps, home_warps = random.integers(1, [4, 4, 3, 4, 4]).tolist()
    is_alone = bool(random.random() < 0.3)
    num_open = int(random.integers(1, 4))
    build, forward, push, part, sums, sum_home, agree = random.exponential(1.0, 7).tolist()
    nvlink, own, first_rows = random.exponential(1.0, (3, num_domains)).tolist()
    plane = Plane(
        num_slots,
        slots_per_credit,
        per_chunk,
        per_part,
        send_warps,
        forward_warps,
        push_warps,
        domain_warps,
        home_warps,
        is_alone,
        build=build,
        forward=forward,
        part=0.0 if is_alone else part,
        sum=push if is_alone else sums,
        sum_home=sum_home,
        nvlink=nvlink,
        own=own,
        first_rows=[0.0] * num_domains if is_alone else first_rows,
        agree=(agree, agree),
        latency=1.0,
        jitter=float(random.choice([0.0, 2.0, 20.0])),
        record_bytes=(1.0, 1.0),
        rate=1.0,
        num_open=num_open,
    )
    slowdown = np.where(random.random(num_domains) < 0.2, 20.0, 1.0)
    # Some domains are destinations of all tokens, and some of none.
    shares = random.choice([0.0, 0.2, 0.7, 1.0], num_domains)

    def draw_tokens() -> NDArray[np.bool_]:
        return random.random((int(random.integers(0, 24)), num_domains)) < shares

    batches = [[draw_tokens() for _ in range(num_domains)] for _ in range(2)]
    starts = random.exponential(5.0, (4, num_domains))
    protocol = Protocol(plane, num_domains, seed, slowdown)
    protocol.run(batches, starts)
    return protocol.clock.num_events


order_of_chunks = Protocol.order_of_chunks


def last_domain(protocol: Protocol, r: int, left: list[int], claimed: list[int]) -> int:
    return max(left, key=lambda d: (d - r) % protocol.num_domains)


def one_order(protocol: Protocol, r: int, left: list[int], claimed: list[int]) -> int:
    return min(left, key=lambda d: (claimed[d] // protocol.plane.per_chunk, (d - r) % protocol.num_domains))


def one_domain_first(protocol: Protocol, r: int, counts: list[int]) -> list[tuple[int, int]]:
    return sorted(order_of_chunks(protocol, r, counts), key=lambda claim: (claim[0] - r) % protocol.num_domains)


# Each mistake by the method that makes it, what that does instead, and the error that it must cause.
MISTAKES: dict[str, tuple[type, str, Callable[..., object], type[Exception]]] = {
    "credits are lost": (Stream, "return_credit", lambda *arguments: iter(()), DeadlockError),
    "credits are not waited for": (Stream, "is_free", lambda *arguments: True, ProtocolError),
    "chunks are forwarded domain by domain": (Protocol, "order_of_chunks", one_domain_first, DeadlockError),
    "a warp at home waits while it holds rows": (Protocol, "are_here", lambda *arguments: True, DeadlockError),
    "a warp claims a part whose slot is not free": (Protocol, "choose", last_domain, DeadlockError),
}


def test_the_clock_runs_processes_in_order_and_finds_who_waits_for_ever() -> None:
    clock, event, seen = Clock(), "a word", []

    def early() -> Process:
        yield 1.0
        seen.append(("early", clock.now))
        clock.signal(event)

    def late() -> Process:
        yield event
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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, method, replacement, error = MISTAKES[mistake]
    monkeypatch.setattr(kind, method, replacement)
    num_errors = 0
    for seed in range(100):
        try:
            check_seed(seed)
        except error:
            num_errors += 1
    assert num_errors >= 5


@pytest.mark.parametrize("in_order", [False, True])
def test_ranks_that_are_alone_take_parts_of_any_domain_whose_slot_is_free(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are sorted: the first ones of each rank go to the next domain, the others to the one after it. Each home
    needs the chunks of one peer, while those of the other one fill their ring.
    """
    plane = plane_of(replace(question(3, 1), num_sms=1))._replace(num_slots=4, slots_per_credit=1)
    goes = [np.zeros((1024, 3), dtype=bool) for _ in range(3)]
    for r in range(3):
        goes[r][:512, (r + 1) % 3] = goes[r][512:, (r + 2) % 3] = True
    if not in_order:
        Protocol(plane, 3, 0).run([goes])
        return
    monkeypatch.setattr(Protocol, "choose", one_order)
    with pytest.raises(DeadlockError, match=r"rank 0: chunk in slot \d from 1"):
        Protocol(plane, 3, 0).run([goes])


def test_a_deadlock_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "return_credit", lambda *arguments: iter(()))
    with pytest.raises(DeadlockError, match=r"rank \d: (credit of group \d from|chunk in slot \d from)"):
        check_seed(0)


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
    plane = plane_of(asked)
    batches = [[np.ones((512, 4), dtype=bool)] * 4]
    even = Protocol(plane, 4, 0).run(batches)
    slowdown = np.array([1.0, 1.0, 4.0, 1.0])
    late = Protocol(plane, 4, 0, slowdown).run(batches)
    assert (late[0] > 2 * even[0]).all()


def test_incast_takes_as_long_as_the_port_of_the_one_that_all_want() -> None:
    asked = question(8, 1, 512)
    plane = plane_of(asked)
    goes = np.zeros((512, 8), dtype=bool)
    goes[:, 3] = True
    dispatch, _ = Protocol(plane, 8, 0).run([[goes] * 8])
    port_us = 7 * 512 * plane.record_bytes[0] / plane.rate
    assert port_us < dispatch[3] < 1.3 * port_us
