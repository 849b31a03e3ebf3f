"""Memory of handles: how pieces are cut, and that a chunk is kept for every stream that uses it. No GPU is needed."""

from __future__ import annotations

import weakref

import pytest
import torch

pytest.importorskip("hybrid_ep._cuda")
from hybrid_ep.engine.cuda.route import Chunk, route_memory

CPU = torch.device("cpu")


class RecordedMemory:
    """Stands for a chunk's memory and notes the streams that torch is told of."""

    device = CPU

    def __init__(self) -> None:
        self.recorded: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.recorded.append(stream)


def test_pieces_stand_side_by_side() -> None:
    memory = route_memory(CPU)
    chunk, first = memory.take(33, 7, alone=False)
    same, second = memory.take(32, 7, alone=False)
    assert same is chunk
    assert first == chunk.memory.data_ptr()
    assert second - first == 256
    other, _ = memory.take(32, 8, alone=False)
    assert other is not chunk, "streams do not share a chunk"
    assert memory.take(32, 7, alone=False) == (chunk, second + 128)


def test_a_piece_never_passes_the_end() -> None:
    memory = route_memory(CPU)
    chunk, _ = memory.take(1, 7, alone=False)
    size = chunk.memory.nbytes
    ints_left = (size - 128) // 4
    assert memory.take(ints_left + 1, 7, alone=False)[0] is not chunk
    large, begin = memory.take(size, 7, alone=False)
    assert (large.memory.nbytes, begin) == (4 * size, large.memory.data_ptr())
    chunk, first = memory.take(1, 8, alone=False)
    assert memory.take(ints_left, 8, alone=False) == (chunk, first + 128), "the last piece"
    assert memory.take(1, 8, alone=False)[0] is not chunk


def test_a_piece_alone_has_its_chunk_for_itself() -> None:
    memory = route_memory(CPU)
    alone, begin = memory.take(33, 7, alone=True)
    assert (alone.memory.nbytes, begin) == (256, alone.memory.data_ptr())
    assert memory.take(33, 7, alone=False)[0] is not alone


def test_dropped_chunks_live_as_long_as_their_pieces() -> None:
    memory = route_memory(CPU)
    chunk, _ = memory.take(1, 7, alone=False)
    kept = weakref.ref(chunk)
    memory.clear()
    assert memory.take(1, 7, alone=False)[0] is not chunk
    assert kept() is chunk
    del chunk
    assert kept() is None


def test_a_chunk_is_kept_for_every_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, memory = Chunk(CPU, 256, 7), RecordedMemory()
    chunk.memory = memory  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    chunk.note_use(7)
    assert memory.recorded == [], "its own stream needs no record"
    for _ in range(2):
        chunk.note_use(8)
    assert memory.recorded == ["the current stream"]
    chunk.note_use(9)
    assert len(memory.recorded) == 2
