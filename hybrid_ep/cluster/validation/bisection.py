"""Finds why a job of many hosts fails or is slow although its hosts and pairs pass: by halving it.

A run is a job of several hosts that passed or failed. A round is a list of runs without a common host, which go on at
the same time. The next round follows from the runs so far, so that any scheduler can go on with it, also later.

1. A failed set is halved, at the border of NVLink domains as long as there are several. Hosts are never divided, so a
   run has all rails.
2. A part is filled up with hosts that passed elsewhere: their traffic leaves the domain, and the size stays.
3. If both halves of a failed set pass, the cause is between them. Quarters of both sides then run crosswise.
4. At last all hosts but those that are blamed run once more, so that a second cause is not missed.

A host is blamed if it is in no run that passed, alone is in all failed runs of its own, and one of these had hosts
beside it that passed elsewhere. Two hosts that pass elsewhere and fail together are an interaction. One host or one
pair needs at most 2·log2(n) rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import NamedTuple


class Run(NamedTuple):
    """A job of several hosts, and whether it passed."""

    hosts: frozenset[str]
    passed: bool


class Bisection(NamedTuple):
    """What is known after some rounds.

    Attributes:
        next_round: hosts of the runs that come next; empty where nothing more can be found.
        blamed: hosts of which each alone makes a run fail.
        together: sets of hosts that fail together, and pass otherwise.
        undecided: hosts of which one or several make runs fail; empty while there is a next round.
    """

    next_round: list[list[str]]
    blamed: list[str]
    together: list[list[str]]
    undecided: list[str]


def bisect(hosts: Sequence[str], domain_of: Mapping[str, str], runs: Sequence[Run]) -> Bisection:
    """Plans the next round, and names what the runs so far blame.

    Args:
        hosts: of the largest job, in the order in which they are halved.
        domain_of: host → NVLink domain; hosts that are not in it, or have an empty name, are a domain of their own.
        runs: of these hosts.
    """
    domains: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        domains[domain_of.get(host) or f"host {host}"].append(host)
    return _Search([*chain(*domains.values())], domains, runs).result()


class _Search:
    def __init__(self, hosts: list[str], domains: Mapping[str, list[str]], runs: Sequence[Run]) -> None:
        self._hosts, self._domains = hosts, domains
        self._domain_of = {host: name for name, members in domains.items() for host in members}
        self._passed = [run.hosts for run in runs if run.passed]
        self._good = frozenset().union(*self._passed)
        failed = {run.hosts for run in runs if not run.passed}
        self._failed = sorted(failed, key=lambda each: (len(each - self._good), len(each)))
        self._ran = {*self._failed, *self._passed}
        self._masks = dict.fromkeys(hosts, 0)
        for number, passed in enumerate(self._passed):
            for host in passed:
                self._masks[host] |= 1 << number
        self._blamed = [host for host in hosts if self._is_blamed(host)]

    def result(self) -> Bisection:
        explained = [failed for failed in self._failed if failed & {*self._blamed}]
        open_failures = [failed for failed in self._failed if failed not in explained]
        failing = frozenset().union(*self._failed)
        suspects = [host for host in self._hosts if host in failing - self._good and host not in self._blamed]
        planned: list[list[str]] = []
        together: list[list[str]] = []
        if suspects:
            planned = self._split(suspects)
        elif open_failures:
            found = [(failed, self._not_together(failed)) for failed in open_failures]
            planned, together = self._cross(*min(found, key=lambda each: len([*chain(*each[1])])))
        elif self._blamed:
            planned = self._rest()
        planned = [run for run in planned if len(run) > 1 and frozenset(run) not in self._ran]
        return Bisection(planned, self._blamed, together, [] if planned else suspects)

    def _is_blamed(self, host: str) -> bool:
        own = [failed for failed in self._failed if host in failed]
        if host in self._good or not any(failed - {host} <= self._good for failed in own):
            return False
        return frozenset.intersection(*own) == {host}

    def _split(self, suspects: list[str]) -> list[list[str]]:
        """Halves of what failed, each with hosts that passed."""
        parts: dict[frozenset[str], list[str]] = defaultdict(list)
        for host in suspects:
            parts[next(failed for failed in self._failed if host in failed)].append(host)
        pieces = [(part, failed) for failed, whole in parts.items() for part in self._halves(whole)]
        free = set(self._good)
        runs = [list(piece) for piece, _ in pieces]
        is_short = True
        while is_short:
            is_short = False
            for run, (piece, failed) in zip(runs, pieces, strict=True):
                if len(run) < max(2, len(self._hosts) // 2) and (more := self._partners(piece, failed, free)):
                    run += more
                    free -= {*more}
                    is_short = True
        done = [run for run, (piece, _) in zip(runs, pieces, strict=True) if len(run) > len(piece)]
        # Without hosts that passed, parts of one domain or single hosts meet those of another failed set, or wait.
        short = [each for run, each in zip(runs, pieces, strict=True) if run == each[0]]
        done += [piece for piece, _ in short if not self._needs_partner(piece)]
        short = [each for each in short if self._needs_partner(each[0])]
        while short:
            piece, failed = short.pop(0)
            others = (each for each in short if each[1] != failed and self._is_apart(piece, each[0]))
            other = next((each for each in others if frozenset(piece + each[0]) not in self._ran), None)
            if other is not None:
                short.remove(other)
                done.append(piece + other[0])
        return done or [piece for piece, _ in pieces]

    def _needs_partner(self, piece: list[str]) -> bool:
        return len(piece) == 1 or (len(self._domains) > 1 and len({self._domain_of[host] for host in piece}) == 1)

    def _is_apart(self, piece: list[str], other: list[str]) -> bool:
        return not {self._domain_of[host] for host in piece} & {self._domain_of[host] for host in other}

    def _partners(self, piece: list[str], failed: frozenset[str], free: set[str]) -> list[str]:
        """As many free hosts of another domain as the piece has of each; of its own domain where there is no other."""
        own = {self._domain_of[host] for host in piece}
        size = len(piece) // len(own)
        # A partner that shares all failed runs with the piece would not tell them apart.
        common = frozenset.intersection(*(each for each in self._failed if {*piece} & each)) if self._failed else failed
        usable = free - (common if free - common else frozenset())
        for name, members in self._domains.items():
            found = [host for host in members if host in usable]
            if name not in own and len(found) >= size:
                return found[:size]
        inside = [host for name in own for host in self._domains[name] if host in usable]
        return inside[:1] if len(self._domains) == 1 and len(piece) == 1 else []

    def _not_together(self, failed: frozenset[str]) -> list[list[str]]:
        """Groups of hosts of a failed set, joined by pairs that have not passed together; each passed elsewhere."""
        masks = {host: self._masks[host] for host in self._hosts if host in failed}
        return _components(masks)

    def _cross(self, failed: frozenset[str], parts: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
        """Runs that narrow down which hosts of a failed set fail together, or the hosts themselves."""
        if not parts:  # every two hosts of it passed in smaller runs
            return [], [[host for host in self._hosts if host in failed]]
        if len(failed) == 2:
            return [], parts
        planned = []
        for part in parts:
            one_side = [host for host in part if self._masks[host] & self._masks[part[0]]]
            sides = [self._halves(side) for side in (one_side, [host for host in part if host not in one_side])]
            planned += [[*left, *right] for left, right in zip(*sides, strict=False)]
        return planned, []

    def _rest(self) -> list[list[str]]:
        """All hosts but the blamed ones, equally many of each domain."""
        rest = [[host for host in members if host not in self._blamed] for members in self._domains.values()]
        rest = [members for members in rest if members]
        run = [host for members in rest for host in members[: min(map(len, rest))]]
        return [] if any({*run} <= passed for passed in self._passed) else [run]

    def _halves(self, part: list[str]) -> list[list[str]]:
        by_domain: dict[str, list[str]] = defaultdict(list)
        for host in part:
            by_domain[self._domain_of[host]].append(host)
        units = [*by_domain.values()] if len(by_domain) > 1 else [[host] for host in part]
        half = (len(units) + 1) // 2
        return [[*chain(*some)] for some in (units[:half], units[half:]) if some]


def _components(masks: Mapping[str, int]) -> list[list[str]]:
    """Groups of hosts that are joined by pairs whose masks have nothing in common."""
    by_mask: dict[int, list[str]] = defaultdict(list)
    for host, mask in masks.items():
        by_mask[mask].append(host)
    group_of = {mask: {mask} for mask in by_mask}
    for one, other in combinations(by_mask, 2):
        if not one & other and group_of[one] is not group_of[other]:
            joined = group_of[one] | group_of[other]
            group_of.update(dict.fromkeys(joined, joined))
    groups: Iterable[set[int]] = {id(group): group for group in group_of.values() if len(group) > 1}.values()
    return [[host for host in masks if masks[host] in group] for group in groups]
