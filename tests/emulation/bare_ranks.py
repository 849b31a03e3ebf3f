"""The kernels between domains on emulated warps, without torch, whose import takes minutes in an emulated machine.

Ranks are processes forked by `run_ranks`; each calls the extension module with addresses of plain memory. `Rank` makes
what `CudaBetween` makes, and `check_round` compares every received row and every sum with what the routing asks for.
`bare_low_latency` has the ranks of low-latency calls. Values are small integers, so that sums of bf16 are exact.
"""

from __future__ import annotations

import array
import ctypes
import importlib.util
import json
import mmap
import os
import signal
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.errors import HybridEPError, TimeoutError
from hybrid_ep.transport import DomainLink, Ring, choose_transport, connect_link

_ABSENT = -1  # hybrid_ep.agree.fields.ABSENT, whose module imports torch
_CPU: Any = SimpleNamespace(type="cpu", index=None)
_SLOT_BYTES = 1 << 20
_NUM_SMS = 2
_CLOSE_S = 30.0


@dataclass(frozen=True)
class Shape:
    """Ranks, and what each of them sends.

    Attributes:
        num_domains, ranks_per_domain: D and G.
        num_tokens: T, of every rank.
        hidden: H, in bf16 values.
        num_topk: K.
        num_experts: E; a multiple of the ranks.
    """

    num_domains: int
    ranks_per_domain: int
    num_tokens: int = 12
    hidden: int = 64
    num_topk: int = 2
    num_experts: int = 8

    @property
    def num_ranks(self) -> int:
        return self.num_domains * self.ranks_per_domain

    def topk_idx(self, rank: int, token: int, seed: int) -> list[int]:
        """Distinct experts of a token; every seventh column is −1."""
        mixed = (rank * 7919 + token * 104729 + seed * 31) * 2654435761 >> 7
        first, step = mixed % self.num_experts, 1 + (mixed >> 8) % (self.num_experts - 1)
        experts = [(first + k * step) % self.num_experts for k in range(self.num_topk)]
        return [-1 if expert in experts[:k] or (mixed + k) % 7 == 0 else expert for k, expert in enumerate(experts)]

    def row(self, rank: int, token: int, seed: int) -> bytes:
        """The bf16 row of a token: integers from 0 to 15."""
        return bf16([(rank * 11 + token * 7 + i * 3 + seed) % 16 for i in range(self.hidden)])

    def weight(self, rank: int, column: int) -> float:
        """Of a column of each token."""
        return rank + column / 4

    def ranks_of(self, rank: int, token: int, seed: int) -> list[int]:
        """The ranks that a token goes to, ascending."""
        num_local = self.num_experts // self.num_ranks
        return sorted({expert // num_local for expert in self.topk_idx(rank, token, seed) if expert >= 0})


class Memory:
    """Zeros that forked processes share; aligned as pages are."""

    def __init__(self, num_bytes: int) -> None:
        self.map = mmap.mmap(-1, max(num_bytes, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def write(self, data: bytes) -> None:
        self.map[: len(data)] = data


class FolderStore:
    """A process group's store, as far as `connect_link` uses it: a file for each key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        path = self._path(key)
        path.with_suffix(".new").write_text(value)
        path.with_suffix(".new").rename(path)

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


class End:
    """One rank's end: communicator, and link.

    Attributes:
        told: what it tells beside what `run_ranks` says of every rank.
    """

    def __init__(self, native: Any, rank: int, shape: Shape, shared: Shared, transport: str, timeout_s: float) -> None:
        self.native, self.shape = native, shape
        self.told: dict[str, Any] = {}
        self.grid = RankGrid(rank, shape.num_ranks, shape.ranks_per_domain)
        domain = self.grid.domain
        self.communicator = native.Communicator(
            rank=self.grid.domain_rank,
            control=[shared.control[r].address for r in domain],
            device=0,
            timeout_s=timeout_s,
        )
        store: Any = FolderStore(shared.folder)
        self.link: DomainLink = connect_link(
            choose_transport(asked=transport),
            store,
            "link",
            self.link_grid(),
            self.rings(),
            device=_CPU,
            timeout_s=timeout_s,
            native=native,
            **self.link_options(),
        )

    def rings(self) -> list[Ring]:
        """Of the link."""
        raise NotImplementedError

    def link_grid(self) -> RankGrid:
        """Whose peers the link joins."""
        return self.grid

    def link_options(self) -> dict[str, Any]:
        """Further arguments of `connect_link`."""
        return {}

    def check_round(self, seed: int) -> None:
        """One dispatch and one combine; every row and every sum is compared."""
        raise NotImplementedError

    def raise_fault(self) -> None:
        """Raises what a kernel has found wrong, as the engine does."""
        fault = self.communicator.take_fault()
        if fault is None:
            return
        where = f"{fault.kernel}: {fault.tag}"
        if fault.kind == self.native.FaultKind.TRANSPORT:
            self.link.check(where)
        raise TimeoutError(where, self.grid.rank, self.rank_of(fault.peer), f"{fault.kind}", timeout_s=fault.waited_s)

    def rank_of(self, peer: int) -> int:
        """The rank that a fault names."""
        first: int = self.native.rank_elsewhere
        return peer - first if peer >= first else self.grid.domain[peer]

    def inputs(self, seed: int) -> tuple[Memory, Memory, Memory]:
        """Rows, topk_idx and weights of this rank's tokens."""
        shape, rank = self.shape, self.grid.rank
        tokens = range(shape.num_tokens)
        rows = b"".join(shape.row(rank, token, seed) for token in tokens)
        experts = array.array("q", [e for token in tokens for e in shape.topk_idx(rank, token, seed)])
        weights = array.array("f", [shape.weight(rank, k) for _ in tokens for k in range(shape.num_topk)])
        given = []
        for data in (rows, experts.tobytes(), weights.tobytes()):
            given.append(Memory(len(data)))
            given[-1].write(data)
        return given[0], given[1], given[2]


class Rank(End):
    """An end of normal calls, with an arena of two slots."""

    def __init__(self, native: Any, rank: int, shape: Shape, shared: Shared, transport: str, timeout_s: float) -> None:
        super().__init__(native, rank, shape, shared, transport, timeout_s)
        self.arena = shared.memory[rank]
        self.communicator.set_arena([shared.memory[r].address for r in self.grid.domain], _SLOT_BYTES, 0)
        self.between = native.BetweenCommunicator(
            domain=self.communicator, rank=rank, num_domains=shape.num_domains, proxy=self.link.proxy
        )
        self._num_dispatches = 0

    def rings(self) -> list[Ring]:
        return [Ring(*self.native.between_ring(num_domains=self.shape.num_domains))]

    def check_round(self, seed: int) -> None:
        """Dispatch, experts that add their rank to each row, combine; every bit is compared."""
        shape, native, rank = self.shape, self.native, self.grid.rank
        num_local = shape.num_experts // shape.num_ranks
        held_capacity = (shape.num_domains - 1) * shape.num_tokens
        plan = native.DispatchShape(
            rank=rank,
            num_ranks=shape.num_ranks,
            num_tokens=shape.num_tokens,
            hidden=shape.hidden,
            dtype=0,
            num_topk=shape.num_topk,
            num_experts=shape.num_experts,
            has_weights=True,
            expert_range=(rank * num_local, (rank + 1) * num_local),
            num_sms=_NUM_SMS,
        )
        rows, topk_idx, weights = self.inputs(seed)
        num_ints = native.between_route_ints(
            num_domains=shape.num_domains,
            ranks_per_domain=shape.ranks_per_domain,
            num_tokens=shape.num_tokens,
            num_topk=shape.num_topk,
            num_experts=shape.num_experts,
            held_capacity=held_capacity,
        )
        route, counts = Memory(4 * num_ints), Memory(4 * num_local)
        counts_epoch = self.between.dispatch(
            plan=plan,
            rows=rows.address,
            topk_idx=topk_idx.address,
            topk_weights=weights.address,
            scales=0,
            route=route.address,
            mapping_checksum=0,
            held_capacity=held_capacity,
            handle=_ABSENT,
            slot_idx=1,
            stream=0,
        )
        self._num_dispatches += 1
        told = self.communicator.wait_for_counts(counts_epoch, 0, counts.address, num_local)
        self.raise_fault()
        assert told is not None, "the kernel has told nothing, and there is no fault"
        needs_capacity, num_recv, *_ = told
        assert not needs_capacity
        received = self._check_received(num_recv, seed)
        out, own_sums = (Memory(2 * shape.hidden * shape.num_tokens) for _ in range(2))
        combine = native.CombinePlan(
            num_tokens=shape.num_tokens,
            hidden=shape.hidden,
            num_topk=shape.num_topk,
            num_experts=shape.num_experts,
            num_sms=_NUM_SMS,
        )
        returned = Memory(2 * shape.hidden * max(num_recv, 1))
        returned.write(b"".join(bf16([value + rank for value in values_of(row)]) for row in received))
        self.between.combine(
            plan=combine,
            rows=returned.address,
            num_rows=num_recv,
            weights=0,
            bias=[],
            out=out.address,
            out_weights=0,
            own_sums=own_sums.address,
            own_weights=0,
            route=route.address,
            held_capacity=held_capacity,
            handle=self._num_dispatches,
            stream=0,
        )
        self.raise_fault()
        row_bytes = 2 * shape.hidden
        for token in range(shape.num_tokens):
            ranks = shape.ranks_of(rank, token, seed)
            sent = values_of(shape.row(rank, token, seed))
            want = [len(ranks) * value + sum(ranks) for value in sent]
            found = values_of(out.map[row_bytes * token : row_bytes * (token + 1)])
            assert found == want, f"sum of token {token} of rank {rank}: {found}, expected {want}"

    def _check_received(self, num_recv: int, seed: int) -> list[bytes]:
        """Compares rows, local experts and their weights with what was sent, by source and token; returns the rows."""
        shape, rank = self.shape, self.grid.rank
        num_local, num_topk, row_bytes = shape.num_experts // shape.num_ranks, shape.num_topk, 2 * shape.hidden
        widths = (row_bytes, 8 * num_topk, 4 * num_topk)
        capacity = (_SLOT_BYTES - 4 * 128) // sum(widths)
        begins = [_SLOT_BYTES]  # csrc/layout/slot_layout.h
        for width in widths[:2]:
            begins.append(begins[-1] + -(-capacity * width // 128) * 128)
        want = [
            (source, token)
            for source in range(shape.num_ranks)
            for token in range(shape.num_tokens)
            if rank in shape.ranks_of(source, token, seed)
        ]
        assert num_recv == len(want), f"rank {rank} receives {num_recv} rows, expected {len(want)}"
        received = []
        for i, (source, token) in enumerate(want):
            row, experts, weights = (
                self.arena.map[begin + i * width : begin + (i + 1) * width]
                for begin, width in zip(begins, widths, strict=True)
            )
            place = f"row {i} of rank {rank}, token {token} of rank {source}"
            assert row == shape.row(source, token, seed), place
            local = [
                expert - rank * num_local if expert // num_local == rank else -1
                for expert in shape.topk_idx(source, token, seed)
            ]
            assert list(struct.unpack(f"{num_topk}q", experts)) == local, f"experts of {place}"
            for k, weight in enumerate(struct.unpack(f"{num_topk}f", weights)):
                assert local[k] < 0 or weight == shape.weight(source, k), f"weights of {place}"
            received.append(row)
        return received


@dataclass(frozen=True)
class Shared:
    """What ranks have in common: memory of each, made before they are forked, and a folder for their store."""

    control: list[Memory]
    memory: list[Memory]
    folder: Path

    @classmethod
    def of(cls, native: Any, shape: Shape, folder: Path) -> Shared:
        num_bytes = native.control_bytes + native.between_control_bytes(
            num_domains=shape.num_domains, ranks_per_domain=shape.ranks_per_domain
        )
        ranks = range(shape.num_ranks)
        folder.mkdir(parents=True)
        return cls([Memory(num_bytes) for _ in ranks], [Memory(2 * _SLOT_BYTES) for _ in ranks], folder)


def load_module(path: str) -> Any:
    """The extension module that tests/emulation/build.py has made."""
    spec = importlib.util.spec_from_file_location("_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def run_ranks(
    native: Any,
    shape: Shape,
    folder: Path,
    *,
    transport: str,
    timeout_s: float,
    num_rounds: int,
    variables_of: Callable[[int], dict[str, str]],
    meanwhile: Callable[[list[int]], None] | None = None,
    end: type[End] = Rank,
) -> list[dict[str, Any]]:
    """Runs rounds on ranks that are forked here, and returns what each of them says.

    Args:
        native: the emulated module.
        shape: of the ranks and their calls.
        folder: absent; for what the ranks tell each other.
        transport: that joins the domains.
        timeout_s: of kernels and of the link.
        num_rounds: after which a rank ends, unless it has lost another.
        variables_of: environment of a rank, as ``HYBRID_EP_NICS``.
        meanwhile: runs here once rank 0 has made a round; gets the process of each rank.
        end: what makes the calls.

    Returns:
        By rank: ``rounds`` that were right; ``link``, its description; ``closed``, whether it closed in order;
        ``error``, ``text``, ``peer`` and ``at`` (of time.monotonic) where it has lost a rank; what `End.told` has. Of a
        rank that was killed only ``killed``.
    """
    shared = Shared.of(native, shape, folder)
    pids = []
    for rank in range(shape.num_ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            arguments = native, rank, shape, shared, transport, timeout_s
            _run_rank(end, arguments, num_rounds, variables_of(rank))
    if meanwhile is not None:
        while not any((folder / name).exists() for name in ("begun", "said-0")):
            time.sleep(0.02)
        meanwhile(pids)
    results = []
    for rank, pid in enumerate(pids):
        _, status = os.waitpid(pid, 0)
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        results.append({"killed": True} if is_killed else json.loads((folder / f"said-{rank}").read_text()))
    for result in results:
        assert "failed" not in result, result["failed"]
    return results


def _run_rank(
    make_end: type[End],
    arguments: tuple[Any, int, Shape, Shared, str, float],
    num_rounds: int,
    variables: dict[str, str],
) -> None:
    """A forked child: it never returns."""
    said: dict[str, Any] = {"rounds": 0}
    _, rank, _, shared, *_ = arguments
    try:
        os.environ.update(variables)
        end = make_end(*arguments)
        said["link"] = end.link.description
        try:
            for seed in range(num_rounds):
                end.check_round(seed)
                said["rounds"] += 1
                if rank == 0:
                    (shared.folder / "begun").touch()
        except HybridEPError as error:
            said |= {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
            said["peer"] = getattr(error, "peer", None)
        said |= end.told
        said["closed"] = end.link.close(_CLOSE_S)
    except BaseException:
        said["failed"] = traceback.format_exc()
    (shared.folder / f"said-{rank}").write_text(json.dumps(said))
    os._exit(0)


def bf16(values: Sequence[float]) -> bytes:
    """Values that bf16 holds exactly, as integers below 256."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def values_of(row: bytes) -> list[float]:
    return [struct.unpack("<f", bytes(2) + row[i : i + 2])[0] for i in range(0, len(row), 2)]
