"""Rules for what a Pod asks of its node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybrid_ep.k8s.manifest import Manifest, PodTemplate, json_path
from hybrid_ep.k8s.problem import Level
from hybrid_ep.k8s.rules.parts import amount, containers, gpus, items, nics_of, spec_of
from hybrid_ep.k8s.rules.registry import Finding, Found, rule

_ARCHITECTURES = ("amd64", "arm64", "ppc64le", "s390x", "riscv64", "386", "arm", "loong64")
_INSTANCE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
# Instance types → GPUs, and EFA interfaces where there are some. Sources: the vendors' pages of instance types.
_INSTANCES = {
    r"p4de?\.24xlarge": (8, 4),
    r"p5e?\.48xlarge": (8, 32),
    r"p5en\.48xlarge": (8, 16),
    r"p6-b200\.48xlarge": (8, 8),
    r"a[34]-(high|mega|ultra)gpu-8g": (8, None),
    r"a4x-highgpu-4g": (4, None),
    r"Standard_ND96\w+": (8, None),
    r"Standard_ND128isr_\w*GB\d00_v6": (4, None),
    r"BM\.GPU\d?\.(\w+\.)?8": (8, None),
}


@rule("architecture", Level.ERROR)
def _architecture(manifest: Manifest) -> Found:
    """A Pod asks for an architecture by Go's name for it: no node has the label `aarch64` or `x86_64`."""
    for template in manifest.pod_templates():
        for path, value in _asked_of_nodes(template, ("kubernetes.io/arch", "beta.kubernetes.io/arch")):
            if value not in _ARCHITECTURES:
                yield Finding(path, f"{value!r}; allowed: {', '.join(_ARCHITECTURES[:5])}")


def _asked_of_nodes(template: PodTemplate, labels: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(JSON path, value) of every value that the Pod asks of a node's label."""
    spec = spec_of(template)
    for name, value in (spec.get("nodeSelector") or {}).items():
        if name in labels:
            yield json_path(f"{template.path}.spec.nodeSelector", [name]), str(value)
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    for i, term in enumerate(items(affinity.get(required), "nodeSelectorTerms")):
        for j, expression in enumerate(items(term, "matchExpressions")):
            if expression.get("key") in labels:
                path = f"{template.path}.spec.affinity.nodeAffinity.{required}.nodeSelectorTerms[{i}]"
                for value in expression.get("values") or []:
                    yield f"{path}.matchExpressions[{j}].values", str(value)


@rule("instance-type", Level.ERROR)
def _instance_type(manifest: Manifest) -> Found:
    """A Pod asks for no more GPUs and EFA interfaces than the instance type has that it selects: it is never scheduled
    otherwise.
    """
    for template in manifest.pod_templates():
        types = [value for _, value in _asked_of_nodes(template, _INSTANCE)]
        has = [found for value in types for name, found in _INSTANCES.items() if re.fullmatch(name, value)]
        if not has or len(has) != len(types):
            continue
        for path, container in containers(template):
            efas = {name: number for name, number in nics_of(container).items() if name.endswith("/efa")}
            for asked, most in (
                (gpus(template, container), max(number for number, _ in has)),
                (efas, max(number or 0 for _, number in has)),
            ):
                for name, number in asked.items():
                    if amount(number) > most:
                        message = f"{number} on {' or '.join(types)}; allowed: up to {most}"
                        yield Finding(json_path(f"{path}.resources.limits", [name]), message)
