"""What a check is and what it says.

Every check ends in one of three ways: `pass`, `fail` (a confirmed fault) or `unknown` (a tool is missing, a file may
not be read). A failed check of severity `warning` is shown as "warn". It does not decide the exit code, because the
node can do its work; only `error` checks do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from hybrid_ep.cluster.doctor.node import Node
    from hybrid_ep.cluster.doctor.profile import Profile

_MOST_SHOWN = 2000  # characters of one text in a report


def clean(text: str) -> str:
    """The text on one line for terminals and XML: what is not printable is escaped, and what is too long is cut."""
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in shown)


class Status(str, enum.Enum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"

    @classmethod
    def worst(cls, statuses: Iterable[Status]) -> Status:
        """`fail` if any is, else `unknown` if any is, else `pass`."""
        found = set(statuses)
        return next((status for status in (cls.FAIL, cls.UNKNOWN) if status in found), cls.PASS)

    @property
    def exit_code(self) -> int:
        """0 = pass, 1 = fail, 2 = unknown."""
        return {Status.PASS: 0, Status.FAIL: 1, Status.UNKNOWN: 2}[self]


class Severity(str, enum.Enum):
    """Whether a check decides the exit code."""

    ERROR = "error"
    WARNING = "warning"


def _clean_texts(item: Any) -> None:
    for name, value in vars(item).items():
        if type(value) is str:
            object.__setattr__(item, name, clean(value))


@dataclass(frozen=True)
class Finding:
    """What a check function returns.

    Attributes:
        status: how it ended.
        seen: what was found, in one line; for `unknown`, why it could not be.
        remedy: what to do about just this; empty: the check's own remedy.
    """

    status: Status
    seen: str
    remedy: str = ""

    @classmethod
    def judge(cls, faults: list[str], seen_if_good: str) -> Finding:
        """Fails with all faults in one line, or passes."""
        return cls(Status.FAIL, "; ".join(faults)) if faults else cls(Status.PASS, seen_if_good)


Counters = Mapping[tuple[str, str], int]  # (thing, counter), e.g. ("GPU 0 link 3", "replay") → reading
Examine = Callable[["Node", "Profile"], Finding]
Sample = Callable[["Node", "Profile"], Counters]
# Two readings of this run, the seconds between them, what is remembered of the last run, and the seconds since then →
# the finding, and what to remember.
Judge = Callable[[Counters, Counters, float, Counters, float], tuple[Finding, Counters]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        id: ``group.name``.
        title: what it looks at, in a few words.
        severity: `warning` checks do not decide the exit code; a profile may change it.
        privilege: what reading needs beyond an ordinary user, or empty.
        source: where the facts are read.
        expectation: a template over the profile: ``{gpu.count}``.
        remedy: what to do when it fails.
        wants: keys of the profile that must be set (not null, false or 0) for the check to apply; none: always applies.
        zero_is_wish: 0 is an expectation, too: no such thing may be there.
        quick: part of ``--quick``: no second sample, no other program.
        of_jobs: judges the Python packages that jobs run with; does not apply where HYBRID_EP_CHECKS_ONLY is on.
        examine: for plain checks: reads and judges.
        sample: for counters: reads them; the runner reads twice and judges the rise.
        judge: for counters: judges them where another thing than their rise counts.
        rise: for counters: section of the profile with the names of those that may rise (`error_rise_per_s`, `_per_h`).
    """

    id: str
    title: str
    severity: Severity
    privilege: str
    source: str
    expectation: str
    remedy: str
    wants: tuple[str, ...]
    quick: bool
    examine: Examine | None = None
    sample: Sample | None = None
    rise: str = ""
    judge: Judge | None = None
    zero_is_wish: bool = False
    of_jobs: bool = False

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Result:
    """One check's outcome on one node; plain values, as in the JSON report. Its texts are `clean`."""

    id: str
    group: str
    title: str
    status: Status
    severity: Severity
    seen: str
    expected: str
    source: str
    remedy: str

    def __post_init__(self) -> None:
        _clean_texts(self)

    @property
    def shown_as(self) -> str:
        """``pass``, ``fail``, ``warn`` or ``unknown``."""
        return "warn" if self.status is Status.FAIL and self.severity is Severity.WARNING else self.status.value


@dataclass(frozen=True)
class Report:
    """Everything that one run found.

    Attributes:
        hybrid_ep: version of the package.
        host: host name, or the folder of a recorded node.
        profile: name of the profile.
        profile_source: why that one.
        duration_s: how long the checks took.
        results: in the order of the checks.
        not_applicable: ids of checks that the profile does not ask for.
        facts: what `compare` needs of a node.
    """

    hybrid_ep: str
    host: str
    profile: str
    profile_source: str
    duration_s: float
    results: tuple[Result, ...]
    not_applicable: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _clean_texts(self)

    @property
    def status(self) -> Status:
        """`fail` if any error check failed, else `unknown` if any could not be answered, else `pass`."""
        return Status.worst(result.status for result in self.results if result.severity is Severity.ERROR)

    @property
    def exit_code(self) -> int:
        """That of `status`."""
        return self.status.exit_code

    def to_json(self) -> dict[str, Any]:
        """A tree of plain values; `from_json` reads it back."""
        return {"schema": 1, "status": self.status.value, "exit_code": self.exit_code, **asdict(self)}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Report:
        """Reads what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is not a report of this version.
        """
        fields = {name: tree[name] for name in cls.__dataclass_fields__}
        fields["results"] = tuple(
            Result(**{**result, "status": Status(result["status"]), "severity": Severity(result["severity"])})
            for result in tree["results"]
        )
        fields["not_applicable"] = tuple(tree["not_applicable"])
        return cls(**fields)


def to_junit(report: Report) -> str:
    """The report as one JUnit file."""
    return ElementTree.tostring(junit_suite(report), encoding="unicode", xml_declaration=True) + "\n"


def junit_suite(report: Report) -> ElementTree.Element:
    """JUnit XML: a confirmed fault is a failure, an unknown is an error, a warning passes with its text as output."""
    failures = sum(result.shown_as == "fail" for result in report.results)
    errors = sum(_is_error(result) for result in report.results)
    suite = ElementTree.Element(
        "testsuite",
        name=f"hybrid-ep doctor {report.host}",
        tests=str(len(report.results)),
        failures=str(failures),
        errors=str(errors),
        time=f"{report.duration_s:.3f}",
    )
    for result in report.results:
        case = ElementTree.SubElement(suite, "testcase", classname=f"doctor.{result.group}", name=result.id)
        detail = f"seen: {result.seen}\nexpected: {result.expected}\nsource: {result.source}\nremedy: {result.remedy}"
        if result.shown_as == "fail":
            ElementTree.SubElement(case, "failure", message=result.seen).text = detail
        elif _is_error(result):
            ElementTree.SubElement(case, "error", message=result.seen).text = detail
        elif result.status is not Status.PASS:
            ElementTree.SubElement(case, "system-out").text = f"{result.shown_as}\n{detail}"
    return suite


def _is_error(result: Result) -> bool:
    return result.status is Status.UNKNOWN and result.severity is Severity.ERROR
