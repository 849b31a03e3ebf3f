"""Balance of experts over ranks: placements from measured loads, and what measures them."""

from hybrid_ep.balance.monitor import LoadMonitor, load_trace, save_trace
from hybrid_ep.balance.moves import NextPlacement, next_placement
from hybrid_ep.balance.placement import DevicePlacement, ExpertPlacement
from hybrid_ep.balance.rebalance import rebalance_experts

__all__ = [
    "DevicePlacement",
    "ExpertPlacement",
    "LoadMonitor",
    "NextPlacement",
    "load_trace",
    "next_placement",
    "rebalance_experts",
    "save_trace",
]
