"""EPLB as its authors describe it, in plain loops: what `hybrid_ep.balance` is compared with.

Written from the description in DeepSeek's EPLB repository and in "DeepSeek-V3 Technical Report" (2024), sections 3.4.1
and 3.4.2. Groups of experts are packed to nodes, the experts of a node are replicated one by one where a replica has
most load, and replicas are packed to the node's GPUs. Both packings give the heaviest item left to the lightest pack
that has room.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["eplb_baseline"]


def eplb_baseline(weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Tensor:
    """Returns phy2log ``[layers, num_replicas]`` int64; arguments as of `rebalance_experts`."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    return torch.tensor([_layer(loads, num_replicas, num_groups, num_nodes, num_gpus) for loads in weight.tolist()])


def _layer(loads: list[float], num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> list[int]:
    size = len(loads) // num_groups
    group_loads = [sum(loads[group * size : (group + 1) * size]) for group in range(num_groups)]
    placed: list[int] = []
    for groups in _pack(group_loads, num_nodes):
        experts = [group * size + i for group in groups for i in range(size)]
        replicas = _replicate([loads[expert] for expert in experts], num_replicas // num_nodes)
        shares = [loads[experts[i]] / replicas.count(i) for i in replicas]
        for members in _pack(shares, num_gpus // num_nodes):
            placed += [experts[replicas[place]] for place in members]
    return placed


def _replicate(loads: Sequence[float], num_replicas: int) -> list[int]:
    replicas = list(range(len(loads)))
    count = [1] * len(loads)
    while len(replicas) < num_replicas:
        expert = max(range(len(loads)), key=lambda i: loads[i] / count[i])
        count[expert] += 1
        replicas.append(expert)
    return replicas


def _pack(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    load = [0.0] * num_packs
    size = len(weights) // num_packs
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        pack = min((p for p in range(num_packs) if len(packs[p]) < size), key=lambda p: load[p])
        packs[pack].append(item)
        load[pack] += weights[item]
    return packs
