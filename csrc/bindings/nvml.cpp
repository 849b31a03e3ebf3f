// `hybrid_ep._nvml`: importing it loads libnvidia-ml.so.1, so a node without the driver answers with ImportError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "topology/nvml_probe.h"

namespace {

namespace py = pybind11;
using namespace py::literals;

py::dict to_dict(const hybrid_ep::topology::Gpu& gpu) {
  py::list links;
  for (const auto& link : gpu.links) {
    links.append(py::dict("link"_a = link.link, "active"_a = link.active, "remote_type"_a = link.remote_type,
                          "remote_pci"_a = link.remote_pci));
  }
  py::object fabric = py::none();
  if (gpu.fabric) {
    fabric = py::dict("cluster_uuid"_a = gpu.fabric->cluster_uuid, "clique"_a = gpu.fabric->clique,
                      "state"_a = gpu.fabric->state, "status"_a = gpu.fabric->status);
  }
  py::object platform = py::none();
  if (gpu.platform) {
    platform = py::dict("chassis_serial"_a = gpu.platform->chassis_serial, "slot"_a = gpu.platform->slot,
                        "tray"_a = gpu.platform->tray, "host_id"_a = gpu.platform->host_id,
                        "module_id"_a = gpu.platform->module_id);
  }
  return py::dict("gpu_idx"_a = gpu.gpu_idx, "name"_a = gpu.name, "uuid"_a = gpu.uuid,
                  "pci_address"_a = gpu.pci_address, "memory_bytes"_a = gpu.memory_bytes, "links"_a = links,
                  "fabric"_a = fabric, "platform"_a = platform, "nvlink_peers"_a = gpu.nvlink_peers);
}

py::dict probe() {
  const auto node = [] {
    const py::gil_scoped_release release;
    return hybrid_ep::topology::probe_nvml();
  }();
  py::list gpus;
  for (const auto& gpu : node.gpus) gpus.append(to_dict(gpu));
  return py::dict("driver_version"_a = node.driver_version, "nvml_version"_a = node.nvml_version,
                  "cuda_driver_version"_a = node.cuda_driver_version, "gpus"_a = gpus);
}

}  // namespace

PYBIND11_MODULE(_nvml, module) { module.def("probe", &probe); }
