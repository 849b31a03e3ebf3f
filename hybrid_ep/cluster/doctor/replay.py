"""A recorded node in the place of this one: ``hybrid-ep doctor --replay FILE``.

Files are laid out below a folder, as ``--sysroot`` reads them. NVML's answers come from the recording, without any
driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pynvml

from hybrid_ep.cluster.doctor.node import Node
from hybrid_ep.cluster.doctor.nvml import P2P_NVLINK, P2P_OK, Nvml
from hybrid_ep.topology import Topology, probe
from hybrid_ep.watched import Unreadable

__all__ = ["ReplayedNode"]

_TEXTS = re.compile(
    r"(name|uuid|pci_address|remote_pci|vbios|inforom|cluster_uuid|chassis_serial|driver_version|nvml_version)$"
)
# Keys that recordings of older versions lack: the key whose value they had, or the value itself.
_INSTEAD = {"ecc_mode_pending": "ecc_mode", "mig_mode_pending": "mig_mode"}
_ABSENT = {"fabric.health": "0"}
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
