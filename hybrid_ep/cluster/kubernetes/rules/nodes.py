"""Rules for what a Pod asks of its node: GPUs of its type, and shared memory."""

from __future__ import annotations

import re

from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import (
    amount,
    amounts,
    gpus,
    items,
    main,
    nics,
    running,
    runs,
)
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule

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
    and NCCL needs more. Its size is below the memory limit, which it counts towards. It is not mounted readOnly.
    """
    for template in manifest.pod_templates():
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
