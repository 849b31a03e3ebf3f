"""The names that callers import from `deep_ep.buffers.legacy`."""

from hybrid_ep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
