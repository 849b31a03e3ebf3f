#include "runtime/communicator.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "common/check.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

// Addresses of experts and of spare slots, and bytes of an expert.
using ExpertTuples = std::vector<std::tuple<uintptr_t, uintptr_t, int64_t>>;

std::vector<ExpertTensor> expert_tensors(const ExpertTuples& given) {
  std::vector<ExpertTensor> tensors;
  for (const auto& [experts, spare, item_bytes] : given) {
    tensors.push_back({pointer<uint8_t>(experts), pointer<uint8_t>(spare), item_bytes});
  }
  return tensors;
}

}  // namespace

const HostCounts* wait_for_counts(const Communicator& communicator, uint32_t counts_epoch, cudaStream_t stream) {
  const py::gil_scoped_release release;
  return communicator.wait_for_host_counts(counts_epoch, stream);
}

py::object fields_of(const HostCounts* host_counts) {
  if (host_counts == nullptr) return py::none();
  return py::make_tuple(host_counts->status == kNeedsCapacity, host_counts->num_recv, host_counts->num_permuted,
                        host_counts->num_sent_away, host_counts->num_kept, host_counts->max_recv, host_counts->max_sent,
                        host_counts->max_rows, host_counts->num_sent_between, host_counts->max_held);
}

void add_communicator(py::module_& module) {
  module.attr("dispatch_number_bits") = kDispatchNumberBits;
  module.def("dispatch_number", &dispatch_number, py::arg("buffer"), py::arg("number"));

  py::enum_<FaultKind>(module, "FaultKind")
      .value("TIMEOUT", FaultKind::kTimeout)
      .value("BAD_EXPERT", FaultKind::kBadExpert)
      .value("OVERFLOW", FaultKind::kOverflow)
      .value("OTHER_CALL", FaultKind::kOtherCall)
      .value("BAD_BOUND", FaultKind::kBadBound)
      .value("TOO_MANY_TOKENS", FaultKind::kTooManyTokens)
      .value("TRANSPORT", FaultKind::kTransport)
      .value("NO_SIGNAL", FaultKind::kNoSignal)
      .value("REFUSED", FaultKind::kRefused)
      .value("NONE", FaultKind::kNone);
  py::class_<Fault>(module, "Fault")
      .def_readonly("kind", &Fault::kind)
      .def_readonly("kernel", &Fault::kernel)
      .def_readonly("tag", &Fault::tag)
      .def_readonly("peer", &Fault::peer)
      .def_readonly("witness", &Fault::witness)
      .def_readonly("missed", &Fault::missed)
      .def_readonly("expected", &Fault::expected)
      .def_readonly("seen", &Fault::seen)
      .def_readonly("waited_s", &Fault::waited_s);

  py::class_<Communicator>(module, "Communicator")
      .def(py::init<int, const std::vector<uintptr_t>&, int, double>(), py::kw_only(), py::arg("rank"),
           py::arg("control"), py::arg("device"), py::arg("timeout_s"))
      .def("set_arena", &Communicator::set_arena, py::arg("arena"), py::arg("slot_bytes"), py::arg("number"))
      .def_property_readonly("default_dispatch_sms", &Communicator::default_dispatch_sms)
      .def_property_readonly("default_copy_sms", &Communicator::default_copy_sms)
      .def(
          "add_peer_memory",
          [](Communicator& self, uintptr_t begin, int64_t num_bytes, uintptr_t peers) {
            self.add_peer_memory(pointer<uint8_t>(begin), num_bytes, pointer<uint8_t*>(peers));
          },
          py::arg("begin"), py::arg("num_bytes"), py::arg("peers"))
      .def(
          "staging_bytes",
          [](const Communicator& self, const ExpertTuples& tensors, int num_slots) {
            return self.staging_bytes(expert_tensors(tensors), num_slots);
          },
          py::arg("tensors"), py::arg("num_slots"))
      .def(
          "copy_experts",
          [](Communicator& self, const ExpertTuples& tensors, uintptr_t mapping, int num_slots, int num_local,
             int num_sms, bool only_compares, uintptr_t stream) {
            self.copy_experts(expert_tensors(tensors), pointer<int64_t>(mapping), num_slots, num_local, num_sms,
                              only_compares, stream_of(stream));
          },
          py::kw_only(), py::arg("tensors"), py::arg("mapping"), py::arg("num_slots"), py::arg("num_local"),
          py::arg("num_sms"), py::arg("only_compares"), py::arg("stream"))
      // Writes `num_counts` tokens per local expert to `counts`, and returns the rest as fields_of().
      .def(
          "wait_for_counts",
          [](const Communicator& self, uint32_t counts_epoch, uintptr_t stream, uintptr_t counts, int num_counts) {
            const HostCounts* host_counts = wait_for_counts(self, counts_epoch, stream_of(stream));
            if (host_counts != nullptr) {
              std::copy_n(host_counts->num_tokens_per_expert, num_counts, pointer<int32_t>(counts));
            }
            return fields_of(host_counts);
          },
          py::arg("counts_epoch"), py::arg("stream"), py::arg("counts"), py::arg("num_counts"))
      .def("take_fault", &Communicator::take_fault)
      .def_property_readonly("has_fault", &Communicator::has_fault);
}

}  // namespace hybrid_ep::bindings
