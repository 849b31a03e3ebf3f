"""Rules for jobs of the MPI operator."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Any, NamedTuple

from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import (
    amount,
    containers,
    environment,
    gpus,
    items,
    main,
    mounted_file,
    runs,
    security,
    spec_of,
    where_asked,
    words,
)
from hybrid_ep.cluster.kubernetes.rules.registry import Build, BuildFound, Finding, Found, build_rule, rule

_ROOT_SSH = "/root/.ssh"
_HOSTFILE = "/etc/mpi/hostfile"
# Variables that mpirun itself reads in the launcher: of Open MPI, its runtime, Intel MPI and MPICH.
_OF_MPIRUN = re.compile(r"(OMPI|OPAL|ORTE|PRTE|PMIX|I_MPI|HYDRA|MPIEXEC|MPICH)_")


class _Job(NamedTuple):
    """An MPIJob, its parts ready at hand; None where it is none."""

    spec: dict[str, Any]
    launcher: PodTemplate
    worker: PodTemplate

    @classmethod
    def of(cls, manifest: Manifest) -> _Job | None:
        if manifest.kind != "MPIJob" or manifest.api_version != "kubeflow.org/v2beta1":
            return None  # that of v1 starts its ranks without sshd
        templates = {template.role: template for template in manifest.pod_templates()}
        if not {"Launcher", "Worker"} <= templates.keys():
            return None
        return cls(manifest.spec, templates["Launcher"], templates["Worker"])

    @property
    def is_open_mpi(self) -> bool:
        """Otherwise mpirun is of Intel MPI or MPICH, which reads the operator's variables and passes on its own."""
        return bool(self.spec.get("mpiImplementation", "OpenMPI") == "OpenMPI")


@rule("mpijob-probe", Level.WARNING)
def _probe(manifest: Manifest) -> Found:
    """The launcher waits for its workers, and their sshd has a readinessProbe: without a probe, a worker is ready as
    soon as it has started. A launcher that itself waits, by ssh or by repeating mpirun, needs neither.
    """
    job = _Job.of(manifest)
    if not job or _waits(main(job.launcher)[1]):
        return
    policy = job.spec.get("launcherCreationPolicy", "AtStartup")
    if policy != "WaitForWorkersReady":
        message = f"{policy!r}: mpirun may find no sshd; allowed: 'WaitForWorkersReady'"
        yield Finding("$.spec.launcherCreationPolicy", message)
    path, container = main(job.worker)
    if "readinessProbe" not in container:
        message = "missing, so the launcher starts before sshd; allowed: a tcpSocket probe"
        yield Finding(f"{path}.readinessProbe", message)


def _waits(launcher: dict[str, Any]) -> bool:
    """Whether its script loops until ssh or mpirun succeeds."""
    return any(re.search(r"\b(while|until)\b[^\n]*\b(ssh|mpirun|nc)\b", word) for word in words(launcher))


@rule("mpijob-limits", Level.WARNING)
def _limits(manifest: Manifest) -> Found:
    """A job states its deadline, its retries and what becomes of its Pods. By default there is no deadline, there are
    six retries, and all Pods are kept.
    """
    if job := _Job.of(manifest):
        policy = job.spec.get("runPolicy") or {}
        for name in ("activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy"):
            if name not in policy:
                level = None if name == "activeDeadlineSeconds" else Level.HINT
                yield Finding(f"$.spec.runPolicy.{name}", "missing; allowed: a value of your own", level)


@rule("mpijob-init", Level.WARNING)
def _init(manifest: Manifest) -> Found:
    """Workers have no init containers: if one fails, the launcher is never made. The deadline is the launcher's, so the
    job never ends.
    """
    if job := _Job.of(manifest):
        for path, container in containers(job.worker, init=True):
            if ".initContainers[" in path and container.get("restartPolicy") != "Always":
                name = container.get("name")
                yield Finding(path, f"{name!r} can leave the job waiting forever; allowed: a step of the launcher")


@rule("mpijob-first-container", Level.ERROR)
def _first_container(manifest: Manifest) -> Found:
    """The containers of mpirun and sshd are the first in their Pods: the operator gives keys and hostfile to the first
    only.
    """
    if job := _Job.of(manifest):
        for template, program in ((job.launcher, "mpirun"), (job.worker, "sshd")):
            for i, (path, container) in enumerate(containers(template)):
                if i and runs(container, program):
                    yield Finding(path, f"{program} runs in container {i}; allowed: 0")


@rule("mpijob-hostfile", Level.HINT)
def _hostfile(manifest: Manifest) -> Found:
    """The launcher passes the hostfile to mpirun: Open MPI 5 does not read the operator's variable for it."""
    job = _Job.of(manifest)
    if job and job.is_open_mpi:
        path, container = main(job.launcher)
        text = " ".join(words(container))
        if runs(container, "mpirun") and not re.search(r"--?(hostfile|machinefile)[ =]\S|(^|\s)(-H|--host)\s", text):
            message = f"mpirun without its hostfile; allowed with Open MPI 5: with --hostfile {_HOSTFILE}"
            yield Finding(f"{path}.{'args' if 'args' in container else 'command'}", message)


@rule("mpijob-environment", Level.WARNING)
def _environment(manifest: Manifest) -> Found:
    """Every variable of the launcher is mpirun's own, is passed on with `-x NAME`, or is used by its command. Workers
    set none. Ranks are started through sshd, which inherits nothing. Intel MPI and MPICH pass on all of the launcher's.
    """
    if job := _Job.of(manifest):
        path, container = main(job.launcher)
        said = words(container)
        text = " ".join(said)
        passes = runs(container, "mpirun") and job.is_open_mpi
        for i, variable in enumerate(items(container, "env")) if passes else ():
            name = str(variable.get("name"))
            used = ("-x", name) in pairwise(said) or re.search(
                rf"-x\s+{re.escape(name)}\b|\$\{{?{re.escape(name)}\b|\$\(\([^)]*\b{re.escape(name)}\b", text
            )
            if not used and not _OF_MPIRUN.match(name):
                message = f"{name} reaches no rank; allowed: together with the arguments -x {name}"
                yield Finding(f"{path}.env[{i}]", message)
        for i, source in enumerate(items(container, "envFrom")) if passes else ():
            if not re.search(r"(^|\s)-x\s|\$", text):
                message = (
                    f"the variables of {_source(source)} reach no rank; allowed: with the arguments -x NAME for each"
                )
                yield Finding(f"{path}.envFrom[{i}]", message)
        path, container = main(job.worker)
        text = " ".join(words(container))
        for i, variable in enumerate(items(container, "env")):
            name = str(variable.get("name"))
            # NVIDIA_* are for the container runtime.
            if not name.startswith("NVIDIA_") and not re.search(rf"\$\{{?{re.escape(name)}\b", text):
                yield Finding(f"{path}.env[{i}]", f"{name} reaches no rank; allowed: in the launcher, with -x {name}")
        for i, source in enumerate(items(container, "envFrom")):
            if runs(container, "sshd") and "$" not in text:
                message = (
                    f"the variables of {_source(source)} reach no rank; allowed: in the launcher, with -x NAME for each"
                )
                yield Finding(f"{path}.envFrom[{i}]", message)


def _source(source: dict[str, Any]) -> str:
    """What an entry of envFrom names."""
    for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
        if key in source:
            return f"{kind} {(source[key] or {}).get('name')!r}"
    return "envFrom"


@rule("mpijob-ssh-path", Level.ERROR)
def _ssh_path(manifest: Manifest) -> Found:
    """Without root, the job's key is mounted where its user can read it: the operator narrows its mode under /root/.ssh
    only.
    """
    if job := _Job.of(manifest):
        where = job.spec.get("sshAuthMountPath", _ROOT_SSH)
        for template in (job.launcher, job.worker):
            context = security(template, main(template)[1])
            if (context.get("runAsNonRoot") or context.get("runAsUser")) and where == _ROOT_SSH:
                yield Finding(
                    "$.spec.sshAuthMountPath", f"{where!r} for a user that is not root; allowed: .ssh in its home"
                )
                return


@build_rule("mpijob-ssh", Level.ERROR)
def _ssh(build: Build) -> BuildFound:
    """The readinessProbe asks the port that sshd listens on, and sshd's configuration names the keys where
    `sshAuthMountPath` puts them. Otherwise the worker is never ready, or refuses every login.
    """
    for manifest in build:
        job = _Job.of(manifest)
        if not job or not runs(main(job.worker)[1], "sshd"):
            continue
        path, container = main(job.worker)
        config = _sshd_config(job.worker, container, build)
        ports = _sshd_ports(container, config)
        if not ports:
            continue  # a file of the image says it
        asked = ((container.get("readinessProbe") or {}).get("tcpSocket") or {}).get("port")
        asked = next((port["containerPort"] for port in items(container, "ports") if port.get("name") == asked), asked)
        if asked is not None and str(asked) not in ports:
            message = f"{asked}, and sshd listens on {' and '.join(ports)}; allowed: sshd's port"
            yield manifest, Finding(f"{path}.readinessProbe.tcpSocket.port", message)
        where = job.spec.get("sshAuthMountPath")
        for name, file in re.findall(r"(?im)^\s*(HostKey|AuthorizedKeysFile)\s+(\S*/\.ssh/\S+)", config or ""):
            if where and not file.startswith(f"{where}/"):
                message = f"{where!r}, and sshd's {name} is {file}; allowed: the folder of that file"
                yield manifest, Finding("$.spec.sshAuthMountPath", message)


def _sshd_ports(container: dict[str, Any], config: str | None) -> list[str]:
    """The ports of sshd, by its command, its configuration or its default; none where a file of the image says it."""
    given = re.findall(r"(?:^|\s)-p\s*(\d+)", " ".join(words(container)))
    ports = given or re.findall(r"(?im)^\s*Port\s+(\d+)", config or "")
    return ports or ([] if config is None and "-f" in words(container) else ["22"])


@build_rule("mpijob-ssh-port", Level.WARNING)
def _ssh_port(build: Build) -> BuildFound:
    """Under hostNetwork, sshd listens on another port than 22, which the node's own sshd has. A launcher of the
    operator's workers asks for the port that their command gives to sshd.
    """
    for manifest in build:
        job = _Job.of(manifest)
        if not job or not runs(main(job.worker)[1], "sshd"):
            continue
        path, container = main(job.worker)
        ports = _sshd_ports(container, _sshd_config(job.worker, container, build))
        if spec_of(job.worker).get("hostNetwork") and "22" in ports:
            message = "sshd listens on 22 with hostNetwork, as the node's own; allowed: another port, e.g. -p 2222"
            yield manifest, Finding(f"{path}.{'args' if 'args' in container else 'command'}", message)
        launcher, asker = main(job.launcher)
        said = " ".join([*words(asker), *environment(asker).values()])
        port = next(iter(re.findall(r"(?:^|\s)-p\s*(\d+)", " ".join(words(container)))), "22")
        if port != "22" and runs(asker, "mpirun") and port not in said and not items(asker, "volumeMounts"):
            message = (
                f"mpirun's ssh asks for port 22, and sshd listens on {port}; allowed: --mca plm_rsh_args '-p {port}'"
            )
            yield manifest, Finding(f"{launcher}.{'args' if 'args' in asker else 'command'}", message)


def _sshd_config(worker: PodTemplate, container: dict[str, Any], build: Build) -> str | None:
    """The text of the file that ``sshd -f`` names, where a ConfigMap of the build holds it."""
    said = " ".join(words(container))
    try:
        split = shlex.split(said)
    except ValueError:
        split = said.split()
    file = next((after for before, after in pairwise(split) if before == "-f"), "")
    held = mounted_file(worker, container, file, build)
    return held[0].content["data"][held[1]] if held else None


@rule("mpijob-launcher-gpus", Level.WARNING)
def _launcher_gpus(manifest: Manifest) -> Found:
    """The launcher asks for no GPUs unless it runs ranks itself: the operator hides them from it."""
    job = _Job.of(manifest)
    if job and not job.spec.get("runLauncherAsWorker"):
        for path, container in containers(job.launcher):
            for name in gpus(job.launcher, container):
                yield Finding(where_asked(path, name), "GPUs that no rank uses; allowed: none")


@rule("mpijob-slots", Level.WARNING)
def _slots(manifest: Manifest) -> Found:
    """A worker has as many slots as GPUs: a rank takes one GPU, and one of nccl-tests as many as `-t` times `-g`."""
    if job := _Job.of(manifest):
        slots = job.spec.get("slotsPerWorker", 1)
        said = " ".join(words(main(job.launcher)[1]))
        of_rank = 1
        for names in ("-t|--nthreads", "-g|--ngpus"):
            given = re.search(rf"_perf\s(?:[^;|&]*\s)?(?:{names})[\s=](\d+)", said)
            of_rank *= int(given[1]) if given else 1
        for name, number in gpus(job.worker, main(job.worker)[1]).items():
            wanted = amount(slots) * of_rank
            if amount(number) < wanted or amount(number) > wanted:
                yield Finding("$.spec.slotsPerWorker", f"{slots} with {number} × {name}; allowed: {number}")


@rule("mpijob-ranks", Level.ERROR)
def _ranks(manifest: Manifest) -> Found:
    """Open MPI's mpirun gets no more ranks than the workers have slots, in all and on each: it refuses more, unless it
    is set to oversubscribe.
    """
    job = _Job.of(manifest)
    if not job or not job.is_open_mpi:
        return
    path, container = main(job.launcher)
    mpirun = _Mpirun.of(container)
    if not mpirun or "oversubscribe" in "\n".join(words(container)).lower():
        return
    where = f"{path}.{'args' if 'args' in container else 'command'}"
    of_worker = int(job.spec.get("slotsPerWorker", 1))
    workers = (job.worker.num_pods or 0) + bool(job.spec.get("runLauncherAsWorker"))
    asked, of_each = mpirun.number("n", "np", "c"), mpirun.number("N", "npernode")
    if asked and asked > workers * of_worker:
        slots = workers * of_worker
        yield Finding(where, f"{asked} ranks, and {workers} workers have {slots} slots; allowed: up to {slots}")
    elif of_each and of_each > of_worker:
        yield Finding(where, f"{of_each} ranks a worker, and each has {of_worker} slots; allowed: up to {of_worker}")


@rule("mpirun-options", Level.ERROR)
def _mpirun_options(manifest: Manifest) -> Found:
    """Each option of Open MPI's mpirun and each value is a word of its own, and `-x` passes on one variable: mpirun
    refuses others, or takes them for its program.
    """
    job = _Job.of(manifest)
    mpirun = _Mpirun.of(main(job.launcher)[1]) if job and job.is_open_mpi else None
    if not job or not mpirun:
        return
    path, container = main(job.launcher)
    where = f"{path}.{'args' if 'args' in container else 'command'}"
    for name, values in mpirun.options:
        if re.search(r"\s", name):
            yield Finding(where, f"{'-' + name!r} is one word; allowed: a word each")
        if name == "x" and "," in values[0].partition("=")[0]:
            yield Finding(where, f"-x {values[0]}; allowed: -x for each variable")
    last, values = mpirun.options[-1] if mpirun.options else ("", [""])
    if (
        last == "x"
        and "=" not in values[0]
        and mpirun.program[1:]
        and re.match("-x$|--?mca$", mpirun.program[1])
        and not re.search(r"[/.]", mpirun.program[0])
    ):
        said = f"-x {values[0]} {mpirun.program[0]}"
        yield Finding(where, f"{said}: {mpirun.program[0]} is taken for the program; allowed: -x {values[0]}=VALUE")


# mpirun's options by how many words follow them; of all others that begin with a dash, none is taken to follow.
_VALUES = {
    **dict.fromkeys(("mca", "gmca", "pmca", "prtemca", "pmixmca", "omca"), 2),
    **dict.fromkeys(
        (
            *("x", "n", "np", "c", "N", "npernode", "npersocket", "ppr", "H", "host", "hostfile", "machinefile"),
            *(
                "default-hostfile",
                "map-by",
                "bind-to",
                "rank-by",
                "wdir",
                "wd",
                "path",
                "prefix",
                "timeout",
                "tune",
                "am",
            ),
            *("cpu-set", "cpu-list", "cpus-per-proc", "cpus-per-rank", "output", "output-filename", "personality"),
            *("launch-agent", "rankfile", "rf", "stdin", "display", "runtime-options", "report-pid", "report-uri"),
        ),
        1,
    ),
}


class _Mpirun(NamedTuple):
    """A command line of mpirun: its own options with their values, then the program's words."""

    options: list[tuple[str, list[str]]]
    program: list[str]

    @classmethod
    def of(cls, container: dict[str, Any]) -> _Mpirun | None:
        """The first of a container, as words or inside a script; None where there is none."""
        names, said = r"(?:mpirun|mpiexec|orterun|prterun)", words(container)
        if said and re.fullmatch(rf"(\S*/)?{names}", said[0]):
            rest = iter(said[1:])
        else:
            text = "\n".join(said).replace("\\\n", " ")
            found = re.search(rf"(?:^|[\s/;&|(]){names}\s([^;|&]*)", text)
            if not found:
                return None
            rest = iter(found[1].split())
        options: list[tuple[str, list[str]]] = []
        for word in rest:
            if not word.startswith("-"):
                return cls(options, [word, *rest])
            name, _, value = word.lstrip("-").partition("=")
            options.append((name, [value] if value else [next(rest, "") for _ in range(_VALUES.get(name, 0))]))
        return cls(options, [])

    def number(self, *names: str) -> int | None:
        """The value of the first of these options that is a number."""
        found = (values[0] for name, values in self.options if name in names)
        return next((int(value) for value in found if value.isdigit()), None)
