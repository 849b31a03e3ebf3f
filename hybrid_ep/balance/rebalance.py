"""`rebalance_experts`: which experts get replicas, and which GPU each replica lives on, from the experts' loads.

A pure function of loads; no device and no group. All layers are planned at once: every step below is an array
operation over layers.

    loads ─ replicate: one replica more for the expert with the most load per replica ─► replicas
          ─ pack: the heaviest replica to the lightest GPU that has a free slot       ─► GPUs
          ─ refine: swaps between a heavy and a light GPU that bring both nearer      ─► GPUs

The first two steps are the algorithm that DeepSeek describes for EPLB. A swap never raises the larger load of its two
GPUs, so that no layer ends up less balanced than after these two steps. Layers that end far from balance are planned
again with other replicas, and the better plan is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_ep.checks import require, require_int
from hybrid_ep.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_DIVISORS = (0.0, -0.7, -0.9)  # of `_replicate`; those after the first are tried on rows that are far from balance
_FAR = 0.02  # above the mean load
_MAX_ROUNDS = 64
_PATIENCE = 8  # rounds without a gain
_CLOSE_ENOUGH = 1e-3  # relative; smaller gains are none


def rebalance_experts(
    weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plans replicas of experts and their GPUs; the interface of DeepSeek's EPLB.

    Where `num_groups` is a multiple of `num_nodes`, the policy is hierarchical: all experts of a group, with all their
    replicas, stay on one node. Elsewhere it is global: a replica may be on any GPU.

    Args:
        weight: ``[layers, E]``, any number dtype, any device; load of each expert, ≥ 0.
        num_replicas: P, replicas of all experts of a layer together, ≥ E and a multiple of `num_gpus`.
        num_groups: groups of experts, a divisor of E with the hierarchical policy.
        num_nodes: divides `num_gpus`.
        num_gpus: G.

    Returns:
        On the CPU, int64: phy2log ``[layers, P]``, the expert of each replica, P/G in a row for each GPU; log2phy
        ``[layers, E, X]``, the replicas of each expert, then −1, where X is the most replicas of any expert; logcnt
        ``[layers, E]``, replicas of each expert.

    Raises:
        ConfigError: an argument does not fit.
    """
    loads = require_loads(weight)
    num_experts = loads.shape[1]
    require_int("num_groups", num_groups, minimum=1)
    require_int("num_nodes", num_nodes, minimum=1)
    require_int("num_gpus", num_gpus, minimum=1, multiple_of=num_nodes)
    require_int("num_replicas", num_replicas, minimum=num_experts, multiple_of=num_gpus)
    if num_groups % num_nodes == 0:
        require(num_experts % num_groups == 0, "num_groups", num_groups, f"divisors of the {num_experts} experts")
        phy2log = _hierarchical(loads, num_replicas, num_groups, num_nodes, num_gpus)
    else:
        phy2log = _global(loads, num_replicas, num_gpus)
    placed = torch.from_numpy(phy2log)
    return placed, *inverse_map(placed, num_experts)


def require_loads(weight: object) -> Floats:
    """Checks ``[layers, E]`` loads and returns them as float64 on the CPU."""
    if not isinstance(weight, Tensor):
        raise ConfigError(f"weight is {type(weight).__name__}; allowed: a torch.Tensor")
    require(weight.dim() == 2 and weight.numel() > 0, "weight.shape", list(weight.shape), "[layers ≥ 1, experts ≥ 1]")
    require(not weight.is_complex(), "weight.dtype", weight.dtype, "a real dtype")
    loads: Floats = weight.detach().to("cpu", torch.float64).numpy()
    if not (np.isfinite(loads).all() and loads.min() >= 0):
        bad = loads[~(np.isfinite(loads) & (loads >= 0))][0]
        raise ConfigError(f"a load in weight is {bad:g}; allowed: finite numbers ≥ 0")
    return loads


def inverse_map(phy2log: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """``[layers, P]`` experts of replicas → log2phy ``[layers, E, X]``, ascending, padded with −1, and logcnt."""
    num_layers, num_replicas = phy2log.shape
    logcnt = phy2log.new_zeros(num_layers, num_experts).scatter_add_(1, phy2log, torch.ones_like(phy2log))
    width = int(logcnt.max())
    order = phy2log.argsort(dim=1, stable=True)
    expert = phy2log.gather(1, order)
    begin = logcnt.cumsum(1) - logcnt
    nth = torch.arange(num_replicas, device="cpu") - begin.gather(1, expert)
    log2phy = phy2log.new_full((num_layers, num_experts * width), -1)
    log2phy.scatter_(1, expert * width + nth, order)
    return log2phy.view(num_layers, num_experts, width), logcnt


def gpu_loads(weight: Tensor, phy2log: Tensor, num_gpus: int) -> Tensor:
    """Load of each GPU, ``[layers, G]`` float64, where the load of an expert is split evenly over its replicas."""
    loads = torch.from_numpy(require_loads(weight))
    _, logcnt = inverse_map(phy2log.cpu(), loads.shape[1])
    return (loads / logcnt.clamp_min(1)).gather(1, phy2log.cpu()).view(len(loads), num_gpus, -1).sum(2)


def _global(loads: Floats, num_replicas: int, num_gpus: int) -> Ints:
    """``[N, E]`` loads → ``[N, P]`` experts of replicas, GPU by GPU."""
    placed, most = _global_with(_DIVISORS[0], loads, num_replicas, num_gpus)
    for divisor in _DIVISORS[1:]:
        far = np.nonzero(most > loads.sum(1) / num_gpus * (1 + _FAR))[0]
        if not far.size:
            break
        other, other_most = _global_with(divisor, loads[far], num_replicas, num_gpus)
        better = other_most < most[far]
        placed[far[better]], most[far[better]] = other[better], other_most[better]
    return placed


def _global_with(divisor: float, loads: Floats, num_replicas: int, num_gpus: int) -> tuple[Ints, Floats]:
    """A placement, and the load of the most loaded GPU of each row."""
    phy2log, per_replica = _replicate(loads, num_replicas, divisor)
    members = _refine(per_replica, _pack(per_replica, num_gpus)).reshape(len(loads), num_replicas)
    load = np.take_along_axis(per_replica, members, 1).reshape(len(loads), num_gpus, -1).sum(2)
    return np.take_along_axis(phy2log, members, 1), load.max(1)


def _hierarchical(loads: Floats, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Ints:
    """Does as `_global`, but keeps every group of experts on one node."""
    num_layers, num_experts = loads.shape
    if num_nodes == 1:
        return _global(loads, num_replicas, num_gpus)
    group_loads = loads.reshape(num_layers, num_groups, -1).sum(2)
    packed = _pack(group_loads, num_nodes)
    refined = _refine(group_loads, packed.copy())
    # Nodes that are closer together can still be harder to balance inside: the better of both, layer by layer.
    other = np.nonzero((packed != refined).any((1, 2)))[0]
    groups, layer = np.concatenate([packed, refined[other]]), np.concatenate([np.arange(num_layers), other])
    size = num_experts // num_groups
    experts = (groups[..., None] * size + np.arange(size)).reshape(len(layer), num_experts)
    of_nodes = np.take_along_axis(loads[layer], experts, 1).reshape(-1, num_experts // num_nodes)
    within = _global(of_nodes, num_replicas // num_nodes, num_gpus // num_nodes).reshape(len(layer), num_nodes, -1)
    within = within + np.arange(num_nodes)[:, None] * (num_experts // num_nodes)
    phy2log = np.take_along_axis(experts, within.reshape(len(layer), num_replicas), 1)
    load = gpu_loads(torch.from_numpy(loads[layer]), torch.from_numpy(phy2log), num_gpus).amax(1).numpy()
    better = load[num_layers:] < load[other]
    phy2log[other[better]] = phy2log[num_layers:][better]
    return phy2log[:num_layers]


def _replicate(loads: Floats, num_replicas: int, divisor: float) -> tuple[Ints, Floats]:
    """``[N, E]`` loads → ``[N, P]`` experts of replicas, and the load of each replica.

    One after another, a replica goes to the expert with the largest load / (replicas + divisor). With 0 that is the
    load per replica, which makes the heaviest replica as light as can be. Less than 0 favours experts with few
    replicas: their replicas get lighter, so that two of them fit on a GPU.
    """
    num_rows, num_experts = loads.shape
    rows = np.arange(num_rows)
    phy2log = np.empty((num_rows, num_replicas), np.int64)
    phy2log[:, :num_experts] = np.arange(num_experts)
    count = np.ones((num_rows, num_experts))
    claim = loads / (1 + divisor)
    for slot in range(num_experts, num_replicas):
        expert = claim.argmax(1)
        phy2log[:, slot] = expert
        count[rows, expert] += 1
        claim[rows, expert] = loads[rows, expert] / (count[rows, expert] + divisor)
    return phy2log, np.take_along_axis(loads / count, phy2log, 1)


def _pack(weights: Floats, num_packs: int) -> Ints:
    """``[N, P]`` weights → ``[N, packs, P/packs]`` indices: the heaviest left goes to the lightest open pack."""
    num_rows, num_items = weights.shape
    size = num_items // num_packs
    rows = np.arange(num_rows)
    members = np.empty((num_rows, num_packs, size), np.int64)
    filled = np.zeros((num_rows, num_packs), np.int64)
    load = np.zeros((num_rows, num_packs))  # infinite once a pack is full
    for item in np.argsort(-weights, axis=1, kind="stable").T:
        pack = load.argmin(1)
        index = filled[rows, pack]
        members[rows, pack, index] = item
        filled[rows, pack] = index + 1
        load[rows, pack] = np.where(index + 1 == size, np.inf, load[rows, pack] + weights[rows, item])
    return members


def _refine(weights: Floats, members: Ints) -> Ints:
    """Swaps items between packs, a heavy one with a light one, until none helps the heaviest; changes `members`.

    In each round the heavier half of the packs is paired with the lighter half, each time in another way. Of all pairs
    of items the one is swapped that comes closest to closing the gap by half.
    """
    num_rows, num_packs, size = members.shape
    num_heavy = num_packs // 2
    num_light = num_packs - num_heavy
    held = np.take_along_axis(weights, members.reshape(num_rows, -1), 1).reshape(members.shape)
    load = held.sum(2)
    # No packing is better than the mean, nor than the heaviest item among the lightest.
    ascending = np.sort(weights, axis=1)
    least = np.maximum(load.mean(1), ascending[:, -1] + ascending[:, : size - 1].sum(1))
    close = least * (1 + _CLOSE_ENOUGH)
    rows = np.nonzero(load.max(1) > close)[0]
    most, last_gain = load.max(1), np.zeros(num_rows, np.int64)
    for turn in range(_MAX_ROUNDS if num_heavy else 0):
        order = np.argsort(-load[rows], axis=1)
        heavy, light = order[:, :num_heavy], order[:, num_packs - 1 - (np.arange(num_heavy) + turn) % num_light]
        row = rows[:, None]
        goal = (load[row, heavy] - load[row, light]) / 2
        miss = held[row, heavy][..., :, None] - held[row, light][..., None, :]
        miss -= goal[..., None, None]
        flat: Any = np.abs(miss, out=miss).reshape(len(rows), num_heavy, size * size)
        best = flat.argmin(2)
        helps = np.take_along_axis(flat, best[..., None], 2)[..., 0] < goal * (1 - _CLOSE_ENOUGH)
        which, pair = np.nonzero(helps)
        swapped, a, b = rows[which], heavy[which, pair], light[which, pair]
        i, j = np.divmod(best[which, pair], size)
        for array in (members, held):
            array[swapped, a, i], array[swapped, b, j] = array[swapped, b, j], array[swapped, a, i]
        moved = held[swapped, b, j] - held[swapped, a, i]
        load[swapped, a] -= moved
        load[swapped, b] += moved
        now = load[rows].max(1)
        last_gain[rows[now < most[rows] * (1 - _CLOSE_ENOUGH)]] = turn
        most[rows] = now
        rows = rows[(now > close[rows]) & (turn - last_gain[rows] < _PATIENCE)]
        if not rows.size:
            break
    return members
