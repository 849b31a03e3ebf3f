"""The table of bad calls and what they raise, docs/bad_calls.md: made by making every call.

python -m tests.multi_process.bad_calls > docs/bad_calls.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hybrid_ep import Buffer, EventOverlap, HybridEPBuffer, HybridEPError
from hybrid_ep.nn import MoELayer
from tests.multi_process.small_calls import TOPK, WEIGHTS, E, H, T, X, layout_of
from tests.multi_process.test_bad_hybrid import HYBRID
from tests.multi_process.test_bad_low_latency import LOW_LATENCY
from tests.multi_process.test_bad_normal import NORMAL
from tests.multi_process.test_disagreement import PAIRS, disagree
from tests.rank_pool import RankPool

_HEAD = """# Bad calls

This page lists the errors of calls whose arguments do not fit. `python -m tests.multi_process.bad_calls` writes it:
it makes every call on the torch engine. A test compares the page with the calls. After each of these errors the buffer
can be used again.

## What other ranks see

If arguments of a collective call do not fit at one rank, every rank raises `ConfigError`, with the value, what is
allowed, and ` at rank ` with that rank's number. No row is sent. The call counts as a call of every rank. A rank whose
own arguments do not fit raises its own error.

| the other ranks | raise it in |
|---|---|
| torch engine | this call |
| cuda engine, where the host waits for counts | this call |
| cuda engine, where no host waits: a bound, a handle, a combine, a hook | the next call, or `raise_pending` |

The cuda engine reports the error in numbers that ranks exchange in every call anyway. So a correct call is as fast.

Other ranks do not learn of these mistakes:

| mistake of one rank | the other ranks |
|---|---|
| in a local call, such as `get_dispatch_layout` | see nothing, and do not wait |
| in a call while a CUDA graph is captured | raise `TimeoutError` in replays, after `timeout_s` |
| a closed buffer, or one of a forked child | raise `TransportError`, or `TimeoutError` after `timeout_s` |
| a call while another thread is in a call | raise `TimeoutError` after `timeout_s` |

On the cuda engine, these calls are several launches, and no host waits between them:

- `HybridEPBuffer.dispatch` with a map of more than 32 experts, and with a number of rows or a handle;
- `HybridEPBuffer.combine` along such a map, with `probs` of more than 128 experts;
- `lb_reduce_grads`, and between domains `lb_prefetch_weights`, if the experts take more than one dispatch.

A rank that refuses such a call takes part in its first launch only. The other ranks raise its error, but their further
launches meet the next call of that rank. Then ranks raise `ConfigError`, because their calls differ, or `TimeoutError`
after `timeout_s`.

## Calls

NaN and Inf in weights, probabilities and rows are sent like other values. A sum with one of them is NaN or Inf.

"""
_LEAF = X.clone().requires_grad_()
MORE: dict[str, Callable[[Buffer], Any]] = {
    "dispatch: a gradient that would be lost": lambda b: b.dispatch(_LEAF, **layout_of(b), topk_idx=TOPK),
    "dispatch: weights with a gradient": lambda b: b.dispatch(
        X, **layout_of(b), topk_idx=TOPK, topk_weights=WEIGHTS.clone().requires_grad_()
    ),
    "dispatch: meta tensors": lambda b: b.dispatch(X.to("meta"), **layout_of(b), topk_idx=TOPK),
    "dispatch: a sparse tensor": lambda b: b.dispatch(X.to_sparse(), **layout_of(b), topk_idx=TOPK),
    "layout: meta tensors": lambda b: b.get_dispatch_layout(TOPK.to("meta"), E),
    "low latency: more tokens than can be counted": lambda b: b.low_latency_dispatch(X, TOPK, 2**31 - 1, E),
    "low latency: use_fp8=[]": lambda b: b.low_latency_dispatch(X, TOPK, T, E, use_fp8=[]),  # type: ignore[arg-type]
    "constructor: timeout_s=1e300": lambda b: Buffer(None, timeout_s=1e300),
    "constructor: timeout_s=True": lambda b: Buffer(None, timeout_s=True),
    "EventOverlap: not an event": lambda b: EventOverlap("x"),  # type: ignore[arg-type]
    "MoELayer: seed='x'": lambda b: MoELayer(b, hidden=H, ffn_hidden=4, num_experts=E, topk=1, seed="x"),  # type: ignore[arg-type]
}


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except HybridEPError as error:
        return f"`{type(error).__name__}`: {error}"
    return "**nothing**"


def _row(name: str, outcome: str) -> str:
    text = outcome.replace("|", "\\|").replace("\n", " ")
    return f"| {name} | {text} |"


def page(pool: RankPool) -> str:
    """Returns the page; `pool` runs the calls of two ranks."""
    lines = ["| call of one rank | outcome |", "|---|---|"]
    with Buffer(None, low_latency_mode=True, enable_shrink=True) as buffer:
        calls = {name: call for name, (call, _) in (NORMAL | LOW_LATENCY).items()} | MORE
        for name, call in calls.items():
            lines.append(_row(name, _outcome(lambda call=call: call(buffer))))  # type: ignore[misc]
    with HybridEPBuffer(None, H, T, E) as hybrid:
        for name, (given, _) in HYBRID.items():
            lines.append(
                _row(
                    f"hybrid: {name}",
                    _outcome(lambda given=given: hybrid.dispatch_with_permute(**({"hidden": X} | given))),
                )
            )  # type: ignore[misc]
    lines += ["", "| ranks that disagree in | outcome at rank 0; another rank names its own value first |", "|---|---|"]
    for name in PAIRS:
        told, _ = pool.run(2, disagree, name)[0]
        lines.append(_row(name, f"`ConfigError`: {told}"))
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    pool = RankPool(variables={"HYBRID_EP_TIMEOUT_S": "20"})
    try:
        sys.stdout.write(page(pool))
    finally:
        pool.close()
