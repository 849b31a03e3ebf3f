"""Rules for jobs: jobs of torchrun, engines of inference, and the fields of Jobs, JobSets and gangs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import amount, containers, gpus, items, main, option, runs, spec_of, words
from hybrid_ep.cluster.kubernetes.rules.registry import Build, BuildFound, Finding, Found, build_rule, rule

TRAINING_RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")  # of TrainJobs


@rule("job-indexed", Level.ERROR)
def _indexed(manifest: Manifest) -> Found:
    """A Job that runs torchrun has a deadline. One of several Pods, also within a JobSet, is Indexed, runs all of them
    at once, and restarts none: ranks are found by index, wait for each other, and cannot be restarted alone.
    """
    for template in manifest.pod_templates():
        if manifest.kind not in ("Job", "JobSet") or not runs(main(template)[1], "torchrun"):
            continue
        path, spec = _job_of(manifest, template)
        mode = "Indexed" if manifest.kind == "JobSet" else "NonIndexed"  # where none is given
        pods, said = int(spec.get("completions") or 1), " ".join(words(main(template)[1]))
        by_index = "JOB_COMPLETION_INDEX" in said or "rdzv" not in said
        together = (
            (f"{path}.completionMode", spec.get("completionMode", mode), "Indexed", by_index),
            (f"{path}.parallelism", spec.get("parallelism", 1), pods, True),
        )
        for where, seen, allowed, asked in together if pods > 1 else ():
            if asked and seen != allowed:
                yield Finding(where, f"{seen!r}; allowed with torchrun: {allowed!r}")
        if manifest.kind == "JobSet":  # it has its own deadline and names
            continue
        alone = (
            ("$.spec.backoffLimit", spec.get("backoffLimit", 6), 0),
            (f"{template.path}.spec.restartPolicy", spec_of(template).get("restartPolicy"), "Never"),
        )
        for where, seen, allowed in alone if pods > 1 else ():
            if seen != allowed:
                yield Finding(where, f"{seen!r}; allowed with torchrun: {allowed!r}", Level.WARNING)
        if "activeDeadlineSeconds" not in spec:
            yield Finding("$.spec.activeDeadlineSeconds", "missing; allowed: a value of your own", Level.WARNING)
        if pods > 1 and not spec_of(template).get("subdomain") and not spec_of(template).get("hostNetwork"):
            message = "missing, so Pods have no names; allowed: a headless Service's name"
            yield Finding(f"{template.path}.spec.subdomain", message)


@rule("torchrun-size", Level.ERROR)
def _torchrun_size(manifest: Manifest) -> Found:
    """Torchrun's `--nnodes` is the number of the job's Pods, and `--nproc-per-node` that of their GPUs, also where a
    PyTorchJob gives it: with more, ranks wait forever, and with fewer, GPUs have no rank.
    """
    for template in manifest.pod_templates():
        path, container = main(template)
        if not runs(container, "torchrun"):
            continue
        nodes, ranks = option(container, "nnodes"), option(container, "nproc-per-node")
        pods = _pods_of(manifest, template)
        where = f"{path}.{'args' if any('nnodes' in str(word) for word in container.get('args') or []) else 'command'}"
        allowed = " or ".join(map(str, pods))
        least = re.fullmatch(r"(\d+):\d+", nodes or "")
        if pods and least and int(least[1]) > max(pods):
            yield Finding(where, f"--nnodes={nodes} with {allowed} Pods; allowed: from {allowed} on")
        elif pods and nodes and nodes.isdigit() and int(nodes) not in pods:
            yield Finding(where, f"--nnodes={nodes} with {allowed} Pods; allowed: {allowed}")
        given = manifest.spec.get("nprocPerNode") if manifest.kind == "PyTorchJob" and not ranks else None
        yield from _ranks("$.spec.nprocPerNode" if given else where, given or ranks, gpus(template, container))


@build_rule("trainjob-size", Level.ERROR)
def _trainjob_size(build: Build) -> BuildFound:
    """A TrainJob and its runtime start no more ranks on a node than it has GPUs, and not several but fewer. What the
    TrainJob does not say (`numProcPerNode`, `resourcesPerNode`) is the runtime's, where the build has it.
    """
    runtimes = {(each.kind, str(each.metadata.get("name"))): each for each in build if each.kind in TRAINING_RUNTIMES}
    for manifest in build:
        if manifest.kind in TRAINING_RUNTIMES:
            path, ranks = _ranks_of_runtime(manifest)
            for finding in _ranks(path, ranks, _gpus_of_runtime(manifest)):
                yield manifest, finding
        if manifest.kind == "TrainJob":
            trainer, ref = manifest.spec.get("trainer") or {}, manifest.spec.get("runtimeRef") or {}
            runtime = runtimes.get((str(ref.get("kind", "ClusterTrainingRuntime")), str(ref.get("name"))))
            ranks, resources = trainer.get("numProcPerNode"), trainer.get("resourcesPerNode")
            if ranks is None and resources is None:
                continue  # all is the runtime's, and judged there
            path = f"$.spec.trainer.{'resourcesPerNode' if ranks is None else 'numProcPerNode'}"
            if ranks is None and runtime:
                _, ranks = _ranks_of_runtime(runtime)
            found = gpus(PodTemplate("", "", {}), {"resources": resources})
            if resources is None and runtime:
                found = _gpus_of_runtime(runtime)
            for finding in _ranks(path, ranks, found):
                yield manifest, finding


def _ranks_of_runtime(runtime: Manifest) -> tuple[str, object]:
    """JSON path and value of the ranks that a runtime starts on each node; None where it does not say."""
    policy = runtime.spec.get("mlPolicy") or {}
    kind = next((kind for kind in ("torch", "mpi") if "numProcPerNode" in (policy.get(kind) or {})), "torch")
    return f"$.spec.mlPolicy.{kind}.numProcPerNode", (policy.get(kind) or {}).get("numProcPerNode")


def _gpus_of_runtime(runtime: Manifest) -> dict[str, Any]:
    """GPUs of the container `node`, which the trainer runs in."""
    for template in runtime.pod_templates():
        for _, container in containers(template):
            if container.get("name") == "node" and (found := gpus(template, container)):
                return found
    return {}


def _ranks(where: str, ranks: object, found: dict[str, Any]) -> Found:
    """Whether there are as many ranks as GPUs. One rank may use several GPUs."""
    name = "--nproc-per-node" if where.endswith(("args", "command")) else "numProcPerNode"
    name = "nprocPerNode" if where.endswith("nprocPerNode") else name
    for gpu, number in found.items():
        if str(ranks).isdigit() and amount(ranks) > amount(number):
            yield Finding(where, f"{name}={ranks} with {number} × {gpu}; allowed: up to {number}")
        elif str(ranks).isdigit() and 1 < amount(ranks) <= amount(number) - 1:
            yield Finding(where, f"{name}={ranks} with {number} × {gpu}; allowed: {number}", Level.WARNING)


_ENGINES = (("vllm", "vllm"), ("sglang", "sglang"), ("trtllm-serve", "tensorrt-llm"))  # programs, and parts of images
# Options by which engines split a model over GPUs (tensors, layers, experts) and copy it (in all, in one Pod).
_SPLITS = (
    ("tensor-parallel-size", "tp-size", "tp", "-tp"),
    ("pipeline-parallel-size", "pp-size", "pp", "-pp"),
    ("expert-parallel-size", "ep-size", "ep"),
    ("data-parallel-size", "dp-size", "dp", "-dp"),
    ("data-parallel-size-local", "-dpl"),
)
_COPIES_ELSEWHERE = r"data-parallel-(address|rank|start-rank|hybrid-lb|external-lb)"  # other Pods have some of them


@rule("engine-size", Level.ERROR)
def _engine_size(manifest: Manifest) -> Found:
    """Engines (vLLM, SGLang, TensorRT-LLM) split and copy a model over no more GPUs than their Pods have, in a
    LeaderWorkerSet those of one group, and `--nnodes` is the number of these Pods: otherwise they end, or wait forever.
    """
    groups = list(manifest.pod_templates())
    for template in groups:
        path, container = main(template)
        image = str(container.get("image"))
        if not any(runs(container, program) or name in image for program, name in _ENGINES):
            continue
        where = f"{path}.{'args' if container.get('args') else 'command'}"
        nodes, pods = option(container, "nnodes") or "1", _pods_of(manifest, template)
        if pods and nodes.isdigit() and int(nodes) > 1 and int(nodes) not in pods:
            allowed = " or ".join(map(str, pods))
            yield Finding(where, f"--nnodes={nodes} with {allowed} Pods; allowed: {allowed}")
        tensor, pipeline, experts, copies, local = (_size(container, names) for names in _SPLITS)
        said = " ".join(words(container))
        if "enable-dp-attention" in said or (manifest.kind != "LeaderWorkerSet" and re.search(_COPIES_ELSEWHERE, said)):
            copies = 1
        of_pod, of_group = _gpus_of_pod(template), _gpus_of_group(manifest, groups, template)
        for number, has in ((local, of_pod if local > 1 else 0), (copies, of_group)):
            split = max(tensor, experts) * pipeline * number
            if has and split > has:
                sizes = [max(tensor, experts), pipeline] + [number] * (number > 1)
                message = f"{' × '.join(map(str, sizes))} GPUs of {has:g}; allowed: up to {has:g}"
                yield Finding(where, message)
                break


def _size(container: dict[str, Any], names: tuple[str, ...]) -> int:
    """The value of the first of these options that is given; 1 where none is, and 0 where it is not known."""
    found = next((found for name in names if (found := option(container, name))), "1")
    return int(found) if found.isdigit() else 0


def _gpus_of_pod(template: PodTemplate) -> float:
    return sum(map(amount, gpus(template, main(template)[1]).values()))


def _gpus_of_group(manifest: Manifest, templates: list[PodTemplate], template: PodTemplate) -> float:
    """GPUs of the Pods that an engine runs on; 0 where that is not known."""
    if manifest.kind == "LeaderWorkerSet":
        size = int((manifest.spec.get("leaderWorkerTemplate") or {}).get("size", 1))
        return _gpus_of_pod(templates[0]) + (size - 1) * _gpus_of_pod(templates[-1])
    container = main(template)[1]
    nodes = option(container, "nnodes") or "1"
    known = nodes.isdigit() and "ray" not in " ".join(words(container))
    return _gpus_of_pod(template) * int(nodes) if known else 0


@rule("pytorchjob", Level.ERROR)
def _pytorchjob(manifest: Manifest) -> Found:
    """A Pod of a PyTorchJob has a container `pytorch`, which the operator wires up, and there is one master: the
    operator refuses others. With an elasticPolicy there are as many workers as it allows: ranks wait for the least.
    """
    for template in manifest.pod_templates() if manifest.kind == "PyTorchJob" else ():
        names = [str(each.get("name")) for each in items(spec_of(template), "containers")]
        if "pytorch" not in names:
            yield Finding(f"{template.path}.spec.containers", f"{', '.join(names)}; allowed: with one called pytorch")
        if template.role == "Master" and template.num_pods != 1:
            where = f"{template.path.removesuffix('.template')}.replicas"
            yield Finding(where, f"{template.num_pods} masters; allowed: 1")
        elastic = manifest.spec.get("elasticPolicy") or {}
        least = elastic.get("minReplicas")
        if template.role == "Worker" and isinstance(least, int) and (template.num_pods or 0) < least:
            yield Finding("$.spec.elasticPolicy.minReplicas", f"{least} of {template.num_pods} workers; allowed: fewer")


@rule("gang", Level.ERROR)
def _gang(manifest: Manifest) -> Found:
    """The gang scheduler waits for no more Pods than the job has: for an MPIJob these are its workers and the launcher,
    for a job of Volcano those of its tasks, and for a task its own.
    """
    if manifest.kind in ("MPIJob", "PyTorchJob"):
        path = "$.spec.runPolicy.schedulingPolicy.minAvailable"
        least = ((manifest.spec.get("runPolicy") or {}).get("schedulingPolicy") or {}).get("minAvailable")
        pods = sum(template.num_pods or 0 for template in manifest.pod_templates())
    elif manifest.api_version.startswith("batch.volcano.sh/"):
        path, least = "$.spec.minAvailable", manifest.spec.get("minAvailable")
        tasks = items(manifest.spec, "tasks")
        pods = sum(int(task.get("replicas", 1)) for task in tasks)
        for i, task in enumerate(tasks):
            of_task, least_of_task = int(task.get("replicas", 1)), task.get("minAvailable")
            if isinstance(least_of_task, int) and least_of_task > of_task:
                message = f"{least_of_task}, and the task has {of_task} Pods; allowed: up to {of_task}"
                yield Finding(f"$.spec.tasks[{i}].minAvailable", message)
    else:
        return
    if isinstance(least, int) and least > pods:
        yield Finding(path, f"{least}, and the job has {pods} Pods; allowed: up to {pods}")


@rule("kueue-resources", Level.ERROR)
def _kueue_resources(manifest: Manifest) -> Found:
    """Each flavor of a ClusterQueue has a quota for each of the group's coveredResources, in their order: Kueue refuses
    others.
    """
    for i, group in enumerate(items(manifest.spec, "resourceGroups") if manifest.kind == "ClusterQueue" else ()):
        covered = list(map(str, group.get("coveredResources") or []))
        for j, flavor in enumerate(items(group, "flavors")):
            names = [str(each.get("name")) for each in items(flavor, "resources")]
            if names != covered:
                path = f"$.spec.resourceGroups[{i}].flavors[{j}].resources"
                yield Finding(path, f"{', '.join(names)}; allowed: {', '.join(covered)}")


@rule("job-fields", Level.ERROR)
def _job_fields(manifest: Manifest) -> Found:
    """A Job chooses its own selector. Limits and success by index need completionMode `Indexed`, which needs
    completions, and name indexes below that. With a podFailurePolicy no container is restarted, and a Pod is replaced
    when it has failed.
    """
    for template in manifest.pod_templates() if manifest.kind in ("Job", "CronJob", "JobSet") else ():
        path, spec = _job_of(manifest, template)
        if spec.get("selector") and not spec.get("manualSelector"):
            yield Finding(f"{path}.selector", "of the manifest's own; allowed: none, or with manualSelector")
        indexed = spec.get("completionMode") == "Indexed"
        for name in ("backoffLimitPerIndex", "maxFailedIndexes", "successPolicy"):
            if spec.get(name) is not None and not indexed:
                yield Finding(f"{path}.{name}", "without an index; allowed: with completionMode Indexed")
        if indexed and spec.get("completions") is None:
            yield Finding(f"{path}.completions", "missing with completionMode Indexed; allowed: a number")
        if spec.get("podFailurePolicy") and spec_of(template).get("restartPolicy") != "Never":
            seen = spec_of(template).get("restartPolicy")
            yield Finding(f"{template.path}.spec.restartPolicy", f"{seen!r} with podFailurePolicy; allowed: 'Never'")
        if spec.get("podFailurePolicy") and spec.get("podReplacementPolicy", "Failed") != "Failed":
            seen = spec["podReplacementPolicy"]
            yield Finding(f"{path}.podReplacementPolicy", f"{seen!r} with podFailurePolicy; allowed: 'Failed'")
        if spec.get("maxFailedIndexes") is not None and spec.get("backoffLimitPerIndex") is None:
            yield Finding(f"{path}.maxFailedIndexes", "without backoffLimitPerIndex; allowed: with it")
        for i, each in enumerate(items(spec.get("successPolicy"), "rules")):
            last = max(map(int, re.findall(r"\d+", str(each.get("succeededIndexes") or ""))), default=-1)
            if last >= int(spec.get("completions") or 1):
                where = f"{path}.successPolicy.rules[{i}].succeededIndexes"
                yield Finding(where, f"{last} of {spec.get('completions')} completions; allowed: indexes below that")


@rule("pod-failure-policy", Level.ERROR)
def _pod_failure_policy(manifest: Manifest) -> Found:
    """A rule of a podFailurePolicy asks for exit codes or for conditions. Exit codes are of a container of the Pod, in
    ascending order, and without 0 where they are those that match. FailIndex needs backoffLimitPerIndex.
    """
    for template in manifest.pod_templates() if manifest.kind in ("Job", "CronJob", "JobSet") else ():
        path, spec = _job_of(manifest, template)
        names = [each.get("name") for key in ("initContainers", "containers") for each in items(spec_of(template), key)]
        for i, each in enumerate(items(spec.get("podFailurePolicy"), "rules")):
            where, codes = f"{path}.podFailurePolicy.rules[{i}]", each.get("onExitCodes") or {}
            if bool(codes) == bool(each.get("onPodConditions")):
                found = "both" if codes else "neither"
                yield Finding(where, f"{found}; allowed: onExitCodes or onPodConditions")
            values = codes.get("values") or []
            if values != sorted(set(values)) or (codes.get("operator") == "In" and 0 in values):
                yield Finding(
                    f"{where}.onExitCodes.values", f"{values}; allowed: in ascending order, and with In not 0"
                )
            if codes.get("containerName") not in (None, *names):
                message = f"{codes['containerName']!r}; allowed: {', '.join(map(str, names))}"
                yield Finding(f"{where}.onExitCodes.containerName", message)
            if each.get("action") == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
                yield Finding(f"{where}.action", "'FailIndex' without backoffLimitPerIndex; allowed: with it")


@rule("jobset-names", Level.ERROR)
def _jobset_names(manifest: Manifest) -> Found:
    """Policies, dependencies and coordinator of a JobSet, also of a TrainJob's runtime, name its own replicatedJobs: it
    would wait forever for any other. Each of these has a name of its own, and the Pods' names are labels of DNS.
    """
    if manifest.kind not in ("JobSet", *TRAINING_RUNTIMES):
        return
    root, spec = "$.spec", manifest.spec
    if manifest.kind in TRAINING_RUNTIMES:  # the JobSet's name is the TrainJob's
        root, spec = "$.spec.template.spec", (spec.get("template") or {}).get("spec") or {}
    jobs = items(spec, "replicatedJobs")
    names = [str(job.get("name")) for job in jobs]
    asked = [
        (f"{root}.successPolicy.targetReplicatedJobs", (spec.get("successPolicy") or {}).get("targetReplicatedJobs"))
    ]
    for i, each in enumerate(items(spec.get("failurePolicy"), "rules")):
        asked.append((f"{root}.failurePolicy.rules[{i}].targetReplicatedJobs", each.get("targetReplicatedJobs")))
    for i, job in enumerate(jobs):
        needed = [each.get("name") for each in items(job, "dependsOn")]
        asked.append((f"{root}.replicatedJobs[{i}].dependsOn", needed))
    if spec.get("coordinator"):
        asked.append((f"{root}.coordinator.replicatedJob", [spec["coordinator"].get("replicatedJob")]))
    for i, job in enumerate(jobs):
        of_job = (job.get("template") or {}).get("spec") or {}
        last = f"{int(job.get('replicas', 1)) - 1}-{int(of_job.get('completions') or 1) - 1}"
        # The Job's controller adds a dash and five letters.
        pod = f"{manifest.metadata.get('name', '')}-{names[i]}-{last}-abcde"
        if names[i] in names[:i]:
            yield Finding(f"{root}.replicatedJobs[{i}].name", f"{names[i]!r} is taken; allowed: a name of its own")
        if manifest.kind == "JobSet" and len(pod) > 63:
            message = f"Pods are called {pod}, of {len(pod)} characters; allowed: up to 63"
            yield Finding(f"{root}.replicatedJobs[{i}].name", message)
    for path, given in asked:
        for name in given or []:
            if name not in names:
                yield Finding(path, f"{name!r}; allowed: {', '.join(names)}")


@rule("jobset-order", Level.ERROR)
def _jobset_order(manifest: Manifest) -> Found:
    """A job of a JobSet depends on jobs that stand before it, so the first on none. A JobSet has dependsOn or the
    startupPolicy `InOrder`, and not both: the API server refuses others.
    """
    if manifest.kind not in ("JobSet", *TRAINING_RUNTIMES):
        return
    root, spec = "$.spec", manifest.spec
    if manifest.kind in TRAINING_RUNTIMES:
        root, spec = "$.spec.template.spec", (spec.get("template") or {}).get("spec") or {}
    jobs = items(spec, "replicatedJobs")
    names = [str(job.get("name")) for job in jobs]
    for i, job in enumerate(jobs):
        for needed in items(job, "dependsOn"):
            if needed.get("name") in names[i:]:
                allowed = ", ".join(names[:i]) or "none, as it is the first"
                yield Finding(f"{root}.replicatedJobs[{i}].dependsOn", f"{needed['name']!r}; allowed: {allowed}")
    order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder")
    if order == "InOrder" and any(job.get("dependsOn") for job in jobs):
        yield Finding(f"{root}.startupPolicy", "'InOrder' with dependsOn; allowed: one of them")


@rule("lws-subgroup", Level.ERROR)
def _lws_subgroup(manifest: Manifest) -> Found:
    """The subGroupSize of a LeaderWorkerSet divides the size of a group, or the size without its leader, and only the
    latter where subgroups leave the leader out: the API server refuses others.
    """
    template = manifest.spec.get("leaderWorkerTemplate") or {}
    policy = template.get("subGroupPolicy") or {}
    of_each, size = policy.get("subGroupSize"), int(template.get("size", 1))
    if manifest.kind != "LeaderWorkerSet" or not of_each:
        return
    sizes = [size - 1] if policy.get("subGroupPolicyType") == "LeaderExcluded" else [size, size - 1]
    if of_each > size or all(each % of_each for each in sizes):
        message = f"{of_each} in a group of {size}; allowed: divisors of {' and of '.join(map(str, sizes))}"
        yield Finding("$.spec.leaderWorkerTemplate.subGroupPolicy.subGroupSize", message)


def _job_of(manifest: Manifest, template: PodTemplate) -> tuple[str, dict[str, Any]]:
    """JSON path and spec of the Job that a Pod template belongs to."""
    path = template.path.removesuffix(".template")
    spec: Any = manifest.content
    for part in re.findall(r"[A-Za-z]+|\d+", path):
        spec = spec[int(part) if part.isdigit() else part]
    return path, spec


def _tasks(manifest: Manifest) -> Iterator[tuple[dict[str, Any], PodTemplate]]:
    """Tasks of a job of Volcano that have Pods."""
    tasks = items(manifest.spec, "tasks")
    for template in manifest.pod_templates():
        yield from ((task, template) for task in tasks if task.get("template") is template.content)


def _pods_of(manifest: Manifest, template: PodTemplate) -> list[int]:
    """How many Pods torchrun can join: those of one group where a workload has several; in a JobSet those of one job,
    or of all that run torchrun. Empty where that is not known.
    """
    if manifest.kind == "LeaderWorkerSet":
        return [int(manifest.spec["leaderWorkerTemplate"].get("size", 1))]
    if manifest.kind == "PyTorchJob":
        return [sum(each.num_pods or 0 for each in manifest.pod_templates())]
    if manifest.api_version.startswith("batch.volcano.sh/"):
        ranks = [task for task, each in _tasks(manifest) if runs(main(each)[1], "torchrun")]
        return [sum(int(task.get("replicas", 1)) for task in ranks)]
    if manifest.kind == "JobSet":
        together = [each for each in manifest.pod_templates() if runs(main(each)[1], "torchrun")]
        return sorted({template.num_pods or 0, sum(each.num_pods or 0 for each in together)})
    return [template.num_pods] if manifest.kind in ("Job", "StatefulSet") and template.num_pods else []
