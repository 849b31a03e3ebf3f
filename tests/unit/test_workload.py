"""Workloads: the same for one seed, and routings that have the popularity they promise."""

import pytest
import torch

from hybrid_ep.errors import ConfigError
from hybrid_ep.testing.batch import make_batch, make_routing
from hybrid_ep.workload import ROUTINGS, Workload, log_popularity


def workload(routing: str = "uniform", **changes: object) -> Workload:
    sizes = {"num_tokens": 2000, "hidden": 128, "num_topk": 4, "num_experts": 32, "routing": routing} | changes
    return Workload(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_batches_follow_from_the_seed_and_differ_between_ranks(routing: str) -> None:
    first, again = make_batch(workload(routing), 1), make_batch(workload(routing), 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (make_batch(workload(routing), 2), make_batch(workload(routing, seed=1), 1)):
        assert not torch.equal(first.x, other.x)
        assert not torch.equal(first.topk_idx, other.topk_idx)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_token_has_distinct_experts_and_weights_that_sum_to_one(routing: str) -> None:
    topk_idx, topk_weights = make_routing(workload(routing), 0)
    assert topk_idx.min() >= 0
    assert topk_idx.max() < 32
    assert (topk_idx.sort(1).values.diff(dim=1) > 0).all()
    torch.testing.assert_close(topk_weights.sum(1), torch.ones(2000))
    assert (topk_weights.diff(dim=1) <= 0).all()  # the preferred expert stands first


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
@pytest.mark.parametrize("num_experts", [1, 2, 32, 2048])
def test_the_popular_experts_are_those_of_torch_randperm(num_experts: int, seed: int) -> None:
    skewed = workload("skewed", num_topk=1, num_experts=num_experts, seed=seed)
    popular_first = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    expected = -skewed.exponent * (popular_first.argsort() + 1).double().log()
    torch.testing.assert_close(torch.tensor(log_popularity(skewed), dtype=torch.float64), expected)


def test_popularity_of_each_routing() -> None:
    share = {r: torch.bincount(make_routing(workload(r), 0)[0].flatten(), minlength=32) / 2000 for r in ROUTINGS}
    assert share["uniform"].max() < 1.3 * 4 / 32
    assert 2 * 4 / 32 < share["skewed"].max() < 0.6
    assert share["skewed"].min() > 0
    assert 0.25 < share["hot"][0] < 0.35
    assert share["hot"][1:].max() < 1.3 * 4 / 31


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": -1}, "tokens is -1"),
        ({"hidden": 100, "dtype": "fp8"}, "hidden is 100"),
        ({"num_topk": 33}, "topk is 33"),
        ({"num_topk": 0}, "topk is 0"),
        ({"dtype": "fp4"}, "dtype is fp4"),
        ({"routing": "learned"}, "routing is learned"),
        ({"num_experts": 0}, "experts is 0"),
    ],
)
def test_values_that_are_not_allowed(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(**changes)  # type: ignore[arg-type]


def test_row_bytes() -> None:
    assert workload().row_bytes == 256
    assert workload(dtype="fp8").row_bytes == 128 + 4
    assert workload(dtype="fp8").combine_row_bytes == 256
