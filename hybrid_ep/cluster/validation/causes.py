"""Why a job failed or a host gave no report, from its output: equal faults are one line of a report.

A cause is recognised by the output of the program that failed. All other output is ``other``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_MOST_LINES = 3
_LONGEST = 200


class Cause(NamedTuple):
    """A cause.

    Attributes:
        id: what reports call it.
        title: in a few words.
        pattern: finds it in a line, whatever the case of its letters.
        remedy: what to do on the hosts that are named with it.
    """

    id: str
    title: str
    pattern: str
    remedy: str


SLOW = Cause(
    *("bandwidth", "slower than expected", r"expected ≥"),
    "See the links, the NICs and their errors in the matrix; if none is faulty, look at the path between the hosts.",
)
LATE = Cause(
    *("timeout", "it did not end in time", r"did not end in time|timeouterror|took more than|waited [\d.]+ s"),
    "Read the end of the log. A host that hangs is one that others wait for; the log names the rank.",
)
OTHER = Cause("other", "a failure of another kind", r"(?!)", "Read the log of the job.")
_CAUSES = (
    Cause(
        *("segfault", "a program crashed", r"segmentation fault|sigsegv|signal:? ?\(?11\b|bus error|sigbus"),
        "Keep the log and the core file. Look for Xid lines in the kernel log, and for versions that differ from the "
        "other hosts' (driver, torch, NCCL, hybrid_ep).",
    ),
    Cause(
        *("memory", "memory ran out", r"out of memory|oom.?kill|cannot allocate memory|bad_alloc|signal:? ?\(?9\b"),
        "See what else uses the host's and its GPUs' memory, and the limits of locked memory and of /dev/shm.",
    ),
    Cause(
        *("login", "ssh did not let it in"),
        r"(?<!errno=)permission denied|host key verification failed|authentication fail",
        "Let the user of the jobs log in by ssh without a password, from the controller and from the other hosts, with "
        "host keys that are known there.",
    ),
    Cause(
        "no-route",
        "a host could not be reached",
        r"no route to host|network is unreachable|connection (refused|timed out|reset|closed)|could not resolve|"
        r"name or service not known|name resolution|no connection|lost connection|host is down|broken pipe",
        "See whether the host is up, and whether its name, its network and its ssh port can be reached from the "
        "controller and from the other hosts.",
    ),
    Cause(
        "python",
        "Python or a package is missing",
        r"no module named|modulenotfounderror|python\S*: (not found|command not found|no such file|can't open)|"
        r"python interpreter|no python",
        "Install Python 3 and the packages that the line names, at the same versions as on the other hosts.",
    ),
    Cause(
        *("program", "a program is missing", r"command not found|no such file|not found in path|executable"),
        "Install the program that the line names, or set its path (container_command, jobs_mpirun).",
    ),
    Cause(
        *("ecc", "a GPU fault", r"uncorrectable ecc|\bxid\b|illegal memory access|fallen off the bus|cuda error"),
        "Run hybrid-ep doctor on the host, and look at the kernel log; reset or replace a GPU with a fault.",
    ),
    Cause(
        *(
            "network",
            "the network between GPUs failed",
            r"nccl\w*error|nccl warn|ibv_\w+|retry exceeded|transporterror",
        ),
        "See the ports, the GID index and the errors of the NICs in the matrix, and the settings of NCCL.",
    ),
    LATE,
    Cause(
        *("wrong-result", "results were wrong", r"wrong|mismatch|differ|not equal"),
        "Do not use the host: wrong results without an error point to memory or to a link. Run hybrid-ep doctor on it.",
    ),
    SLOW,
)


def cause_of(text: str) -> Cause:
    """The first cause, in the order of how much it explains, that a text has words of."""
    return next((cause for cause in _CAUSES if re.search(cause.pattern, text, re.IGNORECASE)), OTHER)


def telling_lines(lines: Iterable[str]) -> list[str]:
    """Lines that name a cause, each once, a few at most; those of different causes come first."""
    found: dict[str, Cause] = {}
    for line in lines:
        cause = cause_of(line)
        if cause is not OTHER and cause is not SLOW:
            found.setdefault(line[:_LONGEST], cause)
    first = {cause: line for line, cause in reversed(found.items())}
    chosen = [line for line in found if first[found[line]] == line]
    return chosen[:_MOST_LINES]
