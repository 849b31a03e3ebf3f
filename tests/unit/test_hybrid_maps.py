"""Maps and probabilities along a route, with an engine that sends to nobody."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hybrid_ep.buffers.hybrid_maps import combine_with_probs, send_along
from hybrid_ep.engine.calls import Combined, CombineRequest, Dispatched, DispatchHandle, Rows, along_handle

TOKENS, EXPERTS = 3, 300


class Alone:
    """Its rows arrive as they were sent, before two rows of memory that nothing was written to."""

    def request_along(self, rows: Rows, handle: DispatchHandle, *, num_sms: int | None) -> Rows:
        return rows

    def dispatch(self, request: Rows) -> Dispatched:
        data, handle = request.data, cast(DispatchHandle, None)
        received = torch.cat([data, torch.full((2, data.shape[1]), float("nan"), dtype=data.dtype)])
        return along_handle(Rows(received), handle)

    def rows_by_source(self, handle: DispatchHandle) -> Tensor:
        return torch.tensor([TOKENS], dtype=torch.int32)

    def combine(self, request: CombineRequest, handle: DispatchHandle) -> Combined:
        assert request.weights is not None
        assert request.weights.shape[1] < 256, "the kernels say the number of weights in 8 bits"
        return Combined(request.data, request.weights)


def test_rows_that_nothing_was_written_to_name_no_expert() -> None:
    engine: Any = Alone()
    handle: Any = None
    routing_map = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)) < 0.2
    probs = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    for given_map, given_probs in ((routing_map, probs), (routing_map, None), (None, probs)):
        received_map, received_probs = send_along(engine, handle, (100, 250), given_map, given_probs, None)
        for received, sent in ((received_map, given_map), (received_probs, given_probs)):
            if sent is None:
                assert received is None
                continue
            assert received is not None
            assert torch.equal(received[:TOKENS], sent[:, 100:250])
            assert not received[TOKENS:].any()


def test_probabilities_come_home_in_as_many_calls_as_it_takes() -> None:
    engine: Any = Alone()
    handle: Any = DispatchHandle(*(None for _ in DispatchHandle._fields))._replace(num_experts=EXPERTS)  # type: ignore[arg-type]
    data, probs = torch.ones(TOKENS, 16), torch.rand(TOKENS, 150, generator=torch.Generator().manual_seed(0))
    combined = combine_with_probs(engine, CombineRequest(data), probs, (100, 250), handle)
    assert combined.data is data
    assert combined.weights is not None
    assert torch.equal(combined.weights[:, 100:250], probs)
    assert not combined.weights[:, :100].any()
    assert not combined.weights[:, 250:].any()
