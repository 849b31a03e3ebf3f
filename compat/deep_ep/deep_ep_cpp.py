"""The names that callers import from `deep_ep_cpp`."""

from hybrid_ep import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
