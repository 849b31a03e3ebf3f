"""`Buffer.get_local_buffer_tensor`: memory of the buffer for the caller, as DeepEP gives it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.checks import MAX_BYTES, require, require_int
from hybrid_ep.core.calls import plain_tensors

__all__ = ["LocalMemory"]


class LocalMemory(BaseBuffer):
    """Mixed into `Buffer`."""

    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    _local_memory: dict[bool, Tensor]  # by `use_rdma_buffer`

    def close(self) -> None:
        self._local_memory.clear()
        super().close()

    @plain_tensors
    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Returns `num_nvl_bytes` (`num_rdma_bytes`) bytes of memory of this rank as a tensor. Local.

        No call of the buffer uses this memory: it is made, with zeros, when it is first asked for, on the GPU if there
        is one. Repeated calls return the same memory.

        With `use_rdma_buffer` in low-latency mode it is the memory in which rows of low-latency calls land, at most
        `num_rdma_bytes` of it. The cuda engine makes that at the first low-latency call; the torch engine has none.
        Callers zero it before `low_latency_clean_mask_buffer`; its contents between calls do not matter.

        Args:
            dtype: of the tensor.
            size: its shape; None = one dimension, all that is left.
            offset: where it begins, in bytes; a multiple of the size of an element.
            use_rdma_buffer: the network buffer instead of the NVLink one.

        Raises:
            ConfigError: `offset` or `size` reaches past the end, or an argument is not what it should be.
        """
        _ = self.engine
        require(isinstance(dtype, torch.dtype), "dtype", repr(dtype), "a torch.dtype")
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        require_int("offset", offset, minimum=0, maximum=MAX_BYTES, multiple_of=dtype.itemsize)
        require(offset <= num_bytes, "offset", offset, f"≤ {num_bytes} bytes")
        if use_rdma_buffer and self.low_latency_mode:
            whole = self.engine.low_latency_memory()[:num_bytes]
        else:
            if use_rdma_buffer not in self._local_memory:
                device = "cuda" if torch.cuda.is_available() else "cpu"
                self._local_memory[use_rdma_buffer] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            whole = self._local_memory[use_rdma_buffer]
        memory = whole[offset:]
        flat = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if size is None:
            return flat
        is_shape = isinstance(size, Sequence) and all(isinstance(length, int) for length in size)
        require(is_shape, "size", repr(size), "a torch.Size or a sequence of integers")
        shape = torch.Size(size)
        require(min(shape, default=0) >= 0, "size", list(shape), "no negative sizes")
        require(shape.numel() <= flat.numel(), "size", list(shape), f"at most {flat.numel()} elements of {dtype}")
        return flat[: shape.numel()].view(shape)
