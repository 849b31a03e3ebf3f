"""The settings of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.checks import require, require_int
from hybrid_ep.workload import Workload

BALANCE = "balance"
MODES = ("normal", "permute", "low-latency", BALANCE)
CALLS = ("dispatch", "combine")
_HALVES = (": send", ": receive")
_IN_A_ROW = ": graph of "
_UNTIL_DONE = ": until done"


@dataclass(frozen=True)
class Candidate:
    """One row of the comparison.

    Attributes:
        implementation: ``hybrid_ep``, ``torch-nccl``, or a module with DeepEP's or Hybrid-EP's interface; in mode
            ``balance`` a policy.
        num_sms: SMs that it may use; None = its own choice.
    """

    implementation: str
    num_sms: int | None = None

    @property
    def title(self) -> str:
        """Name of the candidate in tables."""
        return self.implementation if self.num_sms is None else f"{self.implementation}, {self.num_sms} SMs"


@dataclass(frozen=True)
class BenchPlan:
    """A workload and how it is measured; the same tensors and the same timer for every candidate.

    Attributes:
        workload: of each rank.
        mode: ``normal`` (`Buffer`), ``permute`` (`HybridEPBuffer`, rows grouped by expert), ``low-latency``, or
            ``balance`` (a layer with policies of balance).
        candidates: who takes part; in mode ``balance`` the policies.
        num_warmups: calls before timing.
        num_runs: timed calls.
        no_sync: give the upper bound of received rows, so that the host waits in no call.
        device: ``cpu`` or ``cuda``.
        wire: measure the wire's limit beside the candidates.
        num_held: results of dispatch that are kept alive in the forms named so; 0 = no such forms.

    Raises:
        ConfigError: a value is not allowed.
    """

    workload: Workload
    mode: str
    candidates: tuple[Candidate, ...]
    num_warmups: int
    num_runs: int
    no_sync: bool
    device: str
    wire: bool = True
    num_held: int = 4

    def __post_init__(self) -> None:
        require(self.mode in MODES, "mode", self.mode, ", ".join(MODES))
        require_int("warmups", self.num_warmups, minimum=0)
        require_int("runs", self.num_runs, minimum=1)
        require_int("hold", self.num_held, minimum=0)
        if self.mode == "low-latency":
            require(self.workload.num_tokens > 0, "tokens", 0, "≥ 1 in low-latency mode")

    def row_bytes(self, call: str) -> int:
        """Bytes of one row in ``dispatch`` or ``combine``."""
        return self.workload.row_bytes if call == "dispatch" else self.workload.combine_row_bytes


def call_of(operation: str) -> str | None:
    """The call of which an operation is a form, all rows moved and timed alone as the wire is; None for the others.

    Operations are named ``call`` or ``call: form``.
    """
    call = operation.partition(":")[0]
    is_alone = not operation.endswith((*_HALVES, _UNTIL_DONE)) and _IN_A_ROW not in operation
    return call if call in CALLS and is_alone else None
