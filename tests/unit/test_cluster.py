"""What a virtual cluster refuses before it starts a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_ep import ConfigError
from hybrid_ep.cluster import VirtualCluster


@pytest.mark.parametrize(
    ("num_gpus", "options", "message"),
    [
        (2, {"num_ranks": 0}, "num_ranks is 0; allowed: ≥ 1"),
        (2, {"num_ranks": 1, "device": "tpu"}, "device is 'tpu'; allowed: 'cpu' or 'cuda'"),
        (2, {"num_ranks": 3, "device": "cuda"}, "num_ranks is 3; allowed with cuda: ≤ 2 GPUs"),
        (0, {"num_ranks": 3, "device": "cuda", "ranks_share_gpus": True}, "GPUs that ranks share are 0; allowed: ≥ 1"),
        (2, {"num_ranks": 3, "ranks_share_gpus": True}, "ranks_share_gpus is True with device 'cpu'; allowed"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, num_gpus: int, options: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=message):
        VirtualCluster(**options)
