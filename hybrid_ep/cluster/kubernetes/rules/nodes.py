"""Rules for what a Pod asks of its node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate, json_path
from hybrid_ep.cluster.kubernetes.problem import Level
from hybrid_ep.cluster.kubernetes.rules.parts import amount, gpus, items, main, nics, running, spec_of, where_asked
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule

_ARCHITECTURES = ("amd64", "arm64", "ppc64le", "s390x", "riscv64", "386", "arm", "loong64")
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
# Labels of GPU feature discovery, and GKE's that counts a node's GPUs. Then words of products and instance types whose
# CPU is NVIDIA's Grace.
_PRODUCT = "nvidia.com/gpu.product"
_COUNTS = ("nvidia.com/gpu.count", "cloud.google.com/gke-accelerator-count")
# Labels of nodes on which a GPU is shared or divided, so that a node offers more of them than it has.
_SHARED = (
    "nvidia.com/gpu.replicas",
    "cloud.google.com/gke-gpu-partition-size",
    "cloud.google.com/gke-gpu-sharing-strategy",
    "cloud.google.com/gke-max-shared-clients-per-gpu",
)
_GRACE = re.compile(r"(?i)(?<![a-z])g[bh][23]00(?![0-9])|xgh200|^a4x-")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_CLOUD_NIC = re.compile(r"vpc\.amazonaws\.com/efa|efa\.networking\.k8s\.aws|mrdma\.google\.com")


@rule("architecture", Level.ERROR)
def _architecture(manifest: Manifest) -> Found:
    """A Pod asks for an architecture by Go's name for it: no node has the label `aarch64` or `x86_64`. With GPUs beside
    a Grace CPU (GH200, GB200, GB300) that is `arm64`.
    """
    for template in manifest.pod_templates():
        asked = [_values_of(template, label) for label in (_PRODUCT, *_INSTANCE)]
        with_grace = [value for values in asked if all(map(_GRACE.search, values)) for value in values]
        for path, value in _asked_of_nodes(template, ("kubernetes.io/arch", "beta.kubernetes.io/arch")):
            if value not in _ARCHITECTURES:
                yield Finding(path, f"{value!r}; allowed: {', '.join(_ARCHITECTURES[:5])}")
            elif value != "arm64" and with_grace and ".nodeAffinity." not in path:
                yield Finding(path, f"{value!r} with {' or '.join(with_grace)}; allowed: 'arm64'")


def _asked_of_nodes(template: PodTemplate, labels: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(JSON path, value) of every value that the Pod asks of a node's label."""
    spec = spec_of(template)
    for name, value in (spec.get("nodeSelector") or {}).items():
        if name in labels:
            yield json_path(f"{template.path}.spec.nodeSelector", [name]), str(value)
    for i, term in enumerate(_terms(template)):
        for j, expression in enumerate(items(term, "matchExpressions")):
            if expression.get("key") in labels and expression.get("operator") == "In":
                path = f"{template.path}.spec.affinity.nodeAffinity.{_REQUIRED}.nodeSelectorTerms[{i}]"
                for value in expression.get("values") or []:
                    yield f"{path}.matchExpressions[{j}].values", str(value)


def _terms(template: PodTemplate) -> list[dict[str, Any]]:
    """The Pod's required node affinity: a node fits one of these."""
    affinity = (spec_of(template).get("affinity") or {}).get("nodeAffinity") or {}
    return items(affinity.get(_REQUIRED), "nodeSelectorTerms")


@rule("instance-type", Level.ERROR)
def _instance_type(manifest: Manifest) -> Found:
    """The containers of a Pod together ask for no more GPUs and NICs of the cloud (EFA, GKE's mrdma) than the instance
    type has that it selects. They ask for no more GPUs than the label `nvidia.com/gpu.count` or
    `cloud.google.com/gke-accelerator-count` says that it selects. Otherwise it is never scheduled.
    """
    for template in manifest.pod_templates():
        number = gpus(template, *running(template)).get("nvidia.com/gpu")
        is_shared = any(_values_of(template, label) for label in _SHARED)
        for label in _COUNTS if number is not None and not is_shared else ():
            most = max((amount(value) for value in _values_of(template, label)), default=amount(number))
            if amount(number) > most:
                message = f"{number} on nodes with {label}={most:g}; allowed: up to {most:g}"
                yield Finding(where_asked(main(template)[0], "nvidia.com/gpu"), message)
        types = [value for label in _INSTANCE for value in _values_of(template, label)]
        has = [found for value in types if (found := _devices_of(value))]
        if not has or len(has) != len(types):
            continue
        path = main(template)[0]
        of_cloud = {name: number for name, number in nics(template).items() if _CLOUD_NIC.fullmatch(name)}
        for asked, known in (
            (gpus(template, *running(template)), [g for g, _ in has]),
            (of_cloud, [n for _, n in has]),
        ):
            for name, number in asked.items():
                if None not in known and amount(number) > (most := max(map(int, filter(None, known)), default=0)):
                    message = f"{number} on {' or '.join(types)}; allowed: up to {most}"
                    yield Finding(where_asked(path, name), message)


def _values_of(template: PodTemplate, label: str) -> list[str]:
    """Values of a label of which a node of the Pod has one; empty where it may have any."""
    asked = list(_asked_of_nodes(template, (label,)))
    of_selector = [value for path, value in asked if ".nodeAffinity." not in path]
    terms = _terms(template)
    with_type = {path.partition(".matchExpressions")[0] for path, _ in asked if ".nodeAffinity." in path}
    return of_selector or [value for _, value in asked if len(with_type) == len(terms)]


def _devices_of(instance: str) -> tuple[int | None, int | None] | None:
    """GPUs and NICs of an instance type; None where the type is not known."""
    for pattern, (num_gpus, num_nics) in _INSTANCES.items():
        if found := re.fullmatch(pattern, instance):
            return int(found["gpus"]) if num_gpus is None else num_gpus, num_nics
    return None
