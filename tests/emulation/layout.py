"""The kernels of core/layout.py, which tensors of the CPU do not reach through the public API."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_ep import Buffer
from hybrid_ep.core import kernels, layout
from hybrid_ep.core.layout import (
    columns_of_experts,
    compute_layout,
    experts_of_columns,
    layout_by_kernel,
    weights_to_probs,
)
from hybrid_ep.errors import ConfigError
from tests.battery.normal import equal
from tests.emulation.engine import local_kernels


def check_layout(count: int) -> None:
    """Random routings with holes and duplicates, counted by the kernel and on the host."""
    from hybrid_ep import _cuda

    for seed in range(count):
        draw = random.Random(seed)
        num_domains, per_domain, num_local = draw.randint(1, 3), draw.randint(1, 30), draw.randint(1, 9)
        num_ranks = num_domains * per_domain
        num_experts, num_tokens = num_ranks * num_local, draw.choice([0, 1, 33, 300, 700])
        if seed == 0:
            num_tokens = 8200  # more than the CTAs of a launch take 16 each
        num_topk = draw.randint(1, min(32, num_experts))
        generator = torch.Generator().manual_seed(seed)
        topk_idx = torch.randint(-1, num_experts, (num_tokens, num_topk), generator=generator)
        want = compute_layout(topk_idx, num_experts, num_ranks, per_domain)

        make = functools.partial(_cuda.LayoutCounts, by_python=seed % 4 == 3)
        with mock.patch.object(_cuda, "LayoutCounts", make), local_kernels(), _filled_memory():
            layout._shared_layout.cache_clear()
            count_tokens = layout_by_kernel(topk_idx, num_experts, num_ranks, per_domain)
            per_rank, per_domain_counts, per_expert, in_rank = count_tokens(topk_idx)
        equal(per_rank, want.num_tokens_per_rank, f"seed {seed}: tokens per rank")
        equal(per_domain_counts, want.num_tokens_per_domain, f"seed {seed}: tokens per domain")
        equal(per_expert, want.num_tokens_per_expert, f"seed {seed}: tokens per expert")
        equal(in_rank, want.is_token_in_rank, f"seed {seed}: is_token_in_rank")


def check_many_layouts() -> None:
    """Layouts of one shape, more than share memory for their totals, on two streams: all stay as they were."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(-1, 24, (600, 3), generator=generator) for _ in range(9)]
    wanted = [compute_layout(topk_idx, 24, 4, 2) for topk_idx in draws]
    current = [0]
    with local_kernels(), _filled_memory():
        native: Any = kernels.native
        count = native.LayoutCounts(
            num_topk=3,
            num_experts=24,
            num_ranks=4,
            num_ranks_per_domain=2,
            device=torch.device("cpu"),
            device_index=0,
            current_stream=lambda _: current[0],
        )
        streams = [0] * 130 + [1] * 3 + [0] * 3
        found = []
        for i, stream in enumerate(streams):
            current[:] = [stream]
            found.append(count(draws[i % 9]))
    addresses, memory_of = set(), {0: set[int](), 1: set[int]()}
    for i, (stream, tensors) in enumerate(zip(streams, found, strict=True)):
        for got, want in zip(tensors, wanted[i % 9], strict=True):
            equal(got, want, f"layout {i}")
        addresses |= {tensor.data_ptr() for tensor in tensors}
        memory_of[stream].add(tensors[0].untyped_storage().data_ptr())
    assert len(addresses) == 4 * len(found)
    assert not memory_of[0] & memory_of[1], "a stream must not count in memory that another one clears"


def check_layouts_of_a_buffer() -> None:
    """Layouts of one buffer, of shapes that change from call to call."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(-1, 8, shape, generator=generator) for shape in ((33, 2), (33, 2), (7, 2), (33, 3), (33, 2))]
    with Buffer(None, engine="torch") as buffer:
        wanted = [buffer.get_dispatch_layout(topk_idx, 8) for topk_idx in draws]
        with local_kernels():
            layout._shared_layout.cache_clear()
            found = [buffer.get_dispatch_layout(topk_idx, 8) for topk_idx in draws]
            assert layout._shared_layout.cache_info().currsize == 2, "the number of tokens keeps no memory"
            fewer = buffer.get_dispatch_layout(draws[0].clamp_max(3), 4)
            with pytest.raises(ConfigError, match="num_experts"):
                buffer.get_dispatch_layout(draws[0], 0)
    for i, (found_one, wanted_one) in enumerate(zip(found, wanted, strict=True)):
        for field in (0, 2, 3):
            equal(found_one[field], wanted_one[field], f"call {i}, entry {field}")
    assert fewer[2].shape == (4,)


@contextlib.contextmanager
def _filled_memory() -> Iterator[None]:
    """Inside, torch fills the memory that it allocates, so that it shows if a kernel leaves some of it out."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_probs(count: int, device: str = "cpu") -> None:
    """Weights to probabilities and back, by kernels and by torch, of random routings with holes and duplicates."""
    for seed in range(count):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        num_experts, num_tokens, num_topk = draw.randint(1, 130), draw.choice([0, 1, 33, 300]), 1 + seed % 32
        if seed == 31:
            num_tokens = 8200  # more than the CTAs of a launch take at once
        topk_idx = torch.randint(-1, num_experts, (num_tokens, num_topk), generator=generator)
        weights = torch.rand(num_tokens, num_topk, generator=generator) - 0.5
        probs = weights_to_probs(topk_idx, weights, num_experts)
        columns = columns_of_experts(topk_idx, probs)
        # The dispatch reports an index outside. Here it names no expert.
        outside = draw.choice([-1, -2, num_experts, num_experts + (1 << 32)])
        given, weights = torch.where(topk_idx < 0, outside, topk_idx).to(device), weights.to(device)
        with contextlib.nullcontext() if device == "cuda" else local_kernels():
            sums = weights_to_probs(given, weights, num_experts)
            same = experts_of_columns(given, columns.to(device), num_experts)
            back = columns_of_experts(given, probs.to(device))
        equal(sums.cpu(), probs, f"seed {seed}: sums of columns")
        equal(same.cpu(), probs, f"seed {seed}: equal columns")
        equal(back.cpu(), columns, f"seed {seed}: columns")
