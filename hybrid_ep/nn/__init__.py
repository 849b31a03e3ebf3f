"""Modules for training: dispatch and combine that know their own backward pass, and a small MoE layer built from
them.
"""

from hybrid_ep.nn.layer import MoELayer
from hybrid_ep.nn.modules import DispatchedTokens, MoECombine, MoEDispatch

__all__ = ["DispatchedTokens", "MoECombine", "MoEDispatch", "MoELayer"]
