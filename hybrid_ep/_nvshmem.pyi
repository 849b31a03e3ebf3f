# NVSHMEM, and the kernels between domains compiled for its link. Built where NVIDIA's wheel is found. Errors are
# ConnectionError(-1, what).
version: str
link_kernels: object
"""A capsule for `_cuda.BetweenCommunicator` and `_cuda.LowLatencyBetweenRegion`."""

def unique_id() -> bytes:
    """An id of a new world, which one rank makes and all others join."""

def join(*, rank: int, num_ranks: int, unique_id: bytes, device: int) -> None:
    """Joins the world, or finds the one that this process has joined. Collective, without a deadline."""

def allocate(*, num_bytes: int, device: int) -> int:
    """Address of zeros on the symmetric heap. Collective, without a deadline."""

def clear(*, memory: int, num_bytes: int, device: int) -> None:
    """Writes zeros, and returns when they are written."""

def quiet(*, device: int, timeout_s: float) -> bool:
    """Whether all puts of this rank have become complete in time."""
