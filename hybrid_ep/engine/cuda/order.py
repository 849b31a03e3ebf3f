"""The order of launches whose kernels use the same memory, or could keep each other from running."""

from __future__ import annotations

import weakref

import torch

from hybrid_ep.core.streams import current_raw_stream, is_capturing

__all__ = ["LaunchOrder"]

_last_low_latency: dict[int, weakref.ref[LaunchOrder]] = {}  # by device: whose low-latency launch was the last


class LaunchOrder:
    """Orders the launches of one engine after each other, whatever their streams.

    As long as all are on one stream that costs nothing. From the first change on, an event follows each launch, so that
    a launch on another stream waits for the one before and not for what else that stream holds.

    Attributes:
        free_stream: the stream on which the next low-latency launch does not need `begin`; None: there is none.
        free_event: the event to record after that launch, in place of `end`; None: there is none.

    Args:
        device_index: of this rank's GPU.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self.free_stream: int | None = None
        self.free_event: int | None = None
        self._last: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None  # made when streams first change
        self._is_recorded = False  # whether the event is recorded after the last launch
        self._ref = weakref.ref(self)

    def begin(self, *, is_low_latency: bool = False) -> int:
        """Orders the next launch on the current stream after the earlier ones; returns the stream.

        A low-latency launch also runs after the low-latency launches of all other buffers here. A kernel that receives
        waits on every SM. Two such kernels, of two buffers, could leave no SM for the sends that another rank waits
        for.
        """
        is_last = _last_low_latency.get(self._index) is self._ref
        if is_low_latency and not is_last:
            self._follow_other_buffers()
            is_last = True
        stream = current_raw_stream(self._index)
        if self._last is None or self._last.cuda_stream != stream:
            current = torch.cuda.current_stream(self._index)
            self._hold_back(current)
            self._last = current
        self._is_recorded = False
        self.free_stream = stream if is_last else None
        return stream

    def end(self) -> None:
        """Must be called after a call's last launch, and last use of memory that its next call may write."""
        if self._event is None or self._last is None or is_capturing(self._index):
            return
        self._event.record(self._last)
        self._is_recorded = True
        self.free_event = self._event.cuda_event

    def hold_back_current(self) -> None:
        """Makes the current stream wait for the engine's last launch."""
        current = torch.cuda.current_stream(self._index)
        if self._last is not None and self._last.cuda_stream != current.cuda_stream:
            self._hold_back(current)

    def _follow_other_buffers(self) -> None:
        """Makes the current stream wait for the last low-latency launch of another buffer."""
        last = _last_low_latency.get(self._index)
        other = None if last is None else last()
        if other is not None:
            other.hold_back_current()
            other.free_stream = None
        _last_low_latency[self._index] = self._ref

    def _hold_back(self, current: torch.cuda.Stream) -> None:
        if self._last is None:
            return
        if self._event is None:
            self._event = torch.cuda.Event()
        if not is_capturing(self._index):
            if self._is_recorded:
                current.wait_event(self._event)
            else:
                current.wait_stream(self._last)
            return
        # The first call of a capture waits for nothing: a capture begins when the device is idle, and could not wait
        # for work outside.
        with torch.cuda.stream(self._last):
            is_of_capture = is_capturing(self._index)
        if is_of_capture:
            current.wait_stream(self._last)
