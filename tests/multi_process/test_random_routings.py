"""Random routings, geometries and sizes, drawn by hypothesis, against the reference; and random plans of calls.

The reference has its own code, so the torch engine can be the oracle of the other engines (battery/fuzz.py).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.battery import hybrid, low_latency, normal
from tests.battery.cases import Case
from tests.battery.fuzz import check_seeds, seed_blocks
from tests.conftest import RunRanks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.sampled_from([1, 2, 4, 8]))
    per_domain = draw(st.sampled_from([n for n in (1, 2, 4, 8) if num_ranks % n == 0]))
    num_experts = num_ranks * draw(st.integers(1, 9))
    return Case(
        "random",
        num_ranks,
        tuple(draw(st.lists(st.integers(0, 20), min_size=num_ranks, max_size=num_ranks))),
        hidden=8 * draw(st.integers(1, 20)),
        topk=draw(st.integers(1, min(8, num_experts))),
        num_experts=num_experts,
        routing=draw(st.sampled_from(["uniform", "hot", "holes", "duplicates", "local"])),
        num_ranks_per_domain=per_domain,
        seed=draw(st.integers(0, 10_000)),
    )


few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(case=cases())
@few
def test_normal(run_ranks: RunRanks, case: Case) -> None:
    run_ranks(case.num_ranks, normal.check_round_trip, case)


@given(case=cases())
@few
def test_permuted(run_ranks: RunRanks, case: Case) -> None:
    run_ranks(case.num_ranks, hybrid.check_permuted, case)


@given(case=cases())
@few
def test_low_latency(run_ranks: RunRanks, case: Case) -> None:
    # An expert has room for a row of each token; columns that repeat it may be more (battery: check_too_many_rows).
    most = max(len(rows) for rank in range(case.num_ranks) for rows in low_latency.expert_copies(case, rank))
    assume(most <= case.max_tokens * case.num_ranks)
    run_ranks(case.num_ranks, low_latency.check_low_latency, case, "bf16")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)], ids="{}_ranks".format)
@seed_blocks(2, 41)
def test_plans(run_ranks: RunRanks, num_ranks: int, seeds: range) -> None:
    """Layouts of tensors, a default device, and what came before change no bit."""
    run_ranks(num_ranks, check_seeds, seeds)
