/* A stand-in for libnvidia-ml.so.1: the NVML of simulated and recorded nodes.
 *
 * It answers from a text file, named by HYBRID_EP_NVML_STUB and read by nvmlInit. One line is "key value":
 *
 *   driver_version 580.95.05        gpu.0.name NVIDIA H200        gpu.0.link.3.state 1        gpu.0.p2p.1.2 0
 *
 * A value "100+5" rises by 5 at each reading; "!13" makes the call return that nvmlReturn_t; a key that is not there
 * means NVML_ERROR_NOT_SUPPORTED. Without the variable there is no driver: nvmlInit says NVML_ERROR_DRIVER_NOT_LOADED.
 * A line "hang 1" makes nvmlInit never return, as a driver in trouble does, and "init !999" makes it return that. Not
 * thread safe; a handle is the GPU's index plus one.
 */
#include <nvml.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_LINE 512

struct entry {
  char* key;
  char* value;
  unsigned reads;
};

static struct entry* entries;
static size_t num_entries;
static unsigned sessions; /* the file is read by the first of nested nvmlInit calls */

static void forget(void) {
  for (size_t i = 0; i < num_entries; ++i) {
    free(entries[i].key);
    free(entries[i].value);
  }
  free(entries);
  entries = NULL;
  num_entries = 0;
}

static nvmlReturn_t load(void) {
  if (sessions > 0) {
    ++sessions;
    return NVML_SUCCESS;
  }
  const char* path = getenv("HYBRID_EP_NVML_STUB");
  FILE* file = path == NULL ? NULL : fopen(path, "r");
  if (file == NULL) return NVML_ERROR_DRIVER_NOT_LOADED;
  forget();
  char line[MAX_LINE];
  while (fgets(line, sizeof line, file) != NULL) {
    line[strcspn(line, "\n")] = '\0';
    char* space = strchr(line, ' ');
    if (space == NULL) continue;
    *space = '\0';
    struct entry* grown = realloc(entries, (num_entries + 1) * sizeof *entries);
    if (grown == NULL) break;
    entries = grown;
    entries[num_entries++] = (struct entry){strdup(line), strdup(space + 1), 0};
  }
  fclose(file);
  for (size_t i = 0; i < num_entries; ++i) {
    while (strcmp(entries[i].key, "hang") == 0) pause();
    if (strcmp(entries[i].key, "init") == 0) return (nvmlReturn_t)atoi(entries[i].value + 1);
  }
  sessions = 1;
  return NVML_SUCCESS;
}

/* Finds the value of a printf-style key; NULL, with the reason in *status, where there is none. */
static const char* find(nvmlReturn_t* status, unsigned* reads, const char* format, va_list arguments) {
  char key[MAX_LINE];
  vsnprintf(key, sizeof key, format, arguments);
  for (size_t i = 0; i < num_entries; ++i) {
    if (strcmp(entries[i].key, key) != 0) continue;
    if (entries[i].value[0] == '!') {
      *status = (nvmlReturn_t)atoi(entries[i].value + 1);
      return NULL;
    }
    *status = NVML_SUCCESS;
    *reads = entries[i].reads++;
    return entries[i].value;
  }
  *status = NVML_ERROR_NOT_SUPPORTED;
  return NULL;
}

static nvmlReturn_t get_number(unsigned long long* number, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  nvmlReturn_t status;
  unsigned reads = 0;
  const char* value = find(&status, &reads, format, arguments);
  va_end(arguments);
  if (value == NULL) return status;
  char* end;
  *number = strtoull(value, &end, 0);
  if (*end == '+') *number += reads * strtoull(end + 1, NULL, 0);
  return NVML_SUCCESS;
}

static nvmlReturn_t get_text(char* text, unsigned length, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  nvmlReturn_t status;
  unsigned reads = 0;
  const char* value = find(&status, &reads, format, arguments);
  va_end(arguments);
  if (value == NULL) return status;
  if (strlen(value) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
  strcpy(text, value);
  return NVML_SUCCESS;
}

static int index_of(nvmlDevice_t device) { return (int)(intptr_t)device - 1; }

static nvmlReturn_t get_unsigned(nvmlDevice_t device, const char* name, unsigned* result) {
  unsigned long long number = 0;
  const nvmlReturn_t status = get_number(&number, "gpu.%d.%s", index_of(device), name);
  if (status == NVML_SUCCESS) *result = (unsigned)number;
  return status;
}

static nvmlReturn_t get_link_unsigned(nvmlDevice_t device, unsigned link, const char* name, unsigned* result) {
  unsigned long long number = 0;
  const nvmlReturn_t status = get_number(&number, "gpu.%d.link.%u.%s", index_of(device), link, name);
  if (status == NVML_SUCCESS) *result = (unsigned)number;
  return status;
}

static nvmlReturn_t parse_pci(const char* address, nvmlPciInfo_t* pci) {
  memset(pci, 0, sizeof *pci);
  if (sscanf(address, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3) return NVML_ERROR_UNKNOWN;
  snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain & 0xffffffff, pci->bus & 0xff,
           pci->device & 0xff);
  snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
           pci->device & 0xff);
  return NVML_SUCCESS;
}

/* ---- library and system ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return load();
}
nvmlReturn_t nvmlInit_v2(void) { return load(); }
nvmlReturn_t nvmlShutdown(void) {
  if (sessions > 0) --sessions;
  return NVML_SUCCESS;
}

const char* nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case NVML_SUCCESS:
      return "Success";
    case NVML_ERROR_NOT_SUPPORTED:
      return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
      return "Insufficient Permissions";
    case NVML_ERROR_DRIVER_NOT_LOADED:
      return "Driver Not Loaded";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
      return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
      return "GPU is lost";
    default:
      return "Unknown Error";
  }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char* text, unsigned length) {
  return get_text(text, length, "driver_version");
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char* text, unsigned length) { return get_text(text, length, "nvml_version"); }

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  unsigned long long number = 0;
  const nvmlReturn_t status = get_number(&number, "cuda_driver_version");
  if (status == NVML_SUCCESS) *version = (int)number;
  return status;
}

/* ---- devices ---- */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  unsigned long long number = 0;
  const nvmlReturn_t status = get_number(&number, "gpu_count");
  *count = (unsigned)number;
  return status == NVML_ERROR_NOT_SUPPORTED ? NVML_SUCCESS : status;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  unsigned count = 0;
  nvmlDeviceGetCount_v2(&count);
  if (index >= count) return NVML_ERROR_INVALID_ARGUMENT;
  unsigned long long lost = 0;
  const nvmlReturn_t status = get_number(&lost, "gpu.%u.handle", index);
  if (status != NVML_SUCCESS && status != NVML_ERROR_NOT_SUPPORTED) return status;
  *device = (nvmlDevice_t)(intptr_t)(index + 1);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* address, nvmlDevice_t* device) {
  unsigned count = 0;
  nvmlDeviceGetCount_v2(&count);
  nvmlPciInfo_t wanted;
  if (parse_pci(address, &wanted) != NVML_SUCCESS) return NVML_ERROR_INVALID_ARGUMENT;
  for (unsigned i = 0; i < count; ++i) {
    nvmlPciInfo_t seen;
    nvmlDevice_t candidate = (nvmlDevice_t)(intptr_t)(i + 1);
    if (nvmlDeviceGetPciInfo_v3(candidate, &seen) == NVML_SUCCESS && strcmp(seen.busId, wanted.busId) == 0) {
      *device = candidate;
      return NVML_SUCCESS;
    }
  }
  return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* text, unsigned length) {
  return get_text(text, length, "gpu.%d.name", index_of(device));
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* text, unsigned length) {
  return get_text(text, length, "gpu.%d.uuid", index_of(device));
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* pci) {
  char address[MAX_LINE];
  const nvmlReturn_t status = get_text(address, sizeof address, "gpu.%d.pci_address", index_of(device));
  return status == NVML_SUCCESS ? parse_pci(address, pci) : status;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  memset(memory, 0, sizeof *memory);
  get_number(&memory->used, "gpu.%d.memory_used_bytes", index_of(device));
  return get_number(&memory->total, "gpu.%d.memory_bytes", index_of(device));
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t* memory) {
  memset(memory, 0, sizeof *memory);
  return get_number(&memory->bar1Total, "gpu.%d.bar1_bytes", index_of(device));
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  return get_number(&memory->total, "gpu.%d.memory_bytes", index_of(device));
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t* current, nvmlEnableState_t* pending) {
  unsigned on = 0;
  const nvmlReturn_t status = get_unsigned(device, "ecc_mode", &on);
  *current = *pending = on ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  if (get_unsigned(device, "ecc_mode_pending", &on) == NVML_SUCCESS) {
    *pending = on ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  }
  return status;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t* pending) {
  unsigned number = 0;
  const nvmlReturn_t status = get_unsigned(device, "retired_pages_pending", &number);
  *pending = number ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  return status;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long* count) {
  return get_number(count, "gpu.%d.ecc_errors.%d.%d", index_of(device), (int)type, (int)counter);
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t* status) {
  if (status->version != nvmlEccSramErrorStatus_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  return get_unsigned(device, "sram_threshold_exceeded", &status->bThresholdExceeded);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned* correctable, unsigned* uncorrectable,
                                       unsigned* pending, unsigned* failed) {
  *correctable = *uncorrectable = 0;
  get_unsigned(device, "row_remap_corrected", correctable);
  get_unsigned(device, "row_remap_uncorrected", uncorrectable);
  const nvmlReturn_t status = get_unsigned(device, "row_remap_pending", pending);
  return status == NVML_SUCCESS ? get_unsigned(device, "row_remap_failed", failed) : status;
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t* values) {
  memset(values, 0, sizeof *values);
  return get_unsigned(device, "row_remap_banks_without_spares", &values->none);
}

nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned* count) {
  return get_unsigned(device, "pcie_replay", count);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned* current, unsigned* pending) {
  const nvmlReturn_t status = get_unsigned(device, "mig_mode", current);
  if (get_unsigned(device, "mig_mode_pending", pending) != NVML_SUCCESS) *pending = *current;
  return status;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t* mode) {
  unsigned number = 0;
  const nvmlReturn_t status = get_unsigned(device, "compute_mode", &number);
  *mode = (nvmlComputeMode_t)number;
  return status;
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned* milliwatts) {
  return get_unsigned(device, "power_limit", milliwatts);
}
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned* milliwatts) {
  return get_unsigned(device, "power_limit_enforced", milliwatts);
}
nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned* milliwatts) {
  return get_unsigned(device, "power_limit_default", milliwatts);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char* text, unsigned length) {
  return get_text(text, length, "gpu.%d.vbios", index_of(device));
}
nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t device, char* text, unsigned length) {
  return get_text(text, length, "gpu.%d.inforom", index_of(device));
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned* milliwatts) {
  return get_unsigned(device, "power_usage", milliwatts);
}

/* As many processes as the file counts, without a life of their own. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned* count, nvmlProcessInfo_t* infos) {
  unsigned number = 0;
  const nvmlReturn_t status = get_unsigned(device, "num_processes", &number);
  if (status != NVML_SUCCESS) return status;
  const unsigned room = *count;
  *count = number;
  if (number > room) return NVML_ERROR_INSUFFICIENT_SIZE;
  if (number > 0) {
    memset(infos, 0, number * sizeof *infos);
    (void)get_unsigned(device, "first_process", &infos[0].pid);
  }
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t* mode) {
  unsigned on = 0;
  const nvmlReturn_t status = get_unsigned(device, "persistence_mode", &on);
  *mode = on ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  return status;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long* reasons) {
  return get_number(reasons, "gpu.%d.clocks_event_reasons", index_of(device));
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t* rates) {
  rates->memory = 0;
  return get_unsigned(device, "utilization", &rates->gpu);
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned* width) {
  return get_unsigned(device, "pcie_width", width);
}
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned* width) {
  return get_unsigned(device, "pcie_width_max", width);
}
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned* generation) {
  return get_unsigned(device, "pcie_generation", generation);
}
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned* generation) {
  return get_unsigned(device, "pcie_generation_max", generation);
}

/* ---- NVLink, fields, pairs, fabric ---- */

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, nvmlEnableState_t* state) {
  unsigned on = 0;
  const nvmlReturn_t status = get_link_unsigned(device, link, "state", &on);
  *state = on ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  return status;
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, nvmlNvLinkErrorCounter_t counter,
                                             unsigned long long* value) {
  return get_number(value, "gpu.%d.link.%u.error.%d", index_of(device), link, (int)counter);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, nvmlIntNvLinkDeviceType_t* type) {
  unsigned number = 0;
  const nvmlReturn_t status = get_link_unsigned(device, link, "remote_type", &number);
  *type = (nvmlIntNvLinkDeviceType_t)number;
  return status;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t* pci) {
  char address[MAX_LINE];
  const nvmlReturn_t status = get_text(address, sizeof address, "gpu.%d.link.%u.remote_pci", index_of(device), link);
  return status == NVML_SUCCESS ? parse_pci(address, pci) : status;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t* values) {
  for (int i = 0; i < count; ++i) {
    unsigned long long number = 0;
    values[i].nvmlReturn =
        get_number(&number, "gpu.%d.field.%u.%u", index_of(device), values[i].fieldId, values[i].scopeId);
    values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    values[i].value.ullVal = number;
  }
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t capability,
                                    nvmlGpuP2PStatus_t* result) {
  unsigned long long number = 0;
  const nvmlReturn_t status = get_number(&number, "gpu.%d.p2p.%d.%d", index_of(a), index_of(b), (int)capability);
  *result = (nvmlGpuP2PStatus_t)number;
  return status;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t* level) {
  unsigned long long number = 0;
  const nvmlReturn_t status = get_number(&number, "gpu.%d.common_ancestor.%d", index_of(a), index_of(b));
  *level = (nvmlGpuTopologyLevel_t)number;
  return status;
}

/* ---- fabric and platform ---- */

static nvmlReturn_t get_fabric(nvmlDevice_t device, nvmlGpuFabricInfo_t* info) {
  unsigned number = 0;
  const nvmlReturn_t has_fabric = get_unsigned(device, "fabric.state", &number);
  if (has_fabric != NVML_SUCCESS) return has_fabric;
  info->state = (nvmlGpuFabricState_t)number;
  info->status = get_unsigned(device, "fabric.status", &number) == NVML_SUCCESS ? (nvmlReturn_t)number : NVML_SUCCESS;
  info->cliqueId = get_unsigned(device, "fabric.clique", &number) == NVML_SUCCESS ? number : 0;
  char uuid[MAX_LINE];
  memset(info->clusterUuid, 0, sizeof info->clusterUuid);
  if (get_text(uuid, sizeof uuid, "gpu.%d.fabric.cluster_uuid", index_of(device)) == NVML_SUCCESS) {
    for (size_t i = 0; i < sizeof info->clusterUuid && strlen(uuid) >= 2 * i + 2; ++i) {
      const char digits[] = {uuid[2 * i], uuid[2 * i + 1], '\0'};
      info->clusterUuid[i] = (unsigned char)strtoul(digits, NULL, 16);
    }
  }
  return NVML_SUCCESS;
}

/* What drivers had before GetGpuFabricInfoV. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t* info) {
  return get_fabric(device, info);
}

/* Versions 2 and 3 share their beginning; a caller that sets no version is refused, as the driver does. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t* info) {
  if ((info->version >> 24) < 2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  nvmlGpuFabricInfo_t found;
  const nvmlReturn_t status = get_fabric(device, &found);
  if (status != NVML_SUCCESS) return status;
  memcpy(info->clusterUuid, found.clusterUuid, sizeof info->clusterUuid);
  info->status = found.status;
  info->cliqueId = found.cliqueId;
  info->state = found.state;
  if (get_unsigned(device, "fabric.health", &info->healthMask) != NVML_SUCCESS) info->healthMask = 0;
  unsigned summary = 0;
  if ((info->version >> 24) >= 3 && get_unsigned(device, "fabric.summary", &summary) == NVML_SUCCESS) {
    info->healthSummary = (unsigned char)summary;
  }
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPlatformInfo(nvmlDevice_t device, nvmlPlatformInfo_t* info) {
  if (info->version != nvmlPlatformInfo_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  char serial[sizeof info->chassisSerialNumber + 1] = "";
  const nvmlReturn_t status = get_text(serial, sizeof serial, "gpu.%d.platform.chassis_serial", index_of(device));
  if (status != NVML_SUCCESS) return status;
  memcpy(info->chassisSerialNumber, serial, sizeof info->chassisSerialNumber);
  const struct {
    const char* name;
    unsigned char* value;
  } numbers[] = {{"platform.slot", &info->slotNumber},
                 {"platform.tray", &info->trayIndex},
                 {"platform.host_id", &info->hostId},
                 {"platform.module_id", &info->moduleId}};
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
    unsigned number = 0;
    *numbers[i].value = get_unsigned(device, numbers[i].name, &number) == NVML_SUCCESS ? (unsigned char)number : 0;
  }
  return NVML_SUCCESS;
}
