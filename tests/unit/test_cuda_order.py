"""Which stream waits for which, tested with streams that only record their calls. No GPU is needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hybrid_ep.core import streams
from hybrid_ep.core.event import EventHandle, EventOverlap

pytest.importorskip("hybrid_ep._cuda")
from hybrid_ep.engine.cuda import order as order_module
from hybrid_ep.engine.cuda.order import LaunchOrder

INDEX = 0


class FakeStream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waits: list[object] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append(other)

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(("event", event.recorded_on))


class FakeEvent:
    recorded_on: FakeStream | None = None
    cuda_event = 0

    def record(self, stream: FakeStream) -> None:
        self.recorded_on, self.cuda_event = stream, 7


class Device:
    """A GPU with a current stream, and streams that are being captured."""

    def __init__(self) -> None:
        self.current = FakeStream(1)
        self.captured: set[int] = set()

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(order_module, "current_raw_stream", lambda index: made.current.cuda_stream)
    monkeypatch.setattr(order_module, "is_capturing", lambda index: made.current.cuda_stream in made.captured)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(order_module, "_last_low_latency", {})
    return made


def test_launches_on_one_stream_cost_nothing(device: Device) -> None:
    order = LaunchOrder(INDEX)
    for _ in range(3):
        assert order.begin() == 1
        order.end()
    assert device.current.waits == []
    assert order._event is None


def test_another_stream_waits_for_the_launch_and_not_for_the_stream(device: Device) -> None:
    order, first, second = LaunchOrder(INDEX), device.current, FakeStream(2)
    order.begin()
    order.end()
    with device.on(second):
        order.begin()
        order.end()
    assert second.waits == [first], "nobody knew that there would be another"
    order.begin()
    order.end()
    assert first.waits == [("event", second)]


def test_a_call_that_failed_has_no_event(device: Device) -> None:
    order, first, second = LaunchOrder(INDEX), device.current, FakeStream(2)
    order.begin()
    with device.on(second):
        order.begin()
        order.end()
        order.begin()  # and an error
    order.begin()
    assert first.waits == [second]


def test_streams_of_a_capture_wait_for_each_other_only(device: Device) -> None:
    order, captured, also = LaunchOrder(INDEX), FakeStream(2), FakeStream(3)
    device.captured = {2, 3}
    order.begin()
    with device.on(captured):
        order.begin()
        order.end()
    assert captured.waits == []
    with device.on(also):
        order.begin()
        order.end()
    assert also.waits == [captured]


def test_low_latency_launches_of_all_buffers_run_one_after_another(device: Device) -> None:
    """Kernels that wait for ranks on every SM may not meet those of another buffer there."""
    one, other, first, second = LaunchOrder(INDEX), LaunchOrder(INDEX), device.current, FakeStream(2)
    one.begin(is_low_latency=True)
    one.end()
    with device.on(second):
        other.begin(is_low_latency=True)
        other.end()
        other.begin(is_low_latency=True)
        other.end()
    assert second.waits == [first]
    one.begin(is_low_latency=True)
    one.end()
    assert first.waits == [second]
    with device.on(second):
        other.begin(is_low_latency=True)
    assert second.waits == [first, ("event", first)]


def test_a_low_latency_launch_that_follows_one_of_its_buffer_needs_an_event_at_most(device: Device) -> None:
    one, other, first, second = LaunchOrder(INDEX), LaunchOrder(INDEX), device.current, FakeStream(2)
    assert one.free_stream is None
    one.begin(is_low_latency=True)
    one.end()
    assert (one.free_stream, one.free_event) == (first.cuda_stream, None)
    with device.on(second):
        one.begin(is_low_latency=True)
        one.end()
    assert (one.free_stream, one.free_event) == (second.cuda_stream, 7), "another stream may come again"
    other.begin()
    assert other.free_stream is None, "the last low-latency launch is that of another buffer"
    other.begin(is_low_latency=True)
    assert (other.free_stream, one.free_stream) == (first.cuda_stream, None)


def test_a_buffer_that_is_gone_holds_nobody_back(device: Device) -> None:
    one, other, second = LaunchOrder(INDEX), LaunchOrder(INDEX), FakeStream(2)
    one.begin(is_low_latency=True)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    with device.on(second):
        other.begin(is_low_latency=True)
    assert second.waits == []


def test_a_thread_whose_gpu_is_another_takes_the_streams_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins with GPU 0."""
    mine = torch.device("cuda", 1)
    asked: list[Any] = []

    class OwnStream(FakeStream):
        def __init__(self, device: object = None) -> None:
            asked.append(("made", device))
            super().__init__(7)

    def current(device: object = None) -> FakeStream:
        asked.append(("current", device))
        return FakeStream(1)

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        yield

    for name, fake in (("is_available", lambda: True), ("current_stream", current), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "Stream", OwnStream)
    monkeypatch.setattr(EventHandle, "__init__", lambda self: None)
    comm = streams.CommStream(mine)
    with comm.scope(None, True):
        pass
    assert isinstance(comm.finish(None, True, ()), EventOverlap)
    assert asked
    assert {given for _, given in asked} == {mine}


def test_a_capture_is_looked_for_on_the_gpu_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def on(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    assert not streams.is_capturing(0)
    assert streams.is_capturing(1)
