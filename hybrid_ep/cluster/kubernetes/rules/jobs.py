"""Rules for the sizes of jobs: torchrun, TrainJobs, engines of inference, and gangs."""

from __future__ import annotations

import re
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Level, Manifest, PodTemplate
from hybrid_ep.cluster.kubernetes.rules.parts import amount, containers, gpus, main, option, runs, words
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule

_RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")  # of TrainJobs


@rule("job-indexed", Level.ERROR)
def _indexed(manifest: Manifest) -> Found:
    """A Job that runs torchrun has a deadline. One of several Pods, also within a JobSet, is Indexed, runs all of them
    at once, and restarts none: ranks are found by index, wait for each other, and cannot be restarted alone.
    """
    for template in manifest.pod_templates():
        if manifest.kind not in ("Job", "JobSet") or not runs(main(template)[1], "torchrun"):
            continue
        path, spec, pod = template.path.removesuffix(".template"), manifest.spec, template.spec
        if manifest.kind == "JobSet":
            spec = spec["replicatedJobs"][int(re.findall(r"\d+", path)[0])]["template"]["spec"]
        mode = "Indexed" if manifest.kind == "JobSet" else "NonIndexed"  # where none is given
        pods, said = int(spec.get("completions") or 1), " ".join(words(main(template)[1]))
        of_several: list[tuple[str, object, object, Level]] = []
        of_several += [(f"{path}.parallelism", spec.get("parallelism", 1), pods, Level.ERROR)]
        if "JOB_COMPLETION_INDEX" in said or "rdzv" not in said:
            of_several += [(f"{path}.completionMode", spec.get("completionMode", mode), "Indexed", Level.ERROR)]
        if manifest.kind == "Job":  # a JobSet has its own deadline and names
            of_several += [("$.spec.backoffLimit", spec.get("backoffLimit", 6), 0, Level.WARNING)]
            of_several += [(f"{template.path}.spec.restartPolicy", pod.get("restartPolicy"), "Never", Level.WARNING)]
        for where, seen, allowed, level in of_several if pods > 1 else ():
            if seen != allowed:
                yield Finding(where, f"{seen!r}; allowed with torchrun: {allowed!r}", level)
        if manifest.kind == "Job" and "activeDeadlineSeconds" not in spec:
            yield Finding("$.spec.activeDeadlineSeconds", "missing; allowed: a value of your own", Level.WARNING)
        if manifest.kind == "Job" and pods > 1 and not pod.get("subdomain") and not pod.get("hostNetwork"):
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
        of_job = manifest.spec.get("nprocPerNode") if manifest.kind == "PyTorchJob" and not ranks else None
        if of_job:
            yield from _ranks("$.spec.nprocPerNode", "nprocPerNode", of_job, gpus(template, container))
        else:
            yield from _ranks(where, "--nproc-per-node", ranks, gpus(template, container))


@rule("trainjob-size", Level.ERROR)
def _trainjob_size(manifest: Manifest) -> Found:
    """A TrainJob and its runtime start no more ranks on a node than it has GPUs, and not several but fewer. What the
    TrainJob does not say (`numProcPerNode`, `resourcesPerNode`) is the runtime's, where the build has it.
    """
    if manifest.kind in _RUNTIMES:
        path, ranks, found = _of_runtime(manifest)
        yield from _ranks(path, "numProcPerNode", ranks, found)
    trainer, ref = manifest.spec.get("trainer") or {}, manifest.spec.get("runtimeRef") or {}
    ranks, resources = trainer.get("numProcPerNode"), trainer.get("resourcesPerNode")
    if manifest.kind != "TrainJob" or (ranks is None and resources is None):
        return  # all is the runtime's, and judged there
    path = f"$.spec.trainer.{'resourcesPerNode' if ranks is None else 'numProcPerNode'}"
    wanted = str(ref.get("kind", "ClusterTrainingRuntime")), ref.get("name")
    found = gpus(PodTemplate("", "", {}), {"resources": resources})
    for runtime in (each for each in manifest.build if (each.kind, each.metadata.get("name")) == wanted):
        _, of_runtime, gpus_of_runtime = _of_runtime(runtime)
        ranks, found = of_runtime if ranks is None else ranks, gpus_of_runtime if resources is None else found
    yield from _ranks(path, "numProcPerNode", ranks, found)


def _of_runtime(runtime: Manifest) -> tuple[str, object, dict[str, Any]]:
    """JSON path and number of the ranks that a runtime starts on each node, None where it does not say, and GPUs of the
    container `node`, which the trainer runs in.
    """
    policy = runtime.spec.get("mlPolicy") or {}
    kind = next((kind for kind in ("torch", "mpi") if "numProcPerNode" in (policy.get(kind) or {})), "torch")
    nodes = [(template, each) for template in runtime.pod_templates() for _, each in containers(template)]
    found = [gpus(template, each) for template, each in nodes if each.get("name") == "node"]
    ranks = (policy.get(kind) or {}).get("numProcPerNode")
    return f"$.spec.mlPolicy.{kind}.numProcPerNode", ranks, next(filter(None, found), {})


def _ranks(where: str, name: str, ranks: object, found: dict[str, Any]) -> Found:
    """Whether there are as many ranks as GPUs. One rank may use several GPUs."""
    for gpu, number in found.items() if str(ranks).isdigit() else ():
        if amount(ranks) > amount(number):
            yield Finding(where, f"{name}={ranks} with {number} × {gpu}; allowed: up to {number}")
        elif 1 < amount(ranks) <= amount(number) - 1:
            yield Finding(where, f"{name}={ranks} with {number} × {gpu}; allowed: {number}", Level.WARNING)


_ENGINES = (("vllm", "vllm"), ("sglang", "sglang"), ("trtllm-serve", "tensorrt-llm"))  # programs, and parts of images
# Options by which engines split a model over GPUs (tensors, layers, experts) and copy it (in all).
_SPLITS = (
    ("tensor-parallel-size", "tp-size", "tp", "-tp"),
    ("pipeline-parallel-size", "pp-size", "pp", "-pp"),
    ("expert-parallel-size", "ep-size", "ep"),
    ("data-parallel-size", "dp-size", "dp", "-dp"),
)
_COPIES_ELSEWHERE = r"data-parallel-(address|rank|start-rank|hybrid-lb|external-lb)"  # other Pods have some of them


@rule("engine-size", Level.ERROR)
def _engine_size(manifest: Manifest) -> Found:
    """Engines (vLLM, SGLang, TensorRT-LLM) split and copy a model over no more GPUs than their Pods have, in a
    LeaderWorkerSet or a role of a RoleBasedGroup those of one group, and `--nnodes` is the number of these Pods:
    otherwise they end, or wait forever.
    """
    groups = list(manifest.pod_templates())
    for template in groups:
        path, container = main(template)
        image, said = str(container.get("image")), " ".join(words(container))
        if not any(runs(container, program) or name in image for program, name in _ENGINES):
            continue
        where = f"{path}.{'args' if container.get('args') else 'command'}"
        nodes, pods = option(container, "nnodes") or "1", _pods_of(manifest, template)
        if pods and nodes.isdigit() and int(nodes) > 1 and int(nodes) not in pods:
            allowed = " or ".join(map(str, pods))
            yield Finding(where, f"--nnodes={nodes} with {allowed} Pods; allowed: {allowed}")
        tensor, pipeline, experts, copies = (_size(container, names) for names in _SPLITS)
        if "enable-dp-attention" in said or (manifest.kind != "LeaderWorkerSet" and re.search(_COPIES_ELSEWHERE, said)):
            copies = 1
        has = sum(map(amount, gpus(template, container).values()))
        if manifest.kind == "LeaderWorkerSet":
            size = int((manifest.spec.get("leaderWorkerTemplate") or {}).get("size", 1))
            first, last = (sum(map(amount, gpus(each, main(each)[1]).values())) for each in (groups[0], groups[-1]))
            has = first + (size - 1) * last
        elif manifest.kind == "RoleBasedGroup":
            has *= pods[0] if pods else 0
        else:
            has *= int(nodes) if nodes.isdigit() and "ray" not in said else 0
        if has and max(tensor, experts) * pipeline * copies > has:
            sizes = [max(tensor, experts), pipeline] + [copies] * (copies > 1)
            yield Finding(where, f"{' × '.join(map(str, sizes))} GPUs of {has:g}; allowed: up to {has:g}")


def _size(container: dict[str, Any], names: tuple[str, ...]) -> int:
    """The value of the first of these options that is given; 1 where none is, and 0 where it is not known."""
    found = next((found for name in names if (found := option(container, name))), "1")
    return int(found) if found.isdigit() else 0


@rule("gang", Level.ERROR)
def _gang(manifest: Manifest) -> Found:
    """The gang scheduler waits for no more Pods than the job has: workers, and an MPIJob's launcher."""
    policy = (manifest.spec.get("runPolicy") or {}).get("schedulingPolicy") or {}
    least, pods = policy.get("minAvailable"), sum(template.num_pods or 0 for template in manifest.pod_templates())
    if manifest.kind in ("MPIJob", "PyTorchJob") and isinstance(least, int) and least > pods:
        path = "$.spec.runPolicy.schedulingPolicy.minAvailable"
        yield Finding(path, f"{least}, and the job has {pods} Pods; allowed: up to {pods}")


def _pods_of(manifest: Manifest, template: PodTemplate) -> list[int]:
    """How many Pods torchrun can join: those of one group where a workload has several; in a JobSet those of one job,
    or of all that run torchrun. Empty where that is not known.
    """
    templates = list(manifest.pod_templates())
    if manifest.kind == "LeaderWorkerSet":
        return [int(manifest.spec["leaderWorkerTemplate"].get("size", 1))]
    if manifest.kind == "RoleBasedGroup" and (place := re.match(r"\$\.spec\.roles\[(\d+)\]", template.path)):
        role = manifest.spec["roles"][int(place[1])]  # v1alpha2, and the name that v1alpha1 has
        return [int((role.get("leaderWorkerPattern") or role.get("leaderWorkerSet") or {}).get("size") or 1)]
    if manifest.kind == "PyTorchJob":
        return [sum(each.num_pods or 0 for each in templates)]
    if manifest.kind == "JobSet":
        together = sum(each.num_pods or 0 for each in templates if runs(main(each)[1], "torchrun"))
        return sorted({template.num_pods or 0, together})
    return [template.num_pods] if manifest.kind in ("Job", "StatefulSet") and template.num_pods else []
