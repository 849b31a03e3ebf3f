"""Rules for NICs and networks of a Pod."""

from __future__ import annotations

import json
import re
from typing import Any

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
    is_nic,
    items,
    main,
    nearly,
    nics,
    security,
    spec_of,
    where_asked,
)
from hybrid_ep.cluster.kubernetes.rules.registry import Build, BuildFound, Finding, Found, build_rule, rule


@rule("ipc-lock", Level.WARNING)
def _ipc_lock(manifest: Manifest) -> Found:
    """A container with RDMA NICs adds the capability IPC_LOCK or is privileged: otherwise the runtime's limit of locked
    memory holds, which is too small for RDMA on most nodes.
    """
    for template in manifest.pod_templates():
        given = [annotation for annotation, names in _networks(template).items() if any(map(is_nic, names))]
        having = [(*each, list(nics(template, each[1]))) for each in containers(template) if nics(template, each[1])]
        given += list(nics(template)) if not having else []
        if not having and given:
            having = [(*main(template), [])]
        for path, container, found in having:
            added = added_capabilities(container)
            if not security(template, container).get("privileged") and not {"IPC_LOCK", "ALL"} & set(added):
                where = f"{path}.securityContext.capabilities.add"
                seen = ", ".join([*found, *given])
                yield Finding(where, f"{added} with {seen}; allowed with RDMA: a list with IPC_LOCK")


@rule("rdma-files", Level.WARNING)
def _rdma_files(manifest: Manifest) -> Found:
    """A container that mounts /dev/infiniband of the host has RDMA NICs of a device plugin, or is privileged: otherwise
    the files are there, and it may not open them. For /dev/gdrdrv and IMEX channels of the host it is privileged.
    """
    for template in manifest.pod_templates() if manifest.kind != "DaemonSet" else ():
        of_host = {
            volume.get("name"): str((volume.get("hostPath") or {}).get("path"))
            for volume in items(spec_of(template), "volumes")
            if "hostPath" in volume
        }
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
        path, _ = main(template)
        devices = sum(map(amount, gpus(template, *(each for _, each in containers(template))).values()))
        of_pod = nics(template)
        for name, number in of_pod.items():
            count = amount(number)
            where = where_asked(path, name)
            odd = devices > 1 and count > 1 and max(devices, count) % min(devices, count)
            if odd and devices % 1 == 0:
                message = f"{number} with {devices:g} GPUs; allowed: as many, or a multiple or fraction of that"
                yield Finding(where, message)
        total = sum(amount(number) for name, number in of_pod.items() if "/" in name)
        networks = _networks(template).get(MULTUS)
        if total > 1 and networks is not None and len(networks) != total:
            at = json_path(f"{template.path}.metadata.annotations", [MULTUS])
            listed = ", ".join(f"{number} × {name}" for name, number in of_pod.items() if "/" in name)
            yield Finding(at, f"{len(networks)} networks with {listed}; allowed: {total:g}")


_RESOURCE_OF_NETWORK = "k8s.v1.cni.cncf.io/resourceName"


@build_rule("network-attachment", Level.ERROR)
def _network_attachment(build: Build) -> BuildFound:
    """The configuration of a NetworkAttachmentDefinition is JSON. A network that a Pod names is not nearly one of the
    build, and its Pods ask for the device that it needs, unless the cluster injects that.
    """
    given: dict[str, Manifest] = {}
    for manifest in build:
        if manifest.kind == "NetworkAttachmentDefinition":
            given[str(manifest.metadata.get("name"))] = manifest
            try:
                json.loads(str(manifest.spec.get("config") or "{}"))
            except ValueError as error:
                yield (
                    manifest,
                    Finding("$.spec.config", f"is no JSON: {error}; allowed: a configuration of CNI as JSON"),
                )
    for manifest in build:
        for template in manifest.pod_templates():
            where = json_path(f"{template.path}.metadata.annotations", [MULTUS])
            asked = {name for _, container in containers(template) for name in amounts(container, "limits")}
            for network in _networks(template).get(MULTUS, []):
                name = network.rpartition("/")[2].partition("@")[0]
                if name in given:
                    needed = (given[name].metadata.get("annotations") or {}).get(_RESOURCE_OF_NETWORK)
                    if needed and needed not in asked:
                        message = f"{name} needs {needed}, and no container has it; allowed: in limits of one"
                        yield manifest, Finding(where, message, Level.WARNING)
                elif close := nearly(name, given):
                    yield manifest, Finding(where, f"{name!r}; allowed: {close!r}, which the build has")


def _networks(template: PodTemplate) -> dict[str, list[str]]:
    """Networks that annotations give the Pod: annotation → their names."""
    found = {}
    for name, value in ((template.content.get("metadata") or {}).get("annotations") or {}).items():
        if name in NETWORKS:
            listed: Any = [network.strip() for network in str(value).split(",") if network.strip()]
            if str(value).lstrip().startswith(("[", "{")):
                try:
                    listed = json.loads(value)
                except ValueError:
                    continue  # another rule's
                if not isinstance(listed, list):
                    continue
                named = [each for each in listed if isinstance(each, dict)]
                listed = [str(each.get("name") or each.get("network") or "") for each in named]
            found[name] = listed
    return found
