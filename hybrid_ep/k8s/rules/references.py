"""Rules over all objects of one build: if one object names another, the build should have that one.

What a build does not hold may be in the cluster. So a missing name is a hint, and an error only where the build has
nearly that name.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any

from hybrid_ep.k8s.manifest import Manifest, PodTemplate
from hybrid_ep.k8s.problem import Level
from hybrid_ep.k8s.rules.parts import containers, items, main, option, runs, spec_of
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
            channel = manifest.spec.get("channel") or {}
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


@build_rule("reference-key", Level.ERROR)
def _reference_key(build: Build) -> BuildFound:
    """Where the build has a ConfigMap or Secret, it has the keys that Pods name: otherwise a container is not started,
    and a subPath is an empty folder.
    """
    held = {
        (manifest.kind, str(manifest.metadata.get("name"))): {
            str(key) for part in ("data", "binaryData", "stringData") for key in manifest.content.get(part) or {}
        }
        for manifest in build
        if manifest.kind in ("ConfigMap", "Secret")
    }
    for manifest in build:
        for template in manifest.pod_templates():
            for path, kind, name, key in _named_keys(template):
                keys = held.get((kind, name))
                if keys is not None and key not in keys:
                    allowed = ", ".join(sorted(keys)) or "none, as it is empty"
                    yield manifest, Finding(path, f"{kind} {name!r} has no key {key!r}; allowed: {allowed}")


def _named_keys(template: PodTemplate) -> Iterator[tuple[str, str, str, str]]:
    """(JSON path, kind, name, key) of every key of a ConfigMap or Secret that the Pod needs."""
    plain: dict[Any, tuple[str, str]] = {}  # volumes of all keys by their names: kind, name
    for i, volume in enumerate(items(spec_of(template), "volumes")):
        for field, kind, named in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
            source = volume.get(field) or {}
            for j, item in enumerate(items(source, "items")) if not source.get("optional") else ():
                path = f"{template.path}.spec.volumes[{i}].{field}.items[{j}].key"
                yield path, kind, str(source.get(named)), str(item.get("key"))
            if source and not source.get("items") and not source.get("optional"):
                plain[volume.get("name")] = kind, str(source.get(named))
    for path, container in containers(template, init=True):
        for i, variable in enumerate(items(container, "env")):
            for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                found = (variable.get("valueFrom") or {}).get(field) or {}
                if found and not found.get("optional"):
                    yield f"{path}.env[{i}].valueFrom.{field}.key", kind, str(found.get("name")), str(found.get("key"))
        for i, mount in enumerate(items(container, "volumeMounts")):
            if mount.get("subPath") and mount.get("name") in plain:
                yield (f"{path}.volumeMounts[{i}].subPath", *plain[mount["name"]], str(mount["subPath"]))


@build_rule("object-twice", Level.ERROR)
def _object_twice(build: Build) -> BuildFound:
    """No two objects of a build have one kind, namespace and name: the second takes the place of the first."""
    seen = set()
    for manifest in build:
        name = manifest.metadata.get("name")
        of = manifest.api_version.rpartition("/")[0], manifest.kind, manifest.metadata.get("namespace"), name
        if name and of in seen:
            yield manifest, Finding("$.metadata.name", f"{name!r}, as another {manifest.kind}; allowed: once")
        seen.add(of)


@build_rule("claim-request", Level.ERROR)
def _claim_request(build: Build) -> BuildFound:
    """A request that a container names of a claim is one of the claim's, where the build has the claim: the API server
    takes any, and the Pod is never scheduled.
    """
    given: dict[tuple[str, str], list[str]] = {}
    for manifest in build:
        if manifest.kind in ("ResourceClaimTemplate", "ResourceClaim"):
            spec = manifest.spec
            spec = spec.get("spec") or {} if manifest.kind == "ResourceClaimTemplate" else spec
            names = [str(request.get("name")) for request in items(spec.get("devices"), "requests")]
            given[manifest.kind, str(manifest.metadata.get("name"))] = names
    for manifest in build:
        for template in manifest.pod_templates():
            of_pod = {}
            for claim in items(spec_of(template), "resourceClaims"):
                kind = "ResourceClaim" if "resourceClaimName" in claim else "ResourceClaimTemplate"
                of_pod[claim.get("name")] = kind, str(claim.get(f"r{kind[1:]}Name"))
            for path, container in containers(template, init=True):
                for i, claim in enumerate(items(container.get("resources"), "claims")):
                    names = given.get(of_pod.get(claim.get("name"), ("", "")), [])
                    asked = str(claim.get("request") or "")
                    if names and asked and asked.partition("/")[0] not in names:
                        where = f"{path}.resources.claims[{i}].request"
                        yield manifest, Finding(where, f"{asked!r}; allowed: {', '.join(names)}")


@build_rule("service", Level.ERROR)
def _service(build: Build) -> BuildFound:
    """A Pod's subdomain and a StatefulSet's serviceName are a headless Service, and a Service's selector fits Pods of
    its build: their names cannot be resolved otherwise.
    """
    services = {str(manifest.metadata.get("name")): manifest for manifest in build if manifest.kind == "Service"}
    pods = [(manifest, template) for manifest in build for template in manifest.pod_templates()]
    for manifest, template in pods:
        subdomain, path = _subdomain(manifest, template)
        if not subdomain:
            continue
        service = services.get(subdomain)
        if service is None:
            close = difflib.get_close_matches(subdomain, services, 1, 0.75)
            allowed = f"{close[0]!r}, which the build has" if close else "one that is in the cluster before"
            level = Level.ERROR if close else Level.HINT
            yield manifest, Finding(path, f"no Service {subdomain!r} in the build; allowed: {allowed}", level)
        elif service.spec.get("clusterIP") != "None":
            message = f"the subdomain {subdomain!r} of {manifest.name} needs a headless Service; allowed: 'None'"
            yield service, Finding("$.spec.clusterIP", message)
        elif not _fits(service.spec.get("selector") or {}, template):
            message = f"does not fit the Pods of {manifest.name}, whose subdomain it is; allowed: their labels"
            yield service, Finding("$.spec.selector", message)
    for service in services.values() if pods else ():
        selector = service.spec.get("selector") or {}
        used = any(_subdomain(*pod)[0] == service.metadata.get("name") for pod in pods)
        if selector and not used and not any(_fits(selector, template) for _, template in pods):
            message = f"{selector} fits no Pod of the build; allowed: labels that some have"
            yield service, Finding("$.spec.selector", message, Level.WARNING)


@build_rule("rank-readiness", Level.WARNING)
def _rank_readiness(build: Build) -> BuildFound:
    """Ranks of torchrun with a readinessProbe can find each other before they are ready: their Service publishes
    addresses that are not ready, and a StatefulSet starts its Pods in parallel. Otherwise they may wait for ever.
    """
    services = {str(manifest.metadata.get("name")): manifest for manifest in build if manifest.kind == "Service"}
    for manifest in build:
        for template in manifest.pod_templates():
            _, container = main(template)
            if "readinessProbe" not in container or not runs(container, "torchrun") or template.num_pods == 1:
                continue
            spec = manifest.spec
            policy = spec.get("podManagementPolicy", "OrderedReady")
            if manifest.kind == "StatefulSet" and policy != "Parallel":
                yield manifest, Finding("$.spec.podManagementPolicy", f"{policy!r}; allowed with ranks: 'Parallel'")
            service = services.get(_subdomain(manifest, template)[0] or "")
            if service and not service.spec.get("publishNotReadyAddresses"):
                message = f"false, and the ranks of {manifest.name} have a readinessProbe; allowed: true"
                yield service, Finding("$.spec.publishNotReadyAddresses", message)


@build_rule("service-port", Level.ERROR)
def _service_port(build: Build) -> BuildFound:
    """A Service's targetPort, where it is a name, is a port of a Pod that its selector fits."""
    templates = [template for manifest in build for template in manifest.pod_templates()]
    for service in build:
        selector = service.spec.get("selector") or {}
        fit = [template for template in templates if _fits(selector, template)] if service.kind == "Service" else []
        names = {
            str(port["name"])
            for template in fit
            for _, container in containers(template, init=True)
            for port in items(container, "ports")
            if port.get("name")
        }
        for i, port in enumerate(items(service.spec, "ports")) if selector and fit else ():
            target = port.get("targetPort")
            if isinstance(target, str) and target not in names:
                allowed = ", ".join(sorted(names)) or "a number, as no port has a name"
                yield service, Finding(f"$.spec.ports[{i}].targetPort", f"{target!r}; allowed: {allowed}")


@build_rule("role-binding", Level.ERROR)
def _role_binding(build: Build) -> BuildFound:
    """A binding names a role of the build or of the cluster, not nearly one, and a service account of the build by its
    namespace.
    """
    roles = {(manifest.kind, str(manifest.metadata.get("name"))) for manifest in build}
    accounts = {
        str(manifest.metadata.get("name")): manifest.metadata.get("namespace")
        for manifest in build
        if manifest.kind == "ServiceAccount"
    }
    for manifest in build:
        if manifest.kind not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        role = manifest.content.get("roleRef") or {}
        kind, name = str(role.get("kind")), str(role.get("name"))
        close = difflib.get_close_matches(name, [given for of, given in roles if of == kind], 1, 0.75)
        if close and close[0] != name:
            message = f"there is no {kind} {name!r}; allowed: {close[0]!r}, which the build has"
            yield manifest, Finding("$.roleRef.name", message)
        for i, subject in enumerate(items(manifest.content, "subjects")):
            there = accounts.get(str(subject.get("name")))
            if subject.get("kind") == "ServiceAccount" and there and subject.get("namespace", there) != there:
                yield manifest, Finding(f"$.subjects[{i}].namespace", f"{subject['namespace']!r}; allowed: {there!r}")


def _subdomain(manifest: Manifest, template: PodTemplate) -> tuple[str | None, str]:
    """The Service that gives the Pods their names, and the JSON path to it; None where none does."""
    if manifest.kind == "StatefulSet":
        return manifest.spec.get("serviceName"), "$.spec.serviceName"
    return spec_of(template).get("subdomain"), f"{template.path}.spec.subdomain"


@build_rule("rank-address", Level.ERROR)
def _rank_address(build: Build) -> BuildFound:
    """A `--master-addr` of torchrun that looks like a Pod of the job is the name of one, with its domain: ranks wait
    for ever for a name that no Pod has.
    """
    for manifest in build:
        for template in manifest.pod_templates():
            hosts, domain = _hosts(manifest, template)
            path, container = main(template)
            address = option(container, "master-addr")
            if not hosts or not address or not runs(container, "torchrun"):
                continue
            host, _, rest = address.partition(".")
            in_args = any("master-addr" in str(word) for word in container.get("args") or [])
            where = f"{path}.{'args' if in_args else 'command'}"
            allowed = f"{hosts[0]}.{domain}"
            if host in hosts:
                if rest.partition(".")[0] != domain:
                    yield manifest, Finding(where, f"--master-addr={address}; allowed: {allowed}")
            elif host.startswith(f"{manifest.metadata.get('name')}-"):
                yield manifest, Finding(where, f"--master-addr={address}, which no Pod is called; allowed: {allowed}")


def _hosts(manifest: Manifest, template: PodTemplate) -> tuple[list[str], str]:
    """Host names of the Pods of a template, and their domain; empty where they have none that are known before."""
    name, spec, count = str(manifest.metadata.get("name")), manifest.spec, template.num_pods or 0
    if manifest.kind == "Job" and spec.get("completionMode") == "Indexed" and spec_of(template).get("subdomain"):
        return [f"{name}-{i}" for i in range(count)], str(spec_of(template)["subdomain"])
    if manifest.kind == "StatefulSet" and spec.get("serviceName"):
        first = int((spec.get("ordinals") or {}).get("start", 0))
        return [f"{name}-{first + i}" for i in range(count)], str(spec["serviceName"])
    if manifest.kind == "JobSet" and (spec.get("network") or {}).get("enableDNSHostnames") is not False:
        hosts = []
        for job in items(spec, "replicatedJobs"):
            of_job = (job.get("template") or {}).get("spec") or {}
            for i, j in product(range(int(job.get("replicas", 1))), range(int(of_job.get("completions") or 1))):
                hosts.append(f"{name}-{job.get('name')}-{i}-{j}")
        return hosts, str((spec.get("network") or {}).get("subdomain") or name)
    return [], ""


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
        channel = (domain.spec.get("channel") or {}).get("resourceClaimTemplate") or {}
        counts = [
            template.num_pods
            for manifest in build
            for template in manifest.pod_templates()
            if any(
                c.get("resourceClaimTemplateName") == channel.get("name")
                for c in items(spec_of(template), "resourceClaims")
            )
        ]
        wanted = domain.spec.get("numNodes")
        known = [count for count in counts if count is not None]
        if wanted and known and len(known) == len(counts) and sum(known) != wanted:
            yield (
                domain,
                Finding(
                    "$.spec.numNodes", f"{wanted}, and {sum(known)} Pods claim the channel; allowed: {sum(known)} or 0"
                ),
            )
