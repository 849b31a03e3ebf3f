"""Discrete events: processes that sleep and wait, on a clock that jumps from one event to the next.

A process is a generator. It yields a number of µs to sleep, or a `Gate` to wait for: then it runs again when somebody
opens the gate, and looks itself whether what it waits for has come. If nothing is left to happen while processes wait,
they wait forever: that is a deadlock, and is raised.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import TypeAlias

__all__ = ["Clock", "DeadlockError", "Gate", "Process"]


class DeadlockError(Exception):
    """Processes wait for events that no process will cause: a deadlock.

    Attributes:
        waits: what each of them waits for.
    """

    def __init__(self, waits: list[str]) -> None:
        super().__init__(f"{len(waits)} processes wait forever: {'; '.join(waits[:6])}")
        self.waits = waits


class Gate:
    """A place at which processes wait for what its name says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: list[Process] = []


Process: TypeAlias = Generator["float | Gate", None, None]


class Clock:
    """Runs processes in the order of time.

    Attributes:
        now: µs.
        num_events: that have happened.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Process]] = []
        self._waiting: dict[Process, Gate] = {}

    def start(self, process: Process, delay: float = 0.0) -> None:
        """Lets a process begin."""
        self._push(delay, process)

    def open(self, gate: Gate) -> None:
        """Lets those run that wait at a gate."""
        waiting, gate.waiting = gate.waiting, []
        for process in waiting:
            del self._waiting[process]
            self._push(0.0, process)

    def run(self) -> None:
        """Runs until every process has ended.

        Raises:
            DeadlockError: some wait, and nothing is left to happen.
        """
        events = self._events
        while events:
            self.now, _, process = heapq.heappop(events)
            step = next(process, None)
            if step is None:
                continue
            if isinstance(step, Gate):
                step.waiting.append(process)
                self._waiting[process] = step
            else:
                self._push(step, process)
        if self._waiting:
            raise DeadlockError(sorted(gate.name for gate in self._waiting.values()))

    def _push(self, delay: float, process: Process) -> None:
        self.num_events += 1
        heapq.heappush(self._events, (self.now + delay, self.num_events, process))
