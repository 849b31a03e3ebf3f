"""The names that callers import from `deep_ep.buffers.elastic`."""

from hybrid_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
