"""Tables of the pages of figures, made of benchmarks/results: `python -m benchmarks.tables` writes them again.

A comment `<!-- table: NAME FILE... -->` on a page stands before the table that is replaced.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / name for name in ("README.md", "docs/figures_h200.md", "docs/figures_h100.md")]
_TABLE = re.compile(r"(<!-- table: (\w+)((?: [\w/]+)+) -->\n\n)(?:\|.*\n)*")

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
# label, plan, operation
SHAPES: list[tuple[str, dict[str, object], str]] = [
    ("dispatch bf16, by expert", {"mode": "permute", "dtype": "bf16"}, "dispatch"),
    ("dispatch FP8, by expert", {"mode": "permute", "dtype": "fp8"}, "dispatch"),
    ("combine bf16, by expert", {"mode": "permute", "dtype": "bf16"}, "combine"),
    ("dispatch bf16, one hot expert", {"mode": "normal", "routing": "hot", "dtype": "bf16"}, "dispatch"),
    ("combine bf16, one hot expert", {"mode": "normal", "routing": "hot", "dtype": "bf16"}, "combine"),
]
BATCHES: list[tuple[str, dict[str, object], str]] = [
    ("dispatch bf16, 32,768 tokens", {"mode": "normal", "num_tokens": 32768, "dtype": "bf16"}, "dispatch"),
    ("combine bf16, 32,768 tokens", {"mode": "normal", "num_tokens": 32768, "dtype": "bf16"}, "combine"),
    ("dispatch bf16, 256 tokens", {"mode": "normal", "num_tokens": 256, "dtype": "bf16"}, "dispatch"),
    ("the same without a sync", {"mode": "normal", "num_tokens": 256, "dtype": "bf16"}, "dispatch: no sync"),
    ("combine bf16, 256 tokens", {"mode": "normal", "num_tokens": 256, "dtype": "bf16"}, "combine"),
]
NORMAL: dict[str, object] = {"mode": "normal", "num_tokens": 4096}
FEW: dict[str, object] = {"mode": "low-latency", "num_tokens": 128}
# Times of the GPU alone: no row waits for the host. label, plan, operation
BESIDE: list[tuple[str, dict[str, object], str]] = [
    ("dispatch, bf16", NORMAL | {"dtype": "bf16"}, "dispatch: no sync"),
    ("dispatch, fp8", NORMAL | {"dtype": "fp8"}, "dispatch: no sync"),
    ("combine, bf16", NORMAL | {"dtype": "bf16"}, "combine"),
    ("low-latency dispatch, fp8", FEW | {"dtype": "fp8"}, "dispatch: graph"),
    ("low-latency combine, bf16", FEW | {"dtype": "fp8"}, "combine: graph"),
    ("low-latency dispatch, second half alone (hook)", FEW | {"dtype": "fp8"}, "dispatch: receive"),
]


@cache
def results(file: str) -> Any:
    """The document of one file."""
    return json.loads((RESULTS / f"{file}.json").read_text())


def measured(file: str, operation: str, *, num_sms: int | None, wire: bool = False, **plan: object) -> Any:
    """The one operation of `file` whose plan and workload have the values of `plan`; KeyError if there is not one."""
    found = [
        candidate
        for outcome in results(file)["wire" if wire else "outcomes"]
        if num_sms in (None, outcome["candidate"]["num_sms"])
        and all((outcome["plan"] | outcome["plan"]["workload"])[name] == value for name, value in plan.items())
        for candidate in outcome["operations"]
        if candidate["name"] == operation
    ]
    if len(found) != 1:
        raise KeyError(f"{file}: {len(found)} times {operation!r} with {num_sms} SMs and {plan}")
    return found[0]


def best_us(file: str, implementation: str, operation: str, **plan: object) -> float:
    """The least median of an implementation over the numbers of SMs that were tried, in µs."""
    found = [
        float(candidate["median_us"])
        for outcome in results(file)["outcomes"]
        if outcome["candidate"]["implementation"] == implementation
        and all((outcome["plan"] | outcome["plan"]["workload"])[name] == value for name, value in plan.items())
        for candidate in outcome["operations"]
        if candidate["name"] == operation
    ]
    return min(found)


def beside(file: str) -> str:
    """The medians of hybrid_ep and DeepEP V1 of one run, and which is faster."""
    rows = []
    for label, plan, operation in BESIDE:
        ours, theirs = (best_us(file, name, operation, **plan) for name in ("hybrid_ep", "deep_ep"))
        times = f"{theirs / ours:.1f} × as fast" if theirs > ours else f"{ours / theirs:.2f} × the time: slower"
        rows.append([label, *(f"{us:.1f}" if us < 99.95 else f"{us:.0f}" for us in (ours, theirs)), times])
    return _rows(["µs", "hybrid_ep", "DeepEP V1", "hybrid_ep is"], rows)


def _us(operation: Any) -> str:
    us = operation["median_us"]
    return f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def low_latency(file: str) -> str:
    """Medians by call and tokens, and the wire with 128 tokens beside the three calls."""
    plan = {"mode": "low-latency"}
    rows = []
    for label, dtype, operation in LOW_LATENCY:
        cells = [
            _us(measured(file, operation, num_sms=None, dtype=dtype, num_tokens=tokens, **plan)) for tokens in TOKENS
        ]
        call = operation.partition(":")[0]
        push = measured(file, call, num_sms=None, wire=True, dtype=dtype, num_tokens=128, **plan)
        rows.append([label, *cells, _us(push) if label.endswith(", in a graph") else ""])
    return _rows([f"µs, {results(file)['num_ranks']} GPUs", "1 token", *map(str, TOKENS[1:]), "the wire, 128"], rows)


def wire(file: str) -> str:
    """Medians of 4096 tokens by SMs, beside the push of the same rows."""
    plan = {"mode": "normal", "routing": "uniform", "num_tokens": 4096}
    rows = [
        [str(num_sms)]
        + [
            _us(measured(file, name or "dispatch", num_sms=num_sms, wire=name is None, dtype=dtype, **plan))
            for _, dtype, name in WIRE
        ]
        for num_sms in (8, 12, 16, 24, 32)
    ]
    return _rows([f"SMs, {results(file)['num_ranks']} GPUs", *(label for label, _, _ in WIRE)], rows)


def _with_16_sms(calls: list[tuple[str, dict[str, object], str]], files: tuple[str, ...]) -> str:
    """µs and GB/s of received rows in each file, with 16 SMs."""
    rows = []
    for label, changes, operation in calls:
        plan = {"num_tokens": 4096, "routing": "uniform"} | changes
        found = [measured(file, operation, num_sms=16, **plan) for file in files]
        rows.append([label, *(cell for one in found for cell in (_us(one), f"{one['gbps']:.0f}"))])
    gpus = (results(file)["num_ranks"] for file in files)
    return _rows(["16 SMs", *(name for number in gpus for name in (f"{number} GPUs: µs", "GB/s"))], rows)


def shapes(*files: str) -> str:
    """Calls by expert, and one hot expert."""
    return _with_16_sms(SHAPES, files)


def batches(*files: str) -> str:
    """Large and small batches."""
    return _with_16_sms(BATCHES, files)


def runs(*files: str) -> str:
    """What was measured: a row for each file."""
    rows = []
    for file in files:
        about = results(file)
        versions = about["versions"]
        used = f"driver {versions['driver']}, torch {versions['torch'].partition('+')[0]}, CUDA {versions['CUDA']}"
        rows.append([f"[{file}](../benchmarks/results/{file}.json)", str(about["num_ranks"]), about["date"], used])
    return _rows(["file", "GPUs", "date", "software"], rows)


TABLES = {
    "low_latency": low_latency,
    "wire": wire,
    "shapes": shapes,
    "batches": batches,
    "runs": runs,
    "beside": beside,
}


def with_tables(page: str) -> str:
    """The page with each marked table as the results have it."""
    return _TABLE.sub(lambda found: found[1] + TABLES[found[2]](*found[3].split()), page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text()))
