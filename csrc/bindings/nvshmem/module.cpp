// `hybrid_ep._nvshmem`: NVSHMEM, and the kernels between domains compiled for its link. libnvshmem_host.so.3 must be
// loaded before the module is imported (hybrid_ep/transport/nvshmem.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/cuda_check.h"
#include "kernels/link_kernels.h"
#include "runtime/nvshmem/world.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

LinkKernels kernels = own_link_kernels();

py::bytes unique_id() { return nvshmem_unique_id(); }

void join(int rank, int num_ranks, const py::bytes& id, int device) {
  const std::string bytes = id;
  const py::gil_scoped_release release;
  join_nvshmem(rank, num_ranks, bytes, device);
}

uintptr_t allocate(size_t num_bytes, int device) {
  const py::gil_scoped_release release;
  return reinterpret_cast<uintptr_t>(allocate_symmetric(num_bytes, device));
}

std::vector<uintptr_t> map_peers_of(uintptr_t memory, const std::vector<int>& pes) {
  std::vector<uintptr_t> mapped;
  for (uint8_t* address : map_peers(reinterpret_cast<uint8_t*>(memory), pes)) {
    mapped.push_back(reinterpret_cast<uintptr_t>(address));
  }
  return mapped;
}

void clear(uintptr_t memory, size_t num_bytes, int device) {
  const py::gil_scoped_release release;
  clear_symmetric(reinterpret_cast<uint8_t*>(memory), num_bytes, device);
}

}  // namespace

PYBIND11_MODULE(_nvshmem, module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const NvshmemError& error) {
      // −1: no single peer. hybrid_ep/transport raises TransportError.
      PyErr_SetObject(PyExc_ConnectionError, py::make_tuple(-1, error.what()).ptr());
    } catch (const CudaError& error) {
      PyErr_SetObject(PyExc_ConnectionError, py::make_tuple(-1, error.what()).ptr());
    }
  });
  module.attr("version") = HYBRID_EP_VERSION;
  module.attr("link_kernels") = py::capsule(&kernels, kLinkKernelsName);
  module.def("unique_id", &unique_id);
  module.def("join", &join, py::kw_only(), py::arg("rank"), py::arg("num_ranks"), py::arg("unique_id"),
             py::arg("device"));
  module.def("allocate", &allocate, py::kw_only(), py::arg("num_bytes"), py::arg("device"));
  module.def("map_peers", &map_peers_of, py::kw_only(), py::arg("memory"), py::arg("pes"));
  module.def("clear", &clear, py::kw_only(), py::arg("memory"), py::arg("num_bytes"), py::arg("device"));
  module.def("quiet", &quiet_nvshmem, py::call_guard<py::gil_scoped_release>(), py::kw_only(), py::arg("device"),
             py::arg("timeout_s"));
}

}  // namespace hybrid_ep::bindings
