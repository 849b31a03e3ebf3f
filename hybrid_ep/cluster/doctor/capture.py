"""Records a real node, so that its checks can be replayed anywhere (`Recording`, ``--sysroot``).

A recording holds the files that the checks and the topology probe read, and nothing else. It has no host keys, no
environment, no serial numbers, and no addresses but the GIDs of RDMA ports. The kernel log is reduced to the driver's
lines, without who built it where. It stays well below 1 MB. `ReplayedNode` is a recorded node in the place of this one
(``hybrid-ep doctor --replay FILE``): NVML's answers come from the recording, without any driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pynvml

from hybrid_ep.cluster.doctor.node import LogLine, Node
from hybrid_ep.cluster.doctor.nvml import P2P_NVLINK, P2P_OK, Nvml
from hybrid_ep.cluster.doctor.xid import fault_lines
from hybrid_ep.topology import Nic, Topology, probe
from hybrid_ep.topology.recording import Recording, encode
from hybrid_ep.watched import Unreadable

_AER = tuple(f"aer_dev_{kind}" for kind in ("correctable", "nonfatal", "fatal"))
_PCI = (
    "vendor",
    "device",
    "class",
    "numa_node",
    "current_link_width",
    "current_link_speed",
    "max_link_width",
    "max_link_speed",
    *_AER,
)
_PORT = ("state", "phys_state", "link_layer", "rate", "sm_lid", "counters/*", "hw_counters/*", "gids/*", "pkeys/*")
_FILES = (
    *(f"/sys/class/infiniband/*/{name}" for name in ("node_guid", "fw_ver", "hw_counters/*")),
    *(f"/sys/class/infiniband/*/ports/*/{name}" for name in (*_PORT, "gid_attrs/types/*", "gid_attrs/ndevs/*")),
    "/sys/class/infiniband_verbs/uverbs*/ibdev",
    "/sys/class/infiniband_mad/umad*/ibdev",
    "/sys/class/infiniband_mad/umad*/port",
    "/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.procs",
    "/sys/kernel/iommu_groups/*/type",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    "/sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference",
    *(f"/sys/devices/system/cpu/{name}" for name in ("present", "online", "smt/control")),
    "/sys/devices/system/edac/mc/mc*/ue_count",
    *(f"/sys/class/dmi/id/{name}" for name in ("sys_vendor", "product_name")),
    "/proc/driver/nvidia/params",
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/kernel/osrelease",
    "/etc/nvidia-container-runtime/config.toml",
    "/sys/devices/system/node/node*/cpulist",
)
_EXCERPTS = {
    "/sys/class/dmi/id/chassis_asset_tag": r"^(OracleCloud\.com|7783-7084-3265-9085-8269-3286-77)$",  # of clouds
    "/etc/nccl.conf": r"^\s*NCCL_",
    "/etc/environment": r"^\s*(export\s+)?NCCL_",
    "/proc/cpuinfo": r"^flags\s*:",
    "/proc/devices": r"nvidia",
    "/proc/driver/nvidia/version": r"^NVRM version",
    "/proc/meminfo": r"^MemTotal:",
    "/proc/self/limits": r"^Max (locked memory|open files)",
    "/proc/self/mounts": r"^\S+ /dev/shm ",
}
# Folders that matter by being there, beside those that a check looked into.
_FOLDERS = (
    *("/sys/fs/cgroup/system.slice", "/sys/module/nv*_peer*mem", "/sys/module/nvidia*"),
    "/sys/devices/system/node/node*",
)
_DEVICES = ("/dev/infiniband/*", "/dev/nvidia-caps-imex-channels/*", "/dev/gdrdrv", "/dev/nvidia[0-9]*")
_NETDEV = re.compile(r"[^\s/:*?\[\]]{1,15}")  # as the kernel names interfaces, and no pattern
_GIDS_KEPT = 16  # of up to 256 entries of a port's table
_LOG_WORDS = (  # of lines that are kept beside those of kernel_lines.yaml
    *("NVRM", "nvidia", "SXid", "PCIe Bus Error", "AER:", "DPC:", "mlx5_core"),
    *("EDAC MC", "Memory failure:", "[Hardware Error]", "mce: Uncorrected", "pciehp:"),
)
_LOG_LINES_KEPT = 400
_ASKED_BY_TOPOLOGY = (
    *("name", "uuid", "pci_address", "memory_bytes", "fabric.state", "fabric.status"),
    *("fabric.cluster_uuid", "fabric.clique", "platform.chassis_serial", "platform.slot", "platform.tray"),
    *("platform.host_id", "platform.module_id"),
)


def capture(node: Node) -> Recording:
    """Records what this node's checks read; call it after they ran, so that NVML's answers are complete."""
    recording = Recording()
    for pattern in _FILES:
        for path in _glob(node, pattern):
            _add_file(recording, node, path)
    for path in [path for netdev in _bonds(node) for path in _glob(node, f"/sys/class/net/{netdev}/lower_*/operstate")]:
        _add_file(recording, node, path)
    _add_pci(recording, node)
    _add_excerpts(recording, node)
    folders = node.listed.union(*(_glob(node, pattern) for pattern in _FOLDERS))
    # What is below a link is a folder of the link's target.
    recording.folders.extend(sorted(path for path in folders if not _below(path, recording.links)))
    for pattern in _DEVICES:
        for path in _glob(node, pattern):
            _add_device(recording, node, path)
    _add_kernel_log(recording, node)
    recording.nvml.update(_nvml_answers(node))
    recording.facts.update(_facts(node))
    return recording


def _below(path: str, links: Mapping[str, str]) -> bool:
    return any(str(part) in links for part in (Path(path), *Path(path).parents))


def _glob(node: Node, pattern: str) -> Iterator[str]:
    for place in sorted(node.root.glob(pattern.lstrip("/"))):
        yield "/" + str(place.relative_to(node.root))


def _add_file(recording: Recording, node: Node, path: str) -> None:
    name, _, index = path.rpartition("/")
    if ("/gids" in name or "/gid_attrs/" in name or "/pkeys" in name) and index.isdigit() and int(index) >= _GIDS_KEPT:
        return
    try:
        recording.files[path] = encode(node.read_bytes(path))
    except Unreadable:
        return  # an unreadable file is absent from the recording, and its check says unknown there too


def _add_pci(recording: Recording, node: Node) -> None:
    """GPUs, NICs and bridges: their place in the tree, their links, and the attributes that are read."""
    try:
        topology = node.topology
    except Unreadable:
        return
    for device in topology.pci:
        link = f"/sys/bus/pci/devices/{device.address}"
        place = "/sys/devices/" + "/".join(device.path)
        recording.links[link] = "../../../devices/" + "/".join(device.path)
        if (group := node.link(f"{link}/iommu_group")) is not None:
            recording.links[f"{place}/iommu_group"] = f"../../../kernel/iommu_groups/{group}"
        physical = node.link(f"{link}/physfn")
        if physical is not None:
            recording.links[f"{place}/physfn"] = f"../{physical}"
        for name in _PCI:
            try:
                recording.files[f"{place}/{name}"] = node.read(f"{link}/{name}") + "\n"
            except Unreadable:
                continue
    paths = {device.address: device.path for device in topology.pci}
    for nic in topology.nics:
        if nic.pci_address:
            path = paths.get(nic.pci_address, (nic.pci_address,))
            recording.links[f"/sys/class/infiniband/{nic.name}/device"] = "../../../devices/" + "/".join(path)
            for netdev in nic.netdevs:
                for name in ("mtu", "operstate", "carrier_changes"):
                    _add_file(recording, node, f"/sys/class/net/{netdev}/{name}")
                mtu = recording.files.setdefault(f"/sys/class/net/{netdev}/mtu", "")
                recording.files[f"/sys/devices/{'/'.join(path)}/net/{netdev}/mtu"] = mtu


def _add_excerpts(recording: Recording, node: Node) -> None:
    """Files of which only a few lines are recorded, because the others could hold private data."""
    for path, pattern in _EXCERPTS.items():
        try:
            lines = node.read(path).splitlines()
        except Unreadable:
            continue
        kept = list(dict.fromkeys(line for line in lines if re.search(pattern, line)))
        recording.files[path] = "".join(f"{_without_builder(line)}\n" for line in kept)


def _without_builder(line: str) -> str:
    """The driver names the user and the host that built it, as in "Release Build  (root@somewhere)"."""
    return re.sub(r"\s*\(\S*@\S*\)\s*$", "", line)


def _without_serials(text: str) -> str:
    """Leaves out the serial numbers of cable and transceiver, which mlxlink names."""
    return re.sub(r'("[^"]*Serial[^"]*"\s*:\s*)"[^"]*"', r'\1""', text)


def _add_device(recording: Recording, node: Node, path: str) -> None:
    try:
        device = node.char_device(path)
    except Unreadable:
        return
    if device is not None:
        recording.devices[path] = f"char {device[0]}:{device[1]}\n"


def _add_kernel_log(recording: Recording, node: Node) -> None:
    try:
        recording.files["/dev/kmsg"] = kernel_records(node)
    except Unreadable:
        return


def kernel_records(node: Node) -> str:
    """The driver's and the devices' lines, as /dev/kmsg would have them since the boot.

    Raises:
        Unreadable: there is no log that may be read.
    """
    try:
        lines = node.kernel_log()
    except Unreadable as error:
        if not error.log:
            raise
        lines = list(error.log)
        first = 1  # the beginning is missing, and stays so
    else:
        first = 0
    kept = [line for line in lines if _is_kept(line.message)][-_LOG_LINES_KEPT:]
    records = [LogLine(0.0, "first record"), *kept]
    return "".join(
        f"6,{first + number},{line.seconds * 1e6:.0f},-;{_without_builder(line.message)}\n"
        for number, line in enumerate(records)
    )


def _is_kept(message: str) -> bool:
    if any(word in message for word in _LOG_WORDS):
        return True
    return any(kind.pattern.search(message) for kind in fault_lines())


def _nvml_answers(node: Node) -> dict[str, str]:
    """What the checks asked, and what only the topology probe asks."""
    try:
        nvml = node.nvml
        for gpu_idx in nvml.gpus:
            for key in _ASKED_BY_TOPOLOGY:
                _quietly(partial(nvml.gpu, gpu_idx, key))
            for link in nvml.links(gpu_idx):
                _quietly(partial(nvml.link, gpu_idx, link, "remote_pci"))
    except Unreadable:
        return {}
    return {key: _anonymous(key, value) for key, value in nvml.answers.items()}


def _anonymous(key: str, value: str) -> str:
    """Replaces the identifiers of GPUs: they are private, and only need to differ."""
    if key.endswith(".uuid"):
        return f"GPU-00000000-0000-0000-0000-{int(key.split('.')[1]):012d}"
    return "recorded" if key.endswith(".chassis_serial") and not value.startswith("!") else value


def _quietly(read: Callable[[], Any]) -> None:
    """NVML's refusals are part of the log as well."""
    try:
        read()
    except Unreadable:
        return


def _facts(node: Node) -> dict[str, Any]:
    facts: dict[str, Any] = {"hostname": "recorded-node"}
    readers: dict[str, Callable[[], Any]] = {
        "clock": lambda: asdict(node.clock()),
        "cuda": lambda: asdict(node.cuda()),
        "cuda_start": lambda: asdict(node.started_cuda()),
        "packages": node.packages,
        "torch_cuda": node.torch_cuda,
        "free_mib": lambda: {"/dev/shm": node.free_mib("/dev/shm")},
        "container": lambda: asdict(node.container()),
        "nccl_variables": node.nccl_variables,
    }
    for name, read in readers.items():
        try:
            facts[name] = read()
        except Unreadable:
            continue
    nics = _nics(node)
    facts["verbs"] = [
        {
            "name": nic.name,
            "dmabuf": nic.dmabuf,
            "ports": [{"port": port.port, "active_mtu_bytes": port.active_mtu_bytes} for port in nic.ports],
        }
        for nic in nics
        if nic.dmabuf is not None or any(port.active_mtu_bytes for port in nic.ports)
    ]
    netdevs = {netdev for nic in nics for netdev in nic.netdevs}
    for bond in _bonds(node):
        netdevs |= {place.split("/lower_")[1] for place in _glob(node, f"/sys/class/net/{bond}/lower_*")}
    facts["dcb"] = {netdev: found for netdev in sorted(netdevs) if (found := _dcb(node, netdev)) is not None}
    lines = ["nvidia-imex-ctl -N -j", "nv-fabricmanager --version"]
    lines += [f"mlxlink -d {nic.name} -m -c --json" for nic in nics]
    facts["commands"] = {line: _without_serials(text) for line in lines if (text := _command(node, line)) is not None}
    return facts


def _bonds(node: Node) -> list[str]:
    """Network interfaces of RDMA ports that are built on other interfaces, such as bonds."""
    found = set()
    for path in _glob(node, "/sys/class/infiniband/*/ports/*/gid_attrs/ndevs/0"):
        _quietly(lambda path=path: found.add(node.read(path)))  # type: ignore[misc]
    names = [netdev for netdev in found if _NETDEV.fullmatch(netdev)]
    return sorted(netdev for netdev in names if any(_glob(node, f"/sys/class/net/{netdev}/lower_*")))


def _nics(node: Node) -> tuple[Nic, ...]:
    try:
        return node.topology.nics
    except Unreadable:
        return ()


def _dcb(node: Node, netdev: str) -> dict[str, Any] | None:
    try:
        return asdict(node.dcb(netdev))
    except Unreadable:
        return None


def _command(node: Node, line: str) -> str | None:
    try:
        return node.command(*line.split())
    except Unreadable:
        return None


_TEXTS = re.compile(
    r"(name|uuid|pci_address|remote_pci|vbios|inforom|cluster_uuid|chassis_serial|driver_version|nvml_version)$"
)
# Keys that recordings of older versions lack: the key whose value they had, or the value itself.
_INSTEAD = {"ecc_mode_pending": "ecc_mode", "mig_mode_pending": "mig_mode"}
_ABSENT = {"fabric.health": "0", "fabric.summary": "0"}
_REMOTE_TYPES = {
    int(pynvml.NVML_NVLINK_DEVICE_TYPE_GPU): "gpu",
    int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH): "switch",
    int(pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU): "npu",
}


class RecordedNvml(Nvml):
    """NVML as it was recorded: key → value, ``7+5`` for one that rises by 5 at each reading, ``!15`` for an error."""

    def __init__(self, recorded: Mapping[str, str], watch: Callable[[str], None] = lambda source: None) -> None:
        self._recorded = recorded
        super().__init__(watch)

    def close(self) -> None:
        """There is nothing to shut down."""

    def _start(self) -> None:
        if not self._recorded:
            raise Unreadable("NVML: not in the recording", nvml_code=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        if (refusal := re.fullmatch(r"!(\d{1,3})", self._recorded.get("init", ""))) is not None:
            raise Unreadable(f"NVML: {_words(int(refusal[1]))}", nvml_code=int(refusal[1]))

    def _ask(self, key: str, call: Callable[[], Any]) -> Any:
        self._watch("NVML")
        value = self._value(key)
        if value.startswith("!"):
            code = int(value[1:]) if value[1:].isdigit() else pynvml.NVML_ERROR_UNKNOWN
            self._answers.setdefault(key, []).append(value)
            raise Unreadable(f"NVML {key}: {_words(code)}", nvml_code=code)
        if _TEXTS.search(key):
            self._answers.setdefault(key, []).append(value)
            return value
        number = re.fullmatch(r"(\d{1,20})(?:\+(\d{1,20}))?", value)
        if number is None:
            raise Unreadable(f"NVML {key}: {value!r:.40} is no number")
        readings = len(self._answers.get(key, []))
        found = int(number[1]) + readings * int(number[2] or 0)
        self._answers.setdefault(key, []).append(str(found))
        return found

    def _value(self, key: str) -> str:
        if key not in self._recorded:
            gpu, _, name = key.rpartition(".") if key.rpartition(".")[2] in _INSTEAD else ("", "", "")
            absent = next((value for end, value in _ABSENT.items() if key.endswith(end)), None)
            key = f"{gpu}.{_INSTEAD[name]}" if name else key
            return self._recorded.get(key, absent or f"!{pynvml.NVML_ERROR_NOT_SUPPORTED}")
        return self._recorded[key]


def _words(code: int) -> str:
    """NVML's words for an error, which for some of them only a driver has."""
    try:
        return str(pynvml.NVMLError(code))
    except pynvml.NVMLError:
        return f"error {code}"


class ReplayedNode(Node):
    """A node whose NVML is `recorded`, and whose other facts are below `sysroot`."""

    def __init__(self, sysroot: Path, *, recorded: Mapping[str, str]) -> None:
        super().__init__(sysroot)
        self._answers = recorded

    @cached_property
    def topology(self) -> Topology:
        """As of a live node."""
        return probe(self.root, before=self.watch, ask_nvml=lambda: _probe(self.nvml))

    @cached_property
    def _nvml_or_reason(self) -> Nvml | Unreadable:
        try:
            return RecordedNvml(self._answers, self.watch)
        except Unreadable as error:
            return error


def _probe(nvml: Nvml) -> dict[str, Any]:
    """What the extension's probe says of a live driver."""
    return {
        "driver_version": _or(lambda: nvml.system("driver_version"), ""),
        "nvml_version": _or(lambda: nvml.system("nvml_version"), ""),
        "cuda_driver_version": _or(lambda: nvml.system("cuda_driver_version"), 0),
        "gpus": [_gpu(nvml, gpu_idx) for gpu_idx in nvml.gpus],
    }


def _gpu(nvml: Nvml, gpu_idx: int) -> dict[str, Any]:
    def ask(key: str, instead: Any) -> Any:
        return _or(lambda: nvml.gpu(gpu_idx, key), instead)

    def part(name: str, fields: tuple[str, ...]) -> dict[str, Any] | None:
        found: dict[str, Any] | None = _or(
            lambda: {field: nvml.gpu(gpu_idx, f"{name}.{field}") for field in fields}, None
        )
        return found

    def is_peer(other: int) -> bool:
        return other != gpu_idx and _or(lambda: nvml.p2p(gpu_idx, other, P2P_NVLINK), -1) == P2P_OK

    return {
        "gpu_idx": gpu_idx,
        "name": ask("name", ""),
        "uuid": ask("uuid", ""),
        "pci_address": _as_in_sys(ask("pci_address", "")),
        "memory_bytes": ask("memory_bytes", 0),
        "links": [_link(nvml, gpu_idx, link) for link in _or(lambda: nvml.links(gpu_idx), [])],
        "fabric": part("fabric", ("cluster_uuid", "clique", "state", "status")),
        "platform": part("platform", ("chassis_serial", "slot", "tray", "host_id", "module_id")),
        "nvlink_peers": [other for other in nvml.gpus if is_peer(other)],
    }


def _link(nvml: Nvml, gpu_idx: int, link: int) -> dict[str, Any]:
    def ask(key: str, instead: Any) -> Any:
        return _or(lambda: nvml.link(gpu_idx, link, key), instead)

    kind = ask("remote_type", None)
    return {
        "link": link,
        "active": bool(ask("state", 0)),
        "remote_type": "" if kind is None else _REMOTE_TYPES.get(kind, "unknown"),
        "remote_pci": _as_in_sys(ask("remote_pci", "")),
    }


def _or(read: Callable[[], Any], instead: Any) -> Any:
    try:
        return read()
    except Unreadable:
        return instead


def _as_in_sys(address: str) -> str:
    """NVML writes ``00000000:1B:00.0``, and /sys ``0000:1b:00.0``."""
    text = address.lower()
    return text[4:] if re.match(r"0000[0-9a-f]{4}:", text) else text
