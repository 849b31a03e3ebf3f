"""Modules for training: dispatch and combine with a backward pass, and a small MoE layer built from them."""

from hybrid_ep.nn.experts import Experts, clip_grad_norm_, expert_parameters
from hybrid_ep.nn.layer import MoELayer
from hybrid_ep.nn.modules import DispatchedTokens, GroupedTokens, MoECombine, MoEDispatch, MoEGroupedDispatch, Route

__all__ = [
    "DispatchedTokens",
    "Experts",
    "GroupedTokens",
    "MoECombine",
    "MoEDispatch",
    "MoEGroupedDispatch",
    "MoELayer",
    "Route",
    "clip_grad_norm_",
    "expert_parameters",
]
