// `hybrid_ep._cuda`: the kernels for NVLink domains and what launches them.
#include "bindings/bindings.h"
#include "bindings/cuda/bindings.h"
#include "common/check.h"
#include "common/cuda_check.h"
#include "layout/control_block.h"

PYBIND11_MODULE(_cuda, module) {
  namespace py = pybind11;
  py::register_exception_translator([](std::exception_ptr thrown) {
    // The class is imported only here, so that the module can be imported without the package, which needs torch.
    const auto raise = [](const char* type, const std::exception& error) {
      PyErr_SetString(py::module_::import("hybrid_ep.errors").attr(type).ptr(), error.what());
    };
    try {
      std::rethrow_exception(thrown);
    } catch (const hybrid_ep::CudaError& error) {
      raise("CudaError", error);
    } catch (const hybrid_ep::ConfigError& error) {
      raise("ConfigError", error);
    }
  });
  module.attr("version") = HYBRID_EP_VERSION;
  // For tests that act as another rank.
  py::dict offsets;
  offsets["counts"] = offsetof(hybrid_ep::ControlBlock, counts);
  offsets["rows_epoch"] = offsetof(hybrid_ep::ControlBlock, rows_epoch);
  offsets["ready"] = offsetof(hybrid_ep::ControlBlock, ready);
  offsets["dispatch_epoch"] = offsetof(hybrid_ep::ControlBlock, dispatch_epoch);
  offsets["combine_epoch"] = offsetof(hybrid_ep::ControlBlock, combine_epoch);
  offsets["chunk_epoch"] = offsetof(hybrid_ep::ControlBlock, chunk_epoch);
  module.attr("control_offsets") = offsets;
  module.attr("control_count_row_bytes") = sizeof(hybrid_ep::CountRow);
  module.attr("row_align_bytes") = hybrid_ep::kRowAlignBytes;
  hybrid_ep::bindings::add_balance(module);
  hybrid_ep::calls::add_plans(module);
  hybrid_ep::bindings::add_communicator(module);
  hybrid_ep::bindings::add_local_kernels(module);
  hybrid_ep::bindings::add_ordered_launches(module);
  hybrid_ep::bindings::add_route_memory(module);
  hybrid_ep::calls::add_slots(module);
  hybrid_ep::calls::add_domain(module);
  hybrid_ep::bindings::add_low_latency(module);
  hybrid_ep::calls::add_low_latency(module);
  hybrid_ep::bindings::add_push_rows(module);
  hybrid_ep::bindings::add_sizes(module);
  hybrid_ep::bindings::add_transport(module);
  hybrid_ep::bindings::add_between(module);
}
