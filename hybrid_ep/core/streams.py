"""The stream of a call, and the event that later work waits for. On a CPU every call is finished when it returns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from hybrid_ep.checks import require_bool
from hybrid_ep.core.event import EventHandle, EventOverlap, as_overlap

_CURRENT_STREAM: AbstractContextManager[None] = contextlib.nullcontext()


# Returns the current CUDA stream of a GPU as kernels take it; makes no Stream object. A torch without CUDA has none.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def is_capturing(device_index: int) -> bool:
    """Returns whether the current stream of a GPU is being captured; torch asks that of the current GPU only."""
    if torch._C._cuda_getDevice() == device_index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device_index):
        return torch.cuda.is_current_stream_capturing()


class CommStream:
    """The communication stream of one buffer, made on first use.

    A call that is neither asynchronous nor waits for an event runs on the current stream, where ordering is free. Any
    other call runs on this stream, after the event (or, without one, after what the current stream holds).

    Args:
        device: of the buffer; None = the GPU that is current at each call. Streams are those of this GPU, whatever
            thread calls: a new thread begins with the first GPU.
        record_stream: method of the buffer's engine, which this object does not keep alive.
    """

    def __init__(
        self, device: torch.device | None, record_stream: Callable[[torch.Tensor, torch.Stream], None]
    ) -> None:
        self._device, self._record_stream = device, weakref.WeakMethod(record_stream)
        self._stream: torch.cuda.Stream | None = None

    def get(self) -> torch.Stream:
        """Returns the stream; on a machine without a GPU, the CPU's (empty) one."""
        if not torch.cuda.is_available():
            return torch.cpu.current_stream()  # type: ignore[return-value]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    def scope(
        self, previous_event: EventOverlap | EventHandle | None, async_finish: bool
    ) -> AbstractContextManager[None]:
        """Runs the block on the stream that the call asks for.

        Raises:
            ConfigError: `previous_event` is no event, or `async_finish` no bool.
        """
        if previous_event is None and async_finish is False:  # as most calls are
            return _CURRENT_STREAM
        previous = as_overlap("previous_event", previous_event)
        require_bool("async_finish", async_finish)
        if (previous is None and not async_finish) or not torch.cuda.is_available():
            return _CURRENT_STREAM
        return self._on_own_stream(previous, async_finish)

    @contextlib.contextmanager
    def _on_own_stream(self, previous_event: EventOverlap | None, async_finish: bool) -> Iterator[None]:
        stream = self.get()
        assert isinstance(stream, torch.cuda.Stream)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            if previous_event is not None and previous_event.event is not None:
                previous_event.event.current_stream_wait()
            else:
                stream.wait_stream(current)
            yield
        if not async_finish:
            current.wait_stream(stream)

    def finish(
        self,
        previous_event: EventOverlap | EventHandle | None,
        async_finish: bool,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> EventOverlap:
        """Returns the call's event.

        Args:
            previous_event: as in `scope`.
            async_finish: as in `scope`; False gives an event with nothing to wait for.
            tensors: inputs and outputs of the call, which both streams use.
        """
        if previous_event is None and not async_finish:
            return EventOverlap()
        if not torch.cuda.is_available():
            return EventOverlap(EventHandle())
        stream, current = self.get(), torch.cuda.current_stream(self._device)
        assert isinstance(stream, torch.cuda.Stream)
        record_stream = self._record_stream()
        assert record_stream is not None
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                record_stream(tensor, stream)
                record_stream(tensor, current)
        if not async_finish:
            return EventOverlap()
        with torch.cuda.stream(stream):
            return EventOverlap(EventHandle(), tensors)
