// One region of symmetric memory, and the low-latency calls that go through it.
//
// Calls are collective, in the same order at all ranks and on one stream at a time; the caller ensures that. Other
// calls may come between the two halves of a call. Each dispatch makes a plan, which its combine reads. Nothing here
// allocates memory or synchronises the device.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/low_latency/low_latency.h"
#include "runtime/communicator.h"

namespace hybrid_ep {

// What a dispatch leaves beside its rows, in one piece of memory: where each part begins, in int32. Legend: LE local
// experts, R ranks, M most tokens of a rank, K top-k.
struct LowLatencyResults {
  int64_t layout_range = 0;  // [LE, R] int64, first for its alignment
  int64_t counts;            // [LE]
  int64_t src_info;          // [LE, M×R]
  int64_t row_of;            // [R, M, K]
  int64_t num_received;      // [R]
  int64_t num_too_many;      // [1]
  int64_t number;            // [1] LowLatencyNumber
  int64_t num_ints;          // a multiple of 2

  static LowLatencyResults of(const LowLatencyShape& shape, int num_ranks);
};

struct LowLatencyPlan {
  int num_ranks;
  LowLatencyShape shape;
  ScaleFormat format;
  LowLatencyMessage message;
  LowLatencyWeights weights;
  LowLatencyCapacity capacity;
  LowLatencyResults results;
  LowLatencyCall call;

  static LowLatencyPlan of(const LowLatencyShape& shape, ScaleFormat format, int num_ranks);
  // The plan of a call that this rank refuses. It sends nothing but the number (≥ 1) of the refusal.
  static LowLatencyPlan refused(int num_ranks, uint32_t number);
  // The plan of a call without tokens that publishes this one. It needs no memory of a region but flags.
  LowLatencyPlan compared() const;
};

// Which kernels of a call are launched.
enum class Halves { kSend, kReceive, kBoth };

// A dispatch; kernels/low_latency/low_latency.h has the shapes. `results` is memory as the plan lays it out.
struct LowLatencyDispatch {
  int buffer_idx;
  // What the send reads: as in SendTokensParams.
  const uint8_t* rows;
  const int64_t* topk_idx;
  int num_tokens;
  const float* global_scale;  // nullptr unless rows are NVFP4
  uint32_t counter;
  // What the receive writes: as in ReceiveTokensParams. Scales and wait statistics may be nullptr.
  uint8_t* received_rows;
  uint32_t* received_scales;
  int64_t* wait_stats;
  int32_t* results;
};

// A combine. `results` are those of the dispatch.
struct LowLatencyCombine {
  int buffer_idx;
  int32_t* results;
  const float* topk_weights;
  int num_tokens;
  bool use_logfmt;
  int64_t* wait_stats;  // may be nullptr
  // What the send reads: as in ReturnRowsParams.
  const uint8_t* rows;
  int min_tokens_to_sum;
  // Of experts that still write the rows: with them the send takes num_sms SMs, and no rows are summed before they
  // cross. Without: signals.raised is nullptr.
  ExpertSignals signals;
  int num_sms;
  // What the receive reads and writes: as in SumRowsParams.
  const int64_t* topk_idx;
  uint8_t* out;
};

// The tables of a dispatch that a combine looks up: as in SendHomeParams and ReturnRowsParams.
struct RowTables {
  const int32_t *row_of, *num_received;
};

const LowLatencyNumber* number_of(const LowLatencyPlan& plan, const int32_t* results);

class LowLatencyRegion {
 public:
  // `memory` are the ranks' regions as this process maps them, each of capacity.region_bytes() and zero before any rank
  // makes its first call. `takes_masks`: ranks may be masked; equal at all ranks. The communicator lives longer than
  // the region.
  LowLatencyRegion(const Communicator& communicator, const std::vector<uintptr_t>& memory,
                   const LowLatencyCapacity& capacity, bool takes_masks);
  virtual ~LowLatencyRegion() = default;

  virtual bool covers(const LowLatencyPlan& plan) const { return capacity_.covers(plan.capacity); }

  // Whether a stream is being captured.
  bool is_capturing(cudaStream_t stream) const;
  // Whether a captured stream has used the region. Then a graph may hold its addresses.
  bool was_captured() const { return was_captured_; }

  // Memory that a dispatch needs for its results, in int32.
  virtual int64_t num_ints(const LowLatencyPlan& plan) const { return plan.results.num_ints; }

  // Each launches a call, or a half of it.
  virtual void dispatch(const LowLatencyPlan& plan, const LowLatencyDispatch& call, Halves halves, cudaStream_t stream);
  virtual void combine(const LowLatencyPlan& plan, const LowLatencyCombine& call, Halves halves, cudaStream_t stream);

 protected:
  virtual RowTables tables_of(const LowLatencyPlan& plan, const int32_t* results) const {
    return {results + plan.results.row_of, results + plan.results.num_received};
  }
  // Returns the domain as a launch on the stream gets it: for one buffer of one kind of call.
  // *is_captured becomes whether the stream is being captured.
  LowLatencyDomain begin(const LowLatencyPlan& plan, LowLatencyKind kind, int buffer_idx, cudaStream_t stream,
                         bool* is_captured = nullptr);

  // `is_early`: as for launch_receive_tokens.
  void receive_tokens(const LowLatencyPlan& plan, const LowLatencyDispatch& call, bool is_early, cudaStream_t stream);

  LowLatencyDomain domain_{};
  LowLatencyCapacity capacity_;
  int device_, num_device_sms_;
  uint64_t receive_timeout_ns_;  // of kernels that receive

 private:
  void return_signalled_rows(const LowLatencyPlan& plan, const LowLatencyDomain& domain, const LowLatencyCombine& call,
                             cudaStream_t stream) const;
  SendTokensParams send_tokens_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                      const LowLatencyDispatch& call) const;
  ReceiveTokensParams receive_tokens_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                            const LowLatencyDispatch& call) const;
  ReturnRowsParams return_rows_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                      const LowLatencyCombine& call) const;
  SumRowsParams sum_rows_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                const LowLatencyCombine& call) const;
  void fill(DispatchTokensParams& params, const LowLatencyPlan& plan, const LowLatencyDomain& domain) const;
  void fill(SendHomeParams& params, const LowLatencyPlan& plan, const LowLatencyDomain& domain,
            const LowLatencyCombine& call) const;

  bool was_captured_ = false;
};

}  // namespace hybrid_ep
