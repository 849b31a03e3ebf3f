"""The public buffers: one class per interface, over one engine each."""
