"""Rules for how ranks find each other: Services, readiness, addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Level, Manifest, PodTemplate
from hybrid_ep.cluster.kubernetes.rules.parts import fits, items, main, option, runs
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule


@rule("service", Level.ERROR)
def _service(manifest: Manifest) -> Found:
    """A Pod's subdomain and a StatefulSet's serviceName are a headless Service, whose selector fits the Pod: names of
    Pods cannot be resolved otherwise. Under hostNetwork such Pods have the dnsPolicy `ClusterFirstWithHostNet`, without
    which they ask the node's DNS.
    """
    for template, subdomain, path in _named(manifest):
        service, policy = _services(manifest).get(subdomain), template.spec.get("dnsPolicy", "ClusterFirst")
        if service is None and manifest.build:
            yield Finding(path, f"no Service {subdomain!r} in the build; allowed: one in the cluster", Level.HINT)
        if service and service.spec.get("clusterIP") != "None":
            message = f"the subdomain {subdomain!r} of {manifest.name} needs a headless Service; allowed: 'None'"
            yield Finding("$.spec.clusterIP", message, manifest=service)
        elif service and not fits(service.spec.get("selector") or {}, template):
            message = f"does not fit the Pods of {manifest.name}, whose subdomain it is; allowed: their labels"
            yield Finding("$.spec.selector", message, manifest=service)
        if template.spec.get("hostNetwork") and policy == "ClusterFirst":
            message = f"{policy!r} with hostNetwork; allowed: 'ClusterFirstWithHostNet'"
            yield Finding(f"{template.path}.spec.dnsPolicy", message, Level.WARNING)


@rule("rank-readiness", Level.WARNING)
def _rank_readiness(manifest: Manifest) -> Found:
    """Ranks of torchrun with a readinessProbe can find each other before they are ready: their Service publishes
    addresses that are not ready, and a StatefulSet starts its Pods in parallel. Otherwise they may wait forever.
    """
    for template, subdomain, _ in _named(manifest):
        _, container = main(template)
        if "readinessProbe" not in container or not runs(container, "torchrun") or template.num_pods == 1:
            continue
        policy = manifest.spec.get("podManagementPolicy", "OrderedReady")
        if manifest.kind == "StatefulSet" and policy != "Parallel":
            yield Finding("$.spec.podManagementPolicy", f"{policy!r}; allowed with ranks: 'Parallel'")
        service = _services(manifest).get(subdomain)
        if service and not service.spec.get("publishNotReadyAddresses"):
            message = f"false, and the ranks of {manifest.name} have a readinessProbe; allowed: true"
            yield Finding("$.spec.publishNotReadyAddresses", message, manifest=service)


@rule("rank-address", Level.ERROR)
def _rank_address(manifest: Manifest) -> Found:
    """An address that ranks are given (`--master-addr` and `--rdzv-endpoint` of torchrun, `--dist-init-addr` of SGLang,
    MASTER_ADDR) and that looks like a Pod of the job is the name of one, with its domain: ranks wait forever for a name
    that no Pod has.
    """
    for template in manifest.pod_templates():
        hosts, domain = _hosts(manifest, template)
        name, where, address = _address(*main(template))
        if not hosts or not address:
            continue
        host, _, rest = address.partition(".")
        own = rest.partition(".")[0] == domain
        if host in hosts and not domain:
            message = f"{name}={address}, and no Pod has a name with enableDNSHostnames false; allowed: true"
            yield Finding(where, message)
        elif domain and host in hosts and not own:
            yield Finding(where, f"{name}={address}; allowed: {hosts[0]}.{domain}")
        elif domain and host not in hosts and (own or host.startswith(f"{manifest.metadata.get('name')}-")):
            yield Finding(where, f"{name}={address}, which no Pod is called; allowed: {hosts[0]}.{domain}")


def _services(manifest: Manifest) -> dict[str, Manifest]:
    """The Services of the build by their names."""
    return {str(each.metadata.get("name")): each for each in manifest.build if each.kind == "Service"}


def _named(manifest: Manifest) -> Iterator[tuple[PodTemplate, str, str]]:
    """Pod templates whose Pods get names by a Service: the template, the Service's name, and the JSON path to it."""
    for template in manifest.pod_templates():
        subdomain, path = template.spec.get("subdomain"), f"{template.path}.spec.subdomain"
        if manifest.kind == "StatefulSet":
            subdomain, path = manifest.spec.get("serviceName"), "$.spec.serviceName"
        if subdomain:
            yield template, str(subdomain), path


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
    own = str(template.spec.get("subdomain") or "")
    if manifest.kind == "Job" and spec.get("completionMode") == "Indexed" and own:
        return [f"{name}-{i}" for i in range(count)], own
    if manifest.kind == "StatefulSet" and spec.get("serviceName"):
        first = int((spec.get("ordinals") or {}).get("start", 0))
        return [f"{name}-{first + i}" for i in range(count)], str(spec["serviceName"])
    if manifest.kind == "JobSet":
        network = spec.get("network") or {}
        hosts = []
        for job in items(spec, "replicatedJobs"):
            of_job = (job.get("template") or {}).get("spec") or {}
            for i, j in product(range(int(job.get("replicas", 1))), range(int(of_job.get("completions") or 1))):
                hosts.append(f"{name}-{job.get('name')}-{i}-{j}")
        is_named = network.get("enableDNSHostnames") is not False
        return hosts, str(network.get("subdomain") or name) if is_named else own
    return [], ""
