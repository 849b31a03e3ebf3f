"""How likely a token goes to a group of experts: those of a rank, or those of a domain. Computed, not sampled.

A token takes K experts, one after the other, each in proportion to its popularity among those left. That is the same
as to give each expert a clock that rings after an exponential time, and to take the K that ring first (source: Kool,
van Hoof and Welling, "Stochastic Beams and Where to Find Them", 2019, section 2.3). So a group is touched if its first
clock rings before K others have rung:

    P(group) = ∫ W exp(−W t) P(fewer than K of the other experts have rung by t) dt,    W = the group's popularity

The number of others that have rung is a sum of independent 0s and 1s; its distribution is a product of polynomials of
degree 1, of which K coefficients are kept.
"""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import NDArray

from hybrid_ep.checks import require
from hybrid_ep.workload import HOT_SHARE, Workload, log_popularity

_NUM_NODES = 192  # of the quadrature: the sum over single experts is K to 9 digits
_Array = NDArray[np.float64]


def touched(workload: Workload, num_groups: int) -> _Array:
    """Returns the probability that a token goes to each group, ``[num_groups]`` float64.

    Args:
        workload: its experts, top-k, routing and seed.
        num_groups: of consecutive experts, all of one size; divides the number of experts.

    Raises:
        ConfigError: the groups are not of one size.
    """
    num_experts, topk = workload.num_experts, workload.num_topk
    require(num_experts % num_groups == 0, "experts", num_experts, f"multiples of {num_groups}")
    size = num_experts // num_groups
    if workload.routing == "skewed" and workload.exponent > 0:
        return _touched_by_clocks(np.exp(log_popularity(workload)), num_groups, topk)
    if workload.routing == "hot" and num_experts > topk:
        # A share of the tokens takes expert 0 and topk − 1 of the others; the rest takes topk of the others.
        others = np.full(num_groups, size)
        others[0] -= 1
        wants = np.array([_hit(num_experts - 1, int(n), topk - 1) for n in others])
        wants[0] = 1.0
        leaves = np.array([_hit(num_experts - 1, int(n), topk) for n in others])
        return HOT_SHARE * wants + (1 - HOT_SHARE) * leaves
    return np.full(num_groups, _hit(num_experts, size, topk))


def _hit(num_experts: int, size: int, num_drawn: int) -> float:
    """The probability that `num_drawn` of the experts, all equally likely, touch a group."""
    return 1 - comb(num_experts - size, num_drawn) / comb(num_experts, num_drawn)


def _touched_by_clocks(popularity: _Array, num_groups: int, topk: int) -> _Array:
    rates = popularity / popularity.sum()
    nodes, weights = np.polynomial.legendre.leggauss(_NUM_NODES)
    # [0, 1) to [0, ∞); half of the nodes lie below the time by which about topk clocks have rung.
    fraction = (nodes + 1) / 2
    times = _time_of(rates, topk) * fraction / (1 - fraction)
    weights = weights / 2 * _time_of(rates, topk) / (1 - fraction) ** 2
    rung = -np.expm1(-np.outer(times, rates))  # [nodes, E]
    size = len(rates) // num_groups
    # Of the experts before each group, and of those behind it: [groups + 1, nodes, topk].
    before = np.zeros((num_groups + 1, _NUM_NODES, topk))
    behind = np.zeros_like(before)
    before[0, :, 0] = behind[num_groups, :, 0] = 1
    for g in range(num_groups):
        before[g + 1] = _with_experts(before[g], rung[:, g * size : (g + 1) * size])
        end = num_groups - g
        behind[end - 1] = _with_experts(behind[end], rung[:, (end - 1) * size : end * size])
    # P(fewer than topk of both together) = Σ_i P(i before) P(fewer than topk − i behind).
    fewer = np.cumsum(behind, axis=2)[:, :, ::-1]
    few_others = np.einsum("gni,gni->gn", before[:num_groups], fewer[1:])
    of_group = rates.reshape(num_groups, size).sum(1)
    densities = of_group[:, None] * np.exp(-np.outer(of_group, times))
    found: _Array = (densities * few_others) @ weights
    return np.minimum(found, 1.0)


def _with_experts(counts: _Array, rung: _Array) -> _Array:
    """The distribution of how many have rung, ``[nodes, topk]``, with more experts, ``[nodes, experts]``."""
    counts = counts.copy()
    for e in range(rung.shape[1]):
        p = rung[:, e : e + 1]
        counts[:, 1:] += p * (counts[:, :-1] - counts[:, 1:])
        counts[:, :1] *= 1 - p
    return counts


def _time_of(rates: _Array, topk: int) -> float:
    """The time by which half of the clocks, or topk of them if that is sooner, have rung on average."""
    wanted, low, high = min(topk, len(rates) / 2), 0.0, 1.0
    while -np.expm1(-high * rates).sum() < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-middle * rates).sum() < wanted else (low, middle)
    return high
