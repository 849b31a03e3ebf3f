"""`BaseBuffer`: the group, engine, communication stream and life cycle that all public buffers share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import env
from hybrid_ep.agree.group import registered, store_among
from hybrid_ep.agree.roll_call import MIN_TIMEOUT_S
from hybrid_ep.buffers.collective import collective
from hybrid_ep.buffers.expert_moves import add_gradients, copy_weights, route_replicas
from hybrid_ep.buffers.replica_arguments import as_tensors, check_replicas, copies_nothing, sums_nothing
from hybrid_ep.checks import require, require_int, require_seconds
from hybrid_ep.core.event import EventHandle, EventOverlap
from hybrid_ep.core.streams import CommStream
from hybrid_ep.engine.base import Engine, Traffic
from hybrid_ep.engine.select import make_engine
from hybrid_ep.errors import ClosedError, ConfigError, HybridEPError

if TYPE_CHECKING:
    from typing_extensions import Self

_process_id = os.getpid()


def _note_fork() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


class BaseBuffer:
    """The engine of a process group, from construction to `close()`.

    Args:
        group: the process group; None = the default group, or a single rank where there is none.
        comm: an mpi4py communicator instead of a group.
        engine: ``auto``, ``torch`` or ``cuda``; None = ``HYBRID_EP_ENGINE``.
        num_ranks_per_domain: size of a domain; None = ``HYBRID_EP_NUM_RANKS_PER_DOMAIN``, or else the ranks of a host
            (with ``engine="cuda"`` all ranks).
        timeout_s: seconds to wait for a rank; None = ``HYBRID_EP_TIMEOUT_S``.

    Raises:
        ConfigError, TopologyError: an argument does not fit the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        comm: Any = None,
        *,
        engine: str | None = None,
        num_ranks_per_domain: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._process_id = _process_id
        self._asked: dict[str, Any] = {"engine": engine, "timeout_s": timeout_s}
        self.group = resolve_group(group, comm)
        self._groups = dist.distributed_c10d._world.pg_map  # torch's own: those that are not destroyed
        self.rank = 0 if self.group is None else self.group.rank()
        self.group_size = 1 if self.group is None else self.group.size()
        per_domain = env.NUM_RANKS_PER_DOMAIN.get() if num_ranks_per_domain is None else num_ranks_per_domain
        if per_domain is not None:
            require_int("num_ranks_per_domain", per_domain, minimum=1)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s)
        limit_s = max(self.timeout_s, MIN_TIMEOUT_S)
        self.registered_group = None if self.group is None else registered(self.group, limit_s)
        made = make_engine(self.registered_group, num_ranks_per_domain=per_domain, asked=engine, timeout_s=timeout_s)
        self._engine: Engine | None = made
        self._comm_stream = CommStream(made.device, made.record_stream)
        self.grid = made.grid
        self.number = made.number  # of the buffer among those of its group, equal at all ranks
        self.lost = made.lost  # ranks that errors of calls have named, also of calls before the end
        self.lag_s = made.lag_s  # as of the engine

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for a rank."""
        asked = self._asked["timeout_s"]
        return env.TIMEOUT_S.get() if asked is None else float(asked)

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments with which `over` makes a buffer like this one; JSON can hold them. Local."""
        return dict(self._asked)

    @classmethod
    def over(cls, group: dist.ProcessGroup, num_ranks_per_domain: int, options: dict[str, Any]) -> Self:
        """Makes a buffer with the options of another one, on another group. Collective over that group.

        Args:
            group: the ranks.
            num_ranks_per_domain: size of a domain.
            options: what `options()` of a buffer of this class has returned.

        Raises:
            ConfigError, TopologyError: an argument does not fit the group.
        """
        return cls(group, num_ranks_per_domain=num_ranks_per_domain, **options)

    @property
    def engine(self) -> Engine:
        """The engine underneath.

        Raises:
            ClosedError: the buffer is closed, its process group is destroyed, or this is a forked child.
        """
        if self._engine is None:
            raise ClosedError(
                f"{type(self).__name__} of rank {self.rank} was used after it was closed; allowed: a new one"
            )
        if self._process_id != _process_id:
            raise ClosedError(
                f"{type(self).__name__} of rank {self.rank} was made in process {self._process_id} and used in its "
                f"forked child {_process_id}; allowed: a process group and a buffer made in the child"
            )
        if self.registered_group is not None and self.registered_group not in self._groups:
            raise ClosedError(
                f"{type(self).__name__} of rank {self.rank} was used after its process group was destroyed; allowed: a "
                "new process group and a buffer of it"
            )
        return self._engine

    @property
    def runtime(self) -> Engine:
        """Another name of `engine`. DeepEP has an object of this name, with other methods."""
        return self.engine

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent to other ranks; `clear()` sets them to 0. Local.

        The torch engine counts all. The cuda engine counts rows of dispatches of several domains, and nothing else.
        """
        return self.engine.traffic

    def raise_pending(self) -> None:
        """Raises the error of an earlier call that did not wait for the GPU, if the GPU has reported one by now. Local.

        Collective calls raise such errors, too: a lost rank before they send, other errors once they have sent. Replays
        of a CUDA graph make no call: after replays, synchronise their stream and call this.

        Raises:
            OverflowError: more rows arrived than the bound of a dispatch.
            ConfigError: an expert index is out of range, or calls of ranks differ.
            TimeoutError, TransportError: a rank was lost.
        """
        self.engine.raise_pending()

    def empty_cache(self) -> None:
        """Gives back memory that no result and no handle holds. Collective; waits for the GPU.

        The receive slots of the cuda engine grow with its calls, and their number with the results that are held. They
        do not become smaller by themselves. Results that are alive keep their memory. Does nothing on the torch engine,
        which keeps no memory.

        Raises:
            ConfigError: a CUDA graph is being captured.
            TimeoutError, TransportError: a rank did not come.
        """
        self.engine.empty_cache()

    def close(self) -> None:
        """Gives back what the buffer holds. Local; waits for this rank's GPU; further calls do nothing.

        Results that are alive keep their memory. On the torch engine over gloo, connections and threads are gone when
        it returns. So it waits until the other ranks close the buffer, too, but for at most three seconds.

        Raises:
            ConfigError, OverflowError, TimeoutError, TransportError: as `raise_pending`, when everything has been given
                back. The loss of a rank that a call has raised is not raised again.
        """
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(HybridEPError):  # one error is enough
            self.close()

    def __repr__(self) -> str:
        name, where = type(self).__name__, f"rank {self.rank} of {self.group_size}"
        if self._engine is None:
            return f"<{name}: {where}, closed>"
        return (
            f"<{name}: {where} in {self.grid.num_domains} domains of {self.grid.num_ranks_per_domain}, engine "
            f"{self._engine.name}, transport {self._engine.transport}, {self._engine.memory_bytes} bytes of symmetric "
            "memory>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns the buffer itself: a buffer holds connections, so copies of a module share it."""
        return self

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(f"{type(self).__name__} cannot be pickled; allowed: making one in each process")

    # Experts in spare slots.

    @collective("copy of experts", is_local=copies_nothing)
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensor | Sequence[Tensor],
        expert_weights: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
    ) -> EventOverlap:
        """Fills spare slots with the weights of their experts. Collective over the buffer's group.

        Values are copied bit for bit, on the current stream. A slot whose entry in the mapping is −1 is not written.

        Args:
            redundant_expert_weights: ``[B, *shape]`` of any dtype, or several; written where the mapping names an
                expert.
            expert_weights: ``[LE, *shape]`` of the same dtypes: those of this rank's experts.
            redundancy_mapping: ``[ranks of the domain, B]`` int32 or int64, the same on all ranks of the domain: the
                expert in each spare slot, counted within the domain, −1 where it is empty. B is the same on all ranks
                of the group.
            num_sms: SMs to use; 0 = the engine's choice.
            previous_event: the current stream waits for it first.

        Returns:
            An event on the current stream, behind the copies.

        Raises:
            ConfigError: an argument does not fit, a tensor is not contiguous, or, where the mapping is on a CPU, it
                names no expert of the domain. Also if mappings of ranks differ, or inside a domain of the cuda engine
                sizes of experts: on that engine from a later call.
            TimeoutError, TransportError: a rank was lost; on the cuda engine from a later call.
        """
        spare = as_tensors("redundant_expert_weights", redundant_expert_weights)
        experts = as_tensors("expert_weights", expert_weights)
        mapping = check_replicas(self.grid, spare, experts, redundancy_mapping, num_sms, previous_event)
        copy_weights(self, mapping, spare, experts, self.grid.domain.start, num_sms or None)
        return EventOverlap(EventHandle())

    @collective("dispatch", is_local=sums_nothing)
    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor | Sequence[Tensor],
        expert_grads: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
    ) -> EventOverlap:
        """Adds the gradients of replicas to those of their experts, in fp32. Collective over the buffer's group.

        The order of additions is fixed: the home rank's own replicas, then those of the other ranks in ascending
        order. The host waits for how many replicas there are.

        Args:
            redundant_expert_grads: ``[B, *shape]`` float32, or several.
            expert_grads: ``[LE, *shape]`` float32, added to.
            redundancy_mapping: as in `lb_prefetch_weights`.
            num_sms: SMs to use; 0 = the engine's choice.
            previous_event: the current stream waits for it first.

        Returns:
            An event on the current stream, behind the sums.

        Raises:
            ConfigError: as `lb_prefetch_weights`, or gradients are not float32. Nothing is added then.
            TimeoutError, TransportError: a rank was lost.
        """
        spare = as_tensors("redundant_expert_grads", redundant_expert_grads)
        homes = as_tensors("expert_grads", expert_grads)
        mapping = check_replicas(self.grid, spare, homes, redundancy_mapping, num_sms, previous_event)
        num_local = homes[0].shape[0] if homes else 1
        routes = route_replicas(self, mapping, num_local, self.grid.domain.start)
        add_gradients(self, routes, redundancy_mapping.tolist(), spare, homes, num_sms or None)
        return EventOverlap(EventHandle())

    def lb_get_theoretical_num_sms(self) -> int:
        """Returns how many SMs the calls take at most with ``num_sms=0``. Local."""
        return max(self.engine.default_copy_sms, self.engine.default_num_sms)


def resolve_group(group: dist.ProcessGroup | None, comm: Any = None) -> dist.ProcessGroup | None:
    """Returns the group that a constructor's arguments name; None = a single rank.

    Raises:
        ConfigError: both are given, or one is not what it should be.
    """
    if comm is not None:
        if group is not None:
            raise ConfigError("group and comm are both given; allowed: one of them")
        needed = ("Get_rank", "Get_size", "allgather")
        is_comm = all(hasattr(comm, name) for name in needed)
        require(is_comm, "comm", type(comm).__name__, f"an mpi4py communicator, with {', '.join(needed)}")
        return _group_of_comm(comm)
    if group is not None:
        require(isinstance(group, dist.ProcessGroup), "group", type(group).__name__, "a torch.distributed.ProcessGroup")
        return group
    return dist.group.WORLD if dist.is_initialized() else None


def _group_of_comm(comm: Any) -> dist.ProcessGroup | None:
    """The default process group over an mpi4py communicator; rank 0 opens its store."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if not dist.is_initialized():
        store = store_among(rank, size, comm.allgather)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    world = dist.group.WORLD
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ConfigError(
            f"comm has rank {rank} of {size}; allowed beside this process group: {dist.get_rank()} of "
            f"{dist.get_world_size()}"
        )
    return world
