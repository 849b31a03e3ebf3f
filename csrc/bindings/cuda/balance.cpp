// Replicas of experts: which a token goes to, the plan of a micro-batch, and the weights of replicas.
#include "kernels/balance/balance.h"

#include "bindings/cuda/bindings.h"
#include "common/device_guard.h"
#include "kernels/launch.h"
#include "layout/limits.h"

namespace hybrid_ep::bindings {

void add_balance(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "map_topk",
      [](uintptr_t topk_idx, uintptr_t replicas, uintptr_t num_choices, uintptr_t slots, int64_t num_copies,
         int num_topk, int num_experts, int max_replicas, int num_slots, uint32_t rank_turn, int device,
         uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_map_topk(
            {pointer<int64_t>(topk_idx), pointer<int64_t>(replicas), pointer<int64_t>(num_choices),
             pointer<int64_t>(slots), num_copies, num_topk, num_experts, max_replicas, num_slots, rank_turn},
            stream_of(stream));
      },
      py::kw_only(), py::arg("topk_idx"), py::arg("replicas"), py::arg("num_choices"), py::arg("slots"),
      py::arg("num_copies"), py::arg("num_topk"), py::arg("num_experts"), py::arg("max_replicas"), py::arg("num_slots"),
      py::arg("rank_turn"), py::arg("device"), py::arg("stream"));
  module.def(
      "plan_fits",
      [](int num_ranks, int num_experts, int ranks_per_domain, int num_spare) {
        PlanParams params{};
        params.num_ranks = num_ranks;
        params.num_experts = num_experts;
        params.ranks_per_domain = ranks_per_domain;
        params.num_spare = num_spare;
        return plan_shared_bytes(params) <= kDynamicSharedBytes;
      },
      py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("ranks_per_domain"), py::arg("num_spare"));
  module.def(
      "plan_online",
      [](uintptr_t counts, uintptr_t spare, uintptr_t quota, uintptr_t loads, int num_ranks, int num_experts,
         int ranks_per_domain, int num_spare, double tolerance_factor, int device, uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_plan({pointer<int64_t>(counts), pointer<int64_t>(spare), pointer<int64_t>(quota),
                     pointer<int64_t>(loads), num_ranks, num_experts, ranks_per_domain, num_spare, tolerance_factor},
                    stream_of(stream));
      },
      py::kw_only(), py::arg("counts"), py::arg("spare"), py::arg("quota"), py::arg("loads"), py::arg("num_ranks"),
      py::arg("num_experts"), py::arg("ranks_per_domain"), py::arg("num_spare"), py::arg("tolerance_factor"),
      py::arg("device"), py::arg("stream"));
  module.attr("map_online_max_experts") = kMaxExperts;
  module.def(
      "map_online",
      [](uintptr_t counts, uintptr_t spare, uintptr_t quota, uintptr_t topk_idx, uintptr_t slots, int64_t num_copies,
         int num_ranks, int num_experts, int ranks_per_domain, int num_spare, int rank, int device, uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_map_online(
            {pointer<int64_t>(counts), pointer<int64_t>(spare), pointer<int64_t>(quota), pointer<int64_t>(topk_idx),
             pointer<int64_t>(slots), num_copies, num_ranks, num_experts, ranks_per_domain, num_spare, rank},
            stream_of(stream));
      },
      py::kw_only(), py::arg("counts"), py::arg("spare"), py::arg("quota"), py::arg("topk_idx"), py::arg("slots"),
      py::arg("num_copies"), py::arg("num_ranks"), py::arg("num_experts"), py::arg("ranks_per_domain"),
      py::arg("num_spare"), py::arg("rank"), py::arg("device"), py::arg("stream"));
  module.attr("max_replicas") = kMaxReplicas;
  module.attr("replica_routes_max_experts") = kMaxExperts;
  module.def(
      "replica_routes",
      [](uintptr_t mapping, uintptr_t sent, uintptr_t columns, uintptr_t arrived, uintptr_t homes, uintptr_t checksum,
         int num_mapped_ranks, int num_slots, int num_local, int num_sent, int num_ranks, int rank, int first_rank,
         int device, uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_replica_routes({pointer<int64_t>(mapping), pointer<int64_t>(sent), pointer<int64_t>(columns),
                               pointer<int64_t>(arrived), pointer<int64_t>(homes), pointer<int64_t>(checksum),
                               num_mapped_ranks, num_slots, num_local, num_sent, num_ranks, rank, first_rank},
                              stream_of(stream));
      },
      py::kw_only(), py::arg("mapping"), py::arg("sent"), py::arg("columns"), py::arg("arrived"), py::arg("homes"),
      py::arg("checksum"), py::arg("num_mapped_ranks"), py::arg("num_slots"), py::arg("num_local"), py::arg("num_sent"),
      py::arg("num_ranks"), py::arg("rank"), py::arg("first_rank"), py::arg("device"), py::arg("stream"));
  module.def(
      "take_experts",
      [](uintptr_t target, uintptr_t source, uintptr_t index, int64_t target_stride, int64_t source_stride,
         int64_t num_bytes, int num_items, int device, uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_take_experts({pointer<uint8_t>(target), pointer<uint8_t>(source), pointer<int64_t>(index), target_stride,
                             source_stride, num_bytes, num_items},
                            stream_of(stream));
      },
      py::kw_only(), py::arg("target"), py::arg("source"), py::arg("index"), py::arg("target_stride"),
      py::arg("source_stride"), py::arg("num_bytes"), py::arg("num_items"), py::arg("device"), py::arg("stream"));
}

}  // namespace hybrid_ep::bindings
