// `hybrid_ep._verbs`: importing it loads libibverbs.so.1, so a node without rdma-core answers with ImportError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "topology/verbs_probe.h"

namespace {

namespace py = pybind11;
using namespace py::literals;

py::list probe() {
  const auto devices = [] {
    const py::gil_scoped_release release;
    return hybrid_ep::topology::probe_verbs();
  }();
  py::list result;
  for (const auto& device : devices) {
    py::list ports;
    for (const auto& port : device.ports) {
      ports.append(py::dict("port"_a = port.port, "state"_a = port.state, "link_layer"_a = port.link_layer,
                            "active_mtu_bytes"_a = port.active_mtu_bytes, "max_mtu_bytes"_a = port.max_mtu_bytes,
                            "lid"_a = port.lid, "sm_lid"_a = port.sm_lid));
    }
    result.append(py::dict("name"_a = device.name, "firmware"_a = device.firmware, "max_qp"_a = device.max_qp,
                           "max_mr_bytes"_a = device.max_mr_bytes, "dmabuf"_a = device.dmabuf, "ports"_a = ports));
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(_verbs, module) { module.def("probe", &probe); }
