"""The names that callers import from `deep_ep.hybrid_ep_buffer`."""

from hybrid_ep import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
