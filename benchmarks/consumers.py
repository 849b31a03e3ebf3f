"""How long the calls take that frameworks make, beside an all-to-all written in torch.

    python benchmarks/consumers.py                                     # all GPUs; on a machine without, 2 CPU ranks
    python benchmarks/consumers.py --path decode --impl hybrid_ep --impl deep_ep --out out/consumers

- megatron: a layer with the calls of Megatron's flex dispatcher, `deepep`, `hybridep`, and `hybridep` with fused calls;
  forward, and with backward.
- decode: a decode step as vLLM makes it: low latency, FP8, two micro-batches with hooks; all layers in one CUDA graph.
- prefill: a dispatch and a combine as SGLang makes them: `Buffer`, FP8, on the communication stream.

Experts are a multiplication, the same for each way, or left out. Each way is checked against the dense result before it
is timed. What a module does not offer, or cannot import, is told in its row.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.consumer_functions import AllToAll, Combine, Dispatch, PermutingCombine, PermutingDispatch, all_to_all
from hybrid_ep.bench.launch import open_ranks
from hybrid_ep.bench.machine import device_name, rank_device, versions
from hybrid_ep.bench.measure import anywhere
from hybrid_ep.bench.timing import time_calls
from hybrid_ep.launcher import find_launcher
from hybrid_ep.outputs import OutputFolder
from hybrid_ep.quantize import cast_from_fp8, cast_to_fp8
from hybrid_ep.testing.batch import make_batch
from hybrid_ep.workload import Workload

__all__ = ["PATHS", "Settings", "Way", "main", "measure", "ways_of"]

BASELINE = "all-to-all"
PATHS = ("megatron", "decode", "prefill")
_WAYS = {"megatron": ("deepep", "hybridep", "fused"), "decode": ("low latency",), "prefill": ("normal",)}
_CLASSES = {"hybridep": ("HybridEPBuffer",), "fused": ("HybridEPBuffer",)} | dict.fromkeys(
    ("deepep", "low latency", "normal"), ("Buffer",)
)
_LAYERS = {"cuda": 60, "cpu": 2}  # of a decode step
_SIZES = {
    "cuda": {"tokens": 4096, "decode_tokens": 64, "hidden": 7168, "topk": 8, "experts": 256},
    "cpu": {"tokens": 64, "decode_tokens": 8, "hidden": 256, "topk": 2, "experts": 8},
}
_NUM_MICRO_BATCHES = 2
_ALLOWED_RMS = 4 * 2.0**-8  # a few roundings to bf16


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        device: ``cpu`` or ``cuda``.
        tokens: of each rank; of a micro-batch, in a decode step, `decode_tokens`.
        decode_tokens: see there.
        hidden, topk, experts: H, K, E.
        layers: of a decode step.
        runs: timed calls, after `warmups`.
        warmups: see there.
    """

    device: str
    tokens: int
    decode_tokens: int
    hidden: int
    topk: int
    experts: int
    layers: int
    runs: int
    warmups: int

    def workload(self, tokens: int, seed: int) -> Workload:
        return Workload(tokens, self.hidden, self.topk, self.experts, seed=seed)


class Way(NamedTuple):
    """One row: a path, how it moves rows, and with whose classes."""

    path: str
    name: str
    module: str


@dataclass
class Measured:
    """Of one way on one rank.

    Attributes:
        problem: why it was not timed; empty where it was.
        is_wrong: whether that is a wrong result.
        microseconds: of each run, by call.
    """

    problem: str = ""
    is_wrong: bool = False
    microseconds: dict[str, list[float]] = field(default_factory=dict)


def ways_of(paths: tuple[str, ...], modules: tuple[str, ...]) -> list[Way]:
    """Each path with torch's all-to-all, then with every module."""
    return [
        way
        for path in paths
        for way in (
            Way(path, BASELINE, "torch"),
            *(Way(path, name, module) for module in modules for name in _WAYS[path]),
        )
    ]


def measure(way: Way, settings: Settings) -> Measured:
    """Checks, then times, one way. Collective."""
    torch.manual_seed(dist.get_rank())
    kinds: dict[str, Callable[[Way, Settings], Any]] = {"megatron": _Megatron, "decode": _Decode, "prefill": _Prefill}
    try:
        module = importlib.import_module(way.module)
        for name in _CLASSES.get(way.name, ()):
            getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        return Measured(f"{type(error).__name__}: {error}".splitlines()[0])
    made = kinds[way.path](way, settings)
    with made:
        errors = made.errors()
        worst = max(errors, key=lambda name: errors[name])
        if anywhere(errors[worst] > _ALLOWED_RMS, settings.device == "cuda"):
            is_here = errors[worst] > _ALLOWED_RMS
            told = f"{worst}: rms error {errors[worst]:.2%}; allowed {_ALLOWED_RMS:.2%}" if is_here else ""
            return Measured(told, True)
        times = time_calls(made.calls(), num_warmups=settings.warmups, num_runs=settings.runs, device=settings.device)
        return Measured(microseconds={name: one.microseconds for name, one in times.items()})


def _rms_error(got: Tensor, want: Tensor) -> float:
    reference = float(want.double().square().sum())
    return (float((got.double() - want.double()).square().sum()) / max(reference, 1e-30)) ** 0.5


class _Path:
    """A way, opened: its buffer, and this rank's tokens."""

    def __init__(self, way: Way, settings: Settings) -> None:
        self.way, self.settings = way, settings
        self.device = rank_device(settings.device)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_local = settings.experts // self.num_ranks
        self.module = importlib.import_module(way.module)
        self.buffer: Any = None

    def __enter__(self) -> _Path:
        return self

    def __exit__(self, *_: object) -> None:
        if self.buffer is not None and hasattr(self.buffer, "destroy"):
            self.buffer.destroy()


class _Megatron(_Path):
    """One MoE layer; expert e multiplies by (e + 1) / E and by the router's probability."""

    def __init__(self, way: Way, settings: Settings) -> None:
        super().__init__(way, settings)
        batch = make_batch(settings.workload(settings.tokens, 0), self.rank, self.device)
        self.x = batch.x.detach().requires_grad_()
        self.topk_idx = batch.topk_idx
        self.weights = batch.topk_weights.detach().requires_grad_()
        self.factors = (torch.arange(settings.experts, device=self.device) + 1) / settings.experts
        self.grad = torch.randn_like(batch.x)
        if way.name == "deepep":
            kind = self.module.Buffer
            configs = kind.get_dispatch_config(self.num_ranks), kind.get_combine_config(self.num_ranks)
            num_bytes = max(one.get_nvl_buffer_size_hint(2 * settings.hidden, self.num_ranks) for one in configs)
            self.buffer = kind(dist.group.WORLD, num_bytes, 0)
        elif way.name != BASELINE:
            self.buffer = self.module.HybridEPBuffer(dist.group.WORLD, settings.hidden, settings.tokens, self.num_local)

    def calls(self) -> dict[str, Callable[[], object]]:
        return {"forward": self.forward, "forward, backward": self.both}

    def errors(self) -> dict[str, float]:
        y = self.both().detach()
        assert self.x.grad is not None
        assert self.weights.grad is not None
        factors = self.factors[self.topk_idx]
        x = self.x.detach().float()
        scale = (factors * self.weights.detach()).sum(1, keepdim=True)
        dots = (self.grad.float() * x).sum(1, keepdim=True)
        return {
            "output": _rms_error(y, x * scale),
            "gradient of the tokens": _rms_error(self.x.grad, self.grad.float() * scale),
            "gradient of the weights": _rms_error(self.weights.grad, factors * dots),
        }

    def both(self) -> Tensor:
        self.x.grad = self.weights.grad = None
        y = self.forward()
        y.backward(self.grad)
        return y

    def forward(self) -> Tensor:
        if self.way.name == BASELINE:
            return self._all_to_all()
        if self.way.name == "deepep":
            return self._deepep()
        return self._hybridep(self.way.name == "fused")

    def _experts(self, rows: Tensor, local_experts: Tensor, probs: Tensor) -> Tensor:
        factors = self.factors[self.rank * self.num_local + local_experts] * probs
        return (rows * factors.unsqueeze(1)).to(rows.dtype)

    def _all_to_all(self) -> Tensor:
        """As Megatron's `alltoall`: a row for each expert of a token, sorted by expert on both sides."""
        num_experts, topk = self.settings.experts, self.settings.topk
        chosen = self.topk_idx.flatten()
        order = torch.argsort(chosen, stable=True)
        token = order // topk
        counts = torch.bincount(chosen, minlength=num_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        received = received.view(self.num_ranks, self.num_local)
        num_sent = counts.view(self.num_ranks, -1).sum(1).tolist()
        num_received = received.sum(1).tolist()
        rows = AllToAll.apply(self.x[token], num_sent, num_received)
        probs = AllToAll.apply(self.weights.flatten()[order], num_sent, num_received)
        local = torch.arange(self.num_local, device=self.device).repeat(self.num_ranks)
        local = torch.repeat_interleave(local, received.flatten())
        by_expert = torch.argsort(local, stable=True)
        y = self._experts(rows[by_expert], local[by_expert], probs[by_expert])
        back = torch.empty_like(y).index_copy(0, by_expert, y)
        home = AllToAll.apply(back, num_received, num_sent)
        total = torch.zeros(self.x.shape, dtype=torch.float32, device=self.device)
        return total.index_add(0, token, home.float()).to(self.x.dtype)

    def _deepep(self) -> Tensor:
        received, recv_idx, recv_weights, handle = Dispatch.apply(
            self.x, self.topk_idx, self.weights, self.settings.experts, self.buffer
        )
        row, column = torch.nonzero(recv_idx >= 0, as_tuple=True)
        local = recv_idx[row, column]
        order = torch.argsort(local, stable=True)
        row, column, local = row[order], column[order], local[order]
        y = self._experts(received[row], local, recv_weights[row, column])
        sums = torch.zeros(received.shape, dtype=torch.float32, device=self.device).index_add(0, row, y.float())
        combined: Tensor = Combine.apply(sums.to(received.dtype), handle, self.buffer)
        return combined

    def _hybridep(self, is_fused: bool) -> Tensor:
        shape = len(self.x), self.settings.experts
        routing_map = torch.zeros(shape, dtype=torch.bool, device=self.device).scatter(1, self.topk_idx, True)
        probs = torch.zeros(shape, device=self.device).scatter(1, self.topk_idx, self.weights)
        rows, row_probs, counts, handle = PermutingDispatch.apply(self.x, routing_map, probs, is_fused, self.buffer)
        local = torch.arange(self.num_local, device=self.device)
        local = torch.repeat_interleave(local, counts.to(self.device), output_size=len(rows))
        combined: Tensor = PermutingCombine.apply(self._experts(rows, local, row_probs), handle, is_fused, self.buffer)
        return combined


class _Decode(_Path):
    """A decode step: in each layer both micro-batches are sent before the first is waited for.

    The experts are left out: combine takes what a dispatch of the same tokens has brought.
    """

    def __init__(self, way: Way, settings: Settings) -> None:
        super().__init__(way, settings)
        self.most = settings.decode_tokens
        self.batches = [
            make_batch(settings.workload(self.most, 1 + i), self.rank, self.device) for i in range(_NUM_MICRO_BATCHES)
        ]
        # What the all-to-all has before the step begins; a low-latency dispatch quantises by itself.
        self.rows = [cast_to_fp8(batch.x) for batch in self.batches]
        ranks = torch.arange(self.num_ranks, device=self.device).view(-1, 1, 1)
        self.weights = [
            torch.where(batch.topk_idx // self.num_local == ranks, batch.topk_weights, 0.0).sum(2, keepdim=True)
            for batch in self.batches
        ]
        if way.name != BASELINE:
            kind = self.module.Buffer
            num_bytes = kind.get_low_latency_rdma_size_hint(
                self.most, settings.hidden, self.num_ranks, settings.experts
            )
            self.buffer = kind(
                dist.group.WORLD, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=max(1, self.num_local)
            )
        self.outputs = [self._outputs(i) for i in range(_NUM_MICRO_BATCHES)]

    def errors(self) -> dict[str, float]:
        errors = {}
        for i, (got, batch) in enumerate(zip(self.layer(), self.batches, strict=True)):
            rows = cast_from_fp8(*self.rows[i])
            errors[f"micro-batch {i}"] = _rms_error(got, rows * batch.topk_weights.sum(1, keepdim=True))
        return errors

    def calls(self) -> dict[str, Callable[[], object]]:
        name = f"step of {self.settings.layers} layers"
        if self.settings.device == "cpu":
            return {name: self.step}
        self.layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return {name: graph.replay}

    def step(self) -> None:
        for _ in range(self.settings.layers):
            self.layer()

    def layer(self) -> list[Tensor]:
        """Both micro-batches through dispatch and combine."""
        if self.way.name == BASELINE:
            for i in range(_NUM_MICRO_BATCHES):
                self._all_to_all(i)
            return [self._all_to_all_back(i) for i in range(_NUM_MICRO_BATCHES)]
        sent = [self._send(i) for i in range(_NUM_MICRO_BATCHES)]
        for one in sent:
            one[-1]()
        returned = [
            self.buffer.low_latency_combine(y, batch.topk_idx, batch.topk_weights, one[2], return_recv_hook=True)
            for y, batch, one in zip(self.outputs, self.batches, sent, strict=True)
        ]
        for one in returned:
            one[-1]()
        return [one[0] for one in returned]

    def _send(self, i: int) -> Any:
        batch = self.batches[i]
        return self.buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, self.most, self.settings.experts, use_fp8=True, return_recv_hook=True
        )

    def _outputs(self, i: int) -> Tensor:
        """What the experts return, bf16: the rows of a dispatch."""
        if self.way.name == BASELINE:
            rows, scales = self._all_to_all(i)
            data = cast_from_fp8(rows.view(-1, rows.shape[-1]), scales.view(-1, scales.shape[-1])).view(rows.shape)
            return data.to(torch.bfloat16)
        (rows, scales), counts, *_, hook = self._send(i)
        hook()
        outputs = torch.zeros(rows.shape, dtype=torch.bfloat16, device=self.device)
        for local, count in enumerate(counts.tolist()):
            outputs[local, :count] = cast_from_fp8(rows[local, :count], scales[local, :count]).to(torch.bfloat16)
        return outputs

    def _all_to_all(self, i: int) -> tuple[Tensor, Tensor]:
        """As what can be captured must be: every rank gets a block of every rank's tokens."""
        rows, scales = self.rows[i]
        received = []
        for column in (rows.view(torch.uint8), scales):
            blocks = column.unsqueeze(0).expand(self.num_ranks, *column.shape).contiguous()
            got = torch.empty_like(blocks)
            dist.all_to_all_single(got, blocks)
            received.append(got)
        return received[0].view(rows.dtype), received[1]

    def _all_to_all_back(self, i: int) -> Tensor:
        home = torch.empty_like(self.outputs[i])
        dist.all_to_all_single(home, self.outputs[i])
        return (home.float() * self.weights[i]).sum(0).to(torch.bfloat16)


class _Prefill(_Path):
    """Dispatch of FP8 rows and combine, each on the communication stream; the experts are left out."""

    def __init__(self, way: Way, settings: Settings) -> None:
        super().__init__(way, settings)
        self.batch = make_batch(settings.workload(settings.tokens, 3), self.rank, self.device)
        self.rows = cast_to_fp8(self.batch.x)
        if way.name != BASELINE:
            kind = self.module.Buffer
            configs = kind.get_dispatch_config(self.num_ranks), kind.get_combine_config(self.num_ranks)
            num_bytes = max(one.get_nvl_buffer_size_hint(2 * settings.hidden, self.num_ranks) for one in configs)
            self.buffer = kind(dist.group.WORLD, num_bytes, 0)
        self.outputs = cast_from_fp8(*self.dispatch()[0]).to(torch.bfloat16)

    def errors(self) -> dict[str, float]:
        owner = self.batch.topk_idx // self.num_local
        ranks = torch.arange(self.num_ranks, device=self.device)
        num_rows = (owner.unsqueeze(2) == ranks).any(1).sum(1, keepdim=True)  # combine is a sum over ranks
        return {"output": _rms_error(self.both(), cast_from_fp8(*self.rows) * num_rows)}

    def calls(self) -> dict[str, Callable[[], object]]:
        return {"dispatch, combine": self.both}

    def both(self) -> Tensor:
        return self.combine(self.dispatch()[1])

    def dispatch(self) -> tuple[tuple[Tensor, Tensor], Any]:
        """Received rows with scales, and what combine needs."""
        if self.way.name == BASELINE:
            return self._all_to_all()
        kind, topk_idx = self.module.Buffer, self.batch.topk_idx
        apart: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}
        per_rank, per_domain, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            topk_idx, self.settings.experts, previous_event=kind.capture(), **apart
        )
        rows, _, _, _, handle, event = self.buffer.dispatch(
            self.rows,
            topk_idx=topk_idx,
            topk_weights=self.batch.topk_weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **apart,
        )
        event.current_stream_wait()
        return rows, handle

    def combine(self, handle: Any) -> Tensor:
        if self.way.name == BASELINE:
            token, num_sent, num_received = handle
            home = all_to_all(self.outputs, num_received, num_sent)
            total = torch.zeros(self.batch.x.shape, dtype=torch.float32, device=self.device)
            return total.index_add_(0, token, home.float()).to(torch.bfloat16)
        combined, _, event = self.buffer.combine(
            self.outputs,
            handle,
            previous_event=self.module.Buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        result: Tensor = combined
        return result

    def _all_to_all(self) -> tuple[tuple[Tensor, Tensor], Any]:
        ranks = torch.arange(self.num_ranks, device=self.device)
        goes = (self.batch.topk_idx.unsqueeze(2) // self.num_local == ranks).any(1)
        counts = goes.sum(0)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        num_sent, num_received = counts.tolist(), received.tolist()
        token = torch.nonzero(goes.t())[:, 1]
        data = all_to_all(self.rows[0].view(torch.uint8)[token], num_sent, num_received).view(self.rows[0].dtype)
        scales = all_to_all(self.rows[1][token], num_sent, num_received)
        for column in (self.batch.topk_idx, self.batch.topk_weights):
            all_to_all(column[token], num_sent, num_received)
        return (data, scales), (token, num_sent, num_received)


def _summary(way: Way, by_rank: list[Measured]) -> dict[str, Any]:
    """A row: the median over runs of the slowest rank, in µs, or why there is none."""
    problems = [f"rank {rank}: {one.problem}" for rank, one in enumerate(by_rank) if one.problem]
    calls = by_rank[0].microseconds if not problems else {}
    return {
        **way._asdict(),
        "problem": problems[0] if problems else "",
        "is_wrong": any(one.is_wrong for one in by_rank),
        "median_us": {
            name: statistics.median(map(max, zip(*(one.microseconds[name] for one in by_rank), strict=True)))
            for name in calls
        },
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table("path", "way", "with", "call", "median µs", f"{BASELINE} / this")
    for row in rows:
        name = row["path"], row["name"], row["module"]
        if row["problem"]:
            table.add_row(*name, f"not timed: {row['problem']}", "", "")
        base = next(one["median_us"] for one in rows if one["path"] == row["path"] and one["name"] == BASELINE)
        for call, value in row["median_us"].items():
            table.add_row(*name, call, f"{value:.1f}", f"{base[call] / value:.2f}" if call in base else "")
    Console(width=160).print(table)


@click.command(help=__doc__.splitlines()[0])
@click.option("--path", "paths", multiple=True, type=click.Choice(PATHS), default=PATHS, show_default=True)
@click.option("--impl", "modules", multiple=True, default=("hybrid_ep",), show_default=True, help="Modules to import.")
@click.option("--ranks", type=int, help="Processes to start; default: all GPUs, or 2 on a CPU.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tokens", type=int, help="Of each rank, in megatron and prefill.")
@click.option("--decode-tokens", type=int, help="Of each micro-batch.")
@click.option("--hidden", type=int)
@click.option("--topk", type=int)
@click.option("--experts", type=int)
@click.option("--layers", type=int, help="Of a decode step.")
@click.option("--runs", default=30, show_default=True)
@click.option("--warmups", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.option("--out", type=OutputFolder(), help="Write consumers.json here.")
def main(
    paths: tuple[str, ...],
    modules: tuple[str, ...],
    ranks: int | None,
    device: str,
    layers: int | None,
    runs: int,
    warmups: int,
    as_json: bool,
    out: Path | None,
    **asked: int | None,
) -> None:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    launcher = find_launcher()
    num_ranks = launcher.num_ranks if launcher else ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    sizes = _SIZES[device] | {name: value for name, value in asked.items() if value is not None}
    settings = Settings(device, **sizes, layers=layers or _LAYERS[device], runs=runs, warmups=warmups)
    if settings.experts % num_ranks:
        raise click.UsageError(f"experts is {settings.experts}; allowed: multiples of the {num_ranks} ranks")
    with open_ranks(num_ranks, device, launcher) as run:
        name = run(device_name, device)[0]
        rows = [_summary(way, run(measure, way, settings)) for way in ways_of(paths, modules)]
    if launcher is not None and launcher.rank != 0:
        return
    document = {
        "device": name,
        "ranks": num_ranks,
        "versions": versions(device),
        "settings": asdict(settings),
        "rows": rows,
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print(rows)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "consumers.json").write_text(json.dumps(document, indent=2) + "\n")
    if any(row["is_wrong"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
