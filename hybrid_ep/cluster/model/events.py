"""Discrete events: processes that sleep and wait, on a clock that jumps from one event to the next.

A process is a generator. It yields a number of µs to sleep, or the name of an event to wait for. It runs again when
another process signals that event, and then checks by itself whether what it waits for has come.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from typing import TypeAlias

Process: TypeAlias = Generator["float | str", None, None]


class DeadlockError(Exception):
    """Processes wait for events that no process will signal; the message names the events."""


class Clock:
    """Runs processes in the order of time.

    Attributes:
        now: µs.
        num_events: that have happened.
    """

    def __init__(self) -> None:
        self.now, self.num_events = 0.0, 0
        self._queue: list[tuple[float, int, Process]] = []
        self._waiting: dict[str, list[Process]] = {}

    def start(self, process: Process, delay: float = 0.0) -> None:
        """Lets a process run after a delay."""
        self.num_events += 1
        heapq.heappush(self._queue, (self.now + delay, self.num_events, process))

    def signal(self, event: str) -> None:
        """Lets the processes run that wait for an event."""
        for process in self._waiting.pop(event, ()):
            self.start(process)

    def join(self, processes: Sequence[Process], event: str) -> Process:
        """Starts processes, and waits for `event`: that all of them have ended."""
        num_left = len(processes)

        def run(process: Process) -> Process:
            nonlocal num_left
            yield from process
            num_left -= 1
            if num_left == 0:
                self.signal(event)

        for process in processes:
            self.start(run(process))
        while num_left > 0:
            yield event

    def run(self) -> None:
        """Runs until every process has ended.

        Raises:
            DeadlockError: some processes wait, and nothing is left to happen.
        """
        while self._queue:
            self.now, _, process = heapq.heappop(self._queue)
            step = next(process, None)
            if isinstance(step, str):
                self._waiting.setdefault(step, []).append(process)
            elif step is not None:
                self.start(process, step)
        events = sorted(event for event, processes in self._waiting.items() for _ in processes)
        if events:
            raise DeadlockError(f"{len(events)} processes wait forever: {'; '.join(events[:6])}")
