"""On every rank: dispatch → experts → combine, in each of the three ways that the library offers.

Read one of the three functions to see how the library is used.

The experts are two-layer GELU networks in float64, so all error against the reference comes from rounding rows to the
dtype in which they are sent, and none from the experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.buffers.hybrid import HybridEPBuffer
from hybrid_ep.buffers.v1 import Buffer
from hybrid_ep.demo.settings import Path, Settings
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8
from hybrid_ep.testing.batch import Batch

Expert = Callable[[int, Tensor], Tensor]


@dataclass
class PhaseLog:
    """Time and bytes of the phases of one pass.

    Attributes:
        buffer: whose traffic is counted.
        seconds: phase → seconds, from the moment when all ranks are ready.
        sent_bytes: phase → (bytes to ranks of the same domain, bytes to other domains).
        engine: what moved the tokens.
    """

    buffer: BaseBuffer
    seconds: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    engine: str = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what runs inside. Collective."""
        dist.barrier()
        self.engine = self.buffer.engine.name
        self.buffer.traffic.clear()
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        self.sent_bytes[name] = (self.buffer.traffic.within_domain, self.buffer.traffic.between_domains)


@dataclass(frozen=True)
class Passage:
    """The outcome of one pass through dispatch, experts and combine.

    Attributes:
        output: ``[T, H]`` bf16.
        num_tokens_per_expert: LE counts of received tokens.
        log: time and bytes.
    """

    output: Tensor
    num_tokens_per_expert: list[int]
    log: PhaseLog


def travel(path: Path, settings: Settings, batch: Batch, expert: Expert) -> Passage:
    """Takes this rank's tokens along `path`. Collective.

    Args:
        path: which way.
        settings: sizes.
        batch: this rank's tokens and routing.
        expert: (global expert, ``[n, H]`` float64) → ``[n, H]`` float64.
    """
    way = {"buffer": _through_buffer, "permuted": _through_permuted, "low-latency": _through_low_latency}
    return way[path.flavour](path.dtype == "fp8", settings, batch, expert)


def _through_buffer(fp8: bool, settings: Settings, batch: Batch, expert: Expert) -> Passage:
    x, topk_idx, topk_weights = batch
    with Buffer(num_ranks_per_domain=settings.num_ranks_per_domain) as buffer:
        log = PhaseLog(buffer)
        with log.phase("dispatch"):
            tokens = cast_to_fp8(x) if fp8 else x
            per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, settings.num_experts)
            received, recv_topk_idx, recv_weights, counts, handle, _ = buffer.dispatch(
                tokens,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_domain,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
            )
        assert not isinstance(received, tuple) or len(received) == 2
        assert recv_topk_idx is not None
        assert recv_weights is not None
        assert counts is not None
        assert handle is not None
        with log.phase("experts"):
            rows = _as_float64(received)
            outputs = torch.zeros_like(rows)
            for local in range(settings.num_local_experts):
                row, column = torch.nonzero(recv_topk_idx == local, as_tuple=True)
                weights = recv_weights[row, column].double().unsqueeze(1)
                outputs.index_add_(0, row, expert(_global(buffer, settings, local), rows[row]) * weights)
            partial = outputs.to(torch.bfloat16)
        with log.phase("combine"):
            combined, _, _ = buffer.combine(partial, handle)
    return Passage(combined, counts, log)


def _through_permuted(fp8: bool, settings: Settings, batch: Batch, expert: Expert) -> Passage:
    x, topk_idx, topk_weights = batch
    with HybridEPBuffer(
        None,
        settings.hidden,
        settings.num_tokens,
        settings.num_local_experts,
        use_fp8=fp8,
        num_of_hybrid_ep_ranks_per_nvlink_domain=settings.num_ranks_per_domain,
    ) as buffer:
        log = PhaseLog(buffer)
        with log.phase("dispatch"):
            hidden, scales = cast_to_fp8(x) if fp8 else (x, None)
            received, probs, recv_scales, counts, handle = buffer.dispatch_with_permute(
                hidden=hidden,
                scaling_factor=scales,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_of_experts=settings.num_experts,
            )
        assert probs is not None
        with log.phase("experts"):
            rows = _as_float64(received if recv_scales is None else (received, recv_scales))
            blocks = rows.split(counts.tolist())
            outputs = [expert(_global(buffer, settings, local), block) for local, block in enumerate(blocks)]
            weighted = (torch.cat(outputs) * probs.double().unsqueeze(1)).to(torch.bfloat16)
        with log.phase("combine"):
            combined, _ = buffer.combine_with_unpermute(hidden=weighted, handle=handle)
    return Passage(combined, counts.tolist(), log)


def _through_low_latency(fp8: bool, settings: Settings, batch: Batch, expert: Expert) -> Passage:
    x, topk_idx, topk_weights = batch
    with Buffer(low_latency_mode=True, num_ranks_per_domain=settings.num_ranks_per_domain) as buffer:
        log = PhaseLog(buffer)
        with log.phase("dispatch"):
            received, counts, handle, _, _ = buffer.low_latency_dispatch(
                x, topk_idx, settings.num_tokens, settings.num_experts, use_fp8=fp8
            )
        with log.phase("experts"):
            outputs = buffer.get_next_low_latency_combine_buffer(handle)
            for local, count in enumerate(counts.tolist()):
                packed = received[local, :count] if isinstance(received, Tensor) else _pair(received, local, count)
                outputs[local, :count] = expert(_global(buffer, settings, local), _as_float64(packed))
        with log.phase("combine"):
            combined, _, _ = buffer.low_latency_combine(outputs, topk_idx, topk_weights, handle, zero_copy=True)
    return Passage(combined, counts.tolist(), log)


def _global(buffer: BaseBuffer, settings: Settings, local_expert: int) -> int:
    return buffer.rank * settings.num_local_experts + local_expert


def _pair(received: tuple[Tensor, Tensor], local: int, count: int) -> tuple[Tensor, Tensor]:
    return received[0][local, :count], received[1][local, :count]


def _as_float64(rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """bf16 rows, or fp8 values and their scales, as float64 without further rounding."""
    return cast_from_fp8(*rows, torch.float64) if isinstance(rows, tuple) else rows.double()


@dataclass(frozen=True)
class Experts:
    """All experts of the layer; every rank can make all of them and runs its own.

    Attributes:
        up: ``[E, F, H]`` float64.
        down: ``[E, H, F]`` float64.
    """

    up: Tensor
    down: Tensor

    def __call__(self, expert: int, x: Tensor) -> Tensor:
        """``[n, H]`` float64 → ``[n, H]`` float64."""
        return F.gelu(x @ self.up[expert].t()) @ self.down[expert].t()


@lru_cache(maxsize=1)
def make_experts(num_experts: int, hidden: int, ffn_hidden: int, seed: int) -> Experts:
    """Draws weights that keep rows at about their size."""
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(num_experts, ffn_hidden, hidden, generator=generator, device="cpu") / hidden**0.5
    down = torch.randn(num_experts, hidden, ffn_hidden, generator=generator, device="cpu") / ffn_hidden**0.5
    return Experts(up.double(), down.double())
