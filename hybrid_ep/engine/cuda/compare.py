"""Comparison of the ranks' calls before memory grows for one of them.

Growth is a meeting of all ranks. A rank that makes another call may need no growth, and would wait for this one in its
kernel. So a call that needs more memory is first launched without rows. That launch needs no memory, and compares the
calls like every other. If they are the same, all ranks have launched it, and all come to the meeting.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from hybrid_ep.agree.fields import CALLS, encode, format_code, require_agreement
from hybrid_ep.agree.roll_call import RollCall
from hybrid_ep.engine.calls import LowLatencyDispatchRequest
from hybrid_ep.errors import ConfigError, HybridEPError

_FIRST_CALL = "low_latency_dispatch: sizes of the first call"


def compare_calls(
    device: torch.device | None,
    begin: Callable[[], object],
    take_fault: Callable[[], HybridEPError | None],
    launch: Callable[[], object],
) -> None:
    """Launches a call without rows, and waits until it has ended.

    Args:
        device: this rank's GPU.
        begin: keeps the first fault of earlier calls, to be raised when this call has been launched.
        take_fault: returns the error of a fault that a kernel has recorded.
        launch: the call without rows.

    Raises:
        ConfigError: the calls of the ranks differ.
        TimeoutError, TransportError: a rank has not come.
    """
    torch.cuda.synchronize(device)
    begin()
    take_fault()  # of an earlier call, which has another fault already
    launch()
    torch.cuda.synchronize(device)
    if (error := take_fault()) is not None:
        raise error


def compare_first_calls(roll_call: RollCall, rank: int, request: LowLatencyDispatchRequest) -> None:
    """Compares the first low-latency dispatch, for which there is no memory in which kernels could compare it.

    Args:
        roll_call: of all ranks.
        rank: this rank.
        request: of this rank.

    Raises:
        ConfigError: the sizes or formats of the ranks differ, or a rank has refused its call.
        TimeoutError, TransportError: a rank has not come.
    """
    header = encode(
        {
            "call": CALLS.index("low_latency_dispatch"),
            "num_experts": request.num_experts,
            "num_topk": request.topk_idx.shape[1],
            "hidden": request.data.shape[1],
            "max_tokens": request.num_max_tokens_per_rank,
            "scale_format": format_code(request.fmt),
        }
    )
    told = {peer: json.loads(text) for peer, text in roll_call.gather(_FIRST_CALL, json.dumps(header)).items()}
    for theirs in told.values():
        if isinstance(theirs, str):
            raise ConfigError(theirs)
    require_agreement(header, rank, told)


def refuse_first_call(roll_call: RollCall, error: ConfigError) -> None:
    """Makes the other ranks raise an error of this rank in `compare_first_calls`.

    Raises:
        TimeoutError, TransportError: a rank has not come.
    """
    roll_call.gather(_FIRST_CALL, json.dumps(str(error)))
