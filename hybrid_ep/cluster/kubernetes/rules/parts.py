"""Parts of a Pod template that rules ask for: containers, words of a command, amounts, GPUs, NICs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybrid_ep.cluster.kubernetes.manifest import Manifest, PodTemplate

# Whole GPUs, GPUs that are shared by time, and parts of them (MIG).
_GPU = re.compile(r"nvidia\.com/(gpu(\.shared)?|mig-.+)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)")
_GPU_CLASS = re.compile(r"gpu|^mig\.")  # DRA's classes: gpu.nvidia.com, mig.nvidia.com, gpu.amd.com …
# DRA's classes of NICs with RDMA: mrdma.google.com, efa.networking.k8s.aws, sriovnetwork.k8snetworkplumbingwg.io …
_NIC_CLASS = re.compile(r"rdma|roce|sriov|^efa\.|mlnx|connectx", re.IGNORECASE)
_NETWORK_CLASS = re.compile(r"dra\.?net|^netdev\.|^sriov\.")
# Annotations that give a Pod networks of its own, by the plugins Multus and GKE's.
MULTUS = "k8s.v1.cni.cncf.io/networks"
NETWORKS = (MULTUS, "networking.gke.io/interfaces")
# Names under which device plugins offer NICs: rdma/ib, nvidia.com/hostdev, nvidia.com/roce_vf, vpc.amazonaws.com/efa …
_NIC = re.compile(
    r"rdma|roce|hostdev|sriov|efa$|(^|[-_/.])(vf|hca|ib|nic|vnic|rail)s?([-_0-9].*)?$|mlnx|connectx", re.IGNORECASE
)
_FACTORS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_FACTORS |= {letter: 1000.0**i for i, letter in enumerate("kMGTPE", 1)}
_FACTORS |= {f"{letter}i": 1024.0**i for i, letter in enumerate("KMGTPE", 1)}
# Labels that controllers give Pods; a selector may ask for them though no template has them.
_OF_CONTROLLERS = ("kubernetes.io/", "kubeflow.org/", "sigs.k8s.io/", "x-k8s.io/", "job-name", "statefulset.", "batch.")


def items(tree: Any, key: str) -> list[dict[str, Any]]:
    """The list of mappings at `key`; empty where there is none."""
    return [item for item in (tree or {}).get(key) or [] if isinstance(item, dict)]


def containers(template: PodTemplate, *, init: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON path, container) of each container, and of each init container if asked for."""
    for key in ("initContainers", "containers") if init else ("containers",):
        for i, container in enumerate(items(template.spec, key)):
            yield f"{template.path}.spec.{key}[{i}]", container


def running(template: PodTemplate) -> list[dict[str, Any]]:
    """The containers that run together: all but init containers that end."""
    sidecars = [each for each in items(template.spec, "initContainers") if each.get("restartPolicy") == "Always"]
    return [*items(template.spec, "containers"), *sidecars]


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
        name = re.escape(variable)
        if not re.search(rf"(^|[\s;]){name}=", text):  # a script that sets it itself
            value = given.join(re.split(rf"\$(?:\({name}\)|\{{{name}\}}|{name}\b)", value))
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
    found = re.fullmatch(r"\+?((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([KMGTPE]i|[numkMGTPE])?", text)
    return float(found[1]) * _FACTORS[found[2] or ""] if found else float("nan")


def gpus(template: PodTemplate, *of: dict[str, Any]) -> dict[str, Any]:
    """GPU resources and device classes of GPUs of these containers together, and how many of each."""

    def is_gpu(name: str) -> bool:
        return bool(_GPU.fullmatch(name) if "/" in name else _GPU_CLASS.search(name) and not _NIC_CLASS.search(name))

    return _devices(template, of, is_gpu)


def is_nic(name: str) -> bool:
    """Whether a resource, a device class or a network has a name that RDMA NICs have."""
    return bool(_NIC.search(name) or _NIC_CLASS.search(name))


def is_network(kind: str) -> bool:
    """Whether devices of a claim are network interfaces: the Pod has them, also where no container names the claim."""
    return bool(_NIC_CLASS.search(kind) or _NETWORK_CLASS.search(kind))


def nics(template: PodTemplate, *of: dict[str, Any]) -> dict[str, Any]:
    """Resources and device classes of NICs of these containers together, and how many of each. Without a container:
    those of the Pod, also by claims that no container names.
    """
    of_pod: list[dict[str, Any]] = []
    if not of:
        named = [items(each.get("resources"), "claims") for _, each in containers(template, init=True)]
        claimed = {str(claim.get("name")) for claims in named for claim in claims}
        of_pod.append({"resources": {"claims": [{"name": name} for name in template.claims if name not in claimed]}})

    def is_wanted(name: str) -> bool:
        return is_nic(name) if "/" in name else bool(_NIC_CLASS.search(name))

    return _devices(template, (*(of or running(template)), *of_pod), is_wanted)


def _devices(template: PodTemplate, of: Sequence[dict[str, Any]], is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Resources and kinds of device of claims, and how many of each the containers have together. Containers share the
    devices of one claim.
    """
    found: dict[str, Any] = {}
    shared = set()
    for container in of:
        asked = amounts(container, "requests") | amounts(container, "limits")
        mine = [(name, number) for name, number in asked.items() if "/" in name]
        for claim in items(container.get("resources"), "claims"):
            for request, devices in template.claims.get(str(claim.get("name")), {}).items():
                key = (str(claim.get("name")), request)
                if str(claim.get("request") or request).partition("/")[0] == request and key not in shared:
                    shared.add(key)
                    mine += devices.items()
        for name, number in mine:
            if is_wanted(name):
                total = amount(found.get(name, 0)) + amount(number)
                found[name] = (total if total % 1 else int(total)) if name in found else number
    return found


def security(template: PodTemplate, container: dict[str, Any]) -> dict[str, Any]:
    """The container's security context over its Pod's."""
    return (template.spec.get("securityContext") or {}) | (container.get("securityContext") or {})


def mounted_file(
    template: PodTemplate, container: dict[str, Any], file: str, build: Sequence[Manifest]
) -> tuple[Manifest, str] | None:
    """The ConfigMap of the build that holds a file of the container, and the file's key in it; None where none does."""
    maps = {each.get("name"): (each.get("configMap") or {}).get("name") for each in items(template.spec, "volumes")}
    for mount in items(container, "volumeMounts"):
        where, name = str(mount.get("mountPath")), maps.get(mount.get("name"))
        key = str(mount.get("subPath")) if file == where else file.removeprefix(f"{where}/")
        for held in (each for each in build if each.kind == "ConfigMap" and each.metadata.get("name") == name):
            if key in (held.content.get("data") or {}):
                return held, key
    return None


def added_capabilities(container: dict[str, Any]) -> list[str]:
    """Linux capabilities that it is given, without the prefix CAP_."""
    added = ((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or []
    return [str(name).upper().removeprefix("CAP_") for name in added]


def fits(selector: dict[str, Any], template: PodTemplate) -> bool:
    """Whether labels of a selector are the Pod's, or are such as a controller gives it."""
    return all(
        template.labels.get(name) == value
        or (name not in template.labels and any(part in name for part in _OF_CONTROLLERS))
        for name, value in selector.items()
    )
