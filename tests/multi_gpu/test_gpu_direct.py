"""The doctor's GPUDirect measurement on a GPU: its memory, and the answer where no NIC of that name is there."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep.cluster.doctor.active.gpu_direct import TorchMemory, open_gpu_end, window_bytes
from hybrid_ep.errors import TopologyError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU is visible")]


def test_memory_holds_what_is_written() -> None:
    memory = TorchMemory(0)
    memory.write(window_bytes() - 4, b"abc")
    assert memory.read(window_bytes() - 5, 5) == b"\0abc\0"


def test_end_without_its_nic_says_so() -> None:
    with pytest.raises(TopologyError, match=r"RDMA device 'none' cannot be opened|libibverbs cannot be loaded"):
        open_gpu_end(0, 0, "none", None)
