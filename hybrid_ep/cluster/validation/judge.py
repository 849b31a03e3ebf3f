"""Bandwidth of test jobs against the figures of the platform's profile.

A figure is named ``KIND.METRIC``, e.g. ``nic.write``, and holds for the number of hosts it was measured with. A job
passes when it reaches the profile's fraction of the figure. Without a figure, a bandwidth between domains is compared
with a share of the rate of a GPU's NICs (``bandwidth.of_nics``). A pair of hosts with GPUs is then compared with the
median of the run. Any other job that ended well passes if its results are right, and its reason says so, unless it
measured nothing. A job on hosts whose profile cannot be read is `unknown`.

`pair_tables` has every figure that jobs of two hosts measured, by metric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from hybrid_ep.cluster.doctor.model import Status
from hybrid_ep.cluster.doctor.profile import Profile, load_profile
from hybrid_ep.cluster.validation.causes import SLOW
from hybrid_ep.cluster.validation.results import JobFile, Metric
from hybrid_ep.errors import ConfigError

_OF_RUN = 0.5  # of the median of a run's pairs, where no profile has a figure
_FEWEST_JOBS = 6  # for a median to say something


@dataclass(frozen=True)
class JudgedMetric:
    """A figure that a job measured, and what was expected.

    Attributes:
        name, value, unit: as measured.
        least: what the platform's profile asks for, or, where it has no figure, half of the run's median, in the same
            unit; None where there is neither.
        source: where that comes from; empty without one.
    """

    name: str
    value: float
    unit: str
    least: float | None
    source: str

    @property
    def text(self) -> str:
        """Value and unit for people; a time in the unit that it has fewest digits in."""
        value, unit = self.value, self.unit
        for factor, larger in ((1e6, "s"), (1e3, "ms")) if unit == "µs" else ():
            if value >= factor:
                value, unit = value / factor, larger
                break
        return f"{value:.4g} {unit}"


@dataclass(frozen=True)
class Job:
    """A test job, judged.

    Attributes:
        name, kind, hosts, log: as in `hybrid_ep.cluster.validation.results.JobFile`.
        status: ``pass``, ``fail``, ``unknown`` or ``skipped``.
        reason: one line for people, also where it passed.
        metrics: what it measured.
        expected: one line.
        remedy: what to do; empty where it passed.
    """

    name: str
    kind: str
    hosts: tuple[str, ...]
    status: str
    reason: str
    metrics: tuple[JudgedMetric, ...]
    expected: str
    remedy: str
    log: str


class Profiles:
    """Profiles by the name of a platform, each read once."""

    def __init__(self, load: Callable[[str], Profile] = load_profile) -> None:
        self._load = load
        self._known: dict[str, Profile | ConfigError] = {}

    def get(self, platform: str) -> Profile:
        """The platform's profile.

        Raises:
            ConfigError: there is none, or it does not follow the schema.
        """
        if platform not in self._known:
            try:
                self._known[platform] = self._load(platform)
            except ConfigError as error:
                self._known[platform] = error
        found = self._known[platform]
        if isinstance(found, ConfigError):
            raise found
        return found


def judge(job: JobFile, platform_of: Mapping[str, str], profiles: Profiles) -> Job:
    """Compares a job's figures with its platforms' profiles; of several platforms, with the lowest figure.

    Args:
        job: as the results folder has it.
        platform_of: host → platform, of every host of the inventory.
        profiles: where to find profiles.
    """
    strangers = [host for host in job.hosts if host not in platform_of]
    if strangers:
        return _ended(job, Status.UNKNOWN, f"host {strangers[0]!r} is not in the inventory", ())
    try:
        chosen = [profiles.get(platform) for platform in sorted({platform_of[host] for host in job.hosts})]
    except ConfigError as error:
        status = Status.UNKNOWN if job.status == "pass" and job.metrics else None
        return _ended(job, status, f"whether that is enough is not known: {error}", _unjudged(job))
    metrics = tuple(_judge_metric(job, metric, chosen) for metric in job.metrics)
    if job.status != "pass":
        return _ended(job, None, "", metrics)
    odd = [metric for metric in metrics if metric.least is None and metric.source]
    if odd:
        return _ended(job, Status.UNKNOWN, f"{odd[0].name} is in {odd[0].unit}, but {odd[0].source}", metrics)
    if slow := _slow(metrics):
        return _ended(job, Status.FAIL, slow, metrics)
    if metrics and not any(metric.least for metric in metrics):
        names = ", ".join(profile.name for profile in chosen)
        reason = f"passed on correctness alone: profile {names} has no figure for a {job.kind} job of {_hosts(job)}"
        return _ended(job, None, reason, metrics)
    return _ended(job, None, "", metrics)


def judge_by_run(jobs: Sequence[Job], platform_of: Mapping[str, str], profiles: Profiles) -> tuple[Job, ...]:
    """Fails a bandwidth of two hosts that is below half of the median of its kind, where no profile has a figure.

    Jobs are left as they are if they are too few for a median, or if their hosts have no GPUs: without GPUs the
    bandwidth varies too much.
    """
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for job in jobs:
        for metric in job.metrics if len(job.hosts) == 2 else ():
            values[job.kind, metric.name, metric.unit].append(metric.value)
    middle = {key: median(each) for key, each in values.items() if len(each) >= _FEWEST_JOBS and key[2].endswith("/s")}
    return tuple(_judge_by_run(job, middle) if _has_gpus(job, platform_of, profiles) else job for job in jobs)


def _has_gpus(job: Job, platform_of: Mapping[str, str], profiles: Profiles) -> bool:
    try:
        return len(job.hosts) == 2 and all(profiles.get(platform_of[host])["gpu.count"] for host in job.hosts)
    except (ConfigError, KeyError):
        return False


def _judge_by_run(job: Job, middle: Mapping[tuple[str, str, str], float]) -> Job:
    metrics = tuple(
        replace(metric, least=_OF_RUN * middle[key], source=f"{_OF_RUN:g} of the median of this run")
        if metric.least is None and not metric.source and (key := (job.kind, metric.name, metric.unit)) in middle
        else metric
        for metric in job.metrics
    )
    if job.status != "pass" or metrics == job.metrics:
        return job
    slow = _slow(metrics)
    judged = replace(job, metrics=metrics, expected=f"it ends well; {_floors(metrics)}")
    return replace(judged, status="fail", reason=slow, remedy=SLOW.remedy) if slow else judged


def _slow(metrics: Sequence[JudgedMetric]) -> str:
    """What is below its floor; the slowest of several NICs by its own name alone."""
    slow = [metric for metric in metrics if metric.least and metric.value < metric.least]
    named = [metric for metric in slow if not any(_is_part(other.name, metric.name) for other in slow)]
    return "; ".join(f"{metric.name} {_show(metric)}" for metric in named)


def _floors(metrics: Sequence[JudgedMetric]) -> str:
    """What was expected; of the NICs of a sum only once."""
    return "; ".join(
        f"{metric.name} ≥ {metric.least:.4g} {metric.unit} ({metric.source})"
        for metric in metrics
        if metric.least is not None and not any(_is_part(metric.name, other.name) for other in metrics)
    )


def _is_part(name: str, whole: str) -> bool:
    """Whether a metric is that of one NIC: it has one word more, as ``write mlx5_0`` beside ``write``."""
    return name.rpartition(" ")[0] == whole


def _ended(job: JobFile, status: Status | None, reason: str, metrics: tuple[JudgedMetric, ...]) -> Job:
    """The job with its status, or a worse one."""
    final = job.status if status is None else status.value
    said = "; ".join(part for part in (job.reason, reason) if part)
    floors = _floors(metrics)
    remedy = "" if final in ("pass", "skipped") else _remedy(job, final)
    expected = f"it ends well; {floors}" if floors else "it ends well"
    return Job(job.name, job.kind, job.hosts, final, said, metrics, expected, remedy, job.log)


def _remedy(job: JobFile, status: str) -> str:
    if job.status == "pass" and status == "fail":
        return SLOW.remedy
    return f"Read {job.log}." if job.log else f"Read jobs/{job.name}.json; the job left no log."


def _unjudged(job: JobFile) -> tuple[JudgedMetric, ...]:
    return tuple(JudgedMetric(metric.name, metric.value, metric.unit, None, "") for metric in job.metrics)


def _judge_metric(job: JobFile, metric: Metric, profiles: list[Profile]) -> JudgedMetric:
    """The metric beside the lowest floor; a figure in another unit gives a source without a floor.

    One NIC of several is compared with the figure of the slowest, unless it has one of its own.
    """
    floors: list[tuple[float, str]] = []
    whole_name = metric.name.rpartition(" ")[0]
    for profile in profiles:
        figures = profile["bandwidth.figures"]
        whole: Any = figures.get(f"{job.kind}.{whole_name}")
        in_same_unit = whole is not None and whole["unit"] == metric.unit
        figure: Any = figures.get(f"{job.kind}.{metric.name}", whole if in_same_unit else None)
        if figure is None or figure["hosts"] != len(job.hosts):
            shares = profile["bandwidth.of_nics"]
            of_nics = _of_nics(profile, shares.get(metric.name, shares.get(whole_name)), metric.unit)
            if of_nics is None:
                return JudgedMetric(metric.name, metric.value, metric.unit, None, "")
            floors.append(of_nics)
            continue
        if figure["unit"] != metric.unit:
            said = f"profile {profile.name} has its figure in {figure['unit']}"
            return JudgedMetric(metric.name, metric.value, metric.unit, None, said)
        fraction = profile["bandwidth.fraction"]
        said = f"{fraction:g} of {figure['value']:g} {figure['unit']}, profile {profile.name}: {figure['source']}"
        floors.append((fraction * figure["value"], said))
    least, source = min(floors)
    return JudgedMetric(metric.name, metric.value, metric.unit, least, source)


def _of_nics(profile: Profile, share: float | None, unit: str) -> tuple[float, str] | None:
    """That share of the rate of a GPU's NICs, and where it comes from; None where the profile knows no rate."""
    rate_gbps, num_nics, num_gpus = (profile[key] for key in ("nic.rate_gbps", "nic.count", "gpu.count"))
    if not isinstance(num_gpus, int):  # any number, or not checked
        return None
    if share is None or unit != "GB/s" or not (rate_gbps and num_nics and num_gpus):
        return None
    gbytes_per_s = rate_gbps / 8 * num_nics / num_gpus
    return share * gbytes_per_s, f"{share:g} of the {gbytes_per_s:g} GB/s of a GPU's NICs, profile {profile.name}"


def _show(metric: JudgedMetric) -> str:
    return f"{metric.value:.4g} {metric.unit}, expected ≥ {metric.least:.4g}"


def _hosts(job: JobFile) -> str:
    return "1 host" if len(job.hosts) == 1 else f"{len(job.hosts)} hosts"


_FEWEST_PAIRS = 3  # from which on a host's median says something


@dataclass(frozen=True)
class PairFigure:
    """A bandwidth that a job of two hosts measured.

    Attributes:
        job: which.
        metric, value, unit, least: as in `hybrid_ep.cluster.validation.judge.JudgedMetric`; ``nic`` stands before the
            metric of such a job.
    """

    job: Job
    metric: str
    value: float
    unit: str
    least: float | None


@dataclass(frozen=True)
class HostFigure:
    """The median over all pairs that a host was in."""

    name: str
    median: float


@dataclass(frozen=True)
class PairTable:
    """One bandwidth over all pairs that were tested.

    Attributes:
        metric, unit: what.
        median: of all pairs.
        figures: the slowest first.
        hosts: those with three pairs or more, the slowest first: one that is slow with everyone stands out.
    """

    metric: str
    unit: str
    median: float
    figures: tuple[PairFigure, ...]
    hosts: tuple[HostFigure, ...]

    @property
    def has_floor(self) -> bool:
        """Whether there is something to compare it with."""
        return any(figure.least is not None for figure in self.figures)

    def share(self, value: float) -> str:
        """A value as a percentage of the median."""
        return f"{value / self.median:.0%}" if self.median else ""


def pair_tables(jobs: Iterable[Job]) -> list[PairTable]:
    """Every bandwidth (units per second: more is better) of jobs on exactly two hosts; that of most pairs first."""
    found: dict[tuple[str, str], list[PairFigure]] = defaultdict(list)
    for job in jobs:
        for metric in job.metrics if len(job.hosts) == 2 else ():
            if metric.unit.endswith("/s"):
                name = metric.name if job.kind == "pair" else f"{job.kind} {metric.name}"
                figure = PairFigure(job, name, metric.value, metric.unit, metric.least)
                found[name, metric.unit].append(figure)
    tables = [_table(metric, unit, figures) for (metric, unit), figures in found.items()]
    return sorted(tables, key=lambda table: -len(table.figures))


def _table(metric: str, unit: str, figures: list[PairFigure]) -> PairTable:
    by_host: dict[str, list[float]] = defaultdict(list)
    for figure in figures:
        for host in figure.job.hosts:
            by_host[host].append(figure.value)
    hosts = [HostFigure(host, median(values)) for host, values in by_host.items() if len(values) >= _FEWEST_PAIRS]
    slowest = sorted(figures, key=lambda figure: figure.value)
    middle = median(figure.value for figure in figures)
    return PairTable(metric, unit, middle, tuple(slowest), tuple(sorted(hosts, key=lambda host: host.median)))
