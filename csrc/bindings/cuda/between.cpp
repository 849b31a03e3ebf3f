// Calls between domains.
#include "runtime/between.h"

#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

Grid make_grid(int rank, int num_domains, int ranks_per_domain) { return {rank, num_domains, ranks_per_domain}; }

// Two numbers: the tokens of a chunk, and its bytes.
py::tuple chunk_of(const RecordLayout& record) {
  return py::make_tuple(record.per_chunk, record.per_chunk * record.num_bytes);
}

}  // namespace

LinkKernels link_kernels_of(const py::object& capsule) {
  if (capsule.is_none()) return own_link_kernels();
  const auto* kernels = PyCapsule_GetPointer(capsule.ptr(), kLinkKernelsName);
  if (kernels == nullptr) throw py::error_already_set();
  return *static_cast<const LinkKernels*>(kernels);
}

void add_between(py::module_& module) {
  module.attr("rank_elsewhere") = kMaxRanks;
  module.def("between_chunk", [](const DispatchShape& shape) { return chunk_of(record_of(shape)); }, py::arg("plan"));
  module.def("between_chunk", [](const CombinePlan& plan) { return chunk_of(record_of(plan)); }, py::arg("plan"));
  // The offset of rank_prefix in a route, in int32 from its begin.
  module.def(
      "between_rank_prefix",
      [](int num_domains, int ranks_per_domain, int num_tokens, int num_topk, int num_experts) {
        return BetweenRoute::of(make_grid(0, num_domains, ranks_per_domain), num_tokens, num_topk, num_experts, 0)
            .rank_prefix;
      },
      py::kw_only(), py::arg("num_domains"), py::arg("ranks_per_domain"), py::arg("num_tokens"), py::arg("num_topk"),
      py::arg("num_experts"));
  // The offsets of [R, G] tokens of each rank to each rank of this domain, and of [LE] tokens for each local expert.
  module.def(
      "between_counts",
      [](int num_domains, int ranks_per_domain, int num_tokens, int num_topk, int num_experts) {
        const BetweenRoute route =
            BetweenRoute::of(make_grid(0, num_domains, ranks_per_domain), num_tokens, num_topk, num_experts, 0);
        return py::make_tuple(route.counts, route.num_tokens_per_expert);
      },
      py::kw_only(), py::arg("num_domains"), py::arg("ranks_per_domain"), py::arg("num_tokens"), py::arg("num_topk"),
      py::arg("num_experts"));
  py::class_<BetweenCommunicator>(module, "BetweenCommunicator")
      .def(py::init([](Communicator& domain, int rank, int num_domains, Proxy& proxy, const py::object& kernels) {
             return std::make_unique<BetweenCommunicator>(
                 domain, make_grid(rank, num_domains, domain.domain().num_ranks), proxy, link_kernels_of(kernels));
           }),
           py::kw_only(), py::arg("domain"), py::arg("rank"), py::arg("num_domains"), py::arg("proxy"),
           py::arg("kernels") = py::none(), py::keep_alive<1, 2>(), py::keep_alive<1, 5>())
      .def(
          "dispatch",
          [](BetweenCommunicator& self, const DispatchShape& plan, uintptr_t rows, uintptr_t topk_idx,
             uintptr_t topk_weights, uintptr_t scales, uintptr_t route, uintptr_t mapping_checksum, int held_capacity,
             int handle, int slot_idx, uintptr_t stream) {
            return self.dispatch(plan, tensors_of(rows, topk_idx, topk_weights, scales, route, mapping_checksum),
                                 held_capacity, handle, slot_idx, stream_of(stream));
          },
          py::kw_only(), py::arg("plan"), py::arg("rows"), py::arg("topk_idx"), py::arg("topk_weights"),
          py::arg("scales"), py::arg("route"), py::arg("mapping_checksum"), py::arg("held_capacity"), py::arg("handle"),
          py::arg("slot_idx"), py::arg("stream"))
      .def(
          "stream_chunks",
          [](BetweenCommunicator& self, int num_chunks, int chunk_bytes, int num_sms, uintptr_t stream) {
            self.stream_chunks(num_chunks, chunk_bytes, num_sms, stream_of(stream));
          },
          py::kw_only(), py::arg("num_chunks"), py::arg("chunk_bytes"), py::arg("num_sms"), py::arg("stream"))
      .def(
          "combine",
          [](BetweenCommunicator& self, const CombinePlan& plan, uintptr_t rows, int num_rows, uintptr_t weights,
             const std::vector<uintptr_t>& bias, uintptr_t out, uintptr_t out_weights, uintptr_t own_sums,
             uintptr_t own_weights, uintptr_t route, int held_capacity, int handle, uintptr_t stream) {
            CombineTensors tensors{};
            tensors.rows = pointer<uint8_t>(rows);
            tensors.num_rows = num_rows;
            tensors.weights = pointer<float>(weights);
            for (size_t i = 0; i < bias.size() && i < 2; ++i) tensors.bias[i] = pointer<uint8_t>(bias[i]);
            tensors.out = pointer<uint8_t>(out);
            tensors.out_weights = pointer<float>(out_weights);
            tensors.route = pointer<int32_t>(route);
            self.combine(plan, tensors, {pointer<uint8_t>(own_sums), pointer<float>(own_weights)}, held_capacity,
                         handle, stream_of(stream));
          },
          py::kw_only(), py::arg("plan"), py::arg("rows"), py::arg("num_rows"), py::arg("weights"), py::arg("bias"),
          py::arg("out"), py::arg("out_weights"), py::arg("own_sums"), py::arg("own_weights"), py::arg("route"),
          py::arg("held_capacity"), py::arg("handle"), py::arg("stream"));
}

}  // namespace hybrid_ep::bindings
