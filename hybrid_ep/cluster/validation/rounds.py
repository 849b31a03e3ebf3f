"""Pairs of hosts in rounds: a round-robin tournament by the circle method.

Hosts are placed on a circle of n − 1 places, the last one in the middle. In round r the middle meets the host at place
r, and the places r + d and r − d meet each other. Turning by one place each round lets every pair meet exactly once:

    round 0 of a…f        e   b                 a meets f, b meets e, c meets d
                        a   f                   next round: b meets f, c meets a, d meets e
                          d   c

With an odd number of hosts the middle is empty, and the host that would meet it has no partner in this round. Rounds
are made one at a time, from their number alone, so that a thousand hosts (999 rounds, 499,500 pairs) cost no more
memory than their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid_ep.errors import ConfigError


@dataclass(frozen=True)
class Round:
    """Pairs that may be tested at the same time.

    Attributes:
        pairs: disjoint pairs of hosts.
        bye: the host that rests, where their number is odd.
    """

    pairs: tuple[tuple[str, str], ...]
    bye: str | None


def num_rounds(num_hosts: int) -> int:
    """Rounds of the whole tournament: n − 1, or n where n is odd."""
    return num_hosts - 1 + num_hosts % 2 if num_hosts > 1 else 0


def rounds(hosts: Sequence[str], limit: int | None = None) -> Iterator[Round]:
    """Yields rounds of disjoint pairs; no pair comes twice.

    Args:
        hosts: names, each once.
        limit: so many rounds, evenly spread over the tournament, in each of which every host is tested (but for the bye
            of an odd number); None, or as many as there are: every pair.

    Raises:
        ConfigError: a host is given twice, or the limit is below 1.
    """
    seen: set[str] = set()
    for host in hosts:
        if host in seen:
            raise ConfigError(f"host {host!r} is given twice; allowed: each host once")
        seen.add(host)
    if limit is not None and limit < 1:
        raise ConfigError(f"rounds is {limit}; allowed: 1 or more")
    total = num_rounds(len(hosts))
    chosen = total if limit is None else min(limit, total)
    return (_round(hosts, index * total // chosen) for index in range(chosen))


def _round(hosts: Sequence[str], turn: int) -> Round:
    places = num_rounds(len(hosts))  # of the circle: as many as rounds
    pairs = [
        (hosts[(turn + distance) % places], hosts[(turn - distance) % places])
        for distance in range(1, (places + 1) // 2)
    ]
    if len(hosts) % 2:
        return Round(tuple(pairs), bye=hosts[turn])
    return Round(((hosts[turn], hosts[-1]), *pairs), bye=None)
