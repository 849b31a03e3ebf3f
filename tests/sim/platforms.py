"""Healthy nodes of every shipped profile, built from what the hardware is, not from what the profile expects.

host bridge ─ root port ─ switch ─┬─ GPU          HGX: one such tree for each GPU, half of them on each socket
                                  └─ NIC
host bridge ─ root port ─ GPU, host bridge ─ root port ─ NIC          NVL72 tray: a tree of its own for each device
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace

from hybrid_ep.topology.recording import Recording

_CLUSTER = "0123456789abcdef0123456789abcdef"
_PORT_COUNTERS = ("link_downed", "symbol_error", "link_error_recovery", "port_rcv_errors")
_HW_COUNTERS = (
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
    "rnr_nak_retry_err",
    "roce_adp_retrans_to",
)
_EFA_COUNTERS = ("rx_drops", "rdma_read_wr_err", "rdma_write_wr_err", "retrans_pkts", "retrans_timeout_events")
_NVLINK4_COUNTERS = range(4)
_NVLINK5_FIELDS = (206, 207, 208, 209, 210, 211, 212, 214, 215, 219, 221)


@dataclass(frozen=True)
class Platform:
    """One kind of node; the numbers are the hardware's.

    Attributes:
        gpu_name: as NVML says it.
        num_gpus, links, mb_per_s: GPUs, NVLinks of each, MB/s of each link.
        nvlink5: error counters are fields per link, not nvmlDeviceGetNvLinkErrorCounter.
        driver, cuda: versions.
        rate: of each NIC's port, as /sys writes it.
        link_layer: of the NICs; empty without NICs.
        fabric: NVML reports the fabric (Hopper and later).
        tray: a compute tray of an NVL72 rack.
        profile: that fits; empty: the platform's own name.
        storage: there is one more NIC with two ports, one of them without a cable.
        virtual: NICs are virtual functions, and the physical ones are not RDMA devices here.
        near: one more NIC below the first GPU's switch: ``dpu`` (another model and rate), ``same`` (same model and
            rate, further away), ``spare`` (each NIC has a second function without a cable), ``pair`` (with one),
            ``tray`` (a DPU of the NICs' rate on each socket, as in an NVL72 tray).
        efa: interfaces of EFA, in place of NICs with reliable connections.
        dmi: vendor, product and asset tag of the firmware; empty where it says nothing that matters.
        guest: a virtual machine that shows no PCIe tree, and NICs that are virtual functions without a link.
        host_gib: memory of the host.
        memory_gib: of a GPU.
        generation: of PCIe.
    """

    gpu_name: str
    num_gpus: int
    links: int
    mb_per_s: int
    nvlink5: bool
    driver: str
    cuda: int
    rate: str
    link_layer: str
    fabric: bool = True
    tray: bool = False
    profile: str = ""
    storage: bool = False
    virtual: bool = False
    near: str = ""
    efa: int = 0
    memory_gib: float = 79.6
    generation: int = 5
    dmi: tuple[str, str, str] = ("Supermicro", "SYS-821GE-TNHR", "Default string")
    guest: bool = False
    host_gib: int = 2048


PLATFORMS = {
    "dgx-a100": Platform(
        "NVIDIA A100-SXM4-80GB",
        8,
        12,
        25000,
        False,
        "535.216.03",
        12020,
        "200 Gb/sec (4X HDR)",
        "InfiniBand",
        False,
        memory_gib=80.0,
        generation=4,
    ),
    "hgx-h100": Platform(
        "NVIDIA H100 80GB HBM3", 8, 18, 26562, False, "550.144.03", 12040, "400 Gb/sec (4X NDR)", "InfiniBand"
    ),
    "hgx-h200": Platform(
        "NVIDIA H200", 8, 18, 26562, False, "580.95.05", 13000, "400 Gb/sec (4X NDR)", "Ethernet", memory_gib=140.4
    ),
    "hgx-h800": Platform("NVIDIA H800", 8, 8, 26562, False, "550.144.03", 12040, "400 Gb/sec (4X NDR)", "InfiniBand"),
    "hgx-h20": Platform(
        "NVIDIA H20", 8, 18, 26562, False, "580.95.05", 13000, "400 Gb/sec (4X NDR)", "Ethernet", memory_gib=95.6
    ),
    "hgx-b300": Platform(
        "NVIDIA B300 SXM6 AC",
        8,
        18,
        53125,
        True,
        "580.95.05",
        13000,
        "800 Gb/sec (4X XDR)",
        "Ethernet",
        memory_gib=275.0,
        generation=6,
    ),
    "hgx-b200": Platform(
        "NVIDIA B200", 8, 18, 53125, True, "580.95.05", 13000, "400 Gb/sec (4X NDR)", "Ethernet", memory_gib=179.1
    ),
    "gb200-nvl72": Platform(
        "NVIDIA GB200",
        4,
        18,
        53125,
        True,
        "580.95.05",
        13000,
        "400 Gb/sec (4X NDR)",
        "InfiniBand",
        tray=True,
        memory_gib=185.0,
    ),
    "gb300-nvl72": Platform(
        "NVIDIA GB300",
        4,
        18,
        53125,
        True,
        "580.95.05",
        13000,
        "800 Gb/sec (4X XDR)",
        "Ethernet",
        tray=True,
        memory_gib=277.5,
        generation=6,
    ),
    "l40s": Platform("NVIDIA L40S", 4, 0, 0, False, "550.144.03", 12040, "", "", fabric=False, profile="gpu-server"),
}
_OCI = ("Oracle Corporation", "ORACLE SERVER E5-2c", "OracleCloud.com")
_AZURE = ("Microsoft Corporation", "Virtual Machine", "7783-7084-3265-9085-8269-3286-77")
_GCP = ("Google", "Google Compute Engine", "Google")
PLATFORMS |= {
    "hgx-h100 with storage": replace(PLATFORMS["hgx-h100"], profile="hgx-h100", storage=True),
    "hgx-h200 with virtual functions": replace(PLATFORMS["hgx-h200"], profile="hgx-h200", virtual=True),
    "hgx-h200 with a DPU": replace(PLATFORMS["hgx-h200"], profile="hgx-h200", near="dpu"),
    "hgx-h200 with a storage NIC of the same model": replace(PLATFORMS["hgx-h200"], profile="hgx-h200", near="same"),
    "oci-h100": replace(
        PLATFORMS["hgx-h100"], link_layer="Ethernet", rate="200 Gb/sec (4X HDR)", near="pair", dmi=_OCI
    ),
    "oci-a100": replace(
        PLATFORMS["dgx-a100"], link_layer="Ethernet", rate="100 Gb/sec (2X HDR)", near="pair", dmi=_OCI
    ),
    "h100-nvl": replace(
        PLATFORMS["l40s"], gpu_name="NVIDIA H100 NVL", links=18, mb_per_s=26562, profile="", memory_gib=93.6
    ),
    **{
        f"{name}{suffix}": replace(
            PLATFORMS[base],
            link_layer="Unknown",
            rate=rate,
            efa=count,
            guest=True,
            host_gib=memory,
            dmi=("Amazon EC2", product, "Amazon EC2"),
            profile=name,
        )
        for name, suffix, base, product, count, rate, memory in (
            ("p4d-efa", "", "dgx-a100", "p4d.24xlarge", 4, "100 Gb/sec (4X EDR)", 1152),
            ("p5-efa", "", "hgx-h100", "p5.48xlarge", 32, "100 Gb/sec (4X EDR)", 2048),
            ("p5-efa", " whose firmware cannot be seen", "hgx-h100", "", 32, "100 Gb/sec (4X EDR)", 2048),
            ("p5e-efa", "", "hgx-h200", "p5e.48xlarge", 32, "100 Gb/sec (4X EDR)", 2048),
            ("p5en-efa", "", "hgx-h200", "p5en.48xlarge", 16, "200 Gb/sec (4X HDR)", 2048),
            ("p6-b200-efa", "", "hgx-b200", "p6-b200.48xlarge", 8, "400 Gb/sec (4X NDR)", 2048),
            ("p6-b300-efa", "", "hgx-b300", "p6-b300.48xlarge", 16, "400 Gb/sec (4X NDR)", 4096),
        )
    },
    **{
        name: replace(PLATFORMS[base], link_layer="InfiniBand", dmi=_AZURE, guest=True, near="guest", host_gib=memory)
        for name, base, memory in (
            ("azure-nd-a100", "dgx-a100", 900),
            ("azure-nd-h100", "hgx-h100", 1900),
            ("azure-nd-h200", "hgx-h200", 1850),
            ("azure-nd-gb200", "gb200-nvl72", 900),
        )
    },
    **{
        f"azure-nc {count}x {board}": replace(
            PLATFORMS["l40s"], gpu_name=f"NVIDIA {board}", num_gpus=count, dmi=_AZURE, guest=True, profile="azure-nc"
        )
        for count, board in ((1, "H100 NVL"), (2, "H100 NVL"), (4, "A100 80GB PCIe"))
    },
    "gcp-a3": replace(PLATFORMS["hgx-h100"], link_layer="", dmi=_GCP, guest=True),
    "gcp-a3 with one GPU": replace(
        PLATFORMS["hgx-h100"], link_layer="", dmi=_GCP, guest=True, num_gpus=1, links=0, profile="gcp-a3"
    ),
    "gcp-a3-ultra": replace(PLATFORMS["hgx-h200"], dmi=_GCP, guest=True),
    "gcp-a4": replace(PLATFORMS["hgx-b200"], dmi=_GCP, guest=True),
    "p5-4xlarge": replace(
        PLATFORMS["hgx-h100"],
        link_layer="",
        num_gpus=1,
        links=0,
        fabric=False,
        guest=True,
        dmi=("Amazon EC2", "p5.4xlarge", "Amazon EC2"),
    ),
    "gb200-nvl72 with DPUs": replace(PLATFORMS["gb200-nvl72"], profile="gb200-nvl72", near="tray"),
    "hgx-h100 with spare ports": replace(PLATFORMS["hgx-h100"], profile="hgx-h100", near="spare"),
}


def profile_of(name: str) -> str:
    """The shipped profile that fits this healthy node."""
    return PLATFORMS[name].profile or name if name in PLATFORMS else name


def healthy(name: str) -> Recording:
    """A node of this profile with nothing wrong."""
    node = Recording()
    platform = PLATFORMS.get(name)
    _add_host(node, platform)
    if platform is None:
        _add_pci(node, ["pci0000:00", "0000:00:01.0"], "0x060400", ("0x8086", "0x347a"), 0)
        return node
    for idx in range(platform.num_gpus):
        _add_devices(node, platform, idx)
    if platform.storage:
        _add_storage(node, platform)
    if platform.efa:
        node.files["/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"] = "2560\n"
    for number in range(platform.efa):
        _add_efa(node, platform, number)
    _add_driver(node, platform)
    return node


def _numa_node(platform: Platform, idx: int) -> int:
    return idx * 2 // platform.num_gpus


def gpu_address(platform: Platform, idx: int) -> str:
    """PCI address of a GPU."""
    if platform.guest:
        return f"{0x100 + idx:04x}:00:00.0"
    return f"{0x8 + idx:04x}:01:00.0" if platform.tray else f"0000:{0x13 + 0x10 * idx:02x}:00.0"


def _add_host(node: Recording, platform: Platform | None) -> None:
    guest = platform is not None and platform.guest
    for key, text in zip(
        ("sys_vendor", "product_name", "chassis_asset_tag"), platform.dmi if platform else (), strict=False
    ):
        node.files[f"/sys/class/dmi/id/{key}"] = f"{text}\n"
    node.files |= {
        "/proc/cpuinfo": "flags\t\t: fpu sse2 avx512f" + " hypervisor" * guest + "\n",
        "/proc/devices": "Character devices:\n  1 mem\n",
        # The kernel keeps 1.6 % for itself.
        "/proc/meminfo": f"MemTotal:       {int((platform.host_gib if platform else 2048) * 0.984 * 2**20)} kB\n",
        "/proc/self/limits": "Max locked memory         unlimited            unlimited            bytes     \n"
        "Max open files            1048576              1048576              files     \n",
        "/proc/self/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n",
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/proc/sys/kernel/osrelease": "6.8.0-1021-nvidia\n",
        "/proc/812/comm": "sshd\n",
        "/proc/sys/kernel/random/boot_id": "6d2a3c1e-0000-4000-8000-000000000001\n",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
        "/sys/module/ib_core/.present": "",
        "/sys/devices/system/cpu/present": "0-223\n",
        "/sys/devices/system/cpu/online": "0-223\n",
        "/sys/devices/system/cpu/smt/control": "on\n",
        "/sys/devices/system/edac/mc/mc0/ue_count": "0\n",
        "/dev/kmsg": "6,0,0,-;Linux version 6.8.0\n6,1,9,-;nvidia: loading out-of-tree module\n"
        "6,2,9000000,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64\n",
        "/sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
        "/sys/fs/cgroup/system.slice/sshd.service/cgroup.procs": "812\n",
    }
    for numa_node in range(2):
        node.files[f"/sys/devices/system/node/node{numa_node}/cpulist"] = ("0-55,112-167\n", "56-111,168-223\n")[
            numa_node
        ]
    for cpu in range(0 if guest else 4):
        node.files[f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"] = "performance\n"
    node.facts |= {
        "hostname": "simulated",
        "clock": {"synchronized": True, "max_error_us": 2000},
        "cuda": {"dmabuf": True, "fabric_handles": False},
        "packages": {"torch": "2.11.0", "hybrid-ep": "0.1.0"},
        "torch_cuda": None,
        "commands": {},
        "verbs": [],
        "free_mib": {"/dev/shm": 1030000},
        "container": {"inside": False, "visible_devices": ""},
        "dcb": {},
    }


_GTS = {4: "16.0 GT/s PCIe\n", 5: "32.0 GT/s PCIe\n", 6: "64.0 GT/s PCIe\n"}


def _add_pci(
    node: Recording, path: list[str], class_code: str, ids: tuple[str, str], numa_node: int, generation: int = 5
) -> None:
    place = "/sys/devices/" + "/".join(path)
    node.links[f"/sys/bus/pci/devices/{path[-1]}"] = "../../../devices/" + "/".join(path)
    node.files |= {
        f"{place}/class": f"{class_code}\n",
        f"{place}/vendor": f"{ids[0]}\n",
        f"{place}/device": f"{ids[1]}\n",
        f"{place}/numa_node": f"{numa_node}\n",
        f"{place}/current_link_width": "16\n",
        f"{place}/max_link_width": "16\n",
        # The link of an idle GPU slows down.
        f"{place}/current_link_speed": "2.5 GT/s PCIe\n" if class_code == "0x030200" else _GTS[generation],
        f"{place}/max_link_speed": _GTS[generation],
        f"{place}/aer_dev_correctable": "RxErr 4\nBadTLP 0\nTOTAL_ERR_COR 4\n",
        f"{place}/aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0\n",
        f"{place}/aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0\n",
    }
    if class_code.startswith("0x02"):
        node.files[f"{place}/config"] = nic_config(read_request=512, relaxed_ordering=True)
    if class_code == "0x060400":
        node.files[f"{place}/config"] = bridge_config(acs_control=0)


def bridge_config(acs_control: int) -> str:
    """Configuration space of a bridge: AER at 0x100 is followed by ACS at 0x148."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    config[0x148:0x14C] = (1 << 16 | 0x000D).to_bytes(4, "little")
    config[0x14E:0x150] = acs_control.to_bytes(2, "little")
    return "base64:" + base64.b64encode(bytes(config)).decode()


def nic_config(*, read_request: int, relaxed_ordering: bool) -> str:
    """Configuration space of a NIC: the PCI Express capability at 0x60 follows power management at 0x40."""
    config = bytearray(256)
    config[0x34] = 0x40
    config[0x40:0x42] = bytes([0x01, 0x60])
    config[0x60:0x62] = bytes([0x10, 0x00])
    control = (read_request // 128).bit_length() - 1 << 12 | relaxed_ordering << 4
    config[0x68:0x6A] = control.to_bytes(2, "little")
    return "base64:" + base64.b64encode(bytes(config)).decode()


def _add_devices(node: Recording, platform: Platform, idx: int) -> None:
    numa_node = _numa_node(platform, idx)
    gpu = gpu_address(platform, idx)
    if platform.guest:
        gpu_path, nic_path = [f"pci{gpu[:7]}", gpu], [f"pci{0x200 + idx:04x}:00", f"{0x200 + idx:04x}:00:02.0"]
    elif platform.tray:
        trees = [[f"pci{domain:04x}:00", f"{domain:04x}:00:00.0"] for domain in (8 + idx, idx)]
        for tree in trees:
            _add_pci(node, tree, "0x060400", ("0x10de", "0x22b1"), numa_node, platform.generation)
        gpu_path, nic_path = [*trees[0], gpu], [*trees[1], f"{idx:04x}:03:00.0"]
    else:
        bus = 0x10 + 0x10 * idx
        trunk = [f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"]
        ports = [[*trunk, f"0000:{bus + 2:02x}:{port:02x}.0"] for port in (0, 1)]
        for path in (trunk[:2], trunk, *ports):
            _add_pci(node, path, "0x060400", ("0x1000", "0xc030"), numa_node, platform.generation)
        gpu_path, nic_path = [*ports[0], gpu], [*ports[1], f"0000:{bus + 4:02x}:00.0"]
    _add_pci(node, gpu_path, "0x030200", ("0x10de", "0x2330"), numa_node, platform.generation)
    _add_gpu(node, platform, idx)
    if platform.link_layer and not platform.efa:
        _add_nic(node, platform, idx + 2 * (platform.near == "tray"), nic_path, numa_node)
        if platform.near and idx == 0:
            _add_near(node, platform, nic_path)


def _add_near(node: Recording, platform: Platform, first: list[str]) -> None:
    """More NICs near a GPU that are not the GPUs'."""
    if platform.near == "guest":  # Azure's own network
        own = replace(platform, link_layer="Ethernet", rate="100 Gb/sec (4X EDR)")
        _add_nic(node, own, 9, ["pci0900:00", "0900:00:02.0"], 0, "0x101a")
        return
    if platform.near == "tray":
        for idx in (0, 1):
            trunk = [f"pci{0x16 + idx:04x}:00", f"{0x16 + idx:04x}:00:00.0"]
            _add_pci(node, trunk, "0x060400", ("0x10de", "0x22b1"), idx)
            ethernet = replace(platform, link_layer="Ethernet")
            _add_nic(node, ethernet, idx, [*trunk, f"{0x16 + idx:04x}:03:00.0"], idx, "0xa2dc")
        return
    if platform.near in ("spare", "pair"):
        for idx in range(platform.num_gpus):
            bus = 0x10 + 0x10 * idx
            trunk = [
                f"pci0000:{bus:02x}",
                f"0000:{bus:02x}:01.0",
                f"0000:{bus + 1:02x}:00.0",
                f"0000:{bus + 2:02x}:01.0",
            ]
            _add_nic(node, platform, 8 + idx, [*trunk, f"0000:{bus + 4:02x}:00.1"], _numa_node(platform, idx))
            if platform.near == "pair":
                continue
            port = f"/sys/class/infiniband/mlx5_{8 + idx}/ports/1"
            node.files |= {f"{port}/state": "1: DOWN\n", f"{port}/phys_state": "3: Disabled\n"}
            node.files[f"{port}/rate"] = "10 Gb/sec (4X SDR)\n"
        return
    # Below a second switch of the first tree: further from the GPU than its own NIC.
    trunk = [*first[:3], "0000:12:02.0", "0000:17:00.0", "0000:18:00.0"]
    for depth in (4, 5, 6):
        _add_pci(node, trunk[:depth], "0x060400", ("0x1000", "0xc030"), 0, platform.generation)
    other = platform if platform.near == "same" else replace(platform, rate="200 Gb/sec (2X NDR)")
    model = "0x1021" if platform.near == "same" else "0xa2dc"
    _add_nic(node, other, 8, [*trunk, "0000:19:00.0"], 0, model)


def _add_efa(node: Recording, platform: Platform, idx: int) -> None:
    """An interface of EFA: a virtual function without a slot, a link and a network interface that the machine shows."""
    name, path = f"rdmap{idx}s27", [f"pci0001:{idx:02x}", f"0001:{idx:02x}:1b.0"]
    _add_pci(node, path, "0x020000", ("0x1d0f", "0xefa1"), idx * 2 // platform.efa)
    place, device = "/sys/devices/" + "/".join(path), f"/sys/class/infiniband/{name}"
    node.links[f"{device}/device"] = "../../../devices/" + "/".join(path)
    node.files |= {
        f"{place}/current_link_width": "0\n",
        f"{place}/current_link_speed": "Unknown\n",
        f"{device}/node_guid": f"0000:0000:0000:{idx + 1:04x}\n",
        f"{device}/fw_ver": "0.0.0.0\n",
        f"{device}/ports/1/state": "4: ACTIVE\n",
        f"{device}/ports/1/phys_state": "5: LinkUp\n",
        f"{device}/ports/1/link_layer": "Unknown\n",
        f"{device}/ports/1/rate": f"{platform.rate}\n",
        f"{device}/ports/1/sm_lid": "0x0\n",
        f"{device}/ports/1/gids/0": f"fe80:0000:0000:0000:0000:00ff:fe00:{idx + 1:04x}\n",
        f"/sys/class/infiniband_verbs/uverbs{idx}/ibdev": f"{name}\n",
    }
    node.files |= {f"{device}/ports/1/hw_counters/{counter}": "0\n" for counter in _EFA_COUNTERS}
    node.files |= {f"{device}/hw_counters/{counter}": "0\n" for counter in ("cmds_err", "no_completion_cmds")}
    node.devices[f"/dev/infiniband/uverbs{idx}"] = f"char 231:{192 + idx}\n"
    node.facts["verbs"].append({"name": name, "dmabuf": True, "ports": [{"port": 1, "active_mtu_bytes": 4096}]})


def _add_storage(node: Recording, platform: Platform) -> None:
    """A NIC far from every GPU, with its two ports as two functions."""
    trunk = ["pci0000:04", "0000:04:01.0"]
    _add_pci(node, trunk, "0x060400", ("0x8086", "0x347a"), 0)
    ethernet = replace(platform, link_layer="Ethernet", rate="200 Gb/sec (4X HDR)")
    for function in (0, 1):
        _add_nic(node, ethernet, platform.num_gpus + function, [*trunk, f"0000:05:00.{function}"], numa_node=0)
    port = f"/sys/class/infiniband/mlx5_{platform.num_gpus + 1}/ports/1"
    node.files |= {f"{port}/state": "1: DOWN\n", f"{port}/phys_state": "3: Disabled\n"}


def _add_function(node: Recording, platform: Platform, path: list[str], numa_node: int, model: str) -> list[str]:
    """The NIC's function on PCI; returns the path of the one that is the RDMA device."""
    class_code = "0x020700" if platform.link_layer == "InfiniBand" else "0x020000"
    _add_pci(node, path, class_code, ("0x15b3", model), numa_node, platform.generation)
    if not platform.virtual:
        return path
    virtual = [*path[:-1], path[-1].replace(".0", ".1")]
    _add_pci(node, virtual, class_code, ("0x15b3", "0x101e"), numa_node, platform.generation)
    place = "/sys/devices/" + "/".join(virtual)
    node.links[f"{place}/physfn"] = f"../{path[-1]}"
    node.files |= {f"{place}/current_link_width": "0\n", f"{place}/current_link_speed": "Unknown\n"}
    return virtual


def _add_nic(
    node: Recording, platform: Platform, idx: int, path: list[str], numa_node: int, model: str = "0x1021"
) -> None:
    path = _add_function(node, platform, path, numa_node, model)
    if platform.guest:
        place = "/sys/devices/" + "/".join(path)
        node.files |= {f"{place}/current_link_width": "0\n", f"{place}/current_link_speed": "Unknown\n"}
    device = f"/sys/class/infiniband/mlx5_{idx}"
    port = f"{device}/ports/1"
    infiniband = platform.link_layer == "InfiniBand"
    netdev = f"ib{idx}" if infiniband else f"eth{idx}"
    node.links[f"{device}/device"] = "../../../devices/" + "/".join(path)
    node.files |= {
        f"{device}/node_guid": f"a088:c203:0000:{idx:04x}\n",
        f"{device}/fw_ver": "28.43.2026\n",
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/phys_state": "5: LinkUp\n",
        f"{port}/link_layer": f"{platform.link_layer}\n",
        f"{port}/rate": f"{platform.rate}\n",
        f"{port}/sm_lid": "0x1\n" if infiniband else "0x0\n",
        f"/sys/devices/{'/'.join(path)}/net/{netdev}/mtu": "2044\n" if infiniband else "9000\n",
        f"/sys/class/net/{netdev}/mtu": "2044\n" if infiniband else "9000\n",
        f"/sys/class/net/{netdev}/operstate": "up\n",
        f"/sys/class/net/{netdev}/carrier_changes": "2\n",
        f"{port}/pkeys/0": "0xffff\n",
        f"{port}/pkeys/1": "0x0000\n",
        f"/sys/class/infiniband_verbs/uverbs{idx}/ibdev": f"mlx5_{idx}\n",
    }
    node.files |= {f"{port}/counters/{name}": "3\n" for name in _PORT_COUNTERS}
    node.files |= {f"{port}/hw_counters/{name}": "7\n" for name in _HW_COUNTERS}
    for index in range(4):
        address = (
            f"fe80:0000:0000:0000:a288:c2ff:fe03:{idx:04x}"
            if index < 2
            else f"0000:0000:0000:0000:0000:ffff:0a00:{idx + 1:04x}"
        )
        node.files[f"{port}/gids/{index}"] = f"{address}\n"
        node.files[f"{port}/gid_attrs/types/{index}"] = "RoCE v2\n" if index % 2 else "IB/RoCE v1\n"
    node.files[f"{port}/gid_attrs/ndevs/0"] = f"{netdev}\n"
    node.facts["dcb"][netdev] = {"pfc_priorities": 1 << 3, "sorts_by_dscp": True}
    node.devices[f"/dev/infiniband/uverbs{idx}"] = f"char 231:{192 + idx}\n"
    if infiniband:
        node.files[f"/sys/class/infiniband_mad/umad{idx}/ibdev"] = f"mlx5_{idx}\n"
        node.files[f"/sys/class/infiniband_mad/umad{idx}/port"] = "1\n"
        node.devices[f"/dev/infiniband/umad{idx}"] = f"char 231:{idx}\n"
    # On InfiniBand only libibverbs knows the active MTU; on Ethernet the network interface tells.
    ports = [{"port": 1, "active_mtu_bytes": 4096 if infiniband else None}]
    node.facts["verbs"].append({"name": f"mlx5_{idx}", "dmabuf": True, "ports": ports})


def _add_gpu(node: Recording, platform: Platform, idx: int) -> None:
    gpu = f"gpu.{idx}"
    node.nvml |= {
        f"{gpu}.name": platform.gpu_name,
        f"{gpu}.uuid": f"GPU-00000000-0000-0000-0000-{idx:012d}",
        f"{gpu}.pci_address": gpu_address(platform, idx),
        f"{gpu}.memory_bytes": str(int(platform.memory_gib * 2**30)),
        f"{gpu}.bar1_bytes": str(2**30 << (int(platform.memory_gib) - 1).bit_length()),  # the next power of two
        f"{gpu}.memory_used_bytes": str(560 << 20),
        f"{gpu}.num_processes": "0",
        f"{gpu}.mig_mode": "0",
        f"{gpu}.compute_mode": "0",
        f"{gpu}.power_limit": "700000",
        f"{gpu}.power_limit_default": "700000",
        f"{gpu}.power_limit_enforced": "700000",
        f"{gpu}.vbios": "96.00.89.00.01",
        f"{gpu}.inforom": "G520.0200.00.05",
        f"{gpu}.ecc_mode": "1",
        f"{gpu}.ecc_errors.0.0": "2",
        f"{gpu}.ecc_errors.1.0": "0",
        f"{gpu}.sram_threshold_exceeded": "0",
        f"{gpu}.row_remap_corrected": "1",
        f"{gpu}.row_remap_uncorrected": "0",
        f"{gpu}.row_remap_banks_without_spares": "0",
        f"{gpu}.pcie_replay": "5",
        f"{gpu}.row_remap_pending": "0",
        f"{gpu}.row_remap_failed": "0",
        f"{gpu}.persistence_mode": "1",
        f"{gpu}.clocks_event_reasons": "1",  # idle: a reason, not a slowdown
        f"{gpu}.power_usage": "72000",
        f"{gpu}.first_process": "0",
        f"{gpu}.utilization": "0",
        f"{gpu}.pcie_width": "16",
        f"{gpu}.pcie_width_max": "16",
        f"{gpu}.pcie_generation": "1",  # an idle link slows down
        f"{gpu}.pcie_generation_max": str(platform.generation),
    }
    if platform.links:
        node.nvml[f"{gpu}.field.91.0"] = str(platform.links)
    if platform.fabric:
        node.nvml |= {f"{gpu}.field.230.0": "0", f"{gpu}.fabric.state": "3", f"{gpu}.fabric.status": "0"}
        node.nvml[f"{gpu}.fabric.cluster_uuid"] = _CLUSTER if platform.tray else "0" * 32
        node.nvml[f"{gpu}.fabric.clique"] = "1" if platform.tray else "0"
    if platform.tray:
        node.nvml[f"{gpu}.field.170.0"] = "2"
        node.nvml |= {
            f"{gpu}.field.{field}.{link}": str(int(field == 171)) for field in (171, 231, 232) for link in (0, 1)
        }
    if platform.nvlink5:
        node.nvml |= {
            f"{gpu}.platform.chassis_serial": "1820000000001" if platform.tray else "",
            f"{gpu}.platform.slot": "14" if platform.tray else "0",
            f"{gpu}.platform.tray": "4" if platform.tray else "0",
            f"{gpu}.platform.host_id": "1",
            f"{gpu}.platform.module_id": str(idx + 1),
        }
    bridged = platform.gpu_name.endswith("NVL")
    for link in range(platform.links):
        node.nvml |= {
            f"{gpu}.link.{link}.state": "0" if bridged and link >= 12 else "1",
            f"{gpu}.link.{link}.remote_type": "0" if bridged else "2",
            f"{gpu}.link.{link}.remote_pci": "0000:c0:00.0",
            f"{gpu}.field.164.{link}": str(platform.mb_per_s),
            **{f"{gpu}.field.{field}.{link}": "4711" for field in (138, 139)},
        }
        if platform.nvlink5:
            node.nvml |= {f"{gpu}.field.{field}.{link}": "0" for field in _NVLINK5_FIELDS}
        else:
            node.nvml |= {f"{gpu}.link.{link}.error.{counter}": "0" for counter in _NVLINK4_COUNTERS}
            # On a third of the recorded H200's healthy links the CRC data counter rose within a second.
            node.nvml[f"{gpu}.link.{link}.error.3"] = "40+2" if link % 3 == 0 else "11"
    for other in range(platform.num_gpus):
        if other != idx:
            joined = idx // 2 == other // 2 if bridged else bool(platform.links)
            node.nvml[f"{gpu}.p2p.{other}.2"] = "0" if joined else "3"


def _add_driver(node: Recording, platform: Platform) -> None:
    node.nvml |= {
        "driver_version": platform.driver,
        "nvml_version": f"{platform.cuda // 1000}.{platform.driver}",
        "cuda_driver_version": str(platform.cuda),
        "gpu_count": str(platform.num_gpus),
    }
    node.files |= {
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
        f"{platform.driver}  Release Build\n",
        "/proc/driver/nvidia/params": 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n',
        "/sys/module/nvidia_peermem/refcnt": "0\n",
        "/sys/module/nvidia/refcnt": "9\n",
    }
    node.devices |= {f"/dev/nvidia{idx}": f"char 195:{idx}" for idx in range(platform.num_gpus)}
    contexts = dict.fromkeys(map(str, range(platform.num_gpus)), 0)
    node.facts["cuda_start"] = {
        "init": 0,
        "devices": platform.num_gpus,
        "contexts": contexts,
        "lost": "",
        "library": "",
    }
    # A minor version later than the driver's, which CUDA allows.
    node.facts["torch_cuda"] = {12: "12.8", 13: "13.0"}[platform.cuda // 1000]
    if platform.tray:
        node.files["/proc/devices"] += "501 nvidia-caps-imex-channels\n"
        node.devices["/dev/nvidia-caps-imex-channels/channel0"] = "char 501:0\n"
        node.facts["cuda"]["fabric_handles"] = True
        node.facts["commands"]["nvidia-imex-ctl -N -j"] = (
            '{"nodes": {'
            + ", ".join(f'"{tray}": {{"status": "READY", "host": "10.0.0.{tray + 1}"}}' for tray in range(18))
            + '}, "status": "UP"}'
        )
    elif platform.links and not platform.gpu_name.endswith("NVL"):
        node.files["/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.procs"] = "2101\n"
        node.facts["commands"]["nv-fabricmanager --version"] = f"Fabric Manager version is : {platform.driver}\n"
