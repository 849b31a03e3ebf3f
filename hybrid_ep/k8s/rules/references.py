"""Rules over all objects of one build: what one of them names, another of them should be.

What a build does not hold may be in the cluster. So a missing name is a hint, and an error only where the build has
nearly that name.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hybrid_ep.k8s.manifest import PodTemplate
from hybrid_ep.k8s.problem import Level
from hybrid_ep.k8s.rules.parts import containers, items, spec_of
from hybrid_ep.k8s.rules.registry import Build, BuildFound, Finding, build_rule

# Labels that controllers give Pods; a selector may ask for them though no template has them.
_OF_CONTROLLERS = ("kubernetes.io/", "kubeflow.org/", "sigs.k8s.io/", "x-k8s.io/", "job-name", "statefulset.", "batch.")


@build_rule("reference", Level.HINT)
def _reference(build: Build) -> BuildFound:
    """ConfigMaps, Secrets, service accounts, claims and claim templates that a Pod names are in the same build, or
    already in the cluster. A name that is nearly one of the build's is a mistake.
    """
    given: dict[str, set[str]] = defaultdict(set)
    for manifest in build:
        given[manifest.kind].add(str(manifest.metadata.get("name")))
        if manifest.kind == "ComputeDomain":
            channel = manifest.content["spec"].get("channel") or {}
            given["ResourceClaimTemplate"].add(str((channel.get("resourceClaimTemplate") or {}).get("name")))
    for manifest in build:
        for template in manifest.pod_templates():
            for path, kind, name in _named(template):
                if name not in given[kind]:
                    close = difflib.get_close_matches(name, given[kind], 1, 0.75)
                    if close:
                        message = f"there is no {kind} {name!r}; allowed: {close[0]!r}, which the build has"
                        yield manifest, Finding(path, message, Level.ERROR)
                    else:
                        message = f"no {kind} {name!r} in the build; allowed: one that is in the cluster before"
                        yield manifest, Finding(path, message)


def _named(template: PodTemplate) -> Iterator[tuple[str, str, str]]:
    """(JSON path, kind, name) of every object that the Pod cannot start without."""
    spec, root = spec_of(template), f"{template.path}.spec"
    for i, volume in enumerate(items(spec, "volumes")):
        sources = [(f"{root}.volumes[{i}]", volume)]
        projected = items(volume.get("projected"), "sources")
        sources += [(f"{root}.volumes[{i}].projected.sources[{j}]", source) for j, source in enumerate(projected)]
        for path, source in sources:
            for key, kind, field in (
                ("configMap", "ConfigMap", "name"),
                ("secret", "Secret", "secretName"),
                ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
            ):
                found = source.get(key) or {}
                name = found.get(field) or found.get("name")
                if name and not found.get("optional"):
                    yield f"{path}.{key}", kind, str(name)
    for path, container in containers(template, init=True):
        for i, variable in enumerate(items(container, "env")):
            for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                found = (variable.get("valueFrom") or {}).get(key) or {}
                if found.get("name") and not found.get("optional"):
                    yield f"{path}.env[{i}].valueFrom.{key}", kind, str(found["name"])
        for i, source in enumerate(items(container, "envFrom")):
            for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                found = source.get(key) or {}
                if found.get("name") and not found.get("optional"):
                    yield f"{path}.envFrom[{i}].{key}", kind, str(found["name"])
    if (account := spec.get("serviceAccountName")) and account != "default":
        yield f"{root}.serviceAccountName", "ServiceAccount", str(account)
    for i, claim in enumerate(items(spec, "resourceClaims")):
        for field, kind in (
            ("resourceClaimTemplateName", "ResourceClaimTemplate"),
            ("resourceClaimName", "ResourceClaim"),
        ):
            if name := claim.get(field):
                yield f"{root}.resourceClaims[{i}].{field}", kind, str(name)
    for i, secret in enumerate(items(spec, "imagePullSecrets")):
        yield f"{root}.imagePullSecrets[{i}]", "Secret", str(secret.get("name"))


@build_rule("service", Level.ERROR)
def _service(build: Build) -> BuildFound:
    """A Pod's subdomain is a headless Service, and a Service's selector fits Pods of its build: their names cannot be
    resolved otherwise.
    """
    services = {str(manifest.metadata.get("name")): manifest for manifest in build if manifest.kind == "Service"}
    pods = [(manifest, template) for manifest in build for template in manifest.pod_templates()]
    for manifest, template in pods:
        subdomain, path = spec_of(template).get("subdomain"), f"{template.path}.spec.subdomain"
        if not subdomain:
            continue
        service = services.get(subdomain)
        if service is None:
            close = difflib.get_close_matches(subdomain, services, 1, 0.75)
            allowed = f"{close[0]!r}, which the build has" if close else "one that is in the cluster before"
            level = Level.ERROR if close else Level.HINT
            yield manifest, Finding(path, f"no Service {subdomain!r} in the build; allowed: {allowed}", level)
        elif service.content["spec"].get("clusterIP") != "None":
            message = f"the subdomain {subdomain!r} of {manifest.name} needs a headless Service; allowed: 'None'"
            yield service, Finding("$.spec.clusterIP", message)
        elif not _fits(service.content["spec"].get("selector") or {}, template):
            message = f"does not fit the Pods of {manifest.name}, whose subdomain it is; allowed: their labels"
            yield service, Finding("$.spec.selector", message)
    for service in services.values() if pods else ():
        selector = service.content["spec"].get("selector") or {}
        used = any(spec_of(template).get("subdomain") == service.metadata.get("name") for _, template in pods)
        if selector and not used and not any(_fits(selector, template) for _, template in pods):
            message = f"{selector} fits no Pod of the build; allowed: labels that some have"
            yield service, Finding("$.spec.selector", message, Level.WARNING)


def _fits(selector: dict[str, Any], template: PodTemplate) -> bool:
    labels = (template.content.get("metadata") or {}).get("labels") or {}
    return all(
        labels.get(name) == value or (name not in labels and any(part in name for part in _OF_CONTROLLERS))
        for name, value in selector.items()
    )


@build_rule("pod-affinity", Level.WARNING)
def _pod_affinity(build: Build) -> BuildFound:
    """A required podAffinity fits Pods of the same build, e.g. its own: otherwise the first Pod is never scheduled."""
    everyone = [template for manifest in build for template in manifest.pod_templates()]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    for manifest in build:
        for template in manifest.pod_templates():
            affinity = (spec_of(template).get("affinity") or {}).get("podAffinity") or {}
            for i, term in enumerate(items(affinity, required)):
                wanted = (term.get("labelSelector") or {}).get("matchLabels") or {}
                if wanted and not any(_fits(wanted, other) for other in everyone):
                    path = f"{template.path}.spec.affinity.podAffinity.{required}[{i}].labelSelector"
                    yield manifest, Finding(path, f"{wanted} fits no Pod of the build; allowed: labels that some have")


@build_rule("compute-domain", Level.ERROR)
def _compute_domain(build: Build) -> BuildFound:
    """A ComputeDomain's numNodes is 0 or the number of Pods that claim its channel: the driver waits for that many."""
    for domain in build:
        if domain.kind != "ComputeDomain":
            continue
        channel = (domain.content["spec"].get("channel") or {}).get("resourceClaimTemplate") or {}
        counts = [
            template.num_pods
            for manifest in build
            for template in manifest.pod_templates()
            if any(
                c.get("resourceClaimTemplateName") == channel.get("name")
                for c in items(spec_of(template), "resourceClaims")
            )
        ]
        wanted = domain.content["spec"].get("numNodes")
        known = [count for count in counts if count is not None]
        if wanted and known and len(known) == len(counts) and sum(known) != wanted:
            yield (
                domain,
                Finding(
                    "$.spec.numNodes", f"{wanted}, and {sum(known)} Pods claim the channel; allowed: {sum(known)} or 0"
                ),
            )
