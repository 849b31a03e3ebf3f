"""The stream of a call on the GPU of its buffer, whatever GPU is current. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_ep.core import streams
from hybrid_ep.core.event import EventHandle, EventOverlap


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


class Engine:
    def __init__(self) -> None:
        self.users: list[tuple[object, object]] = []

    def record_stream(self, tensor: object, stream: object) -> None:
        self.users.append((tensor, stream))


def test_a_thread_whose_gpu_is_another_takes_the_streams_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins with GPU 0."""
    mine = torch.device("cuda", 1)
    asked: list[Any] = []

    class OwnStream(FakeStream):
        def __init__(self, device: object = None) -> None:
            asked.append(("made", device))

    def current(device: object = None) -> FakeStream:
        asked.append(("current", device))
        return FakeStream()

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        yield

    for name, fake in (("is_available", lambda: True), ("current_stream", current), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "Stream", OwnStream)
    monkeypatch.setattr(EventHandle, "__init__", lambda self: None)
    result, engine = mock.Mock(is_cuda=True), Engine()
    comm = streams.CommStream(mine, engine.record_stream)
    with comm.scope(None, True):
        pass
    assert isinstance(comm.finish(None, True, (result,)), EventOverlap)
    assert [(tensor, type(stream)) for tensor, stream in engine.users] == [(result, OwnStream), (result, FakeStream)]
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
