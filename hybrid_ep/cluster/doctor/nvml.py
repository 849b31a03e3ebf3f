"""NVML through nvidia-ml-py, one key per value.

The keys are those of the NVML stub (tests/sim/nvml_stub.c). So the stub can replay what was read, which is in
`answers`. An NVML error, a missing library and a function that the driver does not have all raise `Unreadable` with
NVML's words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml

from hybrid_ep.watched import Unreadable

P2P_NVLINK = int(pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
P2P_OK = int(pynvml.NVML_P2P_STATUS_OK)
LINK_REMOTE_SWITCH = int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
FABRIC_COMPLETED = int(pynvml.NVML_GPU_FABRIC_STATE_COMPLETED)

_SYSTEM: dict[str, Callable[[], Any]] = {
    "driver_version": pynvml.nvmlSystemGetDriverVersion,
    "nvml_version": pynvml.nvmlSystemGetNVMLVersion,
    "cuda_driver_version": pynvml.nvmlSystemGetCudaDriverVersion_v2,
    "gpu_count": pynvml.nvmlDeviceGetCount,
}
_GPU: dict[str, Callable[[Any], Any]] = {
    "name": pynvml.nvmlDeviceGetName,
    "uuid": pynvml.nvmlDeviceGetUUID,
    "pci_address": lambda gpu: pynvml.nvmlDeviceGetPciInfo(gpu).busId,
    "memory_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "bar1_bytes": lambda gpu: pynvml.nvmlDeviceGetBAR1MemoryInfo(gpu).bar1Total,
    "ecc_mode": lambda gpu: pynvml.nvmlDeviceGetEccMode(gpu)[0],
    "ecc_mode_pending": lambda gpu: pynvml.nvmlDeviceGetEccMode(gpu)[1],
    "ecc_errors.1.0": lambda gpu: pynvml.nvmlDeviceGetTotalEccErrors(
        gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "sram_threshold_exceeded": lambda gpu: _sram(gpu).bThresholdExceeded,
    "row_remap_pending": lambda gpu: pynvml.nvmlDeviceGetRemappedRows(gpu)[2],
    "row_remap_failed": lambda gpu: pynvml.nvmlDeviceGetRemappedRows(gpu)[3],
    "row_remap_corrected": lambda gpu: pynvml.nvmlDeviceGetRemappedRows(gpu)[0],
    "row_remap_uncorrected": lambda gpu: pynvml.nvmlDeviceGetRemappedRows(gpu)[1],
    "row_remap_banks_without_spares": lambda gpu: pynvml.nvmlDeviceGetRowRemapperHistogram(gpu).none,
    "ecc_errors.0.0": lambda gpu: pynvml.nvmlDeviceGetTotalEccErrors(
        gpu, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    "pcie_replay": pynvml.nvmlDeviceGetPcieReplayCounter,
    "mig_mode": lambda gpu: pynvml.nvmlDeviceGetMigMode(gpu)[0],
    "mig_mode_pending": lambda gpu: pynvml.nvmlDeviceGetMigMode(gpu)[1],
    "retired_pages_pending": pynvml.nvmlDeviceGetRetiredPagesPendingStatus,
    "compute_mode": pynvml.nvmlDeviceGetComputeMode,
    "power_limit": pynvml.nvmlDeviceGetPowerManagementLimit,
    "power_limit_enforced": pynvml.nvmlDeviceGetEnforcedPowerLimit,
    "power_limit_default": pynvml.nvmlDeviceGetPowerManagementDefaultLimit,
    "vbios": pynvml.nvmlDeviceGetVbiosVersion,
    "inforom": pynvml.nvmlDeviceGetInforomImageVersion,
    "memory_used_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "num_processes": lambda gpu: len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)),
    "persistence_mode": pynvml.nvmlDeviceGetPersistenceMode,
    "clocks_event_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons,
    "power_usage": pynvml.nvmlDeviceGetPowerUsage,
    "first_process": lambda gpu: next((each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)), 0),
    "utilization": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
    "pcie_width_max": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
    "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
    "pcie_generation_max": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
    "fabric.state": lambda gpu: _fabric(gpu).state,
    "fabric.status": lambda gpu: _fabric(gpu).status,
    "fabric.health": lambda gpu: getattr(_fabric(gpu), "healthMask", 0),  # older drivers have none
    "fabric.summary": lambda gpu: getattr(_fabric(gpu), "healthSummary", 0),
    "fabric.clique": lambda gpu: _fabric(gpu).cliqueId,
    "fabric.cluster_uuid": lambda gpu: bytes(_fabric(gpu).clusterUuid).hex(),
    "platform.chassis_serial": lambda gpu: _platform(gpu).chassisSerialNumber,
    "platform.slot": lambda gpu: ord(_platform(gpu).slotNumber),
    "platform.tray": lambda gpu: ord(_platform(gpu).trayIndex),
    "platform.host_id": lambda gpu: ord(_platform(gpu).hostId),
    "platform.module_id": lambda gpu: ord(_platform(gpu).moduleId),
}


_MOST_GPUS = 64  # of one node; a count beyond that is garbage


def _error_counter(counter: int, gpu: Any, link: int) -> Any:
    return pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, counter)


_LINK: dict[str, Callable[[Any, int], Any]] = {
    "state": pynvml.nvmlDeviceGetNvLinkState,
    "remote_type": lambda gpu, link: pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link),
    "remote_pci": lambda gpu, link: pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId,
    # Replay, recovery, CRC flit, CRC data.
    **{f"error.{counter}": partial(_error_counter, counter) for counter in range(4)},
}
# nvmlFieldValue_t says by valueType which member of its union holds the value.
_FIELD_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


_FABRIC_VERSIONS = (
    (pynvml.c_nvmlGpuFabricInfo_v3_t, pynvml.nvmlGpuFabricInfo_v3),
    (pynvml.c_nvmlGpuFabricInfo_v2_t, pynvml.nvmlGpuFabricInfo_v2),
)


def _fabric(gpu: Any) -> Any:
    """The versioned struct goes in by reference, with its version set; older drivers know an older one, or none."""
    for kind, version in _FABRIC_VERSIONS:
        info = kind()
        info.version = version
        try:
            pynvml.nvmlDeviceGetGpuFabricInfoV(gpu, pynvml.byref(info))
        except (pynvml.NVMLError_ArgumentVersionMismatch, pynvml.NVMLError_FunctionNotFound):
            continue
        return info
    info = pynvml.c_nvmlGpuFabricInfo_t()
    pynvml.nvmlDeviceGetGpuFabricInfo(gpu, pynvml.byref(info))
    return info


def _sram(gpu: Any) -> Any:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(gpu, pynvml.byref(status))
    return status


def _platform(gpu: Any) -> Any:
    info = pynvml.c_nvmlPlatformInfo_v2_t()
    pynvml.nvmlDeviceGetPlatformInfo(gpu, pynvml.byref(info))
    return info


class Nvml:
    """One open NVML session.

    Args:
        watch: is called before each NVML query; may refuse it by raising Unreadable.

    Raises:
        Unreadable: the library is not there or does not start.
    """

    def __init__(self, watch: Callable[[str], None] = lambda source: None) -> None:
        self._watch = watch
        self._answers: dict[str, list[str]] = {}
        self._handles: dict[int, Any] = {}
        watch("NVML")
        self._start()

    def _start(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise Unreadable(f"NVML: {error}", nvml_code=error.value) from None

    @property
    def answers(self) -> dict[str, str]:
        """Key → value of everything that was asked, as the stub reads it."""
        return {key: _replayable(texts) for key, texts in self._answers.items()}

    def close(self) -> None:
        """Shuts NVML down; the object must not be used afterwards."""
        pynvml.nvmlShutdown()

    @property
    def gpus(self) -> range:
        """Indices of the GPUs that the driver counts."""
        return range(min(self.system("gpu_count"), _MOST_GPUS))

    def system(self, key: str) -> Any:
        """A value of the node: ``driver_version`` …"""
        return self._ask(key, lambda: _SYSTEM[key]())

    def gpu(self, gpu_idx: int, key: str) -> Any:
        """A value of a GPU: ``name``, ``ecc_mode`` …"""
        return self._ask(f"gpu.{gpu_idx}.{key}", lambda: _GPU[key](self._handle(gpu_idx)))

    def link(self, gpu_idx: int, link: int, key: str) -> Any:
        """A value of one NVLink: ``state``, ``remote_type``, ``remote_pci``, ``error.0`` …"""
        return self._ask(f"gpu.{gpu_idx}.link.{link}.{key}", lambda: _LINK[key](self._handle(gpu_idx), link))

    def links(self, gpu_idx: int) -> list[int]:
        """Links that the GPU has, up or down. NVML_NVLINK_MAX_LINKS is more than exist: the first refusal ends them."""
        found = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                self.link(gpu_idx, link, "state")
            except Unreadable as error:
                if error.nvml_code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                    break
                raise
            found.append(link)
        return found

    def field(self, gpu_idx: int, field_id: int, scope: int = 0) -> int:
        """The value of one NVML_FI_DEV_* field."""

        def ask() -> int:
            value = pynvml.nvmlDeviceGetFieldValues(self._handle(gpu_idx), [(field_id, scope)])[0]
            if value.nvmlReturn != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(value.nvmlReturn)
            if value.valueType >= len(_FIELD_MEMBERS):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return int(getattr(value.value, _FIELD_MEMBERS[value.valueType]))

        result: int = self._ask(f"gpu.{gpu_idx}.field.{field_id}.{scope}", ask)
        return result

    def p2p(self, gpu_idx: int, other_idx: int, capability: int) -> int:
        """NVML_P2P_STATUS_* of a pair."""

        def ask() -> int:
            pair = self._handle(gpu_idx), self._handle(other_idx)
            return int(pynvml.nvmlDeviceGetP2PStatus(*pair, capability))

        result: int = self._ask(f"gpu.{gpu_idx}.p2p.{other_idx}.{capability}", ask)
        return result

    def _handle(self, gpu_idx: int) -> Any:
        if gpu_idx not in self._handles:
            self._handles[gpu_idx] = pynvml.nvmlDeviceGetHandleByIndex(gpu_idx)
        return self._handles[gpu_idx]

    def _ask(self, key: str, call: Callable[[], Any]) -> Any:
        self._watch("NVML")
        try:
            value = call()
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
            # nvidia-ml-py raises the second, which has no code, where the driver lacks this version of a function.
            code = getattr(error, "value", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            self._answers.setdefault(key, []).append(f"!{code}")
            raise Unreadable(f"NVML {key}: {pynvml.NVMLError(code)}", nvml_code=code) from None
        except (UnicodeError, AttributeError) as error:  # no text, or a function that nvidia-ml-py does not have
            raise Unreadable(f"NVML {key}: {error}") from None
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        self._answers.setdefault(key, []).append(str(value))
        return value


def _replayable(texts: list[str]) -> str:
    """What was said last; for a counter that rose between its two readings ``first+rise``, which the stub replays."""
    if len(texts) == 2 and all(text.isdigit() for text in texts) and int(texts[1]) > int(texts[0]):
        return f"{texts[0]}+{int(texts[1]) - int(texts[0])}"
    return texts[-1]
