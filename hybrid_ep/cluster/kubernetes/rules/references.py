"""Rules over all objects of one build: if one object names another, the build should have that one.

What a build does not hold may be in the cluster. So a missing name is a hint, and an error only where the build has
nearly that name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate, json_path
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import containers, fits, items, main, nearly, option, runs, spec_of
from hybrid_ep.cluster.kubernetes.rules.registry import Build, BuildFound, Finding, build_rule


@build_rule("reference", Level.HINT)
def _reference(build: Build) -> BuildFound:
    """ConfigMaps, Secrets, service accounts, claims and claim templates that a Pod names are in the same build and
    namespace, or already in the cluster. A name that is nearly one of the build's is a mistake, also of a queue, a
    flavor, a topology or its level of Kueue, a TrainJob's runtime, an admission policy, or what is scaled.
    """
    given: dict[str, dict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))  # kind → name → namespaces
    for manifest in build:
        namespace = manifest.metadata.get("namespace")
        given[manifest.kind][str(manifest.metadata.get("name"))].add(namespace)
        if manifest.kind == "Topology":
            for level in items(manifest.spec, "levels"):
                given["level of a Topology"][str(level.get("nodeLabel"))].add(namespace)
        if manifest.kind == "ComputeDomain":
            channel = manifest.spec.get("channel") or {}
            made = str((channel.get("resourceClaimTemplate") or {}).get("name"))
            given["ResourceClaimTemplate"][made].add(namespace)
    for manifest in build:
        for path, kind, name in _named_by(manifest):
            close = nearly(name, given[kind])
            if close and name not in given[kind]:
                message = f"there is no {kind} {name!r}; allowed: {close!r}, which the build has"
                yield manifest, Finding(path, message, Level.ERROR)
        namespace = manifest.metadata.get("namespace")
        for template in manifest.pod_templates():
            for path, kind, name in _named(template):
                elsewhere = given[kind].get(name, set())
                if namespace and elsewhere and not {namespace, None} & elsewhere:
                    message = f"{kind} {name!r} is in {', '.join(sorted(elsewhere))}; allowed: one in {namespace}"
                    yield manifest, Finding(path, message, Level.ERROR)
                if name not in given[kind]:
                    close = nearly(name, given[kind])
                    if close:
                        message = f"there is no {kind} {name!r}; allowed: {close!r}, which the build has"
                        yield manifest, Finding(path, message, Level.ERROR)
                    else:
                        message = f"no {kind} {name!r} in the build; allowed: one that is in the cluster before"
                        yield manifest, Finding(path, message)


_QUEUE = "kueue.x-k8s.io/queue-name"


def _named_by(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """(JSON path, kind, name) of objects that others than Pods name, and that are mostly in the cluster before."""
    spec = manifest.spec
    named = [
        (json_path("$.metadata.labels", [_QUEUE]), "LocalQueue", (manifest.metadata.get("labels") or {}).get(_QUEUE)),
        ("$.spec.clusterQueue", "ClusterQueue", spec.get("clusterQueue") if manifest.kind == "LocalQueue" else None),
        ("$.spec.topologyName", "Topology", spec.get("topologyName") if manifest.kind == "ResourceFlavor" else None),
    ]
    if manifest.kind.startswith(policy := "ValidatingAdmissionPolicy"):
        named.append(("$.spec.policyName", policy, spec.get("policyName")))
    runtime = spec.get("runtimeRef") or {} if manifest.kind == "TrainJob" else {}
    named.append(("$.spec.runtimeRef.name", str(runtime.get("kind", "ClusterTrainingRuntime")), runtime.get("name")))
    for template in manifest.pod_templates():
        for name, value in ((template.content.get("metadata") or {}).get("annotations") or {}).items():
            if re.fullmatch(r"kueue\.x-k8s\.io/podset-(required|preferred|slice-required)-topology", str(name)):
                path = json_path(f"{template.path}.metadata.annotations", [name])
                named.append((path, "level of a Topology", value))
    target = spec.get("scaleTargetRef") or {}
    named.append(("$.spec.scaleTargetRef.name", str(target.get("kind")), target.get("name")))
    for i, group in enumerate(items(spec, "resourceGroups") if manifest.kind == "ClusterQueue" else ()):
        for j, flavor in enumerate(items(group, "flavors")):
            path = f"$.spec.resourceGroups[{i}].flavors[{j}].name"
            named.append((path, "ResourceFlavor", flavor.get("name")))
    return ((path, kind, str(name)) for path, kind, name in named if name)


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


@build_rule("volume-access", Level.WARNING)
def _volume_access(build: Build) -> BuildFound:
    """A PersistentVolumeClaim of the build that several Pods mount has an access mode for many nodes: with
    ReadWriteOnce only the Pods of one node start, and with ReadWriteOncePod one Pod.
    """
    modes = {
        str(each.metadata.get("name")): set(each.spec.get("accessModes") or ())
        for each in build
        if each.kind == "PersistentVolumeClaim"
    }
    for manifest in build:
        for template in manifest.pod_templates():
            for i, volume in enumerate(items(spec_of(template), "volumes")):
                found = modes.get(str((volume.get("persistentVolumeClaim") or {}).get("claimName")), set())
                if found and found <= {"ReadWriteOnce", "ReadWriteOncePod"} and (template.num_pods or 1) > 1:
                    path = f"{template.path}.spec.volumes[{i}].persistentVolumeClaim.claimName"
                    message = f"{', '.join(sorted(found))} for {template.num_pods} Pods; allowed: ReadWriteMany"
                    yield manifest, Finding(path, message)


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


@build_rule("service", Level.ERROR)
def _service(build: Build) -> BuildFound:
    """A Pod's subdomain and a StatefulSet's serviceName are a headless Service, and a Service's selector fits Pods of
    its build: their names cannot be resolved otherwise. So does that of a PodDisruptionBudget, which protects none
    otherwise, and of an InferencePool, which has no endpoints otherwise.
    """
    services = {str(manifest.metadata.get("name")): manifest for manifest in build if manifest.kind == "Service"}
    pods = [(manifest, template) for manifest in build for template in manifest.pod_templates()]
    for manifest, template in pods:
        subdomain, path = _subdomain(manifest, template)
        if not subdomain:
            continue
        service = services.get(subdomain)
        if service is None:
            close = nearly(subdomain, services)
            allowed = f"{close!r}, which the build has" if close else "one that is in the cluster before"
            level = Level.ERROR if close else Level.HINT
            yield manifest, Finding(path, f"no Service {subdomain!r} in the build; allowed: {allowed}", level)
        elif service.spec.get("clusterIP") != "None":
            message = f"the subdomain {subdomain!r} of {manifest.name} needs a headless Service; allowed: 'None'"
            yield service, Finding("$.spec.clusterIP", message)
        elif not fits(service.spec.get("selector") or {}, template):
            message = f"does not fit the Pods of {manifest.name}, whose subdomain it is; allowed: their labels"
            yield service, Finding("$.spec.selector", message)
    for budget in build if pods else ():
        wanted = (budget.spec.get("selector") or {}).get("matchLabels") or {}
        is_known = budget.kind in ("PodDisruptionBudget", "InferencePool")
        if is_known and wanted and not any(fits(wanted, each) for _, each in pods):
            message = f"{wanted} fits no Pod of the build; allowed: labels that some have"
            yield budget, Finding("$.spec.selector", message, Level.WARNING)
    for service in services.values() if pods else ():
        selector = service.spec.get("selector") or {}
        used = any(_subdomain(*pod)[0] == service.metadata.get("name") for pod in pods)
        if selector and not used and not any(fits(selector, template) for _, template in pods):
            message = f"{selector} fits no Pod of the build; allowed: labels that some have"
            yield service, Finding("$.spec.selector", message, Level.WARNING)


@build_rule("rank-readiness", Level.WARNING)
def _rank_readiness(build: Build) -> BuildFound:
    """Ranks of torchrun with a readinessProbe can find each other before they are ready: their Service publishes
    addresses that are not ready, and a StatefulSet starts its Pods in parallel. Otherwise they may wait forever.
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
        fit = [template for template in templates if fits(selector, template)] if service.kind == "Service" else []
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
        close = nearly(name, [given for of, given in roles if of == kind])
        if close and (kind, name) not in roles:
            message = f"there is no {kind} {name!r}; allowed: {close!r}, which the build has"
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
    """An address that ranks are given (`--master-addr` and `--rdzv-endpoint` of torchrun, `--dist-init-addr` of SGLang,
    MASTER_ADDR) and that looks like a Pod of the job is the name of one, with its domain: ranks wait forever for a name
    that no Pod has.
    """
    for manifest in build:
        for template in manifest.pod_templates():
            hosts, domain = _hosts(manifest, template)
            path, container = main(template)
            name, where, address = _address(path, container)
            if not hosts or not address:
                continue
            host, _, rest = address.partition(".")
            if not domain:
                if host in hosts:
                    message = f"{name}={address}, and no Pod has a name with enableDNSHostnames false; allowed: true"
                    yield manifest, Finding(where, message)
                continue
            allowed = f"{hosts[0]}.{domain}"
            if host in hosts:
                if rest.partition(".")[0] != domain:
                    yield manifest, Finding(where, f"{name}={address}; allowed: {allowed}")
            elif host.startswith(f"{manifest.metadata.get('name')}-") or rest.partition(".")[0] == domain:
                yield manifest, Finding(where, f"{name}={address}, which no Pod is called; allowed: {allowed}")


def _address(path: str, container: dict[str, Any]) -> tuple[str, str, str]:
    """Where ranks find the first: name of the option or variable, JSON path, and host; empty where none is given."""
    known = (("torchrun", "master-addr"), ("torchrun", "rdzv-endpoint"), ("sglang", "dist-init-addr"))
    for name in (name for program, name in known if runs(container, program)):
        if address := option(container, name):
            spelt = re.compile("[-_]".join(name.split("-")))
            in_args = any(spelt.search(str(word)) for word in container.get("args") or [])
            return f"--{name}", f"{path}.{'args' if in_args else 'command'}", address.rpartition(":")[0] or address
    for i, variable in enumerate(items(container, "env")):
        value = str(variable.get("value") or "")
        if variable.get("name") == "MASTER_ADDR" and "$" not in value:
            return "MASTER_ADDR", f"{path}.env[{i}].value", value
    return "", "", ""


def _hosts(manifest: Manifest, template: PodTemplate) -> tuple[list[str], str]:
    """Host names of the Pods of a template, and their domain; empty where they have none that are known before. The
    domain alone is empty in a JobSet that gives its Pods none.
    """
    name, spec, count = str(manifest.metadata.get("name")), manifest.spec, template.num_pods or 0
    if manifest.kind == "Job" and spec.get("completionMode") == "Indexed" and spec_of(template).get("subdomain"):
        return [f"{name}-{i}" for i in range(count)], str(spec_of(template)["subdomain"])
    if manifest.kind == "StatefulSet" and spec.get("serviceName"):
        first = int((spec.get("ordinals") or {}).get("start", 0))
        return [f"{name}-{first + i}" for i in range(count)], str(spec["serviceName"])
    if manifest.kind == "JobSet":
        network = spec.get("network") or {}
        is_named = network.get("enableDNSHostnames") is not False
        hosts = []
        for job in items(spec, "replicatedJobs"):
            of_job = (job.get("template") or {}).get("spec") or {}
            for i, j in product(range(int(job.get("replicas", 1))), range(int(of_job.get("completions") or 1))):
                hosts.append(f"{name}-{job.get('name')}-{i}-{j}")
        own = str(spec_of(template).get("subdomain") or "")
        return hosts, str(network.get("subdomain") or name) if is_named else own
    return [], ""


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
                if wanted and not any(fits(wanted, other) for other in everyone):
                    path = f"{template.path}.spec.affinity.podAffinity.{required}[{i}].labelSelector"
                    yield manifest, Finding(path, f"{wanted} fits no Pod of the build; allowed: labels that some have")
