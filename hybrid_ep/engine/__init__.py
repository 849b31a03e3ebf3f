"""The engines, which move the tokens of all buffers: `cuda` and `torch`."""
