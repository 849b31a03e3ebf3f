"""NVLink inside the node: links, errors, pairs, and the fabric that joins them."""

from __future__ import annotations

import contextlib
import re
import statistics
from itertools import permutations

import pynvml

from hybrid_ep.cluster.doctor.model import Counters, Finding, Severity, Status
from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.nvml import FABRIC_COMPLETED, LINK_REMOTE_SWITCH, P2P_NVLINK, P2P_OK
from hybrid_ep.cluster.doctor.profile import Profile
from hybrid_ep.cluster.doctor.registry import check, counters, shorten, survey
from hybrid_ep.watched import Unreadable

_LINK_COUNT = int(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)  # field 91
_LINK_SPEED = int(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED)  # field 164, MB/s per direction, scope = link
# systemd's services: cgroup v2, v1, and both at once.
_SERVICES = tuple(f"/sys/fs/cgroup/{tree}system.slice" for tree in ("", "systemd/", "unified/"))
_FABRIC_NOT_SUPPORTED = 0
_FABRIC_STATES = {_FABRIC_NOT_SUPPORTED: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
# What the fabric's health mask says, by the first of its two bits; 1 stands for yes, 0 and 2 for not known and no.
_FABRIC_HEALTH = {
    int(pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW): "bandwidth degraded",
    int(pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY): "route recovery in progress",
    int(pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY): "route unhealthy",
    int(pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY): "recovery from an access timeout",
}
_HEALTH_SUMMARIES = {
    int(pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY): "unhealthy",
    int(pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY): "of limited capacity",
}
# Four bits of it: 0 and 1 stand for not known and none.
_CONFIGURATION_SHIFT = 8
_CONFIGURATIONS = {
    2: "system GUID",
    3: "chassis serial number",
    4: "no partition",
    5: "too few NVLinks",
    6: "GPU firmware",
    7: "location",
    8: "state of the GPU",
}
# NVLink 5 counts per link in fields; earlier generations answer nvmlDeviceGetNvLinkErrorCounter instead. Left out of
# 206–222: 213 and 215 count successful recoveries with 214, and 216–218, 220, 222 are error rates, not counters.
_NVLINK5_COUNTERS = {
    int(getattr(pynvml, f"NVML_FI_DEV_NVLINK_COUNT_{name}")): name.lower()
    for name in (
        "MALFORMED_PACKET_ERRORS",
        "BUFFER_OVERRUN_ERRORS",
        "RCV_ERRORS",
        "RCV_REMOTE_ERRORS",
        "RCV_GENERAL_ERRORS",
        "LOCAL_LINK_INTEGRITY_ERRORS",
        "XMIT_DISCARDS",
        "LINK_RECOVERY_FAILED_EVENTS",
        "LINK_RECOVERY_EVENTS",
        "EFFECTIVE_ERRORS",
        "SYMBOL_ERRORS",
    )
}
_C2C_COUNT, _C2C_STATUS = int(pynvml.NVML_FI_DEV_C2C_LINK_COUNT), int(pynvml.NVML_FI_DEV_C2C_LINK_GET_STATUS)
_C2C_COUNTERS = {
    int(pynvml.NVML_FI_DEV_C2C_LINK_ERROR_INTR): "c2c_error",
    int(pynvml.NVML_FI_DEV_C2C_LINK_ERROR_REPLAY): "c2c_replay",
}
_MOST_C2C_LINKS = 32  # of one GPU; more is garbage
_OUTLIER = 50
_NVLINK4_COUNTERS = {
    int(pynvml.NVML_NVLINK_ERROR_DL_REPLAY): "replay",
    int(pynvml.NVML_NVLINK_ERROR_DL_RECOVERY): "recovery",
    int(pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT): "crc_flit",
    int(pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA): "crc_data",
}


def _name(gpu_idx: int) -> str:
    return f"GPU {gpu_idx}"


def _whole_gpus(node: Node) -> list[int]:
    """GPUs without MIG, which takes away NVLink: gpu.mig names the others."""
    return [gpu_idx for gpu_idx in node.nvml.gpus if not _has_mig(node, gpu_idx)]


def _has_mig(node: Node, gpu_idx: int) -> bool:
    try:
        return bool(node.nvml.gpu(gpu_idx, "mig_mode"))
    except Unreadable:
        return False


def _has_switch(node: Node) -> bool:
    """Whether a link ends at an NVSwitch, or does not say what it ends at; a bridge joins some GPUs alone."""
    for gpu_idx in node.nvml.gpus:
        for link in _active_links(node, gpu_idx)[:1]:
            try:
                if node.nvml.link(gpu_idx, link, "remote_type") == LINK_REMOTE_SWITCH:
                    return True
            except Unreadable:
                return True
    return False


def _active_links(node: Node, gpu_idx: int) -> list[int]:
    return [link for link in node.nvml.links(gpu_idx) if node.nvml.link(gpu_idx, link, "state")]


@check(
    "nvlink.links",
    title="links up",
    source="NVML DeviceGetNvLinkState per link; field 91 (link count)",
    expectation="{nvlink.links} links of every GPU are up (any: as many as the driver counts); of PCIe boards none, "
    "or those of every board but an odd one",
    remedy="Reset the GPUs and restart the fabric manager; a link that stays down needs service (baseboard, NVSwitch). "
    "PCIe boards: seat the bridge, or take all of them out.",
    wants="nvlink.links",
)
def nvlink_links(node: Node, profile: Profile) -> Finding:
    want, gpus = profile["nvlink.links"], _whole_gpus(node)
    on_bridges = not profile["nvlink.switch"]  # which join PCIe boards, if there are any
    linked: list[int] = []
    if on_bridges:
        with contextlib.suppress(Unreadable):
            linked = [gpu_idx for gpu_idx in gpus if _active_links(node, gpu_idx)]

    def fault(gpu_idx: int) -> str | None:
        there, up = node.nvml.links(gpu_idx), _active_links(node, gpu_idx)
        down = [str(link) for link in there if link not in up]
        if on_bridges and not up:
            # Bridges join pairs, so that one board may be left over.
            spare = len(gpus) % 2 and len(gpus) - len(linked) == 1
            return "no bridge, as the others have" if linked and there and not spare else None
        if want == "any" and (down or not there):
            return f"{len(up)} of {len(there)} links up, down: {', '.join(down)}" if down else None
        counted = node.nvml.field(gpu_idx, _LINK_COUNT)
        if len(up) == (counted if want == "any" else want):
            return None
        said = f"down: {', '.join(down)}" if down else f"{counted} by the driver's count"
        return f"{len(up)} links up, {said}" if want == "any" else f"{len(up)} of {want} links up, {said}"

    good = "all that are there" if want == "any" else f"{want} links up on every GPU"
    return survey(gpus, _name, fault, good if linked or not on_bridges else "no bridge", if_none="every GPU has MIG on")


@check(
    "nvlink.speed",
    title="link speed",
    source="NVML field 164 (NVLINK_GET_SPEED) per link",
    expectation="{nvlink.mb_per_s} MB/s on every link that is up",
    remedy="Reset the GPUs; a link that trains slowly again needs service (baseboard, NVSwitch, cables of the rack).",
    wants="nvlink.mb_per_s",
)
def nvlink_speed(node: Node, profile: Profile) -> Finding:
    want = profile["nvlink.mb_per_s"]

    def fault(gpu_idx: int) -> str | None:
        speeds = {link: node.nvml.field(gpu_idx, _LINK_SPEED, link) for link in _active_links(node, gpu_idx)}
        slow = [f"link {link} {speed} MB/s" for link, speed in speeds.items() if speed != want]
        return ", ".join(slow) or None

    return survey(node.nvml.gpus, _name, fault, f"{want} MB/s on every link")


@counters(
    "nvlink.errors",
    title="link error counters, read twice",
    source="NVML fields 206–212, 214, 215, 219, 221 (NVLink 5) or DeviceGetNvLinkErrorCounter (before); "
    "231 and 232 (C2C)",
    expectation="no counter rises, but for these on one link: a second {nvlink.error_rise_per_s}; an hour "
    "{nvlink.error_rise_per_h}",
    remedy="Replay, recovery, or CRC errors at such a rate mean a bad link: reset the GPUs, then have baseboard, "
    "NVSwitch or cable serviced.",
    wants="nvlink.links",
    rise="nvlink",
)
def nvlink_errors(node: Node, profile: Profile) -> Counters:
    found: dict[tuple[str, str], int] = {}
    for gpu_idx in node.nvml.gpus:
        for link in _active_links(node, gpu_idx):
            found.update(_link_counters(node, gpu_idx, link))
        if profile["nvlink.c2c"]:
            found.update(_c2c_counters(node, gpu_idx))
    return found  # empty where no link is up: nvlink.links says whether that is right


def _judge_outlier(before: Counters, after: Counters, *_: object) -> tuple[Finding, Counters]:
    faults = []
    for name in ("replay", "recovery", "link_recovery_events"):
        values = {thing: value for (thing, counter), value in before.items() if counter == name}
        usual = statistics.median(values.values()) if len(values) > 2 else 0.0
        odd = {thing: value for thing, value in values.items() if len(values) > 2 and value >= _OUTLIER * max(1, usual)}
        faults += [f"{thing}: {name} {value}, median of {len(values)} links {usual:g}" for thing, value in odd.items()]
    return Finding.judge([shorten(faults)] if faults else [], "all links alike"), {}


counters(
    "nvlink.outlier",
    title="one link unlike all the others since the driver was loaded",
    source="the counters of nvlink.errors that sound links do not raise: replay, recovery, link_recovery_events",
    expectation="no link has 50 events or more, and 50 times as many as the median of the node's links",
    remedy="The link still repairs itself. Reset the GPU; if the counter comes back, have baseboard, NVSwitch or cable "
    "serviced before the link fails.",
    wants="nvlink.links",
    judge=_judge_outlier,
    severity=Severity.WARNING,
)(nvlink_errors)


def _c2c_counters(node: Node, gpu_idx: int) -> Counters:
    """Of the links between GPU and CPU; empty where the driver does not count."""
    found: dict[tuple[str, str], int] = {}
    with contextlib.suppress(Unreadable):
        for link in range(node.nvml.field(gpu_idx, _C2C_COUNT)):
            for field, name in _C2C_COUNTERS.items():
                found[f"GPU {gpu_idx} C2C {link}", name] = node.nvml.field(gpu_idx, field, link)
    return found


@check(
    "nvlink.c2c",
    title="links between GPU and CPU (C2C)",
    source="NVML fields 170 and 171 (C2C_LINK_COUNT, C2C_LINK_GET_STATUS)",
    expectation="every link of every GPU is up",
    remedy="Reboot the node; a link that stays down needs service (board of the superchip).",
    wants="nvlink.c2c",
)
def nvlink_c2c(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        links = range(min(node.nvml.field(gpu_idx, _C2C_COUNT), _MOST_C2C_LINKS))
        down = [str(link) for link in links if not node.nvml.field(gpu_idx, _C2C_STATUS, link)]
        if not links:
            return "no C2C link"
        return f"{len(links) - len(down)} of {len(links)} links up, down: {', '.join(down)}" if down else None

    return survey(node.nvml.gpus, _name, fault, "all up")


def _link_counters(node: Node, gpu_idx: int, link: int) -> Counters:
    found: dict[tuple[str, str], int] = {}
    thing = f"GPU {gpu_idx} link {link}"
    refusal: Unreadable | None = None
    for field, name in _NVLINK5_COUNTERS.items():
        try:
            found[thing, name] = node.nvml.field(gpu_idx, field, link)
        except Unreadable as error:
            if not found:
                refusal = error
                break
    if found:
        return found
    for counter, name in _NVLINK4_COUNTERS.items():
        try:
            found[thing, name] = int(node.nvml.link(gpu_idx, link, f"error.{counter}"))
        except Unreadable as error:
            refusal = error
    if not found and refusal:
        raise refusal
    return found


@check(
    "nvlink.pairs",
    title="every pair of GPUs reaches each other over NVLink",
    source="NVML DeviceGetP2PStatus (NVLINK)",
    expectation="all pairs OK; where bridges join PCIe boards, every board with links that are up reaches another one",
    remedy="Check nvlink.links and the fabric manager; in a container, give it all GPUs of the node.",
    wants="nvlink.links",
)
def nvlink_pairs(node: Node, profile: Profile) -> Finding:
    def fault(pair: tuple[int, int]) -> str | None:
        status = node.nvml.p2p(*pair, P2P_NVLINK)
        return None if status == P2P_OK else f"NVLink P2P status {status}"

    gpus = _whole_gpus(node)
    pairs = list(permutations(gpus, 2))
    if not profile["nvlink.switch"] and not _has_switch(node):
        linked = [gpu_idx for gpu_idx in gpus if _active_links(node, gpu_idx)]

        def alone(gpu_idx: int) -> str | None:
            reached = [other for other in gpus if other != gpu_idx and fault((gpu_idx, other)) is None]
            return None if reached else "has NVLinks that are up, and reaches no GPU by them"

        return survey(linked, _name, alone, "bridges join the GPUs", if_none="no GPU has an NVLink that is up")
    name = "GPU {} → GPU {}".format
    return survey(pairs, lambda pair: name(*pair), fault, f"{len(pairs)} pairs OK", if_none="one GPU")


@check(
    "nvlink.remote",
    title="what the links end at",
    source="NVML DeviceGetNvLinkRemoteDeviceType",
    expectation="an NVSwitch on every link that is up",
    remedy="The profile does not fit (a bridge or direct links instead of NVSwitch), or the fabric is mis-cabled.",
    wants="nvlink.switch",
)
def nvlink_remote(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        links = _active_links(node, gpu_idx)
        wrong = [link for link in links if node.nvml.link(gpu_idx, link, "remote_type") != LINK_REMOTE_SWITCH]
        return f"no switch at links {', '.join(map(str, wrong))}" if wrong else None

    return survey(node.nvml.gpus, _name, fault, "NVSwitch on every link")


@check(
    "nvlink.fabric_manager",
    title="fabric manager",
    source="systemd's cgroup of nvidia-fabricmanager.service (v2 or v1); /proc/*/comm; DeviceGetGpuFabricInfoV",
    expectation="running: as a service, in another container (GPU operator), or on the host of this virtual machine",
    remedy="systemctl enable --now nvidia-fabricmanager (its version must be the driver's). HGX B200 and B300 also "
    "need the package nvlsm and the kernel module ib_umad.",
    wants="nvlink.fabric_manager",
)
def nvlink_fabric_manager(node: Node, profile: Profile) -> Finding:
    if (name := _running_service(node)) is not None:
        return Finding(Status.PASS, f"running, {name}")
    services = [folder for folder in _SERVICES if node.is_seen(folder)]
    why = "no such service" if services else "services cannot be seen here"
    try:
        completed = all(_fabric_fault(node, gpu_idx) is None for gpu_idx in node.nvml.gpus)
    except Unreadable as error:
        if services:
            return Finding(Status.FAIL, "not running")
        return Finding(Status.UNKNOWN, f"{why}; {error}")
    if completed:  # only it completes the fabric of an HGX board, wherever it runs
        return Finding(Status.PASS, f"{why}; the fabric that it completes is complete")
    if services:
        return Finding(Status.FAIL, "not running")
    return Finding(Status.UNKNOWN, f"{why}; the fabric is not complete, see nvlink.fabric_state")


def _running_service(node: Node) -> str | None:
    """Where the fabric manager runs: as a service, by cgroup v2 or v1, or as a process of another container."""
    for folder in _SERVICES:
        unit = f"{folder}/nvidia-fabricmanager.service"
        if node.is_seen(unit) and node.read(f"{unit}/cgroup.procs").split():
            return "as a service"
    for name in node.names("/proc"):
        if name.isdigit() and node.is_seen(f"/proc/{name}/comm"):
            with contextlib.suppress(Unreadable):  # the process may have ended
                if node.read(f"/proc/{name}/comm") == "nv-fabricmanage":  # the kernel keeps 15 characters
                    return f"as process {name}"
    return None


@check(
    "nvlink.fabric_version",
    title="fabric manager's version",
    source="nv-fabricmanager --version; NVML SystemGetDriverVersion",
    expectation="the driver's",
    remedy="Install the nvidia-fabricmanager package of the driver's version; another one refuses to start.",
    wants="nvlink.fabric_manager",
    quick=False,
)
def nvlink_fabric_version(node: Node, profile: Profile) -> Finding:
    try:
        text = node.command("nv-fabricmanager", "--version")
    except Unreadable as error:
        return Finding(Status.PASS, f"not on this system, see nvlink.fabric_manager ({error})")
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    if found is None:
        raise Unreadable(f"nv-fabricmanager said {text.strip()[:80]!r}")
    driver = str(node.nvml.system("driver_version"))
    return Finding(Status.PASS if found[0] == driver else Status.FAIL, f"{found[0]}, driver {driver}")


@check(
    "nvlink.fabric_state",
    title="GPUs are registered with the fabric",
    source="NVML DeviceGetGpuFabricInfoV",
    expectation="state completed, status 0, no fault in the health mask, and where there is a summary, healthy",
    remedy="Restart the fabric manager (HGX) or check the NVLink switch trays (NVL72); then reset the GPUs.",
    wants="nvlink.fabric_state",
)
def nvlink_fabric_state(node: Node, profile: Profile) -> Finding:
    def fault(gpu_idx: int) -> str | None:
        if (
            found := _fabric_fault(node, gpu_idx) or _health_fault(int(node.nvml.gpu(gpu_idx, "fabric.health")))
        ) is not None:
            return found
        summary = _HEALTH_SUMMARIES.get(int(node.nvml.gpu(gpu_idx, "fabric.summary")))
        return f"completed, but {summary}" if summary else None

    return survey(node.nvml.gpus, _name, fault, "completed on every GPU")


def _health_fault(mask: int) -> str | None:
    """The faults that the health mask of a completed fabric has."""
    faults = [text for shift, text in _FABRIC_HEALTH.items() if mask >> shift & 0b11 == 1]
    configuration = mask >> _CONFIGURATION_SHIFT & 0xF
    if configuration > 1:
        faults.append(f"wrong configuration: {_CONFIGURATIONS.get(configuration, configuration)}")
    return f"completed, but {', '.join(faults)}" if faults else None


def _fabric_fault(node: Node, gpu_idx: int) -> str | None:
    state = node.nvml.gpu(gpu_idx, "fabric.state")
    if state == _FABRIC_NOT_SUPPORTED and not node.nvml.links(gpu_idx):
        raise Unreadable(
            "not supported, and the GPU shows no NVLink: switched off, or not given to this virtual machine"
        )
    if state != FABRIC_COMPLETED:
        return f"state {_FABRIC_STATES.get(state, state)}"
    status = node.nvml.gpu(gpu_idx, "fabric.status")
    return f"completed with status {status}" if status else None
