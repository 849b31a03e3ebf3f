"""The rule for settings of the network: variables of NCCL, NVSHMEM and hybrid_ep in the environment of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hybrid_ep.cluster.kubernetes.manifest import Level, Manifest, PodTemplate, json_path
from hybrid_ep.cluster.kubernetes.rules.parts import amount, containers, gpus, items, main, mounted_file, nics, words
from hybrid_ep.cluster.kubernetes.rules.registry import Finding, Found, rule
from hybrid_ep.env import VARIABLES

_OURS = {variable.name: variable for variable in VARIABLES}
_BYTE = r"\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5]"
_PRIORITY = r"\d|1[0-5]"
_NIC = r"[\w.-]+"
_JOBS = ("Job", "JobSet", "LeaderWorkerSet", "MPIJob", "PyTorchJob")  # whose Pods may be ranks of one job
# What the others take: name → pattern, and the same for people. Sources: the pages of environment variables in NCCL's
# user guide and NVSHMEM's API reference.
_TAKEN = {
    "NCCL_IB_DISABLE": (r"[01]", "0 or 1"),
    "NCCL_IB_HCA": (rf"\^?=?{_NIC}(:\d+)?(,{_NIC}(:\d+)?)*", "names of NICs, separated by commas"),
    "NCCL_IB_GID_INDEX": (rf"-1|{_BYTE}", "-1 to 255"),
    "NCCL_IB_TC": (_BYTE, "0 to 255"),
    "NCCL_IB_SL": (_PRIORITY, "0 to 15"),
    "NCCL_CROSS_NIC": (r"[0-2]", "0, 1 or 2"),
    "NCCL_NET_GDR_LEVEL": (r"LOC|PIX|PXB|PHB|SYS|[0-5]", "LOC, PIX, PXB, PHB or SYS"),
    "NCCL_DEBUG": (r"(?i)VERSION|WARN|INFO|TRACE|ABORT|NONE", "VERSION, WARN, INFO or TRACE"),
    "NCCL_P2P_LEVEL": (r"LOC|NVL|PIX|PXB|PHB|SYS|[0-5]", "LOC, NVL, PIX, PXB, PHB or SYS"),
    "NCCL_SOCKET_IFNAME": (r"\^?=?[\w.:-]+(,[\w.:-]+)*", "names of network interfaces, separated by commas"),
    "NCCL_MNNVL_ENABLE": (r"[0-2]", "0, 1 or 2"),
    "NVSHMEM_HCA_LIST": (rf"\^?{_NIC}:\d+(,\^?{_NIC}:\d+)*", "entries NAME:PORT, separated by commas"),
    "NVSHMEM_REMOTE_TRANSPORT": (
        r"(?i)none|ib(rc|devx|gda)|ucx|libfabric",
        "ibrc, ibdevx, ibgda, ucx, libfabric or none",
    ),
    "NVSHMEM_IB_GID_INDEX": (_BYTE, "0 to 255"),
    "NVSHMEM_IB_TRAFFIC_CLASS": (_BYTE, "0 to 255"),
    "NVSHMEM_IB_SL": (_PRIORITY, "0 to 15"),
}
# Names of one thing in NCCL, NVSHMEM and hybrid_ep.
_SAME = (
    ("NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX", "HYBRID_EP_GID_INDEX"),
    ("NCCL_IB_TC", "NVSHMEM_IB_TRAFFIC_CLASS", "HYBRID_EP_TRAFFIC_CLASS"),
    ("NCCL_IB_SL", "NVSHMEM_IB_SL", "HYBRID_EP_SERVICE_LEVEL"),
)


class _Setting(NamedTuple):
    """A variable of ranks: its value, and where it is set."""

    value: str
    manifest: Manifest
    path: str


@rule("fabric-settings", Level.WARNING)
def _fabric_settings(manifest: Manifest) -> Found:
    """NCCL, NVSHMEM and hybrid_ep get values that they take. All get one GID index, one traffic class and one service
    level. The NICs that are named are NICs of NCCL, no more than the Pod has, and spread evenly over its GPUs. A Pod
    with RDMA NICs or EFA does not switch them off. Ranks of several Pods do not meet at the loopback interface.
    """
    for template in manifest.pod_templates():
        # What only the node knows is not judged.
        found = {name: each for name, each in _settings(manifest, template) if "$" not in each.value}
        for name, (value, where, path) in found.items():
            if allowed := _allowed_instead(name, value):
                level = Level.ERROR if name.startswith("HYBRID_EP_") else None
                yield Finding(path, f"{name}={value}; allowed: {allowed}", level, where)
        for name, message in (*_disagreements(found, _is_of_several(manifest)), *_nics(found, template)):
            yield Finding(found[name].path, message, manifest=found[name].manifest)


def _is_of_several(manifest: Manifest) -> bool:
    """Whether several Pods are ranks of one job."""
    is_indexed = manifest.kind != "Job" or manifest.spec.get("completionMode") == "Indexed"
    pods = sum(each.num_pods or 1 for each in manifest.pod_templates() if each.role != "Launcher")
    return manifest.kind in _JOBS and is_indexed and pods > 1


def _settings(manifest: Manifest, template: PodTemplate) -> Iterator[tuple[str, _Setting]]:
    """What the ranks of a template find in their environment, as far as the build says it; the last one holds."""
    owner = template
    if manifest.kind == "MPIJob":  # workers get what the launcher's mpirun passes on
        roles = {each.role: each for each in manifest.pod_templates()}
        if template.role != "Worker" or "Launcher" not in roles:
            return
        owner = roles["Launcher"]
    path, container = main(owner)
    found: dict[str, _Setting] = {}
    for source in items(container, "envFrom"):
        named = "ConfigMap", (source.get("configMapRef") or {}).get("name")
        for other in (each for each in manifest.build if (each.kind, each.metadata.get("name")) == named):
            for key, value in (other.content.get("data") or {}).items():
                name = f"{source.get('prefix') or ''}{key}"
                found[name] = _Setting(str(value).strip(), other, json_path("$.data", [key]))
    for i, variable in enumerate(items(container, "env")):
        found[str(variable.get("name"))] = _Setting(str(variable.get("value", "")), manifest, f"{path}.env[{i}]")
    for key in ("command", "args"):
        for name, value in re.findall(r"(?:^|\s)-x\s+(\w+)=(\S+)", "\n".join(words({key: container.get(key)}))):
            found[name] = _Setting(value.strip("\"'"), manifest, f"{path}.{key}")
    yield from found.items()
    script = found["RANK_SETTINGS"].value if "RANK_SETTINGS" in found else ""
    if held := mounted_file(template, main(template)[1], script, manifest.build):
        text = held[0].content["data"][held[1]]
        for name, value in re.findall(r"(?m)^\s*(?:export\s+)?([A-Z]\w*)=(\S*)\s*$", text):
            yield name, _Setting(value.strip("\"'"), held[0], f"$.data['{held[1]}']")


def _allowed_instead(name: str, value: str) -> str | None:
    """What is allowed where this value is not."""
    if name in _OURS and value:
        try:
            _OURS[name].parse(value)
        except ValueError:
            return _OURS[name].allowed
    elif name.startswith("HYBRID_EP_") and value:
        return "a variable that `hybrid-ep env` lists"
    pattern, allowed = _TAKEN.get(name, (r"(?s).*", None))
    return None if not value or re.fullmatch(pattern, value) else allowed


def _disagreements(settings: dict[str, _Setting], is_of_several: bool) -> Iterator[tuple[str, str]]:
    """(name, message) where the libraries get different values, or Pods an interface that does not leave them."""
    for names in _SAME:
        values = {name: settings[name].value for name in names if name in settings and settings[name].value != "-1"}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{name}={value}" for name, value in values.items())
            yield next(iter(values)), f"{shown}; allowed: one value"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if is_of_several else ():
        if name in settings and re.fullmatch(r"=?lo", settings[name].value):
            yield name, f"{name}={settings[name].value} in a job of several Pods; allowed: an interface between them"


def _nics(settings: dict[str, _Setting], template: PodTemplate) -> Iterator[tuple[str, str]]:
    """(name, message) where NICs are named that do not fit each other, the Pod's NICs or its GPUs."""
    named = {name: found for name, each in settings.items() if (found := _named(name, each.value))}
    of_nccl = named.get("NCCL_IB_HCA", [])
    num_gpus = sum(map(amount, gpus(template, *(each for _, each in containers(template))).values()))
    # One NIC is what a plugin for shared NICs gives.
    num_nics = max((amount(number) for number in nics(template).values() if amount(number) > 1), default=0)
    for name, found in named.items():
        if strange := [nic for nic in found if of_nccl and nic not in of_nccl]:
            yield name, f"{name} has {', '.join(strange)}; allowed: NICs of NCCL_IB_HCA"
        if num_nics and len(set(found)) > num_nics:
            yield name, f"{name} names {len(set(found))} NICs; allowed: the Pod's {num_nics:g}"
        if num_gpus > 0 and max(num_gpus, len(set(found))) % min(num_gpus, len(set(found))):
            yield name, f"{name} names {len(set(found))} NICs; allowed: as many for each of {num_gpus:g} GPUs"
    disabled = settings.get("NCCL_IB_DISABLE")
    rdma = [nic for nic in nics(template) if not re.search(r"/efa$|^efa\.", nic)]  # EFA has a plugin of its own
    if disabled and disabled.value == "1" and rdma:
        yield "NCCL_IB_DISABLE", f"NCCL_IB_DISABLE=1 with {', '.join(rdma)}; allowed with RDMA: 0, or no NICs"
    net = settings.get("NCCL_NET")
    if net and net.value.lower() == "socket" and nics(template):
        message = f"NCCL_NET={net.value} with {', '.join(nics(template))}; allowed with NICs: unset, or their plugin"
        yield "NCCL_NET", message
    if "NVSHMEM_HCA_LIST" in named and "NVSHMEM_ENABLE_NIC_PE_MAPPING" not in settings:
        yield "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_LIST has no effect; allowed: with NVSHMEM_ENABLE_NIC_PE_MAPPING=1"


def _named(name: str, value: str) -> list[str]:
    """NICs that a setting names whole; none where it has prefixes, or names those to leave out."""
    if (name == "NCCL_IB_HCA" and value.startswith("=")) or (name == "NVSHMEM_HCA_LIST" and "^" not in value):
        return [entry.partition(":")[0] for entry in value.removeprefix("=").split(",")]
    return re.split(r"[,+]", value) if name == "HYBRID_EP_NICS" else []
