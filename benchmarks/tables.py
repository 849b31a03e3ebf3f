"""Tables of docs/measured that repeat figures of benchmarks/results: `python -m benchmarks.tables` writes them again.

A comment `<!-- table: NAME GPUS -->` on a page stands before the table that is replaced.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "docs/measured" / name for name in ("cuda_engine.md", "low_latency.md")]
GPUS = (2, 4, 8)
_TABLE = re.compile(r"(<!-- table: (\w+)((?: \d+)?) -->\n\n)(?:\|.*\n)*")

TOKENS = (1, 8, 64, 128, 512)
LOW_LATENCY = [  # label, dtype of the dispatch, operation
    ("FP8 dispatch, in a graph", "fp8", "dispatch: graph"),
    ("without a graph", "fp8", "dispatch"),
    ("one of 20", "fp8", "dispatch: graph of 20"),
    ("with a hook, send", "fp8", "dispatch: send"),
    ("with a hook, receive", "fp8", "dispatch: receive"),
    ("BF16 dispatch, in a graph", "bf16", "dispatch: graph"),
    ("without a graph", "bf16", "dispatch"),
    ("one of 20", "bf16", "dispatch: graph of 20"),
    ("BF16 combine, in a graph", "bf16", "combine: graph"),
    ("without a graph", "bf16", "combine"),
    ("one of 20", "bf16", "combine: graph of 20"),
    ("with a hook, send", "bf16", "combine: send"),
    ("with a hook, receive", "bf16", "combine: receive"),
]
WIRE = [  # label, dtype, operation; none is the wire alone
    ("push, 14,336 B", "bf16", None),
    ("dispatch bf16", "bf16", "dispatch"),
    ("without a sync", "bf16", "dispatch: no sync"),
    ("combine bf16", "bf16", "combine"),
    ("push, 7,168 B", "fp8", None),
    ("dispatch FP8", "fp8", "dispatch"),
    ("without a sync", "fp8", "dispatch: no sync"),
]
SHAPES = [  # label, file, its plan, operation
    ("dispatch bf16, by expert", "figures", {"mode": "permute", "dtype": "bf16"}, "dispatch"),
    ("dispatch FP8, by expert", "figures", {"mode": "permute", "dtype": "fp8"}, "dispatch"),
    ("combine bf16, by expert", "figures", {"mode": "permute", "dtype": "bf16"}, "combine"),
    ("dispatch bf16, one hot expert", "figures", {"routing": "hot", "dtype": "bf16"}, "dispatch"),
    ("combine bf16, one hot expert", "figures", {"routing": "hot", "dtype": "bf16"}, "combine"),
    ("dispatch bf16, 32,768 tokens", "batch_sizes", {"num_tokens": 32768, "dtype": "bf16"}, "dispatch"),
    ("combine bf16, 32,768 tokens", "batch_sizes", {"num_tokens": 32768, "dtype": "bf16"}, "combine"),
    ("dispatch bf16, 256 tokens", "batch_sizes", {"num_tokens": 256, "dtype": "bf16"}, "dispatch"),
    ("the same without a sync", "batch_sizes", {"num_tokens": 256, "dtype": "bf16"}, "dispatch: no sync"),
    ("combine bf16, 256 tokens", "batch_sizes", {"num_tokens": 256, "dtype": "bf16"}, "combine"),
]


@cache
def _results(file: str, gpus: int) -> Any:
    return json.loads((RESULTS / f"{file}_{gpus}gpu.json").read_text())


def measured(file: str, gpus: int, operation: str, *, num_sms: int | None, wire: bool = False, **plan: object) -> Any:
    """The one operation of `file` whose plan and workload have the values of `plan`; KeyError if there is not one."""
    found = [
        candidate
        for outcome in _results(file, gpus)["wire" if wire else "outcomes"]
        if num_sms in (None, outcome["candidate"]["num_sms"])
        and all((outcome["plan"] | outcome["plan"]["workload"])[name] == value for name, value in plan.items())
        for candidate in outcome["operations"]
        if candidate["name"] == operation
    ]
    if len(found) != 1:
        raise KeyError(f"{file}_{gpus}gpu: {len(found)} times {operation!r} with {num_sms} SMs and {plan}")
    return found[0]


def _us(operation: Any) -> str:
    us = operation["median_us"]
    return f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def low_latency(gpus: int) -> str:
    """Medians by call and tokens, and the wire with 128 tokens beside the three calls."""
    rows = []
    for label, dtype, operation in LOW_LATENCY:
        cells = [
            _us(measured("low_latency", gpus, operation, num_sms=None, dtype=dtype, num_tokens=tokens))
            for tokens in TOKENS
        ]
        call = operation.partition(":")[0]
        push = measured("low_latency", gpus, call, num_sms=None, wire=True, dtype=dtype, num_tokens=128)
        rows.append([label, *cells, _us(push) if label.endswith(", in a graph") else ""])
    return _rows([f"µs, {gpus} GPUs", "1 token", *map(str, TOKENS[1:]), "the wire, 128"], rows)


def wire(gpus: int) -> str:
    """Medians of 4096 tokens by SMs, beside the push of the same rows."""
    plan = {"mode": "normal", "routing": "uniform"}
    rows = [
        [str(num_sms)]
        + [
            _us(measured("figures", gpus, name or "dispatch", num_sms=num_sms, wire=name is None, dtype=dtype, **plan))
            for _, dtype, name in WIRE
        ]
        for num_sms in (8, 12, 16, 24, 32)
    ]
    return _rows(["SMs", *(label for label, _, _ in WIRE)], rows)


def shapes() -> str:
    """Other calls with 16 SMs: µs and GB/s of received rows for each number of GPUs."""
    rows = []
    for label, file, plan, operation in SHAPES:
        found = [measured(file, gpus, operation, num_sms=16, **plan) for gpus in GPUS]
        rows.append([label, *(cell for one in found for cell in (_us(one), f"{one['gbps']:.0f}"))])
    return _rows(["16 SMs", *(name for gpus in GPUS for name in (f"{gpus} GPUs: µs", "GB/s"))], rows)


TABLES = {"low_latency": low_latency, "wire": wire, "shapes": shapes}


def with_tables(page: str) -> str:
    """The page with each marked table as the results have it."""
    return _TABLE.sub(lambda found: found[1] + TABLES[found[2]](*map(int, found[3].split())), page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text()))
