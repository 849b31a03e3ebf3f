"""`ExpertPlacement`: which expert each slot of each rank holds, and which replica a token is sent to.

A rank has P/R slots for each layer. Slots are the *physical* experts: slot s of rank r has the index r × P/R + s, which
is the expert index that dispatch gets. The *logical* experts are those of the model.

A token goes to a replica in its own domain, or else to any replica. If there are several, tokens are spread over them
by their index, so that each replica gets its share whatever stride the tokens of an expert have.

Ranks may be out of service. No token goes to their slots, and an expert that has no other slot is not served: copies
for it are dropped, as with −1.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_ep.balance.rebalance import inverse_map, rebalance_experts, require_loads
from hybrid_ep.checks import require, require_instance, require_int, require_path
from hybrid_ep.core import kernels
from hybrid_ep.core.checks import packed, require_device, require_expert_indices, require_tensor
from hybrid_ep.errors import ConfigError

_FORMAT = "hybrid_ep.ExpertPlacement/1"
# 2³² × the golden ratio and 2³² × √2, modulo 2³²: multiples of them fall evenly into an interval
# (source: Knuth, The Art of Computer Programming, volume 3, section 6.4).
_TOKEN_STEP, _RANK_STEP, _WORD = 0x9E3779B1, 0x6A09E667, 1 << 32


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of all ranks, for all layers.

    Attributes:
        experts: for each layer, the logical expert of each of P slots, P/R in a row for each rank.
        num_experts: E, logical experts of a layer.
        num_ranks: R, divides P.
        num_ranks_per_domain: divides R.
        version: rises with each placement that replaces another.
        lost_ranks: ranks out of service, ascending.
        unserved: for each layer, the experts without a slot on a rank in service, ascending; () = none in any layer.

    Raises:
        ConfigError: a value does not fit the others.
    """

    experts: tuple[tuple[int, ...], ...]
    num_experts: int
    num_ranks: int
    num_ranks_per_domain: int
    version: int = 0
    lost_ranks: tuple[int, ...] = ()
    unserved: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("experts", "unserved"):
            object.__setattr__(self, name, _table(name, getattr(self, name), "the placement"))
        (lost_ranks,) = _table("lost_ranks", (self.lost_ranks,), "the placement")
        object.__setattr__(self, "lost_ranks", lost_ranks)
        require_int("num_experts", self.num_experts, minimum=1)
        require_int("num_ranks_per_domain", self.num_ranks_per_domain, minimum=1)
        require_int("num_ranks", self.num_ranks, minimum=1, multiple_of=self.num_ranks_per_domain)
        require_int("version", self.version, minimum=0)
        require(len(self.experts) > 0, "layers of experts", 0, "≥ 1")
        num_replicas = len(self.experts[0])
        require_int("slots of a layer", num_replicas, minimum=1, multiple_of=self.num_ranks)
        everyone = set(range(self.num_experts))
        ranks = sorted(set(self.lost_ranks) & set(range(self.num_ranks)))
        require(
            list(self.lost_ranks) == ranks, "lost_ranks", self.lost_ranks, f"ascending, of 0 … {self.num_ranks - 1}"
        )
        require(len(ranks) < self.num_ranks, "lost_ranks", self.lost_ranks, "all but one rank at most")
        if self.unserved:
            require(len(self.unserved) == len(self.experts), "layers of unserved", len(self.unserved), "as of experts")
        for layer, experts in enumerate(self.experts):
            require(
                len(experts) == num_replicas, f"slots of layer {layer}", len(experts), f"{num_replicas}, as layer 0"
            )
            unserved = set(self.unserved[layer]) if self.unserved else set()
            served = self._in_service(experts)
            odd = sorted((set(experts) - everyone) | (served ^ (everyone - unserved)))
            if odd:
                problem = "is both served and unserved" if odd[0] in unserved & served else "has no slot"
                problem = problem if odd[0] in everyone else f"is not one of 0 … {self.num_experts - 1}"
                raise ConfigError(f"expert {odd[0]} of layer {layer} {problem}; allowed: every expert at least once")

    @classmethod
    def contiguous(
        cls, num_layers: int, num_experts: int, num_ranks: int, num_ranks_per_domain: int | None = None
    ) -> ExpertPlacement:
        """Returns a placement without replicas: expert e is on rank e // (E/R), as without a placement.

        Raises:
            ConfigError: a number is not an integer ≥ 1, or E is not a multiple of R.
        """
        require_int("num_layers", num_layers, minimum=1)
        require_int("num_ranks", num_ranks, minimum=1)
        require_int("num_experts", num_experts, minimum=1, multiple_of=num_ranks)
        per_domain = num_ranks if num_ranks_per_domain is None else num_ranks_per_domain
        return cls((tuple(range(num_experts)),) * num_layers, num_experts, num_ranks, per_domain)

    @classmethod
    def from_loads(
        cls,
        weight: Tensor,
        num_replicas: int,
        num_ranks: int,
        *,
        num_groups: int = 1,
        num_ranks_per_domain: int | None = None,
        version: int = 0,
    ) -> ExpertPlacement:
        """The placement of `rebalance_experts`, with domains as its nodes.

        Args:
            weight: ``[layers, E]`` loads.
            num_replicas: P.
            num_ranks: R.
            num_groups: of experts; a multiple of the domains keeps the replicas of each expert in one domain.
            num_ranks_per_domain: None = all ranks are one domain.
            version: of the result.

        Raises:
            ConfigError: as `rebalance_experts`.
        """
        require_int("num_ranks", num_ranks, minimum=1)
        per_domain = num_ranks if num_ranks_per_domain is None else num_ranks_per_domain
        require_int("num_ranks_per_domain", per_domain, minimum=1)
        require(num_ranks % per_domain == 0, "num_ranks_per_domain", per_domain, f"divisors of {num_ranks}")
        phy2log, _, _ = rebalance_experts(weight, num_replicas, num_groups, num_ranks // per_domain, num_ranks)
        return cls(tuple(map(tuple, phy2log.tolist())), weight.shape[1], num_ranks, per_domain, version)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.experts)

    @property
    def num_replicas(self) -> int:
        """P, slots of all ranks together."""
        return len(self.experts[0])

    @property
    def num_slots(self) -> int:
        """P/R, slots of a rank."""
        return self.num_replicas // self.num_ranks

    def require_weight(self, weight: Tensor) -> Tensor:
        """Returns loads of this placement's layers and experts as ``[layers, E]`` float64 on the CPU.

        Raises:
            ConfigError: the shape is another, or a load is not a finite number ≥ 0.
        """
        loads = torch.from_numpy(require_loads(weight))
        wanted = (self.num_layers, self.num_experts)
        require(tuple(loads.shape) == wanted, "weight.shape", list(loads.shape), f"{list(wanted)}, as the placement")
        return loads

    @functools.cached_property
    def phy2log(self) -> Tensor:
        """``[layers, P]`` int64 on the CPU: the logical expert of each slot."""
        return torch.tensor(self.experts, device="cpu")

    def rank_loads(self, weight: Tensor) -> Tensor:
        """Load of each rank, ``[layers, R]`` float64, if each domain sends the same share of each expert's load.

        Args:
            weight: ``[layers, E]`` loads of logical experts.

        Raises:
            ConfigError: as `require_weight`.
        """
        loads = self.require_weight(weight)
        num_domains = self.num_ranks // self.num_ranks_per_domain
        total = torch.zeros(self.num_layers, self.num_replicas, dtype=torch.float64, device="cpu")
        for domain in range(num_domains):
            replicas, count = self._choices(domain)
            share = (loads / num_domains / count.clamp_min(1)).unsqueeze(2).expand(replicas.shape)
            spread = torch.where(replicas >= 0, share, 0.0).flatten(1)
            total.scatter_add_(1, replicas.clamp_min(0).flatten(1), spread)
        return total.view(self.num_layers, self.num_ranks, self.num_slots).sum(2)

    def balancedness(self, weight: Tensor) -> Tensor:
        """Mean over largest load of the ranks, ``[layers]`` float64; 1 is balanced, and so are layers without load.

        Raises:
            ConfigError: as `require_weight`.
        """
        return balancedness(self.rank_loads(weight))

    def on(self, device: torch.device | str, rank: int) -> DevicePlacement:
        """Returns the tables with which `rank` maps its tokens, copied to `device`.

        Raises:
            ConfigError: `rank` is not one of 0 … R−1, or `device` is none.
        """
        device = require_device("device", device)
        require_int("rank", rank, minimum=0, maximum=self.num_ranks - 1)
        replicas, count = self._choices(rank // self.num_ranks_per_domain)
        return DevicePlacement(
            phy2log=self.phy2log.to(device), replicas=replicas.to(device), num_choices=count.to(device), rank=rank
        )

    def replaced_by(self, experts: tuple[tuple[int, ...], ...]) -> ExpertPlacement:
        """Returns the next version: other experts on the same ranks."""
        return dataclasses.replace(self, experts=experts, version=self.version + 1)

    def without(self, ranks: Iterable[int]) -> ExpertPlacement:
        """Returns the next version: the same slots, and `ranks` out of service, with those that are already.

        For low-latency calls in which these ranks are masked: the buffer and the numbers of the slots stay.

        Raises:
            ConfigError: a rank does not exist, or none is left.
        """
        require_instance("ranks", ranks, Iterable, "ranks, each an int")
        ranks = list(ranks)
        for rank in ranks:
            require_instance("a rank of ranks", rank, int, "int")
        lost = tuple(sorted({*self.lost_ranks, *ranks}))
        require(set(lost) <= set(range(self.num_ranks)), "ranks", list(lost), f"of 0 … {self.num_ranks - 1}")
        require(len(lost) < self.num_ranks, "ranks", list(lost), "all but one rank at most")
        trial = dataclasses.replace(self)
        object.__setattr__(trial, "lost_ranks", lost)
        everyone = set(range(self.num_experts))
        unserved = tuple(tuple(sorted(everyone - trial._in_service(experts))) for experts in self.experts)
        return dataclasses.replace(
            self, version=self.version + 1, lost_ranks=lost, unserved=unserved if any(unserved) else ()
        )

    def _in_service(self, experts: tuple[int, ...]) -> set[int]:
        """Experts of one layer that have a slot on a rank in service."""
        size = len(experts) // self.num_ranks
        return {expert for slot, expert in enumerate(experts) if slot // size not in self.lost_ranks}

    def num_moves(self, other: ExpertPlacement) -> Tensor:
        """Expert weights that ranks must load to get from `other` to this, ``[layers]`` int64. Slots may change freely.

        Raises:
            ConfigError: `other` is of another model or other ranks.
        """
        require_instance("other", other, ExpertPlacement, "ExpertPlacement")
        held, wanted = (placement._copies_per_rank() for placement in (other, self))
        require(held.shape == wanted.shape, "layers, ranks and experts", list(held.shape), f"{list(wanted.shape)}")
        # A second copy on the same rank is no load from elsewhere.
        return ((wanted > 0) & (held == 0)).sum((1, 2))

    def save(self, path: str | Path) -> None:
        """Writes JSON, which `load` reads.

        Raises:
            ConfigError: `path` is no path.
            OSError: the file cannot be written.
        """
        require_path("path", path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ExpertPlacement:
        """Reads what `save` wrote.

        Raises:
            ConfigError: it is no such file, or its fields contradict each other.
        """
        try:
            document: Any = json.loads(require_path("path", path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"placement file {path} cannot be read: {error}") from error
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        require(found == _FORMAT, f"format of {path}", repr(found), repr(_FORMAT))
        return cls.from_json(document, str(path))

    def to_json(self) -> dict[str, Any]:
        """Returns what `save` writes, as JSON types."""
        return {"format": _FORMAT, **{name: getattr(self, name) for name in (*_FIELDS, *_LATER_FIELDS)}}

    @classmethod
    def from_json(cls, document: dict[str, Any], source: str = "document") -> ExpertPlacement:
        """The reverse of `to_json`.

        Args:
            document: as JSON has it.
            source: where it comes from, for messages.

        Raises:
            ConfigError: its fields contradict each other.
        """
        require_instance(source, document, dict, "dict")
        if missing := [name for name in _FIELDS if name not in document]:
            raise ConfigError(f"{source} has no {', '.join(missing)}; allowed: all of {', '.join(_FIELDS)}")
        tables = {name: _table(name, document.get(name, []), source) for name in ("experts", "unserved")}
        (lost_ranks,) = _table("lost_ranks", [document.get("lost_ranks", [])], source)
        rest = {name: document[name] for name in _FIELDS[1:]}
        return cls(experts=tables["experts"], **rest, lost_ranks=lost_ranks, unserved=tables["unserved"])

    def _copies_per_rank(self) -> Tensor:
        """``[layers, R, E]`` int64."""
        slots = self.phy2log.view(self.num_layers, self.num_ranks, self.num_slots)
        copies = slots.new_zeros(self.num_layers, self.num_ranks, self.num_experts)
        return copies.scatter_add_(2, slots, torch.ones_like(slots))

    def _choices(self, domain: int) -> tuple[Tensor, Tensor]:
        """The replicas that a token of `domain` may go to: ``[layers, E, X]`` slots, padded with −1, and how many."""
        everywhere, _ = inverse_map(self.phy2log, self.num_experts)
        rank = everywhere.div(self.num_slots, rounding_mode="floor")
        is_there = (everywhere >= 0) & ~torch.isin(rank, torch.tensor(self.lost_ranks, dtype=rank.dtype, device="cpu"))
        near = is_there & (rank.div(self.num_ranks_per_domain, rounding_mode="floor") == domain)
        num_near = near.sum(2)
        order = torch.where(near, 0, torch.where(is_there, 1, 2)).argsort(dim=2, stable=True)
        count = torch.where(num_near > 0, num_near, is_there.sum(2))
        sorted_near = everywhere.gather(2, order)
        beyond = torch.arange(everywhere.shape[2], device="cpu") >= count.unsqueeze(2)
        return torch.where(beyond, -1, sorted_near), count


_FIELDS = ("experts", "num_experts", "num_ranks", "num_ranks_per_domain", "version")
_LATER_FIELDS = ("lost_ranks", "unserved")  # absent in files of older versions


def _table(name: str, rows: Any, source: str) -> tuple[tuple[int, ...], ...]:
    """Returns a list of lists of integers as tuples."""
    is_table = isinstance(rows, list | tuple) and all(isinstance(row, list | tuple) for row in rows)
    if not (is_table and all(type(value) is int for row in rows for value in row)):
        raise ConfigError(f"{name} of {source} is not a list of lists of integers; allowed: one list for each layer")
    return tuple(map(tuple, rows))


@dataclass(frozen=True, eq=False)
class DevicePlacement:
    """A placement as one rank uses it, in tensors of its device.

    Attributes:
        phy2log: ``[layers, P]`` int64.
        replicas: ``[layers, E, X]`` int64: the slots that tokens of this rank may go to, then −1.
        num_choices: ``[layers, E]`` int64: how many these are.
        rank: whose tokens are mapped.
    """

    phy2log: Tensor
    replicas: Tensor
    num_choices: Tensor
    rank: int

    @property
    def rank_turn(self) -> int:
        """The place of this rank's first token in the order in which tokens take the replicas of an expert."""
        return self.rank * _RANK_STEP % _WORD

    def map_topk(self, layer: int, topk_idx: Tensor) -> Tensor:
        """Maps logical to physical experts. The host does not wait; every engine and device gives the same.

        Columns stay where they are, and so do their weights. On a GPU this is one kernel. There an index that is no
        expert becomes an index that is no slot, and the dispatch reports it.

        Args:
            layer: index of the layer.
            topk_idx: ``[T, K]`` int64, logical expert or −1.

        Returns:
            ``[T, K]`` int64, slot or −1, for a dispatch with ``num_experts = P``; −1 also for experts that are not
            served.

        Raises:
            ConfigError: a dtype, a shape, the layer, or, on a CPU, an index outside −1 … E−1.
        """
        num_layers, num_experts, _ = self.replicas.shape
        require_int("layer", layer, minimum=0, maximum=num_layers - 1)
        require_tensor(
            "topk_idx",
            topk_idx,
            dtypes=(torch.int64,),
            shape=(None, None),
            device=self.replicas.device,
        )
        require_expert_indices(topk_idx, num_experts)
        if kernels.run_on(topk_idx):
            return self._map_by_kernel(layer, packed(topk_idx))
        expert = topk_idx.clamp_min(0)
        token = torch.arange(topk_idx.shape[0], device=topk_idx.device).unsqueeze(1)
        turn = (token * _TOKEN_STEP + self.rank_turn) % _WORD
        nth = (turn * self.num_choices[layer][expert]) >> 32
        slot = self.replicas[layer][expert, nth]
        return torch.where(topk_idx >= 0, slot, -1)

    def _map_by_kernel(self, layer: int, topk_idx: Tensor) -> Tensor:
        replicas, num_choices = packed(self.replicas[layer]), packed(self.num_choices[layer])
        slots = torch.empty_like(topk_idx)
        num_experts, max_replicas = replicas.shape
        kernels.native.map_topk(
            topk_idx=topk_idx.data_ptr(),
            replicas=replicas.data_ptr(),
            num_choices=num_choices.data_ptr(),
            slots=slots.data_ptr(),
            num_copies=topk_idx.numel(),
            num_topk=topk_idx.shape[1],
            num_experts=num_experts,
            max_replicas=max_replicas,
            num_slots=self.phy2log.shape[1],
            rank_turn=self.rank_turn,
            **kernels.place_of(topk_idx),
        )
        return slots


def balancedness(loads: Tensor) -> Tensor:
    """``[layers, R]`` loads of ranks → ``[layers]`` mean over largest; 1 where there is no load."""
    most = loads.amax(1)
    return torch.where(most > 0, loads.mean(1) / most.clamp_min(torch.finfo(loads.dtype).tiny), 1.0)
