// The low-latency calls of several domains over one region of symmetric memory and one link to the peers.
//
// A call launches the kernels of one domain, which address all ranks, and one kernel more, which ships rows to the
// peers or forwards those that have come from them: docs/internals/low_latency.md.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/link_kernels.h"
#include "runtime/low_latency.h"
#include "transport/proxy.h"

namespace hybrid_ep {

// What a dispatch leaves for the combine of the own domain, behind its other results, in int32 from their begin.
struct OwnTables {
  int64_t row_of;        // [R, M, K]
  int64_t num_received;  // [R]
  int64_t num_ints;      // of all results; a multiple of 2

  static OwnTables of(const LowLatencyPlan& plan);
};

class LowLatencyBetweenRegion final : public LowLatencyRegion {
 public:
  // `grid`: of the domains. `group_size`: ranks of a group, those of a domain or 1 (LowLatencyPeers). `memory` are the
  // regions of the own domain's ranks, of capacity.region_bytes() with LowLatencyBetweenControl behind it. The link
  // joins groups. It has two rings, of two slots each: LowLatencyKind numbers them. Communicator and proxy live longer
  // than the region.
  LowLatencyBetweenRegion(const Communicator& communicator, const Grid& grid, int group_size,
                          const std::vector<uintptr_t>& memory, const LowLatencyCapacity& capacity, bool takes_masks,
                          Proxy& proxy, const LinkKernels& kernels);

  bool covers(const LowLatencyPlan& plan) const override;
  int64_t num_ints(const LowLatencyPlan& plan) const override { return OwnTables::of(plan).num_ints; }
  void dispatch(const LowLatencyPlan& plan, const LowLatencyDispatch& call, Halves halves,
                cudaStream_t stream) override;
  void combine(const LowLatencyPlan& plan, const LowLatencyCombine& call, Halves halves, cudaStream_t stream) override;

 protected:
  RowTables tables_of(const LowLatencyPlan& plan, const int32_t* results) const override;

 private:
  void fill(LowLatencyBetweenParams& params, const LowLatencyPlan& plan, LowLatencyKind kind, int buffer_idx,
            cudaStream_t stream);
  void ship_tokens(const LowLatencyPlan& plan, const LowLatencyDispatch& call, cudaStream_t stream);
  void forward_tokens(const LowLatencyPlan& plan, const LowLatencyDispatch& call, cudaStream_t stream);
  ShipRowsParams ship_rows_params(const LowLatencyPlan& plan, const LowLatencyCombine& call, cudaStream_t stream);
  void send_rows(const LowLatencyPlan& plan, const LowLatencyCombine& call, cudaStream_t stream);
  void send_signalled_rows(const LowLatencyPlan& plan, const LowLatencyCombine& call, cudaStream_t stream);
  void forward_rows(const LowLatencyPlan& plan, const LowLatencyCombine& call, cudaStream_t stream);

  const LowLatencyPeers peers_;
  Proxy& proxy_;
  const LinkView link_;
  const LinkKernels kernels_;
};

}  // namespace hybrid_ep
