"""Rules for jobs of the MPI operator."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from hybrid_ep.cluster.kubernetes.manifest import Level, Manifest, PodTemplate
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
    words,
)
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule

# Variables that mpirun itself reads in the launcher: of Open MPI, its runtime, Intel MPI and MPICH.
_OF_MPIRUN = re.compile(r"(OMPI|OPAL|ORTE|PRTE|PMIX|I_MPI|HYDRA|MPIEXEC|MPICH)_")
_PORT = re.compile(r"(?:^|\s)-p\s*(\d+)")  # of sshd


class _Part(NamedTuple):
    """The launcher or the workers of a job: the Pod template, its first container, and what that is started with."""

    template: PodTemplate
    path: str
    container: dict[str, Any]

    @property
    def words(self) -> str:
        return " ".join(words(self.container))

    @property
    def command(self) -> str:
        """JSON path to what the container is started with."""
        return f"{self.path}.{'args' if 'args' in self.container else 'command'}"


class _Job(NamedTuple):
    """An MPIJob with its parts."""

    spec: dict[str, Any]
    launcher: _Part
    worker: _Part

    @property
    def is_open_mpi(self) -> bool:
        """Otherwise mpirun is of Intel MPI or MPICH, which reads the operator's variables and passes on its own."""
        return bool(self.spec.get("mpiImplementation", "OpenMPI") == "OpenMPI")


def _jobs(manifest: Manifest) -> list[_Job]:
    """The manifest as a job; empty where it is none. A job of v1 is none, as it starts its ranks without sshd."""
    if manifest.kind != "MPIJob" or manifest.api_version != "kubeflow.org/v2beta1":
        return []
    parts = {template.role: _Part(template, *main(template)) for template in manifest.pod_templates()}
    is_whole = {"Launcher", "Worker"} <= parts.keys()
    return [_Job(manifest.spec, parts["Launcher"], parts["Worker"])] if is_whole else []


@rule("mpijob-probe", Level.WARNING)
def _probe(manifest: Manifest) -> Found:
    """The launcher waits for its workers, and their sshd has a readinessProbe: without a probe, a worker is ready as
    soon as it has started. A launcher that itself waits, by ssh or by repeating mpirun, needs neither.
    """
    for job in _jobs(manifest):
        said = words(job.launcher.container)
        if any(re.search(r"\b(while|until)\b[^\n]*(\b(ssh|mpirun|nc)\b|ready)", word) for word in said):
            continue
        policy = job.spec.get("launcherCreationPolicy", "AtStartup")
        if policy != "WaitForWorkersReady":
            message = f"{policy!r}: mpirun may find no sshd; allowed: 'WaitForWorkersReady'"
            yield Finding("$.spec.launcherCreationPolicy", message)
        if "readinessProbe" not in job.worker.container:
            message = "missing, so the launcher starts before sshd; allowed: a tcpSocket probe"
            yield Finding(f"{job.worker.path}.readinessProbe", message)


@rule("mpijob-init", Level.WARNING)
def _init(manifest: Manifest) -> Found:
    """Workers have no init containers: if one fails, the launcher is never made. The deadline is the launcher's, so the
    job never ends.
    """
    for job in _jobs(manifest):
        for path, container in containers(job.worker.template, init=True):
            if ".initContainers[" in path and container.get("restartPolicy") != "Always":
                name = container.get("name")
                yield Finding(path, f"{name!r} can leave the job waiting forever; allowed: a step of the launcher")


@rule("mpijob-first-container", Level.ERROR)
def _first_container(manifest: Manifest) -> Found:
    """The containers of mpirun and sshd are the first in their Pods: the operator gives keys and hostfile to the first
    only.
    """
    for job in _jobs(manifest):
        for part, program in ((job.launcher, "mpirun"), (job.worker, "sshd")):
            for i, (path, container) in enumerate(containers(part.template)):
                if i and runs(container, program):
                    yield Finding(path, f"{program} runs in container {i}; allowed: 0")


@rule("mpijob-hostfile", Level.HINT)
def _hostfile(manifest: Manifest) -> Found:
    """The launcher passes the hostfile to mpirun: Open MPI 5 does not read the operator's variable for it."""
    for job in _jobs(manifest):
        named = re.search(r"--?(hostfile|machinefile)[ =]\S|(^|\s)(-H|--host)\s", job.launcher.words)
        if job.is_open_mpi and runs(job.launcher.container, "mpirun") and not named:
            message = "mpirun without its hostfile; allowed with Open MPI 5: with --hostfile /etc/mpi/hostfile"
            yield Finding(job.launcher.command, message)


@rule("mpijob-environment", Level.WARNING)
def _environment(manifest: Manifest) -> Found:
    """Every variable of the launcher is mpirun's own, is passed on with `-x NAME`, or is used by its command. Workers
    set none. Ranks are started through sshd, which inherits nothing. Intel MPI and MPICH pass on all of the launcher's.
    """
    for job in _jobs(manifest):
        passes = job.is_open_mpi and runs(job.launcher.container, "mpirun")
        for part, loses in ((job.launcher, passes), (job.worker, runs(job.worker.container, "sshd"))):
            for i, variable in enumerate(items(part.container, "env")) if loses else ():
                name = re.escape(str(variable.get("name")))
                used = rf"-x\s+{name}\b|\$\{{?{name}\b|\$\(\([^)]*\b{name}\b"
                # NVIDIA_* are for the container runtime.
                if not re.match(r"NVIDIA_", name) and not _OF_MPIRUN.match(name) and not re.search(used, part.words):
                    message = f"{name} reaches no rank; allowed: in the launcher, with the arguments -x {name}"
                    yield Finding(f"{part.path}.env[{i}]", message)
            if loses and part.container.get("envFrom") and not re.search(r"(^|\s)-x\s|\$", part.words):
                message = "its variables reach no rank; allowed: in the launcher, with -x NAME for each"
                yield Finding(f"{part.path}.envFrom", message)


@rule("mpijob-ssh", Level.ERROR)
def _ssh(manifest: Manifest) -> Found:
    """The readinessProbe asks the port that sshd listens on, by TCP, and sshd's configuration names the keys where
    `sshAuthMountPath` puts them: otherwise the worker is never ready, or refuses every login. Without root this is no
    folder of root's: the operator narrows the key's mode under /root/.ssh only.
    """
    for job in _jobs(manifest):
        ports, config = _sshd(job.worker, manifest)
        container = job.worker.container
        probe = container.get("readinessProbe") or {}
        kind = next((kind for kind in ("tcpSocket", "httpGet") if kind in probe), "tcpSocket")
        asked = (probe.get(kind) or {}).get("port")
        asked = next((each["containerPort"] for each in items(container, "ports") if each.get("name") == asked), asked)
        if ports and kind == "httpGet" and str(asked) in ports:
            message = f"HTTP on {asked}, where sshd listens; allowed: a tcpSocket probe"
            yield Finding(f"{job.worker.path}.readinessProbe.httpGet", message)
        elif ports and kind == "tcpSocket" and asked is not None and str(asked) not in ports:
            message = f"{asked}, and sshd listens on {' and '.join(ports)}; allowed: sshd's port"
            yield Finding(f"{job.worker.path}.readinessProbe.tcpSocket.port", message)
        where = job.spec.get("sshAuthMountPath", "/root/.ssh")
        contexts = [security(part.template, part.container) for part in (job.launcher, job.worker)]
        if where == "/root/.ssh" and any(each.get("runAsNonRoot") or each.get("runAsUser") for each in contexts):
            message = f"{where!r} for a user that is not root; allowed: .ssh in its home"
            yield Finding("$.spec.sshAuthMountPath", message)
        for name, file in re.findall(r"(?im)^\s*(HostKey|AuthorizedKeysFile)\s+(\S*/\.ssh/\S+)", config):
            if not file.startswith(f"{where}/"):
                message = f"{where!r}, and sshd's {name} is {file}; allowed: the folder of that file"
                yield Finding("$.spec.sshAuthMountPath", message)


@rule("mpijob-ssh-port", Level.WARNING)
def _ssh_port(manifest: Manifest) -> Found:
    """Under hostNetwork, sshd listens on another port than 22, which the node's own sshd has. A launcher of the
    operator's workers asks for the port that their command gives to sshd.
    """
    for job in _jobs(manifest):
        ports, _ = _sshd(job.worker, manifest)
        if job.worker.template.spec.get("hostNetwork") and "22" in ports:
            message = "sshd listens on 22 with hostNetwork, as the node's own; allowed: another port, e.g. -p 2222"
            yield Finding(job.worker.command, message)
        asker = job.launcher.container
        said = " ".join([job.launcher.words, *environment(asker).values()])
        port = next(iter(_PORT.findall(job.worker.words)), "22") if ports else "22"
        if port != "22" and runs(asker, "mpirun") and port not in said and not items(asker, "volumeMounts"):
            message = f"mpirun's ssh asks for 22, and sshd listens on {port}; allowed: --mca plm_rsh_args '-p {port}'"
            yield Finding(job.launcher.command, message)


def _sshd(worker: _Part, manifest: Manifest) -> tuple[list[str], str]:
    """The ports of sshd, by its command, its configuration or its default, and the text of its configuration, where a
    ConfigMap of the build holds it. No ports where a file of the image says them, or the worker runs no sshd.
    """
    if not runs(worker.container, "sshd"):
        return [], ""
    file = re.search(r"(?:^|\s)-f\s+(\S+)", worker.words)
    held = mounted_file(worker.template, worker.container, file[1], manifest.build) if file else None
    config = str(held[0].content["data"][held[1]]) if held else ""
    ports = _PORT.findall(worker.words) or re.findall(r"(?im)^\s*Port\s+(\d+)", config)
    return ports or ([] if file and not held else ["22"]), config


@rule("mpijob-slots", Level.WARNING)
def _slots(manifest: Manifest) -> Found:
    """A worker has as many slots as GPUs: a rank takes one GPU, and one of nccl-tests as many as `-t` times `-g`. The
    launcher asks for none unless it runs ranks itself: the operator hides them from it.
    """
    for job in _jobs(manifest):
        slots = job.spec.get("slotsPerWorker", 1)
        options = (rf"_perf\s(?:[^;|&]*\s)?(?:{names})[\s=](\d+)" for names in ("-t|--nthreads", "-g|--ngpus"))
        of_rank = math.prod(int(found[1]) for each in options if (found := re.search(each, job.launcher.words)))
        for name, number in gpus(job.worker.template, job.worker.container).items():
            if amount(number) < slots * of_rank or amount(number) > slots * of_rank:
                yield Finding("$.spec.slotsPerWorker", f"{slots} with {number} × {name}; allowed: {number}")
        idle = gpus(job.launcher.template, job.launcher.container)
        if idle and not job.spec.get("runLauncherAsWorker"):
            yield Finding(f"{job.launcher.path}.resources", f"{', '.join(idle)} that no rank uses; allowed: none")


@rule("mpijob-ranks", Level.ERROR)
def _ranks(manifest: Manifest) -> Found:
    """Open MPI's mpirun gets no more ranks than the workers have slots, in all and on each: it refuses more, unless it
    is set to oversubscribe.
    """
    for job in _jobs(manifest):
        if not job.is_open_mpi or "oversubscribe" in job.launcher.words.lower():
            continue
        numbers = {name: int(value) for name, value in reversed(_options(job.launcher)) if value.isdigit()}
        asked = next((numbers[name] for name in ("n", "np", "c") if name in numbers), 0)
        of_each = numbers.get("N", numbers.get("npernode", 0))
        of_worker = int(job.spec.get("slotsPerWorker", 1))
        workers = (job.worker.template.num_pods or 0) + bool(job.spec.get("runLauncherAsWorker"))
        if asked > (slots := workers * of_worker):
            message = f"{asked} ranks, and {workers} workers have {slots} slots; allowed: up to {slots}"
            yield Finding(job.launcher.command, message)
        elif of_each > of_worker:
            message = f"{of_each} ranks a worker, and each has {of_worker} slots; allowed: up to {of_worker}"
            yield Finding(job.launcher.command, message)


# mpirun's options by how many words follow them; of all others that begin with a dash, none is taken to follow.
_TWO = "mca gmca pmca prtemca pmixmca omca"
_ONE = """x n np c N npernode npersocket ppr H host hostfile machinefile default-hostfile map-by bind-to rank-by wdir wd
path prefix timeout tune am cpu-set cpu-list cpus-per-proc cpus-per-rank output output-filename personality launch-agent
rankfile rf stdin display runtime-options report-pid report-uri"""
_VALUES = dict.fromkeys(_TWO.split(), 2) | dict.fromkeys(_ONE.split(), 1)


def _options(launcher: _Part) -> list[tuple[str, str]]:
    """The options of the launcher's first mpirun, as words or inside a script, with the first word of their values."""
    names, said = r"(?:mpirun|mpiexec|orterun|prterun)", words(launcher.container)
    rest = iter(said[1:])
    if not said or not re.fullmatch(rf"(\S*/)?{names}", said[0]):
        found = re.search(rf"(?:^|[\s/;&|(]){names}\s([^;|&]*)", "\n".join(said).replace("\\\n", " "))
        rest = iter(found[1].split() if found else ())
    options: list[tuple[str, str]] = []
    for word in rest:
        if not word.startswith("-"):
            break
        name, _, value = word.lstrip("-").partition("=")
        values = [value] if value else [next(rest, "") for _ in range(_VALUES.get(name, 0))]
        options.append((name, values[0] if values else ""))
    return options
