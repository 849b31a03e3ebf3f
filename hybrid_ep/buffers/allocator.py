"""`BufferAllocator`: tensors that are planned, and get their memory together, of a buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_ep.buffers.base import BaseBuffer
from hybrid_ep.checks import require, require_int

_ALIGNMENT_BYTES = 128


class BufferAllocator:
    """A plan of tensors, side by side in one allocation.

    Attributes:
        num_bytes: of the allocation so far.
        alignment: bytes at whose multiples a tensor begins.
        materialized: whether the tensors have their memory.

    Example:
        >>> plan = hybrid_ep.BufferAllocator()
        >>> spare = plan.allocate([2, 16], torch.bfloat16)
        >>> with hybrid_ep.EPBuffer(None, lb_allocation_plan_or_num_bytes=plan):
        ...     plan.num_bytes, plan.materialized, spare.is_meta
        (128, True, False)
    """

    def __init__(self) -> None:
        self.alignment = _ALIGNMENT_BYTES
        self.num_bytes = 0
        self.materialized = False
        self._planned: list[tuple[Tensor, int]] = []

    def allocate(self, shape: torch.Size | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Adds a tensor to the plan.

        Args:
            shape: its shape.
            dtype: its type.

        Returns:
            The tensor, on the meta device. It is the same object once a buffer has been made with the plan.

        Raises:
            ConfigError: the plan has its memory already, or an argument is not what it should be.
        """
        require(
            not self.materialized, "a plan of tensors", "materialized", "calls of allocate before the buffer is made"
        )
        require(isinstance(dtype, torch.dtype), "dtype", repr(dtype), "a torch.dtype")
        require(isinstance(shape, Sequence), "shape", repr(shape), "a torch.Size or a sequence of integers")
        sizes = [require_int("a size of shape", size, minimum=0) for size in shape]
        tensor = torch.empty(sizes, dtype=dtype, device="meta")
        self._planned.append((tensor, self.num_bytes))
        self.num_bytes += -(-tensor.nbytes // self.alignment) * self.alignment
        return tensor

    def require_open(self) -> None:
        """Raises ConfigError where the tensors have their memory already."""
        require(not self.materialized, "a plan of tensors", "materialized", "one buffer for each plan")

    def materialize(self, buffer: BaseBuffer) -> None:
        """Gives the tensors their memory, which holds zeros; once. Collective over the buffer's group.

        `EPBuffer` does it with the plan that it is given. The buffer holds the memory until it is closed. On the cuda
        engine, ranks of a domain can write each other's, so that `lb_prefetch_weights` needs no copy in between.

        Args:
            buffer: whose `lb_prefetch_weights` is to fill them.

        Raises:
            ConfigError: they have it already, a rank's plan has another number of bytes, or a CUDA graph is captured.
            TimeoutError, TransportError: a rank was lost.
        """
        self.require_open()
        default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        memory = buffer.engine.allocate_spare(self.num_bytes, buffer.engine.device or default)
        for tensor, begin in self._planned:
            value = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, value)
        self.materialized = True
