"""A link between two ranks ends, while ranks of their domains are a call ahead."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist

from hybrid_ep.errors import TimeoutError, TransportError
from tests.battery.cases import Case, Inputs
from tests.battery.normal import dispatch, make_buffer

_CASE = Case("lost_link", 4, 6, hidden=64, topk=2, num_experts=4, num_ranks_per_domain=2)


def lose_link_of_last_peers(timeout_s: float) -> tuple[int | None, int]:
    """On 2 × 2 ranks, tokens go to peers only, so that ranks 0 and 2 need nothing of 1 and 3 in a combine.

    Rank 3 closes its link after a dispatch. Then the combine of ranks 0 and 2 comes to its end. In their next dispatch
    they wait for ranks 1 and 3, which have lost each other in the combine.

    Returns:
        Whom this rank's error names, and how many of the calls after the dispatch it has finished.
    """
    rank = dist.get_rank()
    inputs = _CASE.inputs(rank)
    experts = torch.tensor([rank, (rank + 2) % 4]).expand(_CASE.max_tokens, -1).contiguous()
    inputs = Inputs(inputs.x, experts, inputs.topk_weights)
    with mock.patch.dict(os.environ, {"HYBRID_EP_TRANSPORT": "tcp", "HYBRID_EP_TCP_ADDRESS": "127.0.0.1"}):
        buffer = make_buffer(_CASE, timeout_s=timeout_s)
    rows, *_, handle, _ = dispatch(buffer, _CASE, inputs)
    if rank == 3:
        buffer.engine._link.close()  # type: ignore[attr-defined]
    dist.barrier()
    num_finished = 0
    try:
        buffer.combine(rows, handle)
        buffer.raise_pending()
        num_finished += 1
        dispatch(buffer, _CASE, inputs)
    except (TimeoutError, TransportError) as error:
        return error.peer, num_finished
    raise AssertionError(f"rank {rank} has noticed nothing")
