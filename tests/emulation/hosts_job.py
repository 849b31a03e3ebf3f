"""A rank of a job on several hosts: the cuda engine, emulated, between them, until its rounds are over or a rank is
lost. Started by torchrun or mpirun, once for each rank: MODULE TIMEOUT_S ROUNDS [recover]. With `recover` it goes on
with the ranks that are left.

Prints a JSON object a line: which engine serves, each round, and how the rank ends. Before round PAUSE it waits for the
file GO, so that what happens to a host meanwhile finds all ranks at the same call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hybrid_ep.balance import ExpertPlacement
from hybrid_ep.bench.launch import open_ranks
from hybrid_ep.elastic import recover
from hybrid_ep.errors import TimeoutError, TransportError
from hybrid_ep.launcher import find_launcher
from tests.battery.cases import Case
from tests.emulation.engine import install

PAUSE, GO = 3, Path("/tmp/go")
_LOST = 3  # exit status
_ROUNDS_AFTER = 3


def say(**facts: Any) -> None:
    """One write, so that lines of several ranks do not mix."""
    os.write(1, (json.dumps(facts) + "\n").encode())


def check_round(buffer: Any, case: Case) -> None:
    """Dispatch and combine: every row arrives, and comes home from each domain that it went to."""
    from tests.battery.normal import dispatch, equal, gather_rows

    rank, reference = buffer.rank, case.reference()
    inputs, rows = case.inputs(rank), reference.received(rank)
    recv_x, *_, handle, _ = dispatch(buffer, case, inputs)
    equal(recv_x, gather_rows(case, rows, [case.inputs(r).x for r in range(case.num_ranks)]), "recv_x")
    combined, *_ = buffer.combine(torch.ones_like(recv_x), handle)
    buffer.raise_pending()  # a combine tells a lost rank later
    times = [sum((rank, t) in reference.received(r) for r in range(case.num_ranks)) for t in range(case.max_tokens)]
    equal(combined, torch.tensor(times).unsqueeze(1).expand(-1, case.hidden).to(torch.bfloat16), "combined_x")


def main() -> None:
    module, timeout_s, rounds, recovers = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["recover"]
    launcher = find_launcher()
    assert launcher is not None
    with open_ranks(launcher.num_ranks, "cpu", launcher):
        run_rounds(launcher.rank, launcher.num_ranks, module, timeout_s, rounds, recovers)


def run_rounds(rank: int, num_ranks: int, module: str, timeout_s: float, rounds: int, recovers: bool = False) -> None:
    install(module)
    import hybrid_ep

    buffer = hybrid_ep.Buffer(timeout_s=timeout_s)
    say(rank=rank, engine=buffer.engine.name, domains=buffer.grid.num_domains, by=buffer.engine.transport)
    last = time.monotonic()
    try:
        for number in range(rounds):
            while number == PAUSE and not GO.exists():
                time.sleep(0.1)
                last = time.monotonic()
            check_round(buffer, _case(num_ranks, number))
            last = time.monotonic()
            say(rank=rank, round=number)
    except (TimeoutError, TransportError) as error:
        seconds = time.monotonic() - last
        say(rank=rank, error=type(error).__name__, peer=error.peer, seconds=seconds, text=str(error))
        if recovers:
            go_on(rank, buffer)
            os._exit(0)  # the group of all ranks has lost one
        time.sleep(timeout_s)  # when one has failed, torchrun ends the other ranks of its host
        os._exit(_LOST)  # nothing is left to meet
    buffer.destroy()
    say(rank=rank, done=True)


def go_on(rank: int, buffer: Any) -> None:
    """Recovers, and makes some rounds more; or says why it cannot."""
    begin = time.monotonic()
    placement = ExpertPlacement.contiguous(1, _case(buffer.group_size, 0).num_experts, buffer.group_size)
    try:
        recovered = recover(buffer, placement, lambda _, expert: expert)
    except TransportError as error:
        say(rank=rank, left_out=str(error), seconds=time.monotonic() - begin)
        return
    report, buffer = recovered.report, recovered.buffer
    for number in range(_ROUNDS_AFTER):
        check_round(buffer, _case(buffer.group_size, 100 + number))
        say(rank=rank, round_after=number)
    say(
        rank=rank,
        went_on_with=report.ranks,
        lost=report.lost,
        engine_after=buffer.engine.name,
        by=buffer.engine.transport,
    )
    say(rank=rank, unserved=report.unserved, loaded=sorted(report.loaded.values()), seconds_to_recover=report.seconds)
    buffer.destroy()


def _case(num_ranks: int, number: int) -> Case:
    return Case("hosts", num_ranks, 12, hidden=64, num_experts=4 * num_ranks, seed=number)


if __name__ == "__main__":
    main()
