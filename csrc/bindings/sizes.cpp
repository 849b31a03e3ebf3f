// Limits of the CUDA engine, and how much memory its calls take: for the engine, and for who plans a cluster on a
// machine without GPUs. Every formula is one of csrc/layout.
#include "bindings/bindings.h"
#include "common/check.h"
#include "layout/between_layout.h"
#include "layout/control_block.h"
#include "layout/low_latency_layout.h"
#include "layout/slot_layout.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

Grid make_grid(int num_domains, int ranks_per_domain) {
  require(num_domains >= 1, "num_domains", num_domains, "≥ 1");
  require(ranks_per_domain >= 1, "ranks_per_domain", ranks_per_domain, "≥ 1");
  return {0, num_domains, ranks_per_domain};
}

void add_limits(py::module_& module) {
  module.attr("max_ranks") = kMaxRanks;
  module.attr("max_domains") = kMaxDomains;
  module.attr("max_mapped_domains") = kMaxMappedDomains;
  module.attr("max_experts") = kMaxExperts;
  module.attr("max_tokens") = kMaxTokens;
  module.attr("max_topk") = kMaxTopk;
  module.attr("max_row_bytes") = kMaxRowBytes;
  module.attr("max_matrix_ranks") = kMaxMatrixRanks;
  module.attr("low_latency_min_tokens_to_sum") = kMinTokensToSum;
}

}  // namespace

void add_sizes(py::module_& module) {
  add_limits(module);
  module.attr("control_bytes") = sizeof(ControlBlock);
  module.def(
      "between_control_bytes",
      [](int num_domains, int ranks_per_domain) {
        return BetweenLayout::of(make_grid(num_domains, ranks_per_domain)).num_bytes;
      },
      py::kw_only(), py::arg("num_domains"), py::arg("ranks_per_domain"));
  // Words that a source publishes to each domain: those of the header, and counts of its tokens by rank.
  module.def(
      "between_told_words",
      [](int num_domains, int ranks_per_domain) {
        const BetweenLayout layout = BetweenLayout::of(make_grid(num_domains, ranks_per_domain));
        return py::make_tuple(static_cast<int>(CallHeader::kNumColumns), layout.num_columns);
      },
      py::kw_only(), py::arg("num_domains"), py::arg("ranks_per_domain"));
  module.attr("between_verdict_words") = sizeof(Verdict) / sizeof(int32_t);
  module.def(
      "between_ring",
      [](int num_domains) {
        const RingShape ring = stream_ring(num_domains);
        return py::make_tuple(ring.slot_bytes, ring.num_slots, ring.slots_per_credit);
      },
      py::kw_only(), py::arg("num_domains"));
  // Bytes of the link's window and words, also for more domains than a link may have.
  module.def(
      "between_link_bytes",
      [](int num_domains) {
        const RingShape ring = stream_ring(num_domains);
        const LinkLayout layout = arrange_link(num_domains, 0, 1, &ring, 1);
        return layout.window_bytes + layout.num_words * sizeof(uint64_t);
      },
      py::kw_only(), py::arg("num_domains"));
  module.def(
      "between_route_ints",
      [](int num_domains, int ranks_per_domain, int num_tokens, int num_topk, int num_experts, int held_capacity) {
        return BetweenRoute::of(make_grid(num_domains, ranks_per_domain), num_tokens, num_topk, num_experts,
                                held_capacity)
            .num_ints;
      },
      py::kw_only(), py::arg("num_domains"), py::arg("ranks_per_domain"), py::arg("num_tokens"), py::arg("num_topk"),
      py::arg("num_experts"), py::arg("held_capacity"));
  // Bytes of a record, and how many a chunk holds. The columns are 4-byte words.
  module.def(
      "between_record",
      [](int64_t row_bytes, int num_scales, int num_destinations, int num_experts, int num_weights) {
        // Larger rows than calls may have, so that their sizes can be reported.
        require(row_bytes >= 1 && row_bytes <= kChunkSlotBytes / 2, "row_bytes", row_bytes, "1 … 131072");
        const RecordLayout record = RecordLayout::of(row_bytes, num_scales, num_destinations, num_experts, num_weights);
        return py::make_tuple(record.num_bytes, record.per_chunk);
      },
      py::kw_only(), py::arg("row_bytes"), py::arg("num_scales"), py::arg("num_destinations"), py::arg("num_experts"),
      py::arg("num_weights"));
  // A slot of the arena that holds so many rows; bytes per row of each part.
  module.def(
      "slot_bytes",
      [](int64_t rows, int64_t experts, int64_t weights, int64_t scales, int64_t num_rows) {
        return slot_bytes_for({rows, experts, weights, scales}, num_rows);
      },
      py::kw_only(), py::arg("rows"), py::arg("experts"), py::arg("weights"), py::arg("scales"), py::arg("num_rows"));
  module.def(
      "low_latency_region_bytes",
      [](int num_ranks, int num_experts, int num_topk, int hidden, int max_tokens) {
        return LowLatencyCapacity::of({num_experts, num_topk, hidden, max_tokens}, num_ranks).region_bytes();
      },
      py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"),
      py::arg("max_tokens"));
}

}  // namespace hybrid_ep::bindings
