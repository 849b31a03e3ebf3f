"""Parts of a Pod template that rules ask for: containers, words of a command, amounts, GPUs, NICs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hybrid_ep.k8s.manifest import Manifest, PodTemplate
from hybrid_ep.k8s.schema import QUANTITY

__all__ = ["NETWORKS", "added_capabilities", "amount", "amounts", "containers", "environment", "gpus", "is_nic"]
__all__ += [
    "items",
    "main",
    "mounted_file",
    "nearly",
    "nics",
    "nics_of",
    "option",
    "runs",
    "security",
    "spec_of",
    "words",
]

# Whole GPUs, GPUs that are shared by time, and parts of them (MIG).
_GPU = re.compile(r"nvidia\.com/(gpu(\.shared)?|mig-.+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)")
_GPU_CLASS = re.compile(r"gpu|^mig\.")  # DRA's classes: gpu.nvidia.com, mig.nvidia.com, gpu.amd.com …
# Annotations that give a Pod networks of its own, by the plugins Multus and GKE's.
NETWORKS = ("k8s.v1.cni.cncf.io/networks", "networking.gke.io/interfaces")
# Names under which device plugins offer NICs: rdma/ib, nvidia.com/hostdev, nvidia.com/roce_vf, vpc.amazonaws.com/efa …
_NIC = re.compile(
    r"rdma|roce|hostdev|sriov|efa$|(^|[-_/.])(vf|hca|ib|nic|vnic)s?([-_0-9].*)?$|mlnx|connectx", re.IGNORECASE
)
_FACTORS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_FACTORS |= {letter: 1000.0**i for i, letter in enumerate("kMGTPE", 1)}
_FACTORS |= {f"{letter}i": 1024.0**i for i, letter in enumerate("KMGTPE", 1)}


def spec_of(template: PodTemplate) -> dict[str, Any]:
    """The Pod's spec."""
    spec = template.content.get("spec")
    return spec if isinstance(spec, dict) else {}


def nearly(name: str, given: Iterable[str]) -> str | None:
    """The given name that this one is a misspelling of. Names that differ in a number or a single letter only, as
    ``rdma-0`` and ``rdma-1``, are siblings.
    """

    def shape(text: str) -> str:
        return re.sub(r"\d+|(?<![A-Za-z])[a-z](?![A-Za-z])", "#", text)

    others = [other for other in given if shape(other) != shape(name)]
    return next(iter(difflib.get_close_matches(name, others, 1, 0.75)), None)


def items(tree: Any, key: str) -> list[dict[str, Any]]:
    """The list of mappings at `key`; empty where there is none."""
    return [item for item in (tree or {}).get(key) or [] if isinstance(item, dict)]


def containers(template: PodTemplate, *, init: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON path, container) of each container, and of each init container if asked for."""
    for key in ("initContainers", "containers") if init else ("containers",):
        for i, container in enumerate(items(spec_of(template), key)):
            yield f"{template.path}.spec.{key}[{i}]", container


def main(template: PodTemplate) -> tuple[str, dict[str, Any]]:
    """The container of the ranks: the first, which an operator wires up; elsewhere the first with GPUs, if any has."""
    found = list(containers(template)) or [(f"{template.path}.spec.containers", {})]
    wired = template.role in ("Launcher", "Worker", "Master")
    return found[0] if wired else next((each for each in found if gpus(template, each[1])), found[0])


def words(container: dict[str, Any]) -> list[str]:
    """Of its command and arguments."""
    return [str(word) for key in ("command", "args") for word in container.get(key) or []]


# A program that is started by other names, too: Open MPI's and other MPIs' mpirun; torchrun as a module of Python.
_NAMES = {"mpirun": r"mpirun|mpiexec|orterun|prterun"}
_MODULES = {"torchrun": r"torch\.distributed\.(run|launch)"}


def runs(container: dict[str, Any], program: str) -> bool:
    """Whether its command, or a script in it, starts the program, by one of its names or as ``python -m``."""
    names = _NAMES.get(program, re.escape(program))
    modules = _MODULES.get(program, rf"{names}(\.[\w.]+)?")
    return bool(re.search(rf"(^|[\s/;&|(])({names}|-m\s+({modules}))([\s;)]|$)", "\n".join(words(container))))


def option(container: dict[str, Any], name: str) -> str | None:
    """The value of ``--name=value`` or ``--name value``, also by a variable that the container sets; None where it is
    not given, or is what only the running container knows.
    """
    text = "\n".join(words(container))
    spelt = "[-_]".join(map(re.escape, name.split("-")))
    found = re.search(rf"(?:^|\s){spelt if name.startswith('-') else '--' + spelt}[=\s]\s*([^\s\\]+)", text)
    value = found[1].strip("\"'") if found else ""
    for variable, given in environment(container).items():
        if not re.search(rf"(^|[\s;]){re.escape(variable)}=", text):  # a script that sets it itself
            value = re.sub(
                rf"\$(\({re.escape(variable)}\)|\{{{re.escape(variable)}\}}|{re.escape(variable)}\b)", given, value
            )
    return value if value and "$" not in value else None


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Its variables whose values the manifest says."""
    return {str(each.get("name")): str(each["value"]) for each in items(container, "env") if "value" in each}


def amounts(container: dict[str, Any], which: str) -> dict[str, Any]:
    """Its ``limits`` or ``requests``."""
    return (container.get("resources") or {}).get(which) or {}


def amount(value: Any) -> float:
    """A quantity as a number; NaN, which nothing is more or less than, where it is none."""
    text = str(value)
    if not re.match(QUANTITY, text):
        return float("nan")
    suffix = re.search(r"([KMGTPE]i|[numkMGTPE])$", text)
    unit = suffix[0] if suffix else ""
    return float(text.removesuffix(unit)) * _FACTORS[unit]


def gpus(template: PodTemplate, container: dict[str, Any]) -> dict[str, Any]:
    """GPU resources and device classes of GPUs, and how many of each."""
    asked = amounts(container, "requests") | amounts(container, "limits")
    found = {name: number for name, number in asked.items() if _GPU.fullmatch(name)}
    for claim in items(container.get("resources"), "claims"):
        for request, devices in template.claims.get(str(claim.get("name")), {}).items():
            if str(claim.get("request") or request).partition("/")[0] == request:
                for name, number in devices.items():
                    if _GPU_CLASS.search(name):
                        found[name] = found.get(name, 0) + number
    return found


def is_nic(name: str) -> bool:
    """Whether a resource or a network has a name that RDMA NICs have."""
    return bool(_NIC.search(name))


def nics_of(container: dict[str, Any]) -> dict[str, Any]:
    """Resources of a container that are NICs, and how many of each."""
    asked = amounts(container, "requests") | amounts(container, "limits")
    return {name: number for name, number in asked.items() if "/" in name and is_nic(name)}


def nics(template: PodTemplate) -> dict[str, Any]:
    """Resources of the Pod that are NICs, and how many of each."""
    found: dict[str, Any] = {}
    for _, container in containers(template):
        found |= nics_of(container)
    return found


def security(template: PodTemplate, container: dict[str, Any]) -> dict[str, Any]:
    """The container's security context over its Pod's."""
    return (spec_of(template).get("securityContext") or {}) | (container.get("securityContext") or {})


def mounted_file(
    template: PodTemplate, container: dict[str, Any], file: str, build: Sequence[Manifest]
) -> tuple[Manifest, str] | None:
    """The ConfigMap of the build that holds a file of the container, and the file's key in it; None where none does."""
    volumes = {volume.get("name"): volume for volume in items(spec_of(template), "volumes")}
    for mount in items(container, "volumeMounts"):
        where = str(mount.get("mountPath"))
        is_file = file == where and mount.get("subPath")
        if is_file or file.startswith(f"{where}/"):
            key = mount["subPath"] if is_file else file.removeprefix(f"{where}/")
            name = ((volumes.get(mount.get("name")) or {}).get("configMap") or {}).get("name")
            maps = (each for each in build if each.kind == "ConfigMap" and each.metadata.get("name") == name)
            return next(((each, key) for each in maps if key in (each.content.get("data") or {})), None)
    return None


def added_capabilities(container: dict[str, Any]) -> list[str]:
    """Linux capabilities that it is given, without the prefix that another rule reports."""
    added = ((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or []
    return [str(name).upper().removeprefix("CAP_") for name in added]
