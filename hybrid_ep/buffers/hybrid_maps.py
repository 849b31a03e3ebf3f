"""Plain dispatch and combine along a dense map of any width.

A routing of an engine names at most 32 experts of a token. A plain dispatch needs only the ranks of a token, so the
routing names one expert of each rank. The token's row of the map and its probabilities follow along the same route, as
the bytes of a second row. Combine brings probabilities back as weights, some columns at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_ep.core.checks import packed, packed_copy
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.calls import Combined, CombineRequest, DispatchHandle, Rows

_RECORD_ALIGN_BYTES = 16  # of rows that kernels move
_WEIGHTS_AT_ONCE = 128  # columns of weights that one combine takes back
_NO_CHANNELS = 8  # of the rows of a combine that is made for its weights: as few as kernels move


def send_along(
    engine: Engine,
    handle: DispatchHandle,
    experts: tuple[int, int],
    routing_map: Tensor | None,
    probs: Tensor | None,
    num_sms: int | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Sends rows of a map and of probabilities along the route of a dispatch. Collective.

    Args:
        engine: that made the handle.
        handle: of the dispatch.
        experts: (first, end) of the columns to return.
        routing_map: ``[T, E]`` bool, or None.
        probs: ``[T, E]`` float32, or None.
        num_sms: as in `DispatchRequest`.

    Returns:
        ``[N, end − first]`` bool and float32, None for what was not given; False and 0 after the last row that arrived.
    """
    sent = [tensor for tensor in (probs, routing_map) if tensor is not None]
    record = torch.cat([packed(tensor).view(torch.uint8) for tensor in sent], 1)
    record = torch.nn.functional.pad(record, (0, -record.shape[1] % _RECORD_ALIGN_BYTES))
    request = engine.request_along(Rows(record.view(torch.bfloat16)), handle, num_sms=num_sms)
    received = engine.dispatch(request).rows.data.view(torch.uint8)
    row = torch.arange(len(received), device=received.device)
    is_unused = (row >= engine.rows_by_source(handle)[-1]).unsqueeze(1)

    def columns(tensor: Tensor | None, begin: int) -> Tensor | None:
        if tensor is None:
            return None
        first, end = (begin + expert * tensor.itemsize for expert in experts)
        # A copy also where the columns are all of a row: it must not hold the slot.
        own = packed_copy(received[:, first:end])
        return own.view(tensor.dtype).masked_fill_(is_unused, 0)

    num_prob_bytes = 0 if probs is None else probs.shape[1] * probs.itemsize
    return columns(routing_map, num_prob_bytes), columns(probs, 0)


def combine_with_probs(
    engine: Engine, request: CombineRequest, probs: Tensor, experts: tuple[int, int], handle: DispatchHandle
) -> Combined:
    """Combines rows and the probabilities of the domain's experts. Collective.

    Args:
        engine: that made the handle.
        request: of the rows, without weights.
        probs: ``[N, end − first]`` float32.
        experts: (first, end) of the columns of `probs`.
        handle: of the dispatch.

    Returns:
        Rows, and ``[T, E]`` float32.
    """
    first, end = experts
    weights = probs.new_zeros(len(probs), handle.num_experts)
    weights[:, first:end] = probs
    now, *later = weights.split(_WEIGHTS_AT_ONCE, 1)
    combined = engine.combine(request._replace(weights=packed(now)), handle)
    home = [combined.weights]
    empty = request.data.new_zeros(len(probs), _NO_CHANNELS)
    for some in later:
        home.append(engine.combine(request._replace(data=empty, weights=packed(some)), handle).weights)
    return Combined(combined.data, torch.cat([part for part in home if part is not None], 1))
