"""Who a process is in the group that torchrun, mpirun or srun has started, by the variables that they set."""

from __future__ import annotations

from typing import NamedTuple

from hybrid_ep import env
from hybrid_ep.errors import ConfigError


class Launcher(NamedTuple):
    """The rank of this process in a group that a launcher has started.

    Attributes:
        name: ``torchrun``, ``mpirun`` or ``srun``.
        rank: this process.
        num_ranks: of the group.
        local_rank: within its node; says which GPU.
    """

    name: str
    rank: int
    num_ranks: int
    local_rank: int


def find_launcher() -> Launcher | None:
    """Returns who this process is, or None where it was started by hand.

    Raises:
        ConfigError: a launcher's variables are there in part.
    """
    for name, rank, size, local in (
        ("torchrun", env.RANK, env.WORLD_SIZE, env.LOCAL_RANK),
        ("mpirun", env.MPI_RANK, env.MPI_SIZE, env.MPI_LOCAL_RANK),
    ):
        values = rank.get(), size.get(), local.get()
        if values[0] is not None:
            if values[1] is None or values[2] is None:
                raise ConfigError(f"{rank.name} is set; allowed: together with {size.name} and {local.name}")
            return Launcher(name, values[0], values[1], values[2])
    # In a shell that srun opened, a program is started by hand: such a step has one task.
    step = env.SLURM_RANK.get(), env.SLURM_SIZE.get(), env.SLURM_LOCAL_RANK.get()
    if step[0] is not None and step[1] is not None and step[2] is not None and step[1] > 1:
        return Launcher("srun", step[0], step[1], step[2])
    return None
