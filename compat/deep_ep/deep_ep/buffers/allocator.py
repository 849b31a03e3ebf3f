"""The name that callers import from `deep_ep.buffers.allocator`."""

from hybrid_ep import BufferAllocator

__all__ = ["BufferAllocator"]
