"""Rules for devices: GPUs, NICs and networks of a Pod, claims of DRA, types of nodes, shared memory, NVLink domains."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable

from hybrid_ep.cluster.kubernetes.manifest import Level, Manifest, PodTemplate, claim_of, json_path
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
    running,
    runs,
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
    memory holds, which is too small for RDMA on most nodes. Nodes with EFA have no such limit.
    """
    for template in manifest.pod_templates():
        of_pod = [annotation for annotation, names in _networks(template).items() if any(map(is_nic, names))]
        having = [(*each, own) for each in containers(template) if (own := _not_efa(nics(template, each[1])))]
        of_pod += _not_efa(nics(template)) if not having else []
        for path, container, found in having or ([(*main(template), [])] if of_pod else []):
            added = added_capabilities(container)
            if not security(template, container).get("privileged") and not {"IPC_LOCK", "ALL"} & set(added):
                message = f"{added} with {', '.join([*found, *of_pod])}; allowed with RDMA: a list with IPC_LOCK"
                yield Finding(f"{path}.securityContext.capabilities.add", message)


def _not_efa(names: Iterable[str]) -> list[str]:
    return [name for name in names if not re.search(r"/efa$|^efa\.", name)]


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


_INSTANCE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
# Instance types → GPUs, or None where the name says how many, and NICs of the cloud's own plugin or DRA driver.
# The vendor's page that has the numbers stands first, and behind "opened" what was read for them.
_INSTANCES: dict[str, tuple[int | None, int | None]] = {
    # docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html; opened: an extract of it for P5, P5e and P6,
    # and MaximumEfaInterfaces of EC2's DescribeInstanceTypes as public code quotes it, for P4, P5, p5.4xlarge and P6-B
    r"(ml\.)?p4de?\.24xlarge": (8, 4),
    r"(ml\.)?p5\.4xlarge": (1, 1),
    r"(ml\.)?p5e?\.48xlarge": (8, 32),
    r"(ml\.)?p5en\.48xlarge": (8, 16),
    r"(ml\.)?p6-b200\.48xlarge": (8, 8),
    r"(ml\.)?p6-b300\.48xlarge": (8, 16),
    r"(ml\.)?p6e-gb200\.36xlarge": (4, 16),
    # docs.cloud.google.com/compute/docs/gpus; opened: a copy of it, and for A4X and A4X Max public claims for GKE
    r"a2-(high|mega|ultra)gpu-(?P<gpus>\d+)g": (None, 0),
    r"a3-(high|mega|edge)gpu-(?P<gpus>\d)g(-nolssd)?": (None, 0),
    r"(a3-ultra|a4-high)gpu-(?P<gpus>8)g(-nolssd)?": (None, 8),
    r"a4x-highgpu-(?P<gpus>4)g(-nolssd)?": (None, 4),
    r"a4x-maxgpu-(?P<gpus>4)g-metal(-nolssd)?": (None, 8),
    # learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated; opened: the pages' sources for GB200 and GB300,
    # and Hugging Face's list of Azure's hardware for the others
    r"Standard_ND96\w+": (8, None),
    r"Standard_ND128isr_\w*GB\d00_v6": (4, None),
    r"Standard_NC(24ads_A100_v4|40ads_H100_v5)": (1, None),
    r"Standard_NC(48ads_A100_v4|80adis_H100_v5)": (2, None),
    r"Standard_NC96ads_A100_v4": (4, None),
    # docs.oracle.com/iaas/Content/Compute/References/computeshapes.htm: the last number; opened: names in public code
    r"(BM|VM)\.GPU[\w.-]*\.(?P<gpus>\d)": (None, None),
    # docs.coreweave.com/platform/instances: gd-8xh100ib-i128, gd-1xgh200, b200-8x, gb300-4x; opened: the page of GB200,
    # and the table of Kubernetes' cluster autoscaler
    r"gd-(?P<gpus>\d)x\w+(-\w+)?": (None, None),
    r"(g?b\d00|rtxp6000)-(?P<gpus>\d)x": (None, None),
}
_CLOUD_NIC = re.compile(r"vpc\.amazonaws\.com/efa|efa\.networking\.k8s\.aws|mrdma\.google\.com")


@rule("instance-type", Level.ERROR)
def _instance_type(manifest: Manifest) -> Found:
    """The containers of a Pod together ask for no more GPUs and NICs of the cloud (EFA, GKE's mrdma) than the instance
    type has that it selects: otherwise it is never scheduled.
    """
    for template in manifest.pod_templates():
        types = [value for label in _INSTANCE for value in _values_of(template, label)]
        has = [found for value in types if (found := _devices_of(value))]
        of_cloud = {name: number for name, number in nics(template).items() if _CLOUD_NIC.fullmatch(name)}
        for i, asked in enumerate((gpus(template, *running(template)), of_cloud)):
            known = [each[i] for each in has if each[i] is not None]
            for name, number in asked.items() if known and len(known) == len(types) else ():
                if amount(number) > (most := max(map(int, filter(None, known)), default=0)):
                    message = f"{number} × {name} on {' or '.join(types)}; allowed: up to {most}"
                    yield Finding(f"{main(template)[0]}.resources", message)


@rule("shared-memory", Level.WARNING)
def _shared_memory(manifest: Manifest) -> Found:
    """Ranks, and several GPUs, get /dev/shm as a memory volume of more than 64 MiB: a container runtime gives as much,
    and NCCL needs more. Its size is below the memory limit, which it counts towards. It is not mounted readOnly. Ray's
    operator gives its Pods one.
    """
    for template in manifest.pod_templates() if not manifest.api_version.startswith("ray.io/") else ():
        path, container = main(template)
        ranks = template.role == "Worker" or sum(map(amount, gpus(template, container).values())) > 1
        ranks = ranks or any(runs(container, name) for name in ("torchrun", "hybrid-ep", "vllm", "sglang"))
        if not ranks or template.role in ("DaemonSet", "Launcher") or template.spec.get("hostIPC"):
            continue
        mounts = {str(mount.get("mountPath")).rstrip("/"): mount for mount in items(container, "volumeMounts")}
        mount = mounts.get("/dev/shm") or {}
        volumes = {volume.get("name"): volume for volume in items(template.spec, "volumes")}
        volume = volumes.get(mount.get("name")) or {}
        if mount.get("readOnly"):
            yield Finding(f"{path}.volumeMounts", "/dev/shm is readOnly; allowed: false, as ranks make files in it")
        if "hostPath" in volume:
            continue
        empty_dir = volume.get("emptyDir") or {}
        if empty_dir.get("medium") != "Memory":
            level = None if gpus(template, container) else Level.HINT
            message = "no /dev/shm from an emptyDir of medium Memory, so it has 64 MiB; allowed: one"
            yield Finding(f"{path}.volumeMounts", message, level)
            continue
        where = f"{template.path}.spec.volumes[{list(volumes).index(volume['name'])}].emptyDir"
        size, limit = empty_dir.get("sizeLimit"), amounts(container, "limits").get("memory")
        if size is None:
            yield Finding(where, "no sizeLimit, so /dev/shm grows to the Pod's memory limit; allowed: one", Level.HINT)
        elif amount(size) > amount(limit):
            yield Finding(f"{where}.sizeLimit", f"{size} with a memory limit of {limit}; allowed: less than that")
        elif amount(size) <= 64 * 2**20:
            yield Finding(f"{where}.sizeLimit", f"{size} for ranks; allowed: more than 64Mi, e.g. 8Gi")


def _values_of(template: PodTemplate, label: str) -> list[str]:
    """Values of a label of which a node of the Pod has one; empty where it may have any."""
    if selected := (template.spec.get("nodeSelector") or {}).get(label):
        return [str(selected)]
    affinity = (template.spec.get("affinity") or {}).get("nodeAffinity") or {}
    values = []
    for term in items(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"), "nodeSelectorTerms"):
        wanted = {"key": label, "operator": "In"}.items()
        found = [each for each in items(term, "matchExpressions") if wanted <= each.items()]
        if not found:
            return []  # a node that fits this term may have any
        values += [str(value) for each in found for value in each.get("values") or []]
    return values


def _devices_of(instance: str) -> tuple[int | None, int | None] | None:
    """GPUs and NICs of an instance type; None where the type is not known."""
    for pattern, (num_gpus, num_nics) in _INSTANCES.items():
        if found := re.fullmatch(pattern, instance):
            return int(found["gpus"]) if num_gpus is None else num_gpus, num_nics
    return None
