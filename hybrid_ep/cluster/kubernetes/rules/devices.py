"""Rules for devices: GPUs, NICs and networks of a Pod, claims of DRA, and the NVLink domains of several nodes."""

from __future__ import annotations

import contextlib
import json
import re

from hybrid_ep.cluster.kubernetes.claims import claim_of
from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate, json_path
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import (
    MULTUS,
    NETWORKS,
    added_capabilities,
    amount,
    amounts,
    containers,
    gpus,
    is_network,
    is_nic,
    items,
    main,
    nics,
    security,
)
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule


@rule("gpu-limit", Level.ERROR)
def _gpu_limit(manifest: Manifest) -> Found:
    """GPUs and NICs are whole devices: a request needs a limit of the same number."""
    for template in manifest.pod_templates():
        for path, container in containers(template, init=True):
            limits, requests = amounts(container, "limits"), amounts(container, "requests")
            for name, number in requests.items():
                if "/" in name and (name not in limits or amount(number) != amount(limits[name])):
                    seen = f"{name} is requested {number} times, its limit is {limits.get(name)}"
                    where = f"{path}.resources.requests['{name}']"
                    yield Finding(where, f"{seen}; allowed: the limit alone, or both equal")
            for name, number in limits.items():
                if "/" in name and amount(number) % 1 != 0:
                    yield Finding(f"{path}.resources.limits['{name}']", f"{number}; allowed: whole numbers")


@rule("claims", Level.ERROR)
def _claims(manifest: Manifest) -> Found:
    """A container uses every claim of its Pod, unless it is for network interfaces, which the whole Pod has. A request
    that a container names of a claim is one of the claim's, where the build has the claim: the API server takes any,
    and the Pod is never scheduled.
    """
    for template in manifest.pod_templates():
        used = set()
        for path, container in containers(template, init=True):
            for i, claim in enumerate(items(container.get("resources"), "claims")):
                name, request = str(claim.get("name")), str(claim.get("request") or "")
                used.add(name)
                requests = template.claims.get(name, {})
                if requests and request and request.partition("/")[0] not in requests:
                    where = f"{path}.resources.claims[{i}].request"
                    yield Finding(where, f"{request!r}; allowed: {', '.join(requests)}")
        for name in sorted({str(claim.get("name")) for claim in items(template.spec, "resourceClaims")} - used):
            kinds = [kind for request in template.claims.get(name, {}).values() for kind in request]
            if not kinds or not all(map(is_network, kinds)):
                message = f"{name!r} is used by no container, so none gets the device; allowed: in one's resources"
                level = None if kinds else Level.WARNING  # another build's claim, perhaps for network interfaces
                yield Finding(f"{template.path}.spec.resourceClaims", message, level)


@rule("claim-shared", Level.WARNING)
def _claim_shared(manifest: Manifest) -> Found:
    """Several Pods name a ResourceClaimTemplate, and not one ResourceClaim: with one claim, all of them get the same
    devices, and so the same node.
    """
    for template in manifest.pod_templates():
        for i, claim in enumerate(items(template.spec, "resourceClaims")):
            name, pods = claim.get("resourceClaimName"), template.num_pods or 1
            if name and pods > 1:
                where = f"{template.path}.spec.resourceClaims[{i}].resourceClaimName"
                yield Finding(where, f"{name!r} for {pods} Pods; allowed: resourceClaimTemplateName")


@rule("compute-domain", Level.ERROR)
def _compute_domain(manifest: Manifest) -> Found:
    """A ComputeDomain's numNodes is 0 or the number of Pods that claim its channel: the driver waits for that many."""
    if manifest.kind != "ComputeDomain":
        return
    channel = (manifest.spec.get("channel") or {}).get("resourceClaimTemplate") or {}
    claim = "ResourceClaimTemplate", str(channel.get("name"))
    templates = [template for other in manifest.build for template in other.pod_templates()]
    counts = [each.num_pods for each in templates if claim in map(claim_of, items(each.spec, "resourceClaims"))]
    wanted, pods = manifest.spec.get("numNodes"), sum(count or 0 for count in counts)
    if wanted and counts and None not in counts and pods != wanted:
        yield Finding("$.spec.numNodes", f"{wanted}, and {pods} Pods claim the channel; allowed: {pods} or 0")


@rule("ipc-lock", Level.WARNING)
def _ipc_lock(manifest: Manifest) -> Found:
    """A container with RDMA NICs adds the capability IPC_LOCK or is privileged: otherwise the runtime's limit of locked
    memory holds, which is too small for RDMA on most nodes.
    """
    for template in manifest.pod_templates():
        of_pod = [annotation for annotation, names in _networks(template).items() if any(map(is_nic, names))]
        having = [(*each, [*own]) for each in containers(template) if (own := nics(template, each[1]))]
        of_pod += list(nics(template)) if not having else []
        for path, container, found in having or ([(*main(template), [])] if of_pod else []):
            added = added_capabilities(container)
            if not security(template, container).get("privileged") and not {"IPC_LOCK", "ALL"} & set(added):
                message = f"{added} with {', '.join([*found, *of_pod])}; allowed with RDMA: a list with IPC_LOCK"
                yield Finding(f"{path}.securityContext.capabilities.add", message)


@rule("rdma-files", Level.WARNING)
def _rdma_files(manifest: Manifest) -> Found:
    """A container that mounts /dev/infiniband of the host has RDMA NICs of a device plugin, or is privileged: otherwise
    the files are there, and it may not open them. For /dev/gdrdrv and IMEX channels of the host it is privileged.
    """
    for template in manifest.pod_templates() if manifest.kind != "DaemonSet" else ():
        volumes = items(template.spec, "volumes")
        of_host = {each.get("name"): str((each.get("hostPath") or {}).get("path")) for each in volumes}
        for path, container in containers(template, init=True):
            if security(template, container).get("privileged"):
                continue
            for i, mount in enumerate(items(container, "volumeMounts")):
                file = of_host.get(mount.get("name"), "")
                device = re.match(r"/dev/(infiniband|gdrdrv|nvidia-caps-imex-channels)(/|$)", file)
                if device and not (device[1] == "infiniband" and nics(template, container)):
                    allowed = "with a resource of NICs such as rdma/ib, or privileged"
                    allowed = allowed if device[1] == "infiniband" else "privileged"
                    message = f"{file} of the host, which the container may not open; allowed: {allowed}"
                    yield Finding(f"{path}.volumeMounts[{i}]", message)


@rule("nic-count", Level.WARNING)
def _nic_count(manifest: Manifest) -> Found:
    """A Pod's NICs are as many as its GPUs or a multiple or fraction of them, and each has a network. A single one is
    what a plugin for shared NICs gives.
    """
    for template in manifest.pod_templates():
        devices = sum(map(amount, gpus(template, *(each for _, each in containers(template))).values()))
        of_pod = nics(template)
        for name, number in of_pod.items():
            count = amount(number)
            odd = devices > 1 and count > 1 and max(devices, count) % min(devices, count)
            if odd and devices % 1 == 0:
                message = (
                    f"{number} × {name} with {devices:g} GPUs; allowed: as many, or a multiple or fraction of that"
                )
                yield Finding(f"{main(template)[0]}.resources", message)
        total = sum(amount(number) for name, number in of_pod.items() if "/" in name)
        networks = _networks(template).get(MULTUS)
        if total > 1 and networks is not None and len(networks) != total:
            listed = ", ".join(f"{number} × {name}" for name, number in of_pod.items() if "/" in name)
            message = f"{len(networks)} networks with {listed}; allowed: {total:g}"
            yield Finding(json_path(f"{template.path}.metadata.annotations", [MULTUS]), message)


def _networks(template: PodTemplate) -> dict[str, list[str]]:
    """Networks that annotations give the Pod: annotation → their names; those that cannot be read are left out."""
    found = {}
    for name in NETWORKS:
        value = str(template.annotations.get(name, "")).strip()
        if value.startswith("["):
            with contextlib.suppress(ValueError):
                named = [each for each in json.loads(value) if isinstance(each, dict)]
                found[name] = [str(each.get("name") or each.get("network") or "") for each in named]
        elif value and not value.startswith("{"):
            found[name] = [network.strip() for network in value.split(",") if network.strip()]
    return found
