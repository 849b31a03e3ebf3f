"""The PCIe links between a device and the CPU, from /sys: the best speed and width of each, and those in use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hybrid_ep.topology import PciDevice

_ENCODING = 128 / 130  # of 128 bits, 130 are sent, from generation 3 on


def links_above(device: PciDevice, devices: Mapping[str, PciDevice]) -> Iterator[tuple[PciDevice, PciDevice]]:
    """The links of bridges above a device, its own left out, as (upper end, lower end), the nearest to the CPU first.

    ``path`` is host bridge, root port, upstream port, downstream port, …, device. A link joins a root or downstream
    port with what stands below it; the ports of one switch are joined inside it.
    """
    ports = [devices.get(address) for address in device.path[1:-1]]
    for upper, lower in zip(ports[0::2], ports[1::2], strict=False):
        if upper is not None and lower is not None:
            yield upper, lower


def link_faults(device: PciDevice, devices: Mapping[str, PciDevice], without: Collection[str] = ()) -> list[str]:
    """Links above the device that are narrower or slower than both of their ends could be.

    Args:
        without: lower ends whose links are named elsewhere.
    """
    faults = []
    for upper, lower in links_above(device, devices):
        if lower.address in without:
            continue
        width = min(upper.link.max_width, lower.link.max_width)
        gts = min(upper.link.max_gts, lower.link.max_gts)
        if lower.link.width and lower.link.width < width:
            faults.append(f"uplink of {lower.address} x{lower.link.width} of x{width}")
        if lower.link.gts and lower.link.gts < gts:
            faults.append(f"uplink of {lower.address} {lower.link.gts:g} of {gts:g} GT/s")
    return faults


def bandwidth_gbps(device: PciDevice) -> float:
    """What the device's link carries in Gb/s; 0 where not known."""
    return device.link.width * device.link.gts * _ENCODING
