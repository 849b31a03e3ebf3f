"""What the kernels between domains keep stays small, up to 2,048 ranks: docs/internals/cuda_engine.md."""

from __future__ import annotations

import pytest

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.errors import ConfigError

_cuda = pytest.importorskip("hybrid_ep._cuda")

# (domains, ranks of a domain)
GRIDS = [(2, 1), (2, 8), (8, 8), (28, 72), (64, 8), (64, 32)]


@pytest.mark.parametrize("grid", GRIDS)
def test_rings_of_a_direction_fit_64_megabytes(grid: tuple[int, int]) -> None:
    num_domains = grid[0]
    slot_bytes, num_slots, slots_per_credit = _cuda.between_ring(num_domains=num_domains)
    assert num_slots % slots_per_credit == 0
    assert num_slots >= 4
    assert (num_domains - 1) * num_slots * slot_bytes <= 64 << 20


@pytest.mark.parametrize("num_domains", range(2, 65))
def test_slots_and_bytes_of_the_link_are_as_documented(num_domains: int) -> None:
    """Send and receive slots for each peer, a flag for each receive slot, a credit for each group of send slots."""
    slot_bytes, num_slots, slots_per_credit = _cuda.between_ring(num_domains=num_domains)
    num_peers = num_domains - 1
    assert slot_bytes == 256 << 10
    assert num_slots == min(128, max(4, 256 // num_peers // 4 * 4))
    window = 2 * num_peers * num_slots * slot_bytes
    words = 8 * num_peers * (num_slots + num_slots // slots_per_credit)
    assert _cuda.between_link_bytes(num_domains=num_domains) == window + words


@pytest.mark.parametrize("grid", [(2, 1), (2, 8), (8, 32)])
def test_a_handle_of_few_ranks_is_as_documented(grid: tuple[int, int]) -> None:
    num_domains, size = grid
    num_ranks, num_tokens, num_topk, num_experts, held = num_domains * size, 100, 8, 256, 300
    ints = _cuda.between_route_ints(
        num_domains=num_domains,
        ranks_per_domain=size,
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=num_experts,
        held_capacity=held,
    )
    formula = num_tokens * (num_topk + 2 * num_domains) + num_ranks * (size + 1) + held * num_topk + num_experts
    assert formula + num_ranks**2 <= ints <= formula + num_ranks**2 + 1024


@pytest.mark.parametrize("grid", GRIDS)
def test_control_memory_has_no_cell_for_each_pair_of_many_ranks(grid: tuple[int, int]) -> None:
    num_domains, size = grid
    num_ranks = num_domains * size
    num_columns = num_ranks if num_ranks <= _cuda.max_matrix_ranks else size
    words = 8 * num_ranks * (23 + num_columns + _cuda.max_experts // num_ranks) + 4 * _cuda.max_tokens
    used = _cuda.between_control_bytes(num_domains=num_domains, ranks_per_domain=size)
    assert words <= used <= words + (64 << 10)
    assert used < 4 << 20


def test_a_handle_at_2048_ranks_has_no_cell_for_each_token_and_rank() -> None:
    num_tokens, num_topk, num_experts, held = 4096, 8, 2048, 8 * 4096
    ints = _cuda.between_route_ints(
        num_domains=64,
        ranks_per_domain=32,
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=num_experts,
        held_capacity=held,
    )
    formula = num_tokens * (num_topk + 2 * 64) + 2048 * 33 + held * num_topk + num_experts
    assert formula <= ints <= formula + 1024
    assert ints < num_tokens * 2048 // 8


@pytest.mark.parametrize("grid", [(65, 1), (2, 73), (64, 33)])
def test_grids_that_are_too_large_are_refused_before_anything_is_made(grid: tuple[int, int]) -> None:
    from hybrid_ep.engine.cuda.between import CudaBetween

    num_domains, size = grid
    with pytest.raises(
        ConfigError, match=f"grid is {num_domains} domains of {size} ranks; allowed between domains: 2 "
    ):
        CudaBetween(None, RankGrid(0, num_domains * size, size), 1.0, 0)  # type: ignore[arg-type]
