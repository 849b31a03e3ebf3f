"""`BaseBuffer`: the group, engine, communication stream and life cycle that all public buffers share."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybrid_ep import env
from hybrid_ep.checks import MAX_TOPK, require, require_int
from hybrid_ep.core.checks import (
    packed,
    packed_copy,
    require_expert_indices,
    require_no_grad,
    require_rows,
    require_tensor,
    require_topk,
)
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.layout import map_to_indices, widest_token
from hybrid_ep.core.streams import CommStream
from hybrid_ep.engine.base import Engine, Traffic
from hybrid_ep.engine.calls import Routing, Rows
from hybrid_ep.engine.select import make_engine
from hybrid_ep.errors import ClosedError, ConfigError, HybridEPError
from hybrid_ep.quantize import CHANNELS_PER_BLOCK, SCALES_PER_WORD

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "BaseBuffer",
    "as_biases",
    "as_rows",
    "as_words",
    "check_bias",
    "check_global_scale",
    "check_nvfp4_rows",
    "check_rows",
    "check_weights",
    "resolve_group",
    "rounded_up",
]

_process_id = os.getpid()


def _note_fork() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_note_fork)

_BF16 = (torch.bfloat16,)
_FLOAT32 = (torch.float32,)
_UINT8 = (torch.uint8,)
_NVFP4_SCALE_DTYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


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
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.group_size = 1 if self.group is None else dist.get_world_size(self.group)
        per_domain = env.NUM_RANKS_PER_DOMAIN.get() if num_ranks_per_domain is None else num_ranks_per_domain
        if per_domain is not None:
            require_int("num_ranks_per_domain", per_domain, minimum=1)
        made = make_engine(self.group, num_ranks_per_domain=per_domain, asked=engine, timeout_s=timeout_s)
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
        if self.group is not None and self.group not in self._groups:
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

    def _num_local_experts(self, num_experts: int) -> int:
        size = self.group_size
        return require_int("num_experts", num_experts, minimum=1, multiple_of=size) // size

    def _routing_by_rank(self, is_token_in_rank: Tensor, num_experts: int) -> Routing:
        """A routing to ranks, ``[T, R]`` bool: it names the first expert of each. Waits for a GPU above 32 ranks."""
        if self.group_size > MAX_TOPK:
            widest = int(widest_token(is_token_in_rank))
            require(widest <= MAX_TOPK, "ranks of one token", widest, f"≤ {MAX_TOPK}")
        ranks, _ = map_to_indices(is_token_in_rank, None)
        first_experts = ranks * (num_experts // self.group_size)
        return Routing(torch.where(ranks >= 0, first_experts, -1), None, num_experts, has_topk=False)

    def _check_geometry(self, grid: RankGrid) -> None:
        if grid is not self.grid and grid != self.grid:
            require(False, "handle", f"made at {grid}", f"one that was made at {self.grid}")

    def _check_topk(
        self, topk_idx: Tensor, topk_weights: Tensor | None, num_experts: int, device: torch.device | None
    ) -> None:
        """Checks a routing; `device` is where it must be, None = anywhere."""
        require_topk(topk_idx, topk_weights, num_experts, device)
        if topk_idx.is_cpu:
            require_expert_indices(topk_idx, num_experts)


def resolve_group(group: dist.ProcessGroup | None, comm: Any = None) -> dist.ProcessGroup | None:
    """Returns the group that a constructor's arguments name; None = a single rank.

    Raises:
        ConfigError: both are given, or one is not what it should be.
    """
    if comm is not None:
        if group is not None:
            raise ConfigError("group and comm are both given; allowed: one of them")
        needed = ("Get_rank", "Get_size", "allgather", "bcast")
        is_comm = all(hasattr(comm, name) for name in needed)
        require(is_comm, "comm", type(comm).__name__, f"an mpi4py communicator, with {', '.join(needed)}")
        return _group_of_comm(comm)
    if group is not None:
        require(isinstance(group, dist.ProcessGroup), "group", type(group).__name__, "a torch.distributed.ProcessGroup")
        return group
    return dist.group.WORLD if dist.is_initialized() else None


def _group_of_comm(comm: Any) -> dist.ProcessGroup | None:
    """The default process group over an mpi4py communicator; rank 0 opens the store and broadcasts its address."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if not dist.is_initialized():
        names = comm.allgather(socket.gethostname())
        host = "127.0.0.1" if len(set(names)) == 1 else names[0]
        store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
        port = comm.bcast(store.port if store is not None else None, root=0)
        if store is None:
            store = TCPStore(host, port, size, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    world = dist.group.WORLD
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ConfigError(
            f"comm has rank {rank} of {size}; allowed beside this process group: {dist.get_rank()} of "
            f"{dist.get_world_size()}"
        )
    return world


def check_rows(
    name: str, data: Tensor, scales: Tensor | None, *, device: torch.device | None, opaque_scales: bool = False
) -> Rows:
    """Checks token rows, of any strides, and returns them in the engine's form.

    Args:
        name: of the argument, for messages.
        data: ``[T, H]`` bf16, or float8_e4m3fn with `scales`.
        scales: ``[T, H/128]`` float32 or ``[T, ceil(H/512)]`` int32 (packed UE8M0), of any strides; None for bf16.
        device: where they must be; None = anywhere.
        opaque_scales: rows and scales are not interpreted: scales may have any number of columns, rows may be uint8.

    Raises:
        ConfigError: dtype, shape or device does not fit.
    """
    return Rows(*require_rows(name, data, scales, device, opaque_scales))


def check_nvfp4_rows(
    name: str, data: Tensor, scales: Tensor | None, global_scale: Tensor, *, device: torch.device | None
) -> Rows:
    """Checks NVFP4 rows, of any strides, and returns them as engines move them: four scales of blocks are a word.

    Args:
        name: of the argument, for messages.
        data: ``[T, H/2]`` uint8; H a multiple of 64.
        scales: ``[T, H/16]`` of one byte each: float8_e4m3fn, or int8 or uint8 that hold bits.
        global_scale: one float32.
        device: where they must be; None = anywhere.

    Raises:
        ConfigError: dtype, shape or device does not fit.
    """
    require_tensor(name, data, dtypes=_UINT8, shape=(None, None), device=device)
    num_tokens, num_bytes = data.shape
    hidden = 2 * num_bytes
    channels = CHANNELS_PER_BLOCK * SCALES_PER_WORD
    if hidden == 0 or hidden % channels:
        require(False, f"hidden of {name}", hidden, f"with NVFP4: multiples of {channels}")
    if device is None:
        device = data.device
    shape = (num_tokens, hidden // CHANNELS_PER_BLOCK)
    scales = require_tensor(f"scales of {name}", scales, dtypes=_NVFP4_SCALE_DTYPES, shape=shape, device=device)
    check_global_scale(f"global scale of {name}", global_scale, device)
    return as_rows(data, as_words(scales))


def check_weights(name: str, weights: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Checks float32 weights or probabilities that come with rows.

    Raises:
        ConfigError: dtype, shape or device does not fit, or a gradient would be lost.
    """
    require_tensor(name, weights, dtypes=_FLOAT32, shape=shape, device=device)
    require_no_grad(name, weights)


def check_global_scale(name: str, global_scale: Tensor, device: torch.device) -> None:
    """Checks the global scale of NVFP4 rows; its value only where the host has it.

    Raises:
        ConfigError: it is not one positive, finite float32 on the device.
    """
    shape = (1,) if isinstance(global_scale, Tensor) and global_scale.dim() else ()
    require_tensor(name, global_scale, dtypes=_FLOAT32, shape=shape, device=device)
    if global_scale.is_cpu:
        value = float(global_scale)
        require(0 < value < math.inf, name, value, "a positive, finite number")


def as_biases(bias: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Returns the biases that combine adds to its result, as a tuple."""
    return () if bias is None else bias if isinstance(bias, tuple) else (bias,)


def check_bias(
    bias: Tensor | tuple[Tensor, ...] | None, num_tokens: int, hidden: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Checks what combine adds to its result: none, one or two ``[T, H]`` bf16.

    Raises:
        ConfigError: dtype, shape, device or number does not fit, or a gradient would be lost.
    """
    biases = as_biases(bias)
    if len(biases) > 2:
        require(False, "number of biases", len(biases), "0, 1 or 2")
    for term in biases:
        require_tensor("bias", term, dtypes=_BF16, shape=(num_tokens, hidden), device=device)
        require_no_grad("bias", term)
    return biases


def rounded_up(counts: Tensor | Sequence[int], alignment: int) -> list[int]:
    """Returns each count as a multiple of `alignment`."""
    exact = counts.tolist() if isinstance(counts, Tensor) else counts
    return [-(-count // alignment) * alignment for count in exact]


def as_words(scales: Tensor) -> Tensor:
    """Scales of one byte each, of NVFP4 rows, four to a word. Copied where rows do not begin at a word."""
    word = torch.int32.itemsize
    if scales.storage_offset() % word or scales.stride(0) % word:
        scales = packed_copy(scales)
    return packed(scales).view(torch.int32)


def as_rows(data: Tensor, scales: Tensor | None) -> Rows:
    """Checked rows in the engine's form: row-major, without gaps."""
    return Rows(packed(data), packed(scales))
