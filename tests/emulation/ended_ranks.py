"""The process of a rank ends at a given place of a call between domains; the other ranks name the lost rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybrid_ep.errors import TransportError
from tests.battery.cases import Case
from tests.battery.normal import dispatch, make_buffer
from tests.emulation.steps import without


def call_until_a_rank_ends(case: Case, lost: int, place: str, timeout_s: float) -> int | None:
    """A round trip with all ranks, and then one in which a rank ends.

    Args:
        case: of the calls.
        lost: the rank that ends.
        place: of `steps.ENDS`, or ``combine``: the rank ends between its dispatch and its combine.
        timeout_s: of the buffer.

    Returns:
        Whom the error of this rank names.
    """
    rank = dist.get_rank()
    inputs = case.inputs(rank)
    with make_buffer(case, timeout_s=timeout_s) as buffer:
        for ends in (False, True):
            dist.barrier()
            try:
                with without(place if ends and rank == lost else ""):
                    rows, *_, handle, _ = dispatch(buffer, case, inputs)
                    if ends and place == "combine":
                        dist.barrier()
                        if rank == lost:
                            return None
                    buffer.combine(rows, handle)
                    torch.cuda.synchronize()
                    if ends:
                        dispatch(buffer, case, inputs)
            except TransportError as error:
                return error.peer
    raise AssertionError(f"rank {rank} has noticed nothing")
