"""The figures behind the picture of bytes between domains."""

from __future__ import annotations

import random

import pytest

from benchmarks.domains import remote_domains, rows_between_domains


@pytest.mark.parametrize(("num_domains", "expected"), [(2, 0.997), (4, 2.71), (8, 4.63), (16, 6.12)])
def test_remote_domains_of_a_token(num_domains: int, expected: float) -> None:
    assert remote_domains(num_domains) == pytest.approx(expected, abs=0.005)


def test_remote_domains_agree_with_drawn_routings() -> None:
    rng = random.Random(0)
    num_domains, num_experts, topk = 4, 16, 3
    draws = [{e // (num_experts // num_domains) for e in rng.sample(range(num_experts), topk)} for _ in range(20_000)]
    mean = sum(len(domains - {0}) for domains in draws) / len(draws)
    assert remote_domains(num_domains, num_experts, topk) == pytest.approx(mean, rel=0.01)


def test_one_row_for_each_domain_is_never_more_than_the_other_ways() -> None:
    for num_domains in (2, 4, 8, 16, 32):
        *others, own = rows_between_domains(num_domains).values()
        assert own <= min(others)
