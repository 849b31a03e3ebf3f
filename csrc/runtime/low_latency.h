// One region of symmetric memory, and the low-latency calls that go through it.
//
// Calls are collective, in the same order at all ranks and on one stream at a time; the caller ensures that. Other
// calls may come between the two halves of a call. The first call of a size makes a plan, which the caller keeps for
// later calls. Nothing here allocates memory or synchronises the device.
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

// What a dispatch sends: as in SendTokensParams.
struct TokensOut {
  const uint8_t* rows;
  const int64_t* topk_idx;
  int num_tokens;
  const float* global_scale;
  uint32_t counter;
};

// Where a dispatch receives: as in ReceiveTokensParams.
struct TokensIn {
  uint8_t* rows;
  uint32_t* scales;
  int64_t* wait_stats;
};

// The rows of experts that a combine sends back to their sources. `results` are those of the dispatch.
struct RowsHome {
  const uint8_t* rows;
  int32_t* results;
  const float* topk_weights;
  int num_tokens;
  bool use_logfmt;
};

// What a combine sums: as in SumRowsParams. `results` are those of the dispatch.
struct RowsToSum {
  const int32_t* results;
  const int64_t* topk_idx;
  const float* topk_weights;
  uint8_t* out;
  int num_tokens;
  bool use_logfmt;
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

  // The two halves of dispatch and of combine, and each as a whole. `results` is memory as the plan lays it out;
  // kernels/low_latency/low_latency.h has the shapes of the rest. Wait statistics, scales and the global scale may be
  // nullptr.
  virtual void send_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensOut& tokens, int32_t* results,
                           cudaStream_t stream);
  virtual void receive_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensIn& tokens, int32_t* results,
                              cudaStream_t stream);
  virtual void dispatch_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensOut& out, const TokensIn& in,
                               int32_t* results, cudaStream_t stream);
  virtual void return_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsHome& rows, int min_tokens_to_sum,
                           int64_t* wait_stats, cudaStream_t stream);
  // Sends rows that experts still write, on num_sms SMs. No rows are summed before they cross.
  virtual void return_signalled_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsHome& rows,
                                     const ExpertSignals& signals, int num_sms, cudaStream_t stream);
  virtual void sum_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsToSum& rows, int64_t* wait_stats,
                        cudaStream_t stream);
  virtual void combine_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsHome& home, int min_tokens_to_sum,
                            const RowsToSum& to_sum, int64_t* wait_stats, cudaStream_t stream);

 protected:
  virtual RowTables tables_of(const LowLatencyPlan& plan, const int32_t* results) const {
    return {results + plan.results.row_of, results + plan.results.num_received};
  }
  // Returns the domain as a launch on the stream gets it: for one buffer of one kind of call.
  // *is_captured becomes whether the stream is being captured.
  LowLatencyDomain begin(const LowLatencyPlan& plan, LowLatencyKind kind, int buffer_idx, cudaStream_t stream,
                         bool* is_captured = nullptr);

  // `is_early`: as for launch_receive_tokens.
  void receive_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensIn& tokens, int32_t* results,
                      bool is_early, cudaStream_t stream);

  LowLatencyDomain domain_{};
  LowLatencyCapacity capacity_;
  int device_, num_device_sms_;
  uint64_t receive_timeout_ns_;  // of kernels that receive

 private:
  SendTokensParams params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain, const TokensOut& tokens,
                             int32_t* results) const;
  ReceiveTokensParams params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain, const TokensIn& tokens,
                                int32_t* results) const;
  ReturnRowsParams params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain, const RowsHome& rows,
                             int min_tokens_to_sum, int64_t* wait_stats) const;
  SumRowsParams params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain, const RowsToSum& rows,
                          int64_t* wait_stats) const;
  void fill(DispatchTokensParams& params, const LowLatencyPlan& plan, const LowLatencyDomain& domain) const;
  void fill(SendHomeParams& params, const LowLatencyPlan& plan, const LowLatencyDomain& domain,
            const RowsHome& rows) const;

  bool was_captured_ = false;
};

}  // namespace hybrid_ep
