// Topology facts as plain dictionaries; hybrid_ep/topology/model.py gives them their types.
#include <pybind11/stl.h>

#include <algorithm>
#include <map>

#include "bindings/bindings.h"
#include "topology/distance.h"
#include "topology/sysfs.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;
using py::arg;

py::dict to_dict(const topology::PciDevice& device) {
  using namespace py::literals;
  const topology::PciLink& link = device.link;
  return py::dict("address"_a = device.address, "vendor"_a = device.vendor, "device_id"_a = device.device_id,
                  "class_code"_a = device.class_code, "numa_node"_a = device.numa_node, "path"_a = device.path,
                  "link"_a = py::dict("width"_a = link.width, "max_width"_a = link.max_width, "gts"_a = link.gts,
                                      "max_gts"_a = link.max_gts));
}

py::dict to_dict(const topology::NicPort& port) {
  using namespace py::literals;
  return py::dict("port"_a = port.port, "state"_a = port.state, "phys_state"_a = port.phys_state,
                  "link_layer"_a = port.link_layer, "rate_gbps"_a = port.rate_gbps, "sm_lid"_a = port.sm_lid);
}

py::dict to_dict(const topology::Nic& nic) {
  using namespace py::literals;
  py::list ports;
  for (const topology::NicPort& port : nic.ports) ports.append(to_dict(port));
  return py::dict("name"_a = nic.name, "pci_address"_a = nic.pci_address, "numa_node"_a = nic.numa_node,
                  "node_guid"_a = nic.node_guid, "firmware"_a = nic.firmware, "netdevs"_a = nic.netdevs,
                  "ports"_a = ports);
}

// One scan of /sys: devices, NICs, and how far each GPU is from every other device that is not a bridge.
py::dict scan_sysfs(const std::string& sysroot) {
  using namespace py::literals;
  const std::vector<topology::PciDevice> devices = topology::scan_pci(sysroot);
  const std::map<int, std::string> numa_nodes = topology::scan_numa_nodes(sysroot);
  const int num_numa_nodes = std::max<int>(1, static_cast<int>(numa_nodes.size()));
  py::list pci;
  py::dict distances;
  for (const topology::PciDevice& device : devices) {
    pci.append(to_dict(device));
    if (!topology::is_gpu(device)) continue;
    for (const topology::PciDevice& other : devices) {
      if (topology::is_bridge(other)) continue;
      const topology::Distance distance = topology::distance_between(device, other, num_numa_nodes);
      distances[py::make_tuple(device.address, other.address)] = topology::to_string(distance);
    }
  }
  py::list nics;
  for (const topology::Nic& nic : topology::scan_nics(sysroot)) nics.append(to_dict(nic));
  return py::dict("pci"_a = pci, "nics"_a = nics, "distances"_a = distances, "numa_nodes"_a = numa_nodes);
}

}  // namespace

void add_topology(py::module_& module) { module.def("scan_sysfs", &scan_sysfs, py::kw_only(), arg("sysroot")); }

}  // namespace hybrid_ep::bindings
