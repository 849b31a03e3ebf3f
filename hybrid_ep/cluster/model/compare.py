"""The model beside results of `hybrid-ep bench`: its predictions for calls that were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_ep.cluster.model.machine import GPU_MEMORY, Machine
from hybrid_ep.cluster.model.predict import predict
from hybrid_ep.cluster.model.question import MODES, Question
from hybrid_ep.errors import ConfigError
from hybrid_ep.workload import Workload

__all__ = ["Comparison", "compare_results"]

# Calls of which every step runs on the GPU, or hides what runs on the host. A plain dispatch that waits for its counts
# also waits for the host.
_COMPARED = {
    "normal": ("dispatch: no sync", "dispatch: cached", "combine"),
    "permute": ("dispatch", "dispatch: cached", "combine"),
    "low-latency": (
        "dispatch",
        "combine",
        "dispatch: graph",
        "combine: graph",
        "dispatch: graph of 20",
        "combine: graph of 20",
    ),
}
_DEFAULT_SMS = 16


@dataclass(frozen=True)
class Comparison:
    """One measured call of one NVLink domain.

    Attributes:
        source: name of the file.
        gpu: ``H100`` or ``H200``.
        num_ranks, mode, dtype, routing, num_tokens, num_sms, operation: what was measured.
        measured_us: the median.
        model_us: of the model.
    """

    source: str
    gpu: str
    num_ranks: int
    mode: str
    dtype: str
    routing: str
    num_tokens: int
    num_sms: int | None
    operation: str
    measured_us: float
    model_us: float

    @property
    def error(self) -> float:
        return self.model_us / self.measured_us - 1


def compare_results(paths: Iterable[Path]) -> list[Comparison]:
    """Compares with what `hybrid-ep bench --json` wrote: calls of this library on GPUs of one domain.

    Raises:
        ConfigError: a file is of other GPUs.
    """
    return [one for path in paths for one in _compare(path.stem, json.loads(path.read_text(encoding="utf-8")))]


def _compare_call(
    source: str, gpu: str, num_ranks: int, mode: str, workload: Workload, num_sms: int | None, operation: str, us: float
) -> Comparison:
    """Compares with one measured call; `us` is its median."""
    asked = Question(
        workload,
        1,
        num_ranks,
        mode,
        num_sms or _DEFAULT_SMS,
        is_cached=operation.endswith("cached"),
        in_graph=operation.endswith("graph of 20"),
        machine=Machine(memory=GPU_MEMORY[gpu]),
    )
    model_us = predict(asked)[operation.startswith("combine")].total_us
    return Comparison(
        source,
        gpu,
        num_ranks,
        mode,
        workload.dtype,
        workload.routing,
        workload.num_tokens,
        num_sms,
        operation,
        us,
        model_us,
    )


def _compare(source: str, report: dict[str, Any]) -> list[Comparison]:
    gpu = next((name for name in GPU_MEMORY if name in report["device"]), None)
    if gpu is None:
        raise ConfigError(
            f"{source} is of {report['device']}; allowed: GPUs whose name contains {' or '.join(GPU_MEMORY)}"
        )
    found = []
    for outcome in report["outcomes"]:
        plan, candidate = outcome["plan"], outcome["candidate"]
        mode, num_sms = plan["mode"], candidate["num_sms"]
        if mode not in MODES or candidate["implementation"] != "hybrid_ep" or outcome["engine"] != "cuda":
            continue
        workload = Workload(**plan["workload"])
        for operation in outcome["operations"]:
            name, us = operation["name"], operation["median_us"]
            if name in _COMPARED[mode]:
                found.append(_compare_call(source, gpu, report["num_ranks"], mode, workload, num_sms, name, us))
    return found
