"""The names that callers import from `deep_ep.buffers.ep`."""

from hybrid_ep import BufferAllocator, EPBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["BufferAllocator", "EPBuffer", "EPHandle", "EventHandle", "EventOverlap"]
