"""The layout in C++ and in torch operations, the map conversions and the permutation agree with plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_ep import ConfigError
from hybrid_ep.core import layout
from hybrid_ep.core.layout import (
    compute_layout,
    experts_of_columns,
    first_occurrence,
    indices_to_map,
    map_to_indices,
    permutation_by_expert,
    probs_in_columns,
    weights_in_columns,
)


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int, int, int]:
    """(topk_idx, num_experts, num_ranks, num_ranks_per_domain), with holes and duplicates."""
    per_domain, num_domains, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    num_ranks = per_domain * num_domains
    num_experts = num_ranks * num_local
    num_topk = draw(st.integers(1, min(8, num_experts)))
    rows = st.lists(st.integers(-1, num_experts - 1), min_size=num_topk, max_size=num_topk)
    tokens = draw(st.lists(rows, max_size=12))
    topk = torch.tensor(tokens, dtype=torch.int64).reshape(len(tokens), num_topk)
    return topk, num_experts, num_ranks, per_domain


@given(routings())
@settings(max_examples=150, deadline=None)
def test_layout_counts_as_plain_loops_do(routing: tuple[Tensor, int, int, int]) -> None:
    topk, num_experts, num_ranks, per_domain = routing
    num_local = num_experts // num_ranks
    per_rank, per_expert, per_dom = [0] * num_ranks, [0] * num_experts, [0] * (num_ranks // per_domain)
    in_rank = []
    for row in topk.tolist():
        experts = {e for e in row if e >= 0}
        ranks = {e // num_local for e in experts}
        for expert in row:
            per_expert[expert] += int(expert >= 0)
        for rank in ranks:
            per_rank[rank] += 1
        for domain in {r // per_domain for r in ranks}:
            per_dom[domain] += 1
        in_rank.append([r in ranks for r in range(num_ranks)])
    result = compute_layout(topk, num_experts, num_ranks, per_domain)
    assert result.num_tokens_per_rank.tolist() == per_rank
    assert result.num_tokens_per_expert.tolist() == per_expert
    assert result.num_tokens_per_domain.tolist() == per_dom
    assert result.is_token_in_rank.tolist() == in_rank


@given(routings())
@settings(max_examples=100, deadline=None)
def test_torch_operations_give_the_layout_of_the_extension(routing: tuple[Tensor, int, int, int]) -> None:
    topk, num_experts, num_ranks, per_domain = routing
    on_cpu = compute_layout(topk, num_experts, num_ranks, per_domain)
    on_device = layout.compute_layout_on_device(topk, num_experts, num_ranks)
    for left, right in zip((on_cpu.num_tokens_per_rank, on_cpu.num_tokens_per_expert, on_cpu.is_token_in_rank),
                           on_device, strict=True):  # fmt: skip
        assert torch.equal(left, right)


@pytest.mark.parametrize("bad", [-2, 8, 1 << 40])
def test_an_index_outside_is_named(bad: int) -> None:
    with pytest.raises(ConfigError, match=rf"{bad}; allowed: −1 … 7"):
        compute_layout(torch.tensor([[0, 1], [bad, 2]]), 8, 2, 2)


def test_duplicates() -> None:
    topk = torch.tensor([[3, 1, 3, -1], [2, 2, 2, 2], [-1, -1, 0, 1]])
    assert first_occurrence(topk).sum(1).tolist() == [2, 1, 2]
    weights = torch.tensor([[1.0, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8]])
    _, probs = indices_to_map(topk, weights, 3, 4)
    assert probs is not None
    assert probs.tolist() == [[0, 2, 0, 5], [0, 0, 15, 0], [4, 8, 0, 0]]
    in_columns = probs_in_columns(topk, probs)
    assert in_columns.tolist() == [[5, 2, 0, 0], [15, 0, 0, 0], [0, 0, 4, 8]]
    assert torch.equal(indices_to_map(topk, in_columns, 3, 4)[1], probs)
    assert torch.equal(experts_of_columns(topk, probs.gather(1, topk.clamp_min(0)), 4), probs)


def test_probabilities_do_not_depend_on_the_order_of_columns() -> None:
    weights = torch.tensor([[1.0, 2.0**-24, 2.0**-24, 2.0**-25]])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        _, probs = indices_to_map(torch.zeros(1, 4, dtype=torch.int64), weights[:, order], 1, 1)
        assert probs is not None
        assert probs.item() == 1 + 2.0**-23


@given(routings())
@settings(max_examples=100, deadline=None)
def test_maps_and_indices_say_the_same(routing: tuple[Tensor, int, int, int]) -> None:
    topk, num_experts, _, _ = routing
    weights = torch.rand(topk.shape) + 0.5
    routing_map, probs = indices_to_map(topk, weights, topk.shape[0], num_experts)
    assert probs is not None
    for token, row in enumerate(topk.tolist()):
        for expert in range(num_experts):
            named = expert in row
            assert bool(routing_map[token, expert]) == named
            its_weights = [float(weights[token, k]) for k, other in enumerate(row) if other == expert]
            assert float(probs[token, expert]) == float(torch.tensor(sum(its_weights), dtype=torch.float32))
    back, back_weights = map_to_indices(routing_map, probs)
    assert back_weights is not None
    again, probs_again = indices_to_map(back, back_weights, topk.shape[0], num_experts)
    assert torch.equal(again, routing_map)
    assert torch.equal(probs_again, probs)


@given(routings())
@settings(max_examples=100, deadline=None)
def test_weights_go_to_the_columns_of_other_indices(routing: tuple[Tensor, int, int, int]) -> None:
    topk, _, _, _ = routing
    weights = torch.rand(topk.shape)
    wanted = torch.cat([topk.flip(1), torch.full((topk.shape[0], 1), 999)], 1)
    want = []
    for token, row in enumerate(wanted.tolist()):
        left = list(zip(topk[token].tolist(), weights[token].tolist(), strict=True))
        want.append([])
        for index in row:
            found = next((pair for pair in left if pair[0] == index), None)
            want[-1].append(found[1] if found else 0.0)
            if found:
                left.remove(found)
    assert weights_in_columns(wanted, topk, weights).tolist() == want


def test_maps_without_weights_and_of_wrong_shape() -> None:
    topk = torch.tensor([[0, 1]])
    assert indices_to_map(topk, None, 1, 4)[1] is None
    with pytest.raises(ConfigError, match=r"topk_idx.shape is \[1, 2\]; allowed: \[2, any\]"):
        indices_to_map(topk, None, 2, 4)
    for bad in (4, -2):
        with pytest.raises(ConfigError, match=rf"topk_idx is {bad}; allowed: −1 … 3"):
            indices_to_map(torch.tensor([[0, bad]]), None, 1, 4)
    with pytest.raises(ConfigError, match=r"topk_weights.device is meta; allowed: cpu"):
        indices_to_map(topk, torch.ones(1, 2, device="meta"), 1, 4)
    with pytest.raises(ConfigError, match=r"topk_weights.dtype is torch.float64"):
        indices_to_map(topk, torch.ones(1, 2, dtype=torch.float64), 1, 4)


@given(routings(), st.sampled_from([1, 4, 16]))
@settings(max_examples=100, deadline=None)
def test_permutation_groups_by_expert_and_pads(routing: tuple[Tensor, int, int, int], pad: int) -> None:
    topk, num_experts, _, _ = routing
    permutation = permutation_by_expert(topk, num_experts, pad)
    expected: list[tuple[int, int] | None] = []
    for expert in range(num_experts):
        expected += [(n, k) for n, row in enumerate(topk.tolist()) for k, named in enumerate(row) if named == expert]
        expected += [None] * (-len(expected) % pad)
    size = int(permutation.num_tokens_per_expert.sum())
    got: list[tuple[int, int] | None] = [None] * size
    for row, column, place in zip(*(t.tolist() for t in permutation[:3]), strict=True):
        assert got[place] is None
        got[place] = (row, column)
    assert got == expected
