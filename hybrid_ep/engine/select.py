"""Which engine serves a group, and why."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybrid_ep import env
from hybrid_ep.agree.roll_call import MIN_TIMEOUT_S, gather_all
from hybrid_ep.checks import require_seconds
from hybrid_ep.core.geometry import RankGrid
from hybrid_ep.core.host import host_name
from hybrid_ep.engine.base import Engine
from hybrid_ep.engine.torch.engine import TorchEngine
from hybrid_ep.errors import ConfigError
from hybrid_ep.transport.choice import TransportState, agree_on_transport, survey

_LOG = logging.getLogger("hybrid_ep")
_said: set[str] = set()


class Choice(NamedTuple):
    """An engine's name, and why it is chosen."""

    name: str
    reason: str


def choose_engine(asked: str | None = None) -> Choice:
    """Returns which engine this process could serve with.

    Args:
        asked: ``auto``, ``torch`` or ``cuda``; None = ``HYBRID_EP_ENGINE``.

    Raises:
        ConfigError: cuda was asked for by name and cannot run here.
    """
    asked = env.ENGINE.get() if asked is None else asked
    if asked not in ("auto", "torch", "cuda"):
        raise ConfigError(f"engine is {asked!r}; allowed: auto, torch or cuda")
    if asked == "torch":
        return Choice("torch", "asked for by name")
    obstacle = _cuda_obstacle()
    if obstacle is None:
        return Choice("cuda", "the extension is built and the GPU is capable")
    if asked == "cuda":
        raise ConfigError(f"engine is 'cuda', but {obstacle}; allowed here: auto or torch")
    return Choice("torch", obstacle)


def _cuda_obstacle() -> str | None:
    """Returns why the cuda engine cannot run in this process, or None."""
    if importlib.util.find_spec("hybrid_ep._cuda") is None:
        return "the _cuda extension is not built"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    # Imported here, because the extension may be absent.
    from hybrid_ep import _cuda

    if not _cuda.can_run(torch.cuda.current_device()):
        major, minor = torch.cuda.get_device_capability()
        return f"the _cuda extension is not built for compute capability {major}.{minor}"
    return None


def make_engine(
    group: dist.ProcessGroup | None,
    *,
    num_ranks_per_domain: int | None = None,
    asked: str | None = None,
    timeout_s: float | None = None,
) -> Engine:
    """Makes the engine for a group. Collective: all ranks agree on one.

    Args:
        group: the process group; None for a single rank.
        num_ranks_per_domain: size of a domain; None: NVLink joins the ranks of a host, and where the cuda engine is
            asked for by name, all.
        asked: as in `choose_engine`.
        timeout_s: how long to wait for a peer; None = ``HYBRID_EP_TIMEOUT_S``.

    Raises:
        ConfigError: the engine cannot run at some rank, or ranks ask for different ones or for different domains.
        TopologyError: the domains do not divide the ranks.
        TimeoutError: a rank makes no buffer.
        TransportError: the store of the process group cannot be reached.
    """
    asked = env.ENGINE.get() if asked is None else asked
    timeout_s = env.TIMEOUT_S.get() if timeout_s is None else require_seconds("timeout_s", timeout_s)
    choice, grid, number = _agree(group, num_ranks_per_domain, asked, timeout_s)
    if choice.name not in _said:
        _said.add(choice.name)
        is_slow = choice.name != "cuda" and asked != "torch" and torch.cuda.is_available()
        _LOG.log(logging.WARNING if is_slow else logging.INFO, "engine %s: %s", choice.name, choice.reason)
    if choice.name == "torch":
        return TorchEngine(group, grid, timeout_s, number)
    if grid.num_domains > 1:
        from hybrid_ep.engine.cuda.between import CudaBetween

        assert group is not None
        return CudaBetween(group, grid, timeout_s, number)
    from hybrid_ep.engine.cuda.engine import CudaEngine

    return CudaEngine(group, grid, timeout_s, number)


class _Vote(NamedTuple):
    """The settings that a rank asks for, and its abilities.

    Attributes:
        engine, num_ranks_per_domain, low_latency_between: as they were asked for.
        choice: the engine that the rank could serve with; None if there is none.
        refusal: why there is none.
        host: that the rank runs on.
        transport: the one that is asked for between domains.
        transports: names of the transports that the rank could use; empty if it could not serve with the cuda engine.
    """

    engine: str
    num_ranks_per_domain: int | None
    low_latency_between: str
    choice: Choice | None
    refusal: str
    host: str
    transport: str
    transports: tuple[TransportState, ...]

    @classmethod
    def of(cls, fields: list[Any]) -> _Vote:
        """Returns the vote that JSON has made a list of."""
        engine, num_ranks_per_domain, low_latency_between, choice, refusal, host, transport, transports = fields
        return cls(
            engine,
            num_ranks_per_domain,
            low_latency_between,
            None if choice is None else Choice(*choice),
            refusal,
            host,
            transport,
            tuple(TransportState(**state) for state in transports),
        )

    def as_json(self) -> str:
        return json.dumps(self._replace(transports=[asdict(state) for state in self.transports]))  # type: ignore[arg-type]


def _vote(num_ranks_per_domain: int | None, asked: str) -> _Vote:
    choice, refusal = None, ""
    try:
        choice = choose_engine(asked)
    except ConfigError as error:
        refusal = str(error)
    could_join = choice is not None and choice.name == "cuda"
    transports = survey() if could_join else ()
    kernels = env.LOW_LATENCY_BETWEEN.get()
    return _Vote(asked, num_ranks_per_domain, kernels, choice, refusal, host_name(), env.TRANSPORT.get(), transports)


def _ranks_per_host(hosts: list[str]) -> int:
    """Returns the ranks of a host, if all hosts have equally many, with consecutive numbers; otherwise all ranks.

    Args:
        hosts: of each rank.
    """
    size = hosts.count(hosts[0])
    blocks = [set(hosts[begin : begin + size]) for begin in range(0, len(hosts), size)]
    is_regular = len(set(hosts)) * size == len(hosts) and all(len(block) == 1 for block in blocks)
    return size if is_regular else len(hosts)


def _agree(
    group: dist.ProcessGroup | None, num_ranks_per_domain: int | None, asked: str, timeout_s: float
) -> tuple[Choice, RankGrid, int]:
    """Returns the same engine at every rank: cuda only where each could serve with it and something joins the domains.

    A rank raises its own errors after the exchange, so that no other rank waits for it. The third result is the number
    of the buffer on its group.
    """
    rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
    grid = RankGrid(rank, num_ranks, num_ranks_per_domain or num_ranks)
    mine = _vote(num_ranks_per_domain, asked)
    votes, number = [mine], 0
    if group is not None and num_ranks > 1:
        limit_s, where = max(timeout_s, MIN_TIMEOUT_S), "making a buffer"
        texts, number = gather_all(
            group, "buffer", mine.as_json(), timeout_s=limit_s, where=where, missed="it has made none"
        )
        votes = [_Vote.of(json.loads(text)) for text in texts]
    for rank, other in enumerate(votes):
        for name in ("engine", "num_ranks_per_domain", "low_latency_between"):
            ours, theirs = getattr(mine, name), getattr(other, name)
            if ours != theirs:
                raise ConfigError(
                    f"{name} is {ours!r} at rank {grid.rank} and {theirs!r} at rank {rank}; "
                    "allowed: the same on every rank"
                )
    choices = []
    for rank, other in enumerate(votes):
        if other.choice is None:
            raise ConfigError(other.refusal if rank == grid.rank else f"rank {rank}: {other.refusal}")
        choices.append(other.choice)
    if num_ranks_per_domain is None and asked != "cuda":
        grid = RankGrid(grid.rank, num_ranks, _ranks_per_host([vote.host for vote in votes]))
    choice = _choose(choices, votes, grid, asked)
    if choice.name == "cuda" and grid.num_domains > 1:
        _require_same_transport(votes)
    return choice, grid, number


def _choose(choices: list[Choice], votes: Sequence[_Vote], grid: RankGrid, asked: str) -> Choice:
    """Returns the same at every rank. `choices` are those of the votes, none of them None.

    Raises:
        ConfigError: ranks ask for different transports.
    """
    if asked != "auto":
        return choices[grid.rank]
    for rank, choice in enumerate(choices):
        if choice.name == "torch":
            return Choice("torch", choice.reason if grid.num_ranks == 1 else f"rank {rank}: {choice.reason}")
    hosts = [vote.host for vote in votes]
    size = grid.num_ranks_per_domain
    for begin in range(0, grid.num_ranks, size):
        num_hosts = len(set(hosts[begin : begin + size]))
        if num_hosts > 1:
            which = f"ranks {begin} … {begin + size - 1} are on {num_hosts} hosts"
            return Choice("torch", f"{which}; engine='cuda' says that NVLink joins them")
    return choices[grid.rank] if grid.num_domains == 1 else _choose_between(votes, grid)


def _choose_between(votes: Sequence[_Vote], grid: RankGrid) -> Choice:
    """Chooses the engine of several domains: cuda if a transport joins them."""
    from hybrid_ep.engine.cuda.between import refusal_of_grid

    _require_same_transport(votes)
    transport = votes[0].transport
    what = f"{grid.num_domains} domains of {grid.num_ranks_per_domain} ranks"
    if refusal := refusal_of_grid(grid):
        return Choice("torch", refusal)
    try:
        chosen = agree_on_transport([vote.transports for vote in votes], [vote.host for vote in votes], transport)
    except ConfigError as error:
        return Choice("torch", f"{what}; {error}")
    return Choice("cuda", f"{what}, joined by {chosen.name}: {chosen.reason}")


def _require_same_transport(votes: Sequence[_Vote]) -> None:
    for rank, vote in enumerate(votes):
        if vote.transport != votes[0].transport:
            raise ConfigError(
                f"transport is {votes[0].transport!r} at rank 0 and {vote.transport!r} at rank {rank}; "
                "allowed: the same on every rank"
            )
