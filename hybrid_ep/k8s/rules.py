"""What schemas cannot know: manifests that are valid, are accepted, and then hang, fall back or fail.

A rule is a function over a manifest that yields (JSON path, message). Its id and its docstring are what
docs/kubernetes.md lists. Each one stands for something that was seen to go wrong; a test breaks a shipped overlay for
each and sees it found by that rule alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from hybrid_ep.k8s.manifest import Manifest, PodTemplate
from hybrid_ep.k8s.problem import Problem

__all__ = ["RULES", "Rule", "check_rules"]

Found = Iterator[tuple[str, str]]
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_ROOT_SSH = "/root/.ssh"
_HOSTFILE = "/etc/mpi/hostfile"


class Rule(NamedTuple):
    """One rule.

    Attributes:
        id: what reports call it.
        text: what it demands and why.
        check: yields a JSON path and a message for every breach.
    """

    id: str
    text: str
    check: Callable[[Manifest], Found]


RULES: list[Rule] = []


def check_rules(manifest: Manifest) -> Iterator[Problem]:
    """Yields every breach of every rule."""
    for rule in RULES:
        for path, message in rule.check(manifest):
            yield Problem(str(manifest.source), manifest.name, path, rule.id, message)


def _rule(id: str) -> Callable[[Callable[[Manifest], Found]], Callable[[Manifest], Found]]:
    def register(check: Callable[[Manifest], Found]) -> Callable[[Manifest], Found]:
        RULES.append(Rule(id, " ".join((check.__doc__ or "").split()), check))
        return check

    return register


class _Job(NamedTuple):
    """An MPIJob, its parts ready at hand; `None` where the schema has already complained."""

    spec: dict[str, Any]
    launcher: PodTemplate
    worker: PodTemplate

    @classmethod
    def of(cls, manifest: Manifest) -> _Job | None:
        if manifest.kind != "MPIJob":
            return None
        templates = {template.role: template for template in manifest.pod_templates()}
        if not {"Launcher", "Worker"} <= templates.keys():
            return None
        return cls(manifest.content["spec"], templates["Launcher"], templates["Worker"])


def _containers(template: PodTemplate, *, init: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON path, container) of each container, and of each init container if asked for."""
    spec = template.content.get("spec") or {}
    for key in ("initContainers", "containers") if init else ("containers",):
        for i, container in enumerate(spec.get(key) or []):
            yield f"{template.path}.spec.{key}[{i}]", container


def _words(container: dict[str, Any]) -> list[str]:
    return [str(word) for key in ("command", "args") for word in container.get(key) or []]


def _runs(container: dict[str, Any], program: str) -> bool:
    return any(re.search(rf"(^|[\s/]){program}(\s|$)", word) for word in _words(container))


def _main(template: PodTemplate) -> tuple[str, dict[str, Any]]:
    """The container that the operator wires up: the first."""
    return next(_containers(template), (f"{template.path}.spec.containers", {}))


def _amounts(container: dict[str, Any], which: str) -> dict[str, Any]:
    return (container.get("resources") or {}).get(which) or {}


def _nic_resources(template: PodTemplate) -> list[str]:
    """What the Pod asks for that is a NIC: any extended resource but GPUs, or networks by annotation."""
    found = [
        name
        for _, container in _containers(template)
        for name in _amounts(container, "limits") | _amounts(container, "requests")
        if "/" in name and name not in _GPU_RESOURCES
    ]
    annotations = (template.content.get("metadata") or {}).get("annotations") or {}
    return found + [
        name for name in annotations if name in ("k8s.v1.cni.cncf.io/networks", "networking.gke.io/interfaces")
    ]


# Any workload.


@_rule("image-pinned")
def _image_pinned(manifest: Manifest) -> Found:
    """Every image has a digest or a tag other than `latest`: nodes would run what they happen to have."""
    for template in manifest.pod_templates():
        for path, container in _containers(template, init=True):
            image = str(container.get("image", ""))
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@sha256:" not in image and tag in ("", "latest"):
                yield f"{path}.image", f"{image!r} is not pinned; allowed: NAME:VERSION or NAME@sha256:…"


@_rule("gpu-limit")
def _gpu_limit(manifest: Manifest) -> Found:
    """GPUs and NICs are whole devices: a request needs a limit, and the same one."""
    for template in manifest.pod_templates():
        for path, container in _containers(template, init=True):
            limits = _amounts(container, "limits")
            for name, amount in _amounts(container, "requests").items():
                if "/" in name and str(limits.get(name)) != str(amount):
                    seen = f"{name} is requested {amount} times, its limit is {limits.get(name)}"
                    yield f"{path}.resources.requests['{name}']", f"{seen}; allowed: the limit alone, or both equal"


@_rule("ipc-lock")
def _ipc_lock(manifest: Manifest) -> Found:
    """A Pod with RDMA NICs adds the capability IPC_LOCK: without it memory cannot be registered with the NIC."""
    for template in manifest.pod_templates():
        if nics := _nic_resources(template):
            path, container = _main(template)
            added = ((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or []
            if "IPC_LOCK" not in added:
                where = f"{path}.securityContext.capabilities.add"
                yield where, f"{added} with {', '.join(nics)}; allowed with RDMA: a list with IPC_LOCK"


@_rule("hugepages")
def _hugepages(manifest: Manifest) -> Found:
    """A container with huge pages also states cpu and memory: Kubernetes refuses the Pod otherwise."""
    for template in manifest.pod_templates():
        for path, container in _containers(template, init=True):
            stated = _amounts(container, "limits") | _amounts(container, "requests")
            pages = [name for name in stated if name.startswith("hugepages-")]
            missing = [name for name in ("cpu", "memory") if name not in stated]
            if pages and missing:
                yield f"{path}.resources", f"{', '.join(pages)} without {' and '.join(missing)}; allowed: with both"


@_rule("shared-memory")
def _shared_memory(manifest: Manifest) -> Found:
    """Ranks get /dev/shm as a memory volume with a size: a container runtime gives 64 MiB, and NCCL needs more."""
    for template in manifest.pod_templates():
        if template.role not in ("Worker", "Job"):
            continue
        path, container = _main(template)
        mounts = {mount.get("mountPath"): mount.get("name") for mount in container.get("volumeMounts") or []}
        volumes = {volume.get("name"): volume for volume in template.content["spec"].get("volumes") or []}
        empty_dir = (volumes.get(mounts.get("/dev/shm")) or {}).get("emptyDir") or {}
        if empty_dir.get("medium") != "Memory" or "sizeLimit" not in empty_dir:
            yield f"{path}.volumeMounts", "no /dev/shm from an emptyDir of medium Memory with a sizeLimit; allowed: one"


@_rule("claims")
def _claims(manifest: Manifest) -> Found:
    """Every claim that a container uses is one of its Pod's, and every one of the Pod's is used."""
    for template in manifest.pod_templates():
        given = {claim.get("name") for claim in template.content.get("spec", {}).get("resourceClaims") or []}
        used = set()
        for path, container in _containers(template, init=True):
            for i, claim in enumerate((container.get("resources") or {}).get("claims") or []):
                used.add(claim.get("name"))
                if claim.get("name") not in given:
                    yield f"{path}.resources.claims[{i}]", f"{claim.get('name')!r}; allowed: {sorted(map(str, given))}"
        for name in sorted(map(str, given - used)):
            yield (
                f"{template.path}.spec.resourceClaims",
                f"no container uses the claim {name!r}, so none gets the device",
            )


# The MPI operator.


@_rule("mpijob-probe")
def _probe(manifest: Manifest) -> Found:
    """The launcher waits for its workers, and their sshd has a readinessProbe: without it, ready means started."""
    if job := _Job.of(manifest):
        policy = job.spec.get("launcherCreationPolicy", "AtStartup")
        if policy != "WaitForWorkersReady":
            yield (
                "$.spec.launcherCreationPolicy",
                f"{policy!r}: mpirun may find no sshd; allowed: 'WaitForWorkersReady'",
            )
        path, container = _main(job.worker)
        if "readinessProbe" not in container:
            yield f"{path}.readinessProbe", "missing, so the launcher starts before sshd; allowed: a tcpSocket probe"


@_rule("mpijob-limits")
def _limits(manifest: Manifest) -> Found:
    """A job states its deadline, its retries and what becomes of its Pods: by default never, six, and all are kept."""
    if job := _Job.of(manifest):
        policy = job.spec.get("runPolicy") or {}
        for name in ("activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy"):
            if name not in policy:
                yield f"$.spec.runPolicy.{name}", "missing; allowed: a value of your own"


@_rule("mpijob-init")
def _init(manifest: Manifest) -> Found:
    """Workers have no init containers: where one fails, the launcher is never made, and the deadline, which is the
    launcher's, never comes.
    """
    if job := _Job.of(manifest):
        for path, container in _containers(job.worker, init=True):
            if ".initContainers[" in path:
                yield (
                    path,
                    f"{container.get('name')!r} can leave the job waiting for ever; allowed: a step of the launcher",
                )


@_rule("mpijob-first-container")
def _first_container(manifest: Manifest) -> Found:
    """First in their Pods are the containers of mpirun and sshd: the operator gives keys and hostfile to no other."""
    if job := _Job.of(manifest):
        for template, program in ((job.launcher, "mpirun"), (job.worker, "sshd")):
            for i, (path, container) in enumerate(_containers(template)):
                if i and _runs(container, program):
                    yield path, f"{program} runs in container {i}; allowed: 0"


@_rule("mpijob-hostfile")
def _hostfile(manifest: Manifest) -> Found:
    """The launcher tells mpirun the hostfile: Open MPI 5 does not know the variable by which the operator names it."""
    if job := _Job.of(manifest):
        path, container = _main(job.launcher)
        text = " ".join(_words(container))
        if _runs(container, "mpirun") and not re.search(rf"--?hostfile[ =]{_HOSTFILE}(\s|$)", text):
            yield f"{path}.args", f"mpirun without its hostfile; allowed: with --hostfile {_HOSTFILE}"


@_rule("mpijob-environment")
def _environment(manifest: Manifest) -> Found:
    """Every variable of the launcher is handed on with `-x NAME` or used by its command, and workers set none: ranks
    are started through sshd, which inherits nothing.
    """
    if job := _Job.of(manifest):
        path, container = _main(job.launcher)
        words = _words(container)
        text = " ".join(words)
        for i, variable in enumerate(container.get("env") or []):
            name = str(variable.get("name"))
            handed_on = ("-x", name) in pairwise(words)
            if not handed_on and not re.search(rf"-x {name}\b|\$\{{?{name}\b", text):
                yield f"{path}.env[{i}]", f"{name} reaches no rank; allowed: together with the arguments -x {name}"
        path, container = _main(job.worker)
        for i, variable in enumerate(container.get("env") or []):
            name = str(variable.get("name"))
            if not name.startswith("NVIDIA_"):  # those are for the container runtime
                yield f"{path}.env[{i}]", f"{name} reaches no rank; allowed: in the launcher, with -x {name}"


@_rule("mpijob-ssh-path")
def _ssh_path(manifest: Manifest) -> Found:
    """Without root, the job's key is mounted where its user can read it: only under /root/.ssh is its mode narrowed."""
    if job := _Job.of(manifest):
        where = job.spec.get("sshAuthMountPath", _ROOT_SSH)
        for template in (job.launcher, job.worker):
            _, container = _main(template)
            context = (template.content["spec"].get("securityContext") or {}) | (container.get("securityContext") or {})
            if (context.get("runAsNonRoot") or context.get("runAsUser")) and where == _ROOT_SSH:
                yield "$.spec.sshAuthMountPath", f"{where!r} for a user that is not root; allowed: .ssh in its home"
                return


@_rule("mpijob-launcher-gpus")
def _launcher_gpus(manifest: Manifest) -> Found:
    """The launcher asks for no GPUs unless it runs ranks itself: the operator hides them from it."""
    job = _Job.of(manifest)
    if job and not job.spec.get("runLauncherAsWorker"):
        for path, container in _containers(job.launcher):
            for name in _GPU_RESOURCES:
                if name in _amounts(container, "limits") | _amounts(container, "requests"):
                    yield f"{path}.resources.limits['{name}']", "GPUs that no rank uses; allowed: none"


@_rule("mpijob-slots")
def _slots(manifest: Manifest) -> Found:
    """A worker has as many slots as GPUs: a rank takes one GPU."""
    if job := _Job.of(manifest):
        _, container = _main(job.worker)
        slots = job.spec.get("slotsPerWorker", 1)
        for name in _GPU_RESOURCES:
            gpus = _amounts(container, "limits").get(name)
            if gpus is not None and str(gpus) != str(slots):
                yield "$.spec.slotsPerWorker", f"{slots} with {gpus} × {name}; allowed: {gpus}"


# Jobs of Kubernetes itself.


@_rule("job-indexed")
def _indexed(manifest: Manifest) -> Found:
    """A Job that runs torchrun is Indexed, runs all its Pods at once, restarts none, and has a deadline: ranks are
    found by index, wait for each other, and cannot be restarted alone.
    """
    for template in manifest.pod_templates():
        if manifest.kind != "Job" or not _runs(_main(template)[1], "torchrun"):
            continue
        spec = manifest.content["spec"]
        completions = spec.get("completions", 1)
        for path, seen, allowed in (
            ("$.spec.completionMode", spec.get("completionMode", "NonIndexed"), "Indexed"),
            ("$.spec.parallelism", spec.get("parallelism", 1), completions),
            ("$.spec.backoffLimit", spec.get("backoffLimit", 6), 0),
            (f"{template.path}.spec.restartPolicy", template.content["spec"].get("restartPolicy"), "Never"),
        ):
            if seen != allowed:
                yield path, f"{seen!r}; allowed with torchrun: {allowed!r}"
        if "activeDeadlineSeconds" not in spec:
            yield "$.spec.activeDeadlineSeconds", "missing; allowed: a value of your own"
        if not template.content["spec"].get("subdomain"):
            yield (
                f"{template.path}.spec.subdomain",
                "missing, so Pods have no names; allowed: a headless Service's name",
            )
