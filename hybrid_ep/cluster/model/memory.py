"""Memory of a rank, by the formulas that the engine allocates with (csrc/bindings/sizes.cpp)."""

from __future__ import annotations

from math import ceil

from hybrid_ep import _C
from hybrid_ep.cluster.model.question import Question
from hybrid_ep.cluster.model.traffic import Rows

__all__ = ["memory_of"]


def memory_of(question: Question, rows: Rows) -> dict[str, int]:
    """Returns bytes of the most loaded rank by part.

    Args:
        question: the grid and the workload.
        rows: the numbers of rows that are expected.
    """
    workload, num_domains = question.workload, question.num_domains
    grid = {"num_domains": num_domains, "ranks_per_domain": question.num_ranks_per_domain}
    memory = {"control": _C.control_bytes}
    if num_domains > 1:
        memory["control"] += _C.between_control_bytes(**grid)
        memory["rings of the link"] = _C.between_link_bytes(num_domains=num_domains)
    if question.mode == "low-latency":
        memory["low-latency region"] = _C.low_latency_region_bytes(
            num_ranks=question.num_ranks,
            num_experts=workload.num_experts,
            num_topk=workload.num_topk,
            hidden=workload.hidden,
            max_tokens=workload.num_tokens,
        )
        return memory
    scales = workload.row_bytes - workload.hidden if workload.dtype == "fp8" else 0
    # In one domain rows arrive by expert; between domains torch sorts them.
    arrive_by_expert = question.mode == "permute" and num_domains == 1
    memory["rows of a dispatch"] = _C.slot_bytes(
        rows=workload.row_bytes - scales,
        experts=8 * workload.num_topk,
        weights=0 if arrive_by_expert else 4 * workload.num_topk,
        scales=scales,
        num_rows=ceil((rows.copies if arrive_by_expert else rows.received).max()),
    )
    if question.mode == "permute":
        if num_domains > 1:
            memory["rows by expert"] = ceil(rows.copies.max()) * workload.row_bytes
        memory["sums of experts"] = ceil(rows.received.max()) * workload.combine_row_bytes
    memory["rows of a combine"] = _C.slot_bytes(
        rows=workload.combine_row_bytes, experts=0, weights=0, scales=0, num_rows=ceil((rows.within - rows.kept).max())
    )
    if num_domains > 1:
        held = min(num_domains - 1, workload.num_topk) * workload.num_tokens
        memory["a handle"] = 4 * _C.between_route_ints(
            **grid,
            num_tokens=workload.num_tokens,
            num_topk=workload.num_topk,
            num_experts=workload.num_experts,
            held_capacity=max(held, ceil(rows.held.max())),
        )
        memory["sums of a combine"] = workload.num_tokens * workload.combine_row_bytes
    return memory
