"""The torch engine, layers, placements and recovery make tensors on a named device, never on torch's default one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import Buffer
from hybrid_ep.balance import ExpertPlacement, next_placement
from hybrid_ep.elastic import recover
from hybrid_ep.nn import MoELayer, clip_grad_norm_
from tests.battery.cases import Case
from tests.battery.default_device import MetaInside, check_under_default_device
from tests.conftest import RunRanks


@pytest.mark.parametrize("ranks_per_domain", [None, 1])
def test_battery(run_ranks: RunRanks, ranks_per_domain: int | None) -> None:
    run_ranks(2, check_under_default_device, Case("default", 2, (9, 12), num_ranks_per_domain=ranks_per_domain))


def _layers() -> None:
    rank = dist.get_rank()
    with MetaInside(), Buffer() as buffer:
        placement = ExpertPlacement.from_loads(torch.ones(1, 4), 8, 2)
        moved = next_placement(placement, torch.tensor([[5.0, 1.0, 1.0, 1.0]]), max_moves=2).placement
        assert not moved.phy2log.is_meta
        assert not placement.without([1]).rank_loads(torch.ones(1, 4)).is_meta
        for balance in (None, placement, "online"):
            layer = MoELayer(buffer, hidden=32, ffn_hidden=8, num_experts=4, topk=2, balance=balance)
            y = layer(torch.ones(3 + rank, 32, requires_grad=True))
            y.sum().backward()
            layer.sync_router_gradients()
            assert float(clip_grad_norm_(layer.parameters(), 1.0).cpu()) > 0
        assert clip_grad_norm_([], 1.0).device.type == "cpu"
    with MetaInside():
        again = recover(Buffer(timeout_s=5.0), placement)
        assert again.buffer.group_size == 2
        again.buffer.close()


def test_layers_placements_and_recovery(run_ranks: RunRanks) -> None:
    run_ranks(2, _layers)


def test_a_layer_is_made_on_the_default_device() -> None:
    """As a module of torch is; its weights are the same on each."""
    with Buffer() as buffer, torch.device("meta"):
        layer = MoELayer(buffer, hidden=32, ffn_hidden=8, num_experts=4, topk=2)
        assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
