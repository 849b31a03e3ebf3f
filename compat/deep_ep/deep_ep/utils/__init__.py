"""The names that callers import from `deep_ep.utils`."""

from hybrid_ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
