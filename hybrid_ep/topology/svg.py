"""The topology as one self-contained SVG picture.

┌ NVLink ─────────────────────────────┐   one bar over GPUs that reach each other over NVLink
│ GPU 0   GPU 1  │  GPU 2   GPU 3     │   one box per PCIe root port, inside one frame per NUMA node
│ mlx5_0  mlx5_1 │  mlx5_2  mlx5_3    │   a line joins each GPU with the NIC that it uses
"""

from __future__ import annotations

from html import escape

from hybrid_ep.topology.choice import choose_nic
from hybrid_ep.topology.model import Gpu, Locality, Nic, Topology, localities, numa_name

_BOX_W, _BOX_H, _GAP = 112, 46, 12
_GPU_Y, _NIC_Y, _BAR_Y, _HEIGHT = 96, 196, 52, 290
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#1b2430} .small{font-size:10px;fill:#526070}
.title{font-size:14px;font-weight:600} .use{stroke:#526070;stroke-width:2} .bar{fill:#3d9a50;opacity:.85}
.numa{fill:#f4f6f9;stroke:#c6cfda} .root{fill:#fff;stroke:#dde3ea} .down{fill:#fbe0de;stroke:#c0392b}
.gpu{fill:#dff3e3;stroke:#3d9a50} .nic{fill:#dcebfa;stroke:#3576b5}
"""


def draw(topology: Topology) -> str:
    """Returns the picture as SVG text."""
    groups = localities(topology)
    shapes: list[str] = []
    centers: dict[str, float] = {}
    x = _GAP
    numa_start = x
    for position, group in enumerate(groups):
        width = max(len(group.gpus), len(group.nics), 1) * (_BOX_W + _GAP) + _GAP
        shapes.append(_root_box(group, x, width))
        for column, gpu in enumerate(group.gpus):
            left = x + _GAP + column * (_BOX_W + _GAP)
            centers[f"gpu{gpu.gpu_idx}"] = left + _BOX_W / 2
            shapes.append(_gpu_box(gpu, left))
        for column, nic in enumerate(group.nics):
            left = x + _GAP + column * (_BOX_W + _GAP)
            centers[nic.name] = left + _BOX_W / 2
            shapes.append(_nic_box(nic, left))
        x += width + _GAP
        if position + 1 == len(groups) or groups[position + 1].numa_node != group.numa_node:
            name = numa_name(topology, group.numa_node)
            shapes.insert(0, _numa_frame(name, numa_start, x - _GAP))
            x += _GAP
            numa_start = x
    lines = [_use_line(topology, gpu, centers) for gpu in topology.gpus]
    width = max(x, 420)
    size = f'viewBox="0 0 {width:g} {_HEIGHT}" width="{width:g}" height="{_HEIGHT}"'
    body = "".join([_title(topology), *shapes, *lines, _nvlink_bar(topology, centers)])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{body}</svg>\n'


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{style}"/>'


def _title(topology: Topology) -> str:
    driver = f" · driver {topology.driver_version}" if topology.driver_version else ""
    return _text(_GAP, 22, f"{len(topology.gpus)} GPUs · {len(topology.nics)} NICs{driver}", "title", "start")


def _numa_frame(name: str, start: float, end: float) -> str:
    frame = _rect(start - _GAP / 2, 36, end - start + _GAP, _HEIGHT - 44, "numa")
    return frame + _text(start, _HEIGHT - 16, name, "small", "start")


def _root_box(group: Locality, x: float, width: float) -> str:
    box = _rect(x, _GPU_Y - 14, width, _NIC_Y + _BOX_H - _GPU_Y + 34, "root")
    return box + _text(x + width / 2, _NIC_Y + _BOX_H + 14, group.root or "no PCI function", "small")


def _gpu_box(gpu: Gpu, left: float) -> str:
    middle = left + _BOX_W / 2
    links = f"NVLink {gpu.num_active_links}/{len(gpu.links)}" if gpu.links else gpu.pci_address
    style = "gpu" if gpu.num_active_links == len(gpu.links) else "down"
    label = _text(middle, _GPU_Y + 19, f"GPU {gpu.gpu_idx}") + _text(middle, _GPU_Y + 35, links, "small")
    return _rect(left, _GPU_Y, _BOX_W, _BOX_H, style) + label


def _nic_box(nic: Nic, left: float) -> str:
    middle = left + _BOX_W / 2
    rate = " + ".join(f"{port.rate_gbps:g}" for port in nic.ports)
    label = _text(middle, _NIC_Y + 19, nic.name) + _text(middle, _NIC_Y + 35, f"{rate} Gb/s", "small")
    return _rect(left, _NIC_Y, _BOX_W, _BOX_H, "nic" if nic.is_active else "down") + label


def _use_line(topology: Topology, gpu: Gpu, centers: dict[str, float]) -> str:
    nic = choose_nic(topology, gpu.gpu_idx)
    if nic is None:
        return ""
    x1, x2 = centers[f"gpu{gpu.gpu_idx}"], centers[nic.name]
    return f'<line x1="{x1:g}" y1="{_GPU_Y + _BOX_H}" x2="{x2:g}" y2="{_NIC_Y}" class="use"/>'


def _nvlink_bar(topology: Topology, centers: dict[str, float]) -> str:
    joined = [centers[f"gpu{gpu.gpu_idx}"] for gpu in topology.gpus if gpu.nvlink_peers]
    if not joined:
        return ""
    left, right = min(joined), max(joined)
    bar = _rect(left - 8, _BAR_Y, right - left + 16, 12, "bar")
    stems = "".join(_rect(x - 3, _BAR_Y + 6, 6, _GPU_Y - _BAR_Y - 6, "bar") for x in joined)
    return stems + bar + _text((left + right) / 2, _BAR_Y - 4, "NVLink", "small")
