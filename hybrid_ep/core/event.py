"""Events between the compute and the communication stream; on a CPU, where calls finish before they return, no-ops."""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point on the stream that is current when it is made (nothing, on a machine without a GPU)."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for this point; the host goes on."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An `EventHandle` and the tensors that must live until it has passed.

    Used as a context manager, the block runs first and the current stream waits for the event at its end, so that what
    the block launches overlaps with the communication.

    Args:
        event: the point to wait for; None = nothing to wait for.
        extra_tensors: kept alive as long as this object.
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor | None, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host goes on."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.current_stream_wait()
