// One parameter struct per kernel, filled by the runtime. Legend: T tokens of this rank, K top-k, E experts, LE local
// experts, R ranks, N received rows, P permuted rows, H hidden, W columns of weights.
#pragma once

#include <cstdint>

#include "layout/control_block.h"
#include "layout/fault.h"
#include "layout/slot_layout.h"

namespace hybrid_ep {

// What the host reads when it must know sizes: pinned memory, one per communicator.
struct HostCounts {
  uint32_t started;          // epoch of the call whose kernel runs; stored relaxed
  uint32_t epoch;            // of the call that wrote the rest; stored last, with release at system scope
  int32_t status;            // CallStatus
  int32_t num_recv;          // N of this rank
  int32_t num_permuted;      // P of this rank; 0 for a plain dispatch
  int32_t num_sent_away;     // rows that this rank sends to others
  int32_t num_kept;          // rows that this rank sends to itself
  int32_t max_recv;          // most rows that any rank receives
  int32_t max_sent;          // most rows that any rank sends
  int32_t max_rows;          // most rows that any rank's slot must hold
  int32_t num_sent_between;  // tokens that this rank sends to other domains, once for each; 0 within a domain
  int32_t max_held;          // most records of other domains that any rank forwards; 0 within a domain
  int32_t num_tokens_per_expert[kMaxExperts];
};
// The most slots that the pool of any rank needs, as each of the last dispatches has found it: slots << 32 | number of
// the call, which the host counts. Pinned memory, stored relaxed. The host reads the word of the dispatch
// kPoolReportLag calls before (docs/cuda_engine.md#memory).
constexpr int kPoolReportLag = 8;
struct PoolReports {
  uint64_t words[kPoolReportLag];
};
enum CallStatus : int32_t { kSent = 0, kNeedsCapacity = 1, kFailed = 2 };

// The ranks of a domain and what one call may use of their memory.
struct Domain {
  int rank, num_ranks;
  uint64_t timeout_ns;
  FaultRecord* fault;
  int64_t slot_bytes;
  int arena_number;  // of the arena below, equal at all ranks; a CUDA graph keeps both
  ControlBlock* control[kMaxRanks];
  uint8_t* arena[kMaxRanks];
};

// Parameters of a dispatch, inside a domain as between domains.
struct CommonDispatchParams {
  // What is sent.
  const uint8_t* rows;              // [T, row_bytes]
  const int64_t* topk_idx;          // [T, K]; nullptr: the route of an earlier dispatch is used
  const float* topk_weights;        // [T, K] or nullptr
  const uint32_t* scales;           // [T, num_scales] 4-byte words or nullptr
  const int64_t* mapping_checksum;  // [1] where rows are of experts, else nullptr
  int num_tokens, num_topk, num_experts, row_bytes, num_scales;
  bool has_weights;  // at every rank, also at one whose topk_weights is empty and therefore nullptr
  // Experts that a receiver sees: [range_first + r × range_step, … + range_size) at rank r; others become −1.
  int range_first, range_step, range_size;
  // Where this rank's rows land.
  int row_limit;
  bool is_bounded;   // rows beyond the limit are dropped; otherwise all ranks grow their slots where one is too small
  int common_bound;  // of a bound call: rows that each slot must hold, otherwise no rank sends
  int max_tokens;    // most tokens that a rank may have; otherwise no rank sends
  SlotLayout slot;
  HostCounts* host_counts;  // nullptr: the host does not wait
  uint32_t counts_epoch;
};

struct DispatchParams : CommonDispatchParams {
  Domain domain;
  int32_t call[CountRow::kNumCallColumns];  // what is published of the call, but for the checksum of a mapping
  // Expert-major output: rows of an expert begin at a multiple of pad_multiple. 0: rows by source rank and token.
  int pad_multiple;
  // The route: written, or read when topk_idx is nullptr.
  int32_t* send_slot;    // [T, R] index among what this rank sends to r, or −1
  int32_t* send_list;    // [R, T] the token at each index
  int32_t* dst_row;      // [T, R] row at r, expert-major output only, or −1
  int32_t* rank_prefix;  // [R, R] rows that ranks 0…i send to j
  // Written unless the route is read.
  int64_t* kept_topk_idx;          // [T, K] a copy for the handle, for the caller may overwrite topk_idx
  int32_t* expert_row;             // [T, K] scratch, expert-major output only: row of each copy at its rank, or −1
  int32_t* num_tokens_per_expert;  // [LE], padding included
  int64_t* returned_counts;        // [LE] the same for the caller, expert-major output only
  int32_t* overflow;               // [1], or nullptr
  bool reports_overflow;           // at every rank, as a fault
  uint64_t* pool_report;           // the word of PoolReports that this call writes; nullptr in a graph
  uint32_t pool_call;              // its number
  // Shape of the launch.
  int num_send_warps, num_stages;
  int rings_begin;     // in dynamic shared memory
  bool rings_overlap;  // the expert counters: nothing is loaded before these are done with
};

// The sums that a combine from experts makes before it sends: rows of a token's experts on this rank, added in
// ascending order of experts and rounded once.
struct ExpertRowParams {
  const uint8_t* rows;     // [P, H] bf16
  const float* probs;      // [P] or nullptr
  const int32_t* dst_row;  // [N, K] row of each copy, or −1
  uint8_t* sums;           // [N, H] bf16; what the combine takes as its rows
  float* sum_weights;      // [N, K] or nullptr; the weights of each sum, in the columns of its experts
  uint32_t* row_epoch;     // [N] the combine that has last written the sum: release at GPU scope, acquire
  int num_topk, row_limit;
};

// Parameters of a combine, inside a domain as between domains.
struct CommonCombineParams {
  const uint8_t* rows;     // [N, H] bf16
  const float* weights;    // [N, W] or nullptr
  const uint8_t* bias[2];  // [T, H] bf16 or nullptr
  uint8_t* out;            // [T, H] bf16
  float* out_weights;      // [T, W] or nullptr
  int num_tokens, num_rows, row_bytes;
  int num_weights;  // W, 0 without weights; > 0 at every rank, also at one that has no rows and therefore no pointer
  uint32_t call[kNumReadyWords];  // what is published of the call: equal at all ranks, otherwise no rank sends
  SlotLayout slot;                // `rows` and `weights` of the partial rows at the rank that sums them
  int window_bytes;               // of stores on the wire at once; 0: not limited
};

struct CombineParams : CommonCombineParams {
  Domain domain;
  const int32_t* send_slot;    // [T, R]
  const int32_t* rank_prefix;  // [R, R]
  ExpertRowParams experts;
  int num_sms;  // that send and sum; further ones sum rows of experts
};

// Expert-major rows: makes the further copies of a row that has several local experts, and what the push does not
// write.
struct DuplicateParams {
  uint8_t* rows;                         // [P, row_bytes]; the lowest copy of each row is there
  const int32_t* dst_row;                // [N, K] row of each copy, or −1
  int32_t* kept_dst_row;                 // [N, K] a copy of dst_row for the handle, or nullptr where both are the same
  uint32_t* row_epoch;                   // [N] set to 0 along with kept_dst_row: no combine has summed the row
  const float* weights;                  // [N, K] or nullptr
  const uint32_t* scales;                // [N, num_scales] or nullptr
  float* probs;                          // [P] or nullptr
  uint32_t* permuted_scales;             // [P, num_scales] or nullptr
  const int32_t* rank_prefix;            // [R, R], for N
  const int32_t* num_tokens_per_expert;  // [LE], padding included
  const int32_t* num_rows_per_expert;    // [LE], padding not included
  int rank, num_ranks, num_topk, num_local_experts, row_bytes, num_scales;
  int row_limit;   // rows of the output
  int recv_limit;  // rows of dst_row
};

// Counts of this rank's tokens, for `get_dispatch_layout`.
struct LayoutParams {
  const int64_t* topk_idx;  // [T, K]
  int32_t* totals;          // [R + D + E] tokens per rank, per domain and per expert
  bool* is_token_in_rank;   // [T, R]
  int num_tokens, num_topk, num_experts, num_ranks, num_ranks_per_domain;
};

// Weights in the columns of a top-k, and probabilities of all experts, which name the same values.
struct ProbsParams {
  const int64_t* topk_idx;  // [T, K]; what is no expert has no value
  float* weights;           // [T, K], 0 where no expert is named
  float* probs;             // [T, E], 0 where an expert is not named
  int num_tokens, num_topk, num_experts;
  bool adds_columns;  // the probability is the sum of the columns that name an expert; otherwise they have equal values
};

}  // namespace hybrid_ep
