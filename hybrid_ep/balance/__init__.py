"""Balance of experts over ranks: placements from measured loads, and what measures them."""

from hybrid_ep.balance.placement import DevicePlacement, ExpertPlacement
from hybrid_ep.balance.rebalance import rebalance_experts

__all__ = ["DevicePlacement", "ExpertPlacement", "rebalance_experts"]
