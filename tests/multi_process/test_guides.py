"""Every block of Python on a page runs as it stands, on CPU ranks.

A block that makes a process group is a whole program, and a file of examples/, which test_examples.py runs. The other
blocks of a page run one after another in one namespace. What the page says that the reader has, such as a buffer,
`GIVEN` puts there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid_ep
from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.elastic import recover, waiting
from hybrid_ep.testing.cluster import RankError, VirtualCluster
from tests.conftest import RunRanks
from tests.multi_process.recovery_trials import Job
from tests.multi_process.recovery_trials import step as recovery_step

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


def is_program(block: str) -> bool:
    return "init_process_group" in block


BLOCKS = {str(p.relative_to(ROOT)): blocks_of(p) for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
PARTS = {page: parts for page, blocks in BLOCKS.items() if (parts := [b for b in blocks if not is_program(b)])}
FRAGMENTS = [page for page in PARTS if page not in ("README.md", "docs/elastic.md")]


# ---- what a page's reader has ----


def _hybrid_tensors() -> dict[str, Any]:
    tokens, hidden, experts = 4, 128, 2 * NUM_RANKS
    routing_map = torch.rand(tokens, experts).argsort(1) < 2
    return {
        "group": dist.group.WORLD,
        "T": tokens,
        "M": tokens,
        "H": hidden,
        "E": experts,
        "R": NUM_RANKS,
        "K": 2,
        "x": torch.randn(tokens, hidden).bfloat16(),
        "routing_map": routing_map,
        "probs": torch.rand(tokens, experts) * routing_map,
        "topk_idx": torch.tensor([[0, 3]] * tokens),
        "topk_weights": torch.rand(tokens, 2),
        "grouped_gemm": lambda rows, counts: rows,
    }


def _balanced_job() -> dict[str, Any]:
    """Two ranks of two experts with two spare slots each; top-2 of three tokens."""
    tokens, hidden, local = 3, 128, 2
    topk_idx = torch.tensor([[0, 1]] * tokens)
    return {
        "buffer": hybrid_ep.Buffer(dist.group.WORLD),
        "mapping": torch.tensor([[2, 3], [0, 1]]),
        "experts": [torch.ones(local, hidden, hidden, dtype=torch.bfloat16)],
        "num_ranks": NUM_RANKS,
        "rank": dist.get_rank(),
        "num_spare": 2,
        "counts": torch.tensor([[tokens, tokens, 0, 0]] * NUM_RANKS),
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(tokens, 2),
        "x": torch.ones(tokens, hidden, dtype=torch.bfloat16),
        "S": tokens,
        "K": 2,
        "home_weights": torch.ones(local, hidden, hidden, dtype=torch.bfloat16),
        "spare_weights": torch.ones(2, hidden, hidden, dtype=torch.bfloat16),
    }


def _graph_and_mask() -> dict[str, Any]:
    buffer = hybrid_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True)
    graph = SimpleNamespace(replay=lambda: None)  # a CPU captures nothing
    return {"buffer": buffer, "graph": graph, "mask": torch.zeros(NUM_RANKS, dtype=torch.int32)}


GIVEN: dict[tuple[str, int], Callable[[], dict[str, Any]]] = {  # before the block of this number
    ("docs/balance.md", 4): _balanced_job,
    ("docs/balance.md", 5): lambda: {"buffer": hybrid_ep.HybridEPBuffer(dist.group.WORLD, 128, 3, 2)},
    ("docs/interfaces.md", 0): _hybrid_tensors,
    ("docs/low_latency.md", 0): _graph_and_mask,
}


def _run(page: str, folder: str) -> None:
    os.chdir(folder)
    names: dict[str, Any] = {}
    for number, block in enumerate(PARTS[page]):
        if (page, number) in GIVEN:
            names |= GIVEN[page, number]()
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    for value in list(names.values()):
        if isinstance(value, (hybrid_ep.Buffer, hybrid_ep.HybridEPBuffer, hybrid_ep.ElasticBuffer)):
            value.close()


# ---- tests ----


@pytest.mark.parametrize("page", FRAGMENTS)
def test_parts_of_programs_run(page: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, _run, page, str(tmp_path))


def test_whole_programs_are_examples() -> None:
    """Without the docstring, which says how to start it."""
    bodies = [path.read_text().split('"""\n\n', 1)[1] for path in (ROOT / "examples").glob("*.py")]
    programs = [(page, block) for page, blocks in BLOCKS.items() for block in blocks if is_program(block)]
    assert len(programs) >= 2
    assert [page for page, block in programs if block not in bodies] == []


def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    (program,) = BLOCKS["README.md"]
    path = tmp_path / "example.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("128 tokens came back\n")


# ---- a lost rank, and one that comes ----

_VICTIM = 2
_PLACEMENT = ExpertPlacement(((0, 1, 1, 2, 2, 0),), 3, 3, 3)


def _die(buffer: Any, placement: Any, weights: Any) -> None:
    if buffer.rank == _VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    recovery_step(Job(buffer, placement), 0)


_survivor: list[Any] = []  # of this process: its buffer and its placement


def _survive(blocks: list[str]) -> tuple[int, list[list[str]]]:
    """The block that recovers, and then the one of low-latency calls, without another loss."""
    buffer = hybrid_ep.Buffer(dist.group.WORLD, timeout_s=3.0)
    mine = [str(expert) for expert in _PLACEMENT.experts[0][2 * buffer.rank : 2 * buffer.rank + 2]]
    names: dict[str, Any] = {"step": _die, "buffer": buffer, "placement": _PLACEMENT, "weights": [mine]}
    exec(blocks[0], names)
    with hybrid_ep.Buffer(names["buffer"].group, 0, 1 << 20, low_latency_mode=True) as low:
        x, slots = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
        exec(blocks[1], names | {"buffer": low, "x": x, "slots": slots, "max_tokens": 2})
    _survivor[:] = [names["buffer"], names["placement"]]
    return names["buffer"].group_size, names["weights"]


def _admit() -> int:
    buffer, placement = _survivor
    while not waiting(buffer):
        time.sleep(0.05)
    return recover(buffer, placement, _load).buffer.group_size


def _come(block: str, port: int) -> int:
    names: dict[str, Any] = {"address": "127.0.0.1", "port": port, "load_expert": _load}
    exec(block, names)
    return names["buffer"].group_size


def _load(layer: int, expert: int) -> str:
    return str(expert)


def test_the_guide_to_lost_ranks_runs() -> None:
    blocks = PARTS["docs/elastic.md"]
    with VirtualCluster(3) as cluster:
        cluster.start(_survive, blocks)
        with pytest.raises(RankError):
            cluster.collect([_VICTIM], limit_s=60)
        survivors = cluster.collect([0, 1], limit_s=60)
        assert survivors == [(2, [["0", "1"]]), (2, [["1", "2"]])]
        cluster.replace(_VICTIM)
        cluster.start(_admit, ranks=[0, 1])
        cluster.start(_come, blocks[2], cluster.port, ranks=[_VICTIM])
        assert cluster.collect([0, 1, _VICTIM], limit_s=60) == [3, 3, 3]
