"""Events between the compute and the communication stream; on a CPU, where calls finish before they return, no-ops."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from hybrid_ep.errors import ConfigError


class EventHandle:
    """A point on the stream that is current when it is made (nothing, on a machine without a GPU).

    Example:
        >>> hybrid_ep.EventHandle().current_stream_wait()
    """

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for this point. The host does not wait; without a GPU nothing does."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An `EventHandle` and the tensors that must live until it has passed.

    Used as a context manager, the block runs first and the current stream waits for the event at its end, so that what
    the block launches overlaps with the communication. ``with event(release_handle=True):`` drops the event and the
    tensors there.

    Args:
        event: the point to wait for; None = nothing to wait for.
        extra_tensors: kept alive as long as this object.

    Attributes:
        hook_after_wait: what `register_hook_after_wait` has registered; None after the wait.

    Raises:
        ConfigError: an argument has another type.

    Example:
        >>> x = torch.ones(2, 128, dtype=torch.bfloat16)
        >>> with hybrid_ep.Buffer(None) as buffer:
        ...     layout = buffer.get_dispatch_layout(torch.tensor([[0], [1]]), 2, async_finish=True)
        ...     with layout[-1]:
        ...         y = 2 * x  # beside the call; the current stream waits for the call at the end of the block
        >>> layout[0].tolist()
        [2]
    """

    event: EventHandle | None = None
    extra_tensors: tuple[torch.Tensor | None, ...] | None = None
    hook_after_wait: Callable[[], Any] | None = None
    _releases = False

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor | None, ...] | None = None
    ) -> None:
        if event is not None and not isinstance(event, EventHandle):
            raise ConfigError(f"event is {type(event).__name__}; allowed: EventHandle or None")
        if extra_tensors is not None and not isinstance(extra_tensors, tuple):
            raise ConfigError(f"extra_tensors is {type(extra_tensors).__name__}; allowed: tuple or None")
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes the current stream wait for the event. The host does not wait.

        Args:
            release_handle: drop the event and the tensors afterwards.

        Returns:
            What the hook of `register_hook_after_wait` returns; None without one.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = self.extra_tensors = None
        return result

    def wait(self) -> Any:
        """Calls `current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Calls `hook` once, after the next wait. That wait returns the hook's result.

        Raises:
            ConfigError: a hook is registered already, or it cannot be called.
        """
        if not callable(hook):
            raise ConfigError(f"hook is {type(hook).__name__}; allowed: a function without arguments")
        if self.hook_after_wait is not None:
            raise ConfigError("a hook is registered already; allowed: one for each wait")
        self.hook_after_wait = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        releases, self._releases = self._releases, False
        self.current_stream_wait(release_handle=releases)


def as_overlap(name: str, event: EventOverlap | EventHandle | None) -> EventOverlap | None:
    """An event that a caller hands in, in either form.

    Raises:
        ConfigError: it is neither.
    """
    if event is None or isinstance(event, EventOverlap):
        return event
    if not isinstance(event, EventHandle):
        raise ConfigError(f"{name} is {type(event).__name__}; allowed: EventHandle, EventOverlap or None")
    return EventOverlap(event)
