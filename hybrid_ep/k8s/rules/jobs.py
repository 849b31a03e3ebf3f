"""Rules for jobs that torchrun joins."""

from __future__ import annotations

import re
from typing import Any

from hybrid_ep.k8s.manifest import Manifest, PodTemplate
from hybrid_ep.k8s.problem import Level
from hybrid_ep.k8s.rules.parts import amount, gpus, items, main, option, runs, spec_of, words
from hybrid_ep.k8s.rules.registry import Finding, Found, rule


@rule("job-indexed", Level.ERROR)
def _indexed(manifest: Manifest) -> Found:
    """A Job that runs torchrun has a deadline. One of several Pods is Indexed, runs all of them at once, and restarts
    none: ranks are found by index, wait for each other, and cannot be restarted alone.
    """
    for template in manifest.pod_templates():
        if manifest.kind != "Job" or not runs(main(template)[1], "torchrun"):
            continue
        spec = manifest.spec
        pods, said = template.num_pods or 1, " ".join(words(main(template)[1]))
        by_index = "JOB_COMPLETION_INDEX" in said or "rdzv" not in said
        together = (
            ("$.spec.completionMode", spec.get("completionMode", "NonIndexed"), "Indexed", by_index),
            ("$.spec.parallelism", spec.get("parallelism", 1), pods, True),
        )
        for path, seen, allowed, asked in together if pods > 1 else ():
            if asked and seen != allowed:
                yield Finding(path, f"{seen!r}; allowed with torchrun: {allowed!r}")
        alone = (
            ("$.spec.backoffLimit", spec.get("backoffLimit", 6), 0),
            (f"{template.path}.spec.restartPolicy", spec_of(template).get("restartPolicy"), "Never"),
        )
        for path, seen, allowed in alone if pods > 1 else ():
            if seen != allowed:
                yield Finding(path, f"{seen!r}; allowed with torchrun: {allowed!r}", Level.WARNING)
        if "activeDeadlineSeconds" not in spec:
            yield Finding("$.spec.activeDeadlineSeconds", "missing; allowed: a value of your own", Level.WARNING)
        if pods > 1 and not spec_of(template).get("subdomain") and not spec_of(template).get("hostNetwork"):
            message = "missing, so Pods have no names; allowed: a headless Service's name"
            yield Finding(f"{template.path}.spec.subdomain", message)


@rule("torchrun-size", Level.ERROR)
def _torchrun_size(manifest: Manifest) -> Found:
    """Torchrun's `--nnodes` is the number of the job's Pods, and `--nproc-per-node` that of their GPUs: with more,
    ranks wait for ever.
    """
    for template in manifest.pod_templates():
        path, container = main(template)
        if not runs(container, "torchrun"):
            continue
        nodes, ranks = option(container, "nnodes"), option(container, "nproc-per-node")
        pods = _pods_of(manifest, template)
        where = f"{path}.{'args' if any('nnodes' in str(word) for word in container.get('args') or []) else 'command'}"
        if nodes and nodes.isdigit() and pods and int(nodes) not in pods:
            allowed = " or ".join(map(str, pods))
            yield Finding(where, f"--nnodes={nodes} with {allowed} Pods; allowed: {allowed}")
        for name, number in gpus(container).items():
            if ranks and ranks.isdigit() and amount(ranks) > amount(number):
                yield Finding(where, f"--nproc-per-node={ranks} with {number} × {name}; allowed: up to {number}")


@rule("job-fields", Level.ERROR)
def _job_fields(manifest: Manifest) -> Found:
    """A Job chooses its own selector. Limits and success by index need completionMode `Indexed`, which needs
    completions. With a podFailurePolicy no container is restarted.
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


@rule("jobset-names", Level.ERROR)
def _jobset_names(manifest: Manifest) -> Found:
    """Policies and dependencies of a JobSet name its own replicatedJobs: it would wait for ever for any other."""
    if manifest.kind != "JobSet":
        return
    spec = manifest.spec
    jobs = items(spec, "replicatedJobs")
    names = [str(job.get("name")) for job in jobs]
    asked = [
        ("$.spec.successPolicy.targetReplicatedJobs", (spec.get("successPolicy") or {}).get("targetReplicatedJobs"))
    ]
    for i, each in enumerate(items(spec.get("failurePolicy"), "rules")):
        asked.append((f"$.spec.failurePolicy.rules[{i}].targetReplicatedJobs", each.get("targetReplicatedJobs")))
    for i, job in enumerate(jobs):
        needed = [each.get("name") for each in items(job, "dependsOn")]
        asked.append((f"$.spec.replicatedJobs[{i}].dependsOn", needed))
    for path, given in asked:
        for name in given or []:
            if name not in names:
                yield Finding(path, f"{name!r}; allowed: {', '.join(names)}")


def _job_of(manifest: Manifest, template: PodTemplate) -> tuple[str, dict[str, Any]]:
    """JSON path and spec of the Job that a Pod template belongs to."""
    path = template.path.removesuffix(".template")
    spec: Any = manifest.content
    for part in re.findall(r"[A-Za-z]+|\d+", path):
        spec = spec[int(part) if part.isdigit() else part]
    return path, spec


def _pods_of(manifest: Manifest, template: PodTemplate) -> list[int]:
    """How many Pods torchrun can join: those of one group where a workload has several; in a JobSet those of one job,
    or of all that run torchrun. Empty where that is not known.
    """
    if manifest.kind == "LeaderWorkerSet":
        return [int(manifest.spec["leaderWorkerTemplate"].get("size", 1))]
    if manifest.kind == "PyTorchJob":
        return [sum(each.num_pods or 0 for each in manifest.pod_templates())]
    if manifest.kind == "JobSet":
        together = [each for each in manifest.pod_templates() if runs(main(each)[1], "torchrun")]
        return sorted({template.num_pods or 0, sum(each.num_pods or 0 for each in together)})
    return [template.num_pods] if manifest.kind in ("Job", "StatefulSet") and template.num_pods else []
