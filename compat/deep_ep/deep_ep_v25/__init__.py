"""DeepEP 2.5 under the name of its wheel, which can be installed beside V1; `EPBuffer` is always there."""

from hybrid_ep import BufferAllocator, EPBuffer, EPHandle, EventHandle, EventOverlap, __version__, topk_idx_t

__all__ = ["BufferAllocator", "EPBuffer", "EPHandle", "EventHandle", "EventOverlap", "__version__", "topk_idx_t"]
