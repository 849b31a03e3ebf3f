"""The cuda engine: kernels inside an NVLink domain, and between domains."""
