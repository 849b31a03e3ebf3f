"""A job that torchrun starts again after a rank was killed: it goes on with the placement that it saved.

torchrun --standalone --nproc-per-node 3 --max-restarts 1 -m tests.multi_process.restarted_job PLACEMENT
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_ep import Buffer
from hybrid_ep.balance import ExpertPlacement
from tests.multi_process.recovery_trials import Job, step


def main(path: Path) -> None:
    """Fails in the first attempt, and is right in the second."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first:
        placement = ExpertPlacement.from_loads(torch.arange(2.0 * num_ranks).unsqueeze(0), 3 * num_ranks, num_ranks)
        if rank == 0:
            placement.save(path)
    else:
        placement = ExpertPlacement.load(path)
    with Buffer(num_ranks_per_domain=num_ranks) as buffer:
        job = Job(buffer, placement)
        assert step(job, 0) == ""
        if is_first and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert step(job, 1) == ""  # which in the first attempt raises, or torchrun ends the process in it
    print(f"rank {rank} is right with placement {placement.experts[0]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
