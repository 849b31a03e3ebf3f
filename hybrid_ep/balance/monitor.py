"""`LoadMonitor`: the recent loads of each layer's experts, from counts that dispatch returns anyway.

Recording adds a few numbers to a tensor of this rank. It sends nothing and waits for nothing. Only `loads`
communicates with the other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_ep import env
from hybrid_ep.agree.group import registered
from hybrid_ep.agree.refusals import at_rank
from hybrid_ep.agree.roll_call import MIN_TIMEOUT_S, gather_all
from hybrid_ep.balance.placement import ExpertPlacement
from hybrid_ep.balance.rebalance import require_loads
from hybrid_ep.checks import require, require_instance, require_int, require_path, require_seconds
from hybrid_ep.core.checks import require_device, require_tensor
from hybrid_ep.errors import ConfigError
from hybrid_ep.inputs import read_json_input

_TRACE_FORMAT = "hybrid_ep.LoadTrace/1"


class LoadMonitor:
    """Tokens of each expert in the last steps. Everything but `loads` is local and sends nothing.

    Args:
        num_layers: layers that are recorded.
        num_experts: E, logical experts of a layer.
        rank: this rank.
        num_ranks: R.
        window: steps that count.
        placement: which expert each slot of this rank holds; None = expert e is on rank e // (E/R).
        device: where the counts are kept: that of the counts that are recorded as tensors.

    Attributes:
        placement: may be replaced when the experts have moved; what was recorded before stays right.

    Raises:
        ConfigError: an argument does not fit.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        rank: int,
        num_ranks: int,
        window: int,
        placement: ExpertPlacement | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        require_int("window", window, minimum=1)
        require_int("num_ranks", num_ranks, minimum=1)
        require_int("rank", rank, minimum=0, maximum=num_ranks - 1)
        self._shape = (
            require_int("num_layers", num_layers, minimum=1),
            require_int("num_experts", num_experts, minimum=1),
        )
        self._rank, self._num_ranks = rank, num_ranks
        device = require_device("device", device)
        self._steps = torch.zeros(window, *self._shape, dtype=torch.int64, device=device)
        self._place = 0
        if placement is None:
            placement = ExpertPlacement.contiguous(num_layers, num_experts, num_ranks)
        self.placement = placement

    @property
    def placement(self) -> ExpertPlacement:
        return self._placement

    @placement.setter
    def placement(self, placement: ExpertPlacement) -> None:
        require_instance("placement", placement, ExpertPlacement, "ExpertPlacement")
        found = (placement.num_layers, placement.num_experts, placement.num_ranks)
        wanted = (*self._shape, self._num_ranks)
        require(found == wanted, "layers, experts and ranks of placement", found, str(wanted))
        self._placement = placement
        slots = placement.phy2log.view(placement.num_layers, placement.num_ranks, -1)
        self._experts = slots[:, self._rank].contiguous().to(self._steps.device)

    def record(self, layer: int, counts: Tensor | Sequence[int]) -> None:
        """Adds the tokens that this rank received for its experts, in this step. The host does not wait.

        Args:
            layer: index of the layer.
            counts: one number for each slot of this rank: `num_recv_tokens_per_expert` of a dispatch,
                `packed_recv_count` of a low-latency dispatch, or `tokens_per_expert` of a permuted one. int32 or int64
                as a tensor.

        Raises:
            ConfigError: the layer or the shape does not fit.
        """
        require_int("layer", layer, minimum=0, maximum=self._shape[0] - 1)
        experts = self._experts[layer]
        if not isinstance(counts, Tensor):
            counts = _as_counts(counts)
        require_tensor("counts", counts, dtypes=(torch.int32, torch.int64), shape=(experts.shape[0],))
        added = counts.to(self._steps.device, torch.int64, non_blocking=True)
        self._steps[self._place, layer].index_add_(0, experts, added)

    def step(self) -> None:
        """Ends a step: the oldest one leaves the window. The host does not wait."""
        self._place = (self._place + 1) % self._steps.shape[0]
        self._steps[self._place].zero_()

    def local_loads(self) -> Tensor:
        """``[layers, E]`` int64 on the monitor's device: tokens that this rank received in the window. Local."""
        return self._steps.sum(0)

    def loads(self, group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None) -> Tensor:
        """``[layers, E]`` int64: tokens that all ranks received in the window, the same on every rank. Collective.

        Args:
            group: the ranks; None = the default group, or this rank alone where there is none.
            timeout_s: seconds to wait for the other ranks to call it; None = ``HYBRID_EP_TIMEOUT_S``. If a rank is lost
                after that, while the sum is made, the group raises its own error after its own timeout.

        Raises:
            ConfigError: ranks have monitors of different layers or experts, or `timeout_s` of a rank is no number of
                seconds.
            TimeoutError: a rank has not come in time.
            TransportError: the store of the process group cannot be reached.
        """
        refusal, limit_s = None, env.TIMEOUT_S.get()
        try:
            limit_s = limit_s if timeout_s is None else require_seconds("timeout_s", timeout_s)
        except ConfigError as error:
            refusal = error
        total = self.local_loads()
        if dist.is_initialized():
            group = dist.group.WORLD if group is None else group
            assert group is not None
            self._meet(group, limit_s, refusal)
            dist.all_reduce(total, group=group)
        elif refusal is not None:
            raise refusal
        return total

    def _meet(self, group: dist.ProcessGroup, timeout_s: float, refusal: ConfigError | None) -> None:
        """Waits for the other ranks, up to a deadline. A sum would wait for a lost rank forever.

        All ranks raise the refusal of any.
        """
        rank, what = group.rank(), "sum of loads"
        mine = list(self._shape) if refusal is None else at_rank(refusal, rank)
        texts, _ = gather_all(
            registered(group, max(timeout_s, MIN_TIMEOUT_S)),
            what,
            json.dumps(mine),
            timeout_s=timeout_s,
            where=what,
            missed="it has not called loads",
        )
        shapes = [json.loads(text) for text in texts]
        # A rank that refuses the call raises its own error.
        for shape in (shapes[rank], *shapes):
            if isinstance(shape, str):
                raise ConfigError(shape)
        for other, shape in enumerate(shapes):
            if shape != shapes[rank]:
                raise ConfigError(
                    f"layers and experts of the monitor are {shapes[rank]} at rank {rank} and {shape} at rank {other}; "
                    "allowed: the same on every rank"
                )

    def prometheus(self) -> str:
        """The window of this rank in Prometheus' text format; the sum over ranks is what `loads` gives. Local."""
        lines = [
            "# HELP hybrid_ep_expert_tokens Tokens that a rank received for an expert, in the last steps.",
            "# TYPE hybrid_ep_expert_tokens gauge",
        ]
        loads = self.local_loads().tolist()
        for layer, experts in enumerate(self._experts.tolist()):
            for expert in sorted(set(experts)):
                labels = f'rank="{self._rank}",layer="{layer}",expert="{expert}"'
                lines.append(f"hybrid_ep_expert_tokens{{{labels}}} {loads[layer][expert]}")
        lines += [
            "# HELP hybrid_ep_placement_version Version of the placement of experts.",
            "# TYPE hybrid_ep_placement_version gauge",
            f'hybrid_ep_placement_version{{rank="{self._rank}"}} {self._placement.version}',
        ]
        return "\n".join(lines) + "\n"


def _as_counts(counts: object) -> Tensor:
    """Returns counts of one layer as a tensor; a model calls this for each layer of each step."""
    require_instance("counts", counts, Sequence, "a tensor, or a sequence of ints")
    assert isinstance(counts, Sequence)
    require(all(isinstance(count, int) for count in counts), "counts", counts, "a tensor, or a sequence of ints")
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def save_trace(path: str | Path, windows: Sequence[Tensor]) -> None:
    """Writes loads of several windows, each ``[layers, E]``, as JSON for `hybrid-ep balance`.

    Raises:
        ConfigError: `path` is no path, or a window is no tensor.
        OSError: the file cannot be written.
    """
    require_instance("windows", windows, Sequence, "a sequence of tensors")
    for window in windows:
        require_instance("a window of windows", window, Tensor, "torch.Tensor")
    document = {"format": _TRACE_FORMAT, "loads": [window.tolist() for window in windows]}
    require_path("path", path).write_text(json.dumps(document) + "\n", encoding="utf-8")


def load_trace(path: str | Path) -> Tensor:
    """Reads ``[windows, layers, E]`` float64.

    Raises:
        ConfigError: the file is no such trace.
    """
    try:
        document: Any = read_json_input(require_path("path", path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    require(found == _TRACE_FORMAT, f"format of {path}", repr(found), repr(_TRACE_FORMAT))
    try:
        loads = torch.tensor(document.get("loads"), dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"loads of {path} are not numbers [windows, layers, experts]: {error}") from error
    require(
        loads.dim() == 3 and loads.numel() > 0, f"shape of loads of {path}", list(loads.shape), "[windows, layers, E]"
    )
    require_loads(loads.flatten(0, 1))
    return loads
