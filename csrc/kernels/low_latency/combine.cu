// Low-latency combine: a warp per segment of a row on the way out and some CTAs per token on the way in. They are CTAs
// of one kernel, those that send first, or with a hook of two.
//
//     rows[row_of[s, t, k]] ─► (several of one token: weighted sum) ─► row (t, k) in s's buffer ─ sent ─► sum_rows
//     topk_weights ─► every rank ─────────────────────┘
//     sum_rows: out[t] = Σ_k weight[t, k] × row (t, k), weight 1 where the row is a sum already
//
// The expert's rank stores each row where the source's sum reads it. Dispatch has recorded the packed row of each
// source, token and column.
//
// Partial sums: if a token has several experts on one rank, that rank sums their rows before they cross, into the first
// column. It needs the source's weights for this, so every rank sends its weights first. Other rows leave at once. Rows
// are not summed in two cases. The source has few tokens: waiting for weights would take longer than the saved bytes.
// The receive is a separate launch: such a send may not wait for another rank. Each rank decides alone, and publishes
// in its flag how many tokens a source must have for its rows to be sums.
//
// Signalled rows: the experts' kernel still runs, and signals each block of rows that it has written. A sending kernel
// of its own, on few SMs, takes the packed rows in order and waits for the signal of each block. Rows are not summed.
// If a signal does not come, this rank says so in its flag at every rank, and each rank reports it.
//
// kLogFmt: rows, and sums of rows, cross as LogFMT-10, which takes two thirds of the bytes.
// Legend: T tokens, K top-k, H hidden, M most tokens of a rank, R ranks, LE local experts.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/bf16.cuh"
#include "device/lanes.cuh"
#include "device/logfmt.cuh"
#include "device/low_latency.cuh"
#include "device/ptx/launch.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency/low_latency.h"
#include "kernels/low_latency/signalled_rows.cuh"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kReturnWarps = 16;  // of an SM
constexpr int kReturnStages = 6;  // of a warp
constexpr int kReturnRingBytes = kReturnWarps * kReturnStages * kSegmentBytes;
static_assert(kReturnRingBytes <= kDynamicSharedBytes);
constexpr int kCombineCtasPerSm = 2;  // of the kernel that sends and receives
constexpr int kCombineWarps = kReturnWarps / kCombineCtasPerSm;
constexpr int kCombineRingBytes = kReturnRingBytes / kCombineCtasPerSm;
constexpr int kWeightsInFlight = 8;                // 16-byte vectors of weights that a lane loads before it stores
constexpr int kSumThreads = 256;                   // a thread sums one 16-byte vector of a token
constexpr int kRowsInFlight = 8;                   // that a thread loads before it adds
static_assert(kSumThreads == kCombineWarps * 32);  // CTAs of one kernel
// NOTE: the first threads announce what other ranks wait for. The warps of return_rows that wait for ranks have none of
// these threads, or ranks would wait for each other.
template <int kWarps>
constexpr int kAnnouncingThreads = (kWarps - (kMaxRanks + 31) / 32) * 32;
static_assert(kAnnouncingThreads<kCombineWarps> > 0);

__host__ __device__ int segments_of(const LowLatencyShape& shape) {
  return (2 * shape.hidden + kSegmentBytes - 1) / kSegmentBytes;
}

__host__ __device__ int sum_ctas_of_token(const LowLatencyShape& shape) {
  return (2 * shape.hidden + kSumThreads * 16 - 1) / (kSumThreads * 16);
}

// Adds a weighted row to eight sums. Product and sum round separately, as every engine does.
__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4& row, float weight) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(bf16_low(words[i]), weight));
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(bf16_high(words[i]), weight));
  }
}

// The work item of a sending warp: one segment of a token's rows on this rank, or of their sum. Collective over the
// warp; lane i holds the i-th row.
struct Unit {
  int source, token;
  int begin, num_bytes;  // of each row
  int num_rows;
  int row, column;  // the packed row, and its column of top-k
  int num_fetched;

  // Units are in the order of tokens. Neighbouring units run on different SMs, and so go to different sources.
  static __device__ Unit find(const ReturnRowsParams& params, int index) {
    const LowLatencyShape& shape = params.shape;
    const int num_segments = segments_of(shape), lane = threadIdx.x % 32;
    const int pair = index / num_segments;
    Unit unit{};
    unit.source = pair % params.domain.num_ranks;
    unit.token = pair / params.domain.num_ranks;
    unit.begin = index % num_segments * kSegmentBytes;
    unit.num_bytes = min(kSegmentBytes, 2 * shape.hidden - unit.begin);
    int row = -1;
    if (unit.token < shape.max_tokens && lane < shape.num_topk) {
      row = params.row_of[(unit.source * shape.max_tokens + unit.token) * shape.num_topk + lane];
    }
    for (unsigned left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1) {
      if (lane == unit.num_rows++) unit.column = __ffs(left) - 1;
    }
    unit.row = __shfl_sync(kAllLanes, row, unit.column);
    return unit;
  }

  __device__ void fetch_next(const ReturnRowsParams& params, SegmentRing& ring) {
    if (num_fetched == num_rows) return;
    const int64_t its_row = __shfl_sync(kAllLanes, row, num_fetched++);
    ring.fetch(params.rows + its_row * 2 * params.shape.hidden + begin, num_bytes);
  }
  __device__ void fetch_ahead(const ReturnRowsParams& params, SegmentRing& ring) {
    for (int i = 0; i < ring.num_ahead(); ++i) fetch_next(params, ring);
  }
};

// The weights of a source's tokens at a rank: [M, K].
template <typename Params>
__device__ float* weights_of(const Params& params, int rank, int source) {
  return reinterpret_cast<float*>(buffer_of(params.domain, rank) + params.weights.begin +
                                  source * params.weights.rank_bytes);
}

// Sends this rank's weights to the other ranks, a warp to each, whether or not they sum. Few tokens need none. But a
// rank that goes along the handle of another dispatch may wait for them, so the flag is raised nevertheless.
template <typename Params>
__device__ void send_weights(const Params& params, const CtaOfRole& cta, const bool* present, uint32_t epoch) {
  const LowLatencyDomain& domain = params.domain;
  const int lane = threadIdx.x % 32;
  const bool has_few = params.num_tokens < kMinTokensToSum;
  // NOTE: the last vector may reach beyond the tensor, but not beyond the 16 bytes that its end is in.
  const int num_vectors = has_few ? 0 : (params.num_tokens * params.shape.num_topk + 3) / 4;
  const auto* weights = reinterpret_cast<const uint4*>(params.topk_weights);
  for (int r = cta.idx; r < domain.num_ranks; r += cta.count) {
    if (r == domain.rank || !present[r]) continue;
    auto* target = reinterpret_cast<uint4*>(weights_of(params, r, domain.rank));
    for (int first = lane; first < num_vectors; first += 32 * kWeightsInFlight) {
      uint4 vectors[kWeightsInFlight];
#pragma unroll
      for (int i = 0; i < kWeightsInFlight; ++i) {
        if (first + 32 * i < num_vectors) vectors[i] = ptx::load_streaming(weights + first + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < kWeightsInFlight; ++i) {
        if (first + 32 * i < num_vectors) target[first + 32 * i] = vectors[i];
      }
    }
    uint32_t* flag = &channel_of(domain, r).weights_epoch[domain.rank];
    __syncwarp();
    if (lane == 0 && has_few) ptx::store_relaxed_system(flag, epoch);
    if (lane == 0 && !has_few) ptx::store_release_system(flag, epoch);
  }
}

// Both halves of a call add to wait_stats, and may do so at once.
__device__ void add_to_wait_stats(int64_t* wait_stats, int rank, uint64_t started) {
  atomicAdd(reinterpret_cast<unsigned long long*>(wait_stats + rank), (ptx::clock_ns() - started) / 1000);
}

// Adds the time of waiting for each rank's weights to wait_stats; a thread per rank.
__device__ void note_waits(const ReturnRowsParams& params, const int* num_received, const Waiter& waiter,
                           uint32_t epoch) {
  const int r = threadIdx.x;
  if (r >= params.domain.num_ranks || r == params.domain.rank || num_received[r] < params.min_tokens_to_sum) return;
  const uint64_t started = ptx::clock_ns();
  wait_for_weights(params.domain, waiter, epoch, r);
  add_to_wait_stats(params.wait_stats, r, started);
}

// Sends a unit: its rows as they are, or their sum into the first column. Lane i has the weight of the i-th row. Loads
// of the first rows are in flight. Rows of a source that was given up are dropped. Collective over the warp.
template <bool kLogFmt>
__device__ void send_unit(const ReturnRowsParams& params, Unit& unit, bool is_present, bool is_sum, float weight,
                          SegmentRing& ring) {
  const int lane = threadIdx.x % 32, row_bytes = 2 * params.shape.hidden;
  uint8_t* target = buffer_of(params.domain, unit.source) + unit.begin +
                    static_cast<int64_t>(unit.token) * params.shape.num_topk * row_bytes;
  float sum[kVectorsPerLane][8] = {};
  for (int i = 0; i < unit.num_rows; ++i) {
    const int64_t column = __shfl_sync(kAllLanes, unit.column, is_sum ? 0 : i);
    const bool is_last = i + 1 == unit.num_rows;
    uint8_t* segment = ring.wait();
    if (is_sum) {
      const float its_weight = __shfl_sync(kAllLanes, weight, i);
#pragma unroll
      for (int v = 0; v < kVectorsPerLane; ++v) {
        auto* vector = reinterpret_cast<uint4*>(segment) + v * 32 + lane;
        add_weighted(sum[v], *vector, its_weight);
        if (is_last) *vector = round_to_bf16(sum[v]);
      }
      if (is_last) ptx::fence_shared_for_bulk();
      __syncwarp();
    }
    if constexpr (kLogFmt) {
      if (is_present && (!is_sum || is_last)) {
        const LogRow row{target - unit.begin + column * row_bytes, params.shape.hidden};
        send_as_logfmt(segment, row, unit.begin, unit.num_bytes);
      }
    } else if (lane == 0 && is_present && (!is_sum || is_last)) {
      ptx::bulk_store(target + column * row_bytes, segment, unit.num_bytes);
    }
    ring.release();
    unit.fetch_next(params, ring);
  }
}

template <bool kLogFmt, int kWarps>
__device__ __forceinline__ void return_rows(const ReturnRowsParams& params, const CtaOfRole& cta, uint8_t* stages) {
  __shared__ uint64_t barriers[kWarps * kReturnStages];
  __shared__ bool present[kMaxRanks];
  __shared__ int num_received[kMaxRanks];
  __shared__ uint32_t epoch, num_too_many;
  __shared__ LowLatencyNumber number;
  const LowLatencyDomain& domain = params.domain;
  const LowLatencyShape& shape = params.shape;
  const Waiter waiter = waiter_of_send(domain, KernelName::kLowLatencyCombine);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  SegmentRing ring(stages + warp * kReturnStages * kSegmentBytes, barriers + warp * kReturnStages, kReturnStages,
                   kSegmentBytes, lane);

  // The last warps wait for the ranks while the others load their first rows.
  const int peer = kWarps * 32 - 1 - tid;
  if (peer < domain.num_ranks) {
    const int received = params.num_received[peer], too_many = *params.num_too_many;
    const LowLatencyNumber its_number = *params.number;
    const uint32_t this_epoch = next_epoch(channel_of(domain, domain.rank).send);
    present[peer] = wait_until_free(domain, waiter, this_epoch, peer);
    num_received[peer] = received;
    if (peer == 0) {
      epoch = this_epoch;
      num_too_many = too_many;
      number = its_number;
    }
  }
  __syncwarp();
  int index = warp * cta.count + cta.idx;
  Unit unit = Unit::find(params, index);
  unit.fetch_ahead(params, ring);
  if (cta.idx == 0) announce_free_buffers(domain, kAnnouncingThreads<kWarps>);
  __syncthreads();
  if (warp == kWarps - 1) send_weights(params, cta, present, epoch);  // this warp gets the fewest units
  if (params.wait_stats != nullptr && cta.idx == 0) note_waits(params, num_received, waiter, epoch);
  __syncwarp();

  bool has_lost = peer < domain.num_ranks && !present[peer];  // other CTAs may have sent to that rank
  int max_tokens = 0;
  for (int r = lane; r < domain.num_ranks; r += 32) max_tokens = max(max_tokens, num_received[r]);
  const int num_units = __reduce_max_sync(kAllLanes, max_tokens) * domain.num_ranks * segments_of(shape);
  while (index < num_units) {
    index += cta.count * kWarps;
    Unit next{};
    if (index < num_units) next = Unit::find(params, index);  // while the rows come
    const bool is_sum = unit.num_rows > 1 && num_received[unit.source] >= params.min_tokens_to_sum;
    bool is_present = present[unit.source];
    float weight = 0;
    if (is_sum && is_present) {
      const bool is_local = unit.source == domain.rank;
      is_present = is_local || wait_for_weights(domain, waiter, epoch, unit.source);
      is_present = __all_sync(kAllLanes, is_present);
      has_lost |= !is_present;
      const int position = unit.token * shape.num_topk + unit.column;
      const float* weights = is_local ? params.topk_weights : weights_of(params, domain.rank, unit.source);
      if (is_present && lane < unit.num_rows) weight = __ldcg(weights + position);
    }
    send_unit<kLogFmt>(params, unit, is_present, is_sum, weight, ring);
    unit = next;
    unit.fetch_ahead(params, ring);
  }
  if (lane == 0) ptx::bulk_wait_written<0>();
  const auto value = [&] {
    return num_too_many != 0 ? kTooManyRowsBit | num_too_many : params.min_tokens_to_sum | (kLogFmt ? kLogFmtBit : 0);
  };
  finish_send(domain, present, epoch, value, number, has_lost, cta.count);
}

template <bool kLogFmt>
__global__ void __launch_bounds__(kReturnWarps * 32, 1)
    return_rows_kernel(const __grid_constant__ ReturnRowsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  ptx::allow_next_kernel();
  return_rows<kLogFmt, kReturnWarps>(params, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}, stages);
}

template <bool kLogFmt>
__global__ void __launch_bounds__(kReturnWarps * 32, 1)
    return_signalled_rows_kernel(const __grid_constant__ ReturnSignalledRowsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t barriers[kReturnWarps * kReturnStages];
  __shared__ bool present[kMaxRanks];
  __shared__ uint32_t epoch;
  __shared__ Piece pieces[kReturnWarps][kReturnStages];
  const CtaOfRole cta{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  const LowLatencyDomain& domain = params.domain;
  const Waiter waiter = waiter_of_send(domain, KernelName::kLowLatencyCombine);
  LowLatencyChannel& channel = channel_of(domain, domain.rank);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  SegmentRing ring(stages + warp * kReturnStages * kSegmentBytes, barriers + warp * kReturnStages, kReturnStages,
                   kSegmentBytes, lane);
  const int peer = kReturnWarps * 32 - 1 - tid;
  if (peer < domain.num_ranks) {
    const uint32_t this_epoch = next_epoch(channel.send);
    present[peer] = wait_until_free(domain, waiter, this_epoch, peer);
    if (peer == 0) epoch = this_epoch;
  }
  if (cta.idx == 0) announce_free_buffers(domain, kAnnouncingThreads<kReturnWarps>);
  __syncthreads();
  if (warp == kReturnWarps - 1) send_weights(params, cta, present, epoch);  // other ranks may sum

  // Loads run ahead as far as signals have been raised. Loaded rows are sent before the warp waits for a signal.
  SignalledRows rows(params, cta.idx * kReturnWarps + warp, cta.count * kReturnWarps);
  int num_fetched = 0, num_sent = 0;
  while (rows.has_next() || num_sent < num_fetched) {
    while (rows.has_next() && num_fetched - num_sent < ring.num_ahead()) {
      const bool waits = num_fetched == num_sent;
      if (rows.is_raised(waiter, waits)) {
        const Piece piece = rows.fetch(ring, present);
        if (lane == 0) pieces[warp][num_fetched % kReturnStages] = piece;
        ++num_fetched;
      } else if (waits) {
        if (lane == 0) atomicCAS(&channel.no_signal, 0u, kNoSignalBit | static_cast<uint32_t>(rows.signal_idx()));
        rows.give_up();
      } else {
        break;
      }
    }
    if (num_sent == num_fetched) break;
    uint8_t* segment = ring.wait();
    const Piece& piece = pieces[warp][num_sent % kReturnStages];
    if constexpr (kLogFmt) {
      __syncwarp();
      if (piece.target != nullptr) {
        const LogRow row{piece.target - piece.begin, params.shape.hidden};
        send_as_logfmt(segment, row, piece.begin, piece.num_bytes);
      }
    } else if (lane == 0) {
      if (piece.target != nullptr) ptx::bulk_store(piece.target, segment, piece.num_bytes);
    }
    ring.release();
    ++num_sent;
  }
  if (lane == 0) ptx::bulk_wait_written<0>();
  const bool has_lost = peer < domain.num_ranks && !present[peer];
  const auto value = [&] {
    const uint32_t no_signal = channel.no_signal;
    channel.no_signal = 0;
    if (no_signal != 0) return no_signal;
    const uint32_t num_too_many = *params.num_too_many;
    return num_too_many != 0 ? kTooManyRowsBit | num_too_many : kNoSums | (kLogFmt ? kLogFmtBit : 0);
  };
  finish_send(domain, present, epoch, value, *params.number, has_lost, cta.count);
}

// The columns of a token whose rows are summed here, in order.
struct Terms {
  int count;
  int column[kMaxTopk];
  float weight[kMaxTopk];
};

// Finds them: one warp, a lane per column, which has loaded the expert and the weight of its column. Of several columns
// whose rows a rank has summed, the first one counts, with weight 1.
__device__ void find_terms(const SumRowsParams& params, const bool* present, const bool* has_summed, int64_t expert,
                           float weight, Terms& terms) {
  const int lane = threadIdx.x % 32;
  if (expert >= params.shape.num_experts) expert = -1;  // dispatch reports it
  const int rank = expert >= 0 ? ExpertMap{params.shape.num_experts, params.domain.num_ranks}.rank_of(expert) : -1;
  bool counts = rank >= 0 && present[rank];
  const unsigned same_rank = __match_any_sync(kAllLanes, rank);
  if (counts && has_summed[rank] && __popc(same_rank) > 1) {
    counts = __ffs(same_rank) - 1 == lane;
    weight = 1;
  }
  const unsigned chosen = __ballot_sync(kAllLanes, counts);
  if (counts) {
    const int i = __popc(chosen & ((1u << lane) - 1));
    terms.column[i] = lane;
    terms.weight[i] = weight;
  }
  if (lane == 0) terms.count = __popc(chosen);
}

// Reports why a rank has not sent all rows, as the value of its flag says. A rank that has refused the call reports
// nothing.
__device__ __noinline__ void report_unsent(const SumRowsParams& params, int rank, uint32_t value) {
  const LowLatencyDomain& domain = params.domain;
  if (params.number->call == 0) return;
  if (value >= kRefusedBits) {
    report_fault(domain.fault, FaultKind::kRefused, KernelName::kLowLatencyCombine, WaitTag::kPartialRows, domain.rank,
                 rank, 0, value - kRefusedBits);
  } else if (value >= kNoSignalBit) {
    report_fault(domain.fault, FaultKind::kNoSignal, KernelName::kLowLatencyCombine, WaitTag::kSignals, domain.rank,
                 rank, 0, value - kNoSignalBit);
  } else if (rank != domain.rank) {  // which dispatch has reported
    report_fault(domain.fault, FaultKind::kOverflow, KernelName::kLowLatencyDispatch, WaitTag::kRows, domain.rank, rank,
                 params.shape.max_tokens * domain.num_ranks, value - kTooManyRowsBit);
  }
}

// Sums 16 bytes of a token's rows, from `rows` on.
__device__ __forceinline__ void sum_rows(const SumRowsParams& params, const uint8_t* rows, const Terms& terms,
                                         float (&sum)[8]) {
  const int row_bytes = 2 * params.shape.hidden;
  for (int first = 0; first < terms.count; first += kRowsInFlight) {
    uint4 row[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (first + i < terms.count) {
        row[i] = ptx::load_streaming(rows + static_cast<int64_t>(terms.column[first + i]) * row_bytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (first + i < terms.count) add_weighted(sum, row[i], terms.weight[first + i]);
    }
  }
}

// Sums eight channels of a token's rows that crossed as LogFMT. `vector` is the index of the channels in a row, `rows`
// the token's rows.
__device__ void sum_logfmt_rows(const SumRowsParams& params, uint8_t* rows, int vector, const Terms& terms,
                                float (&sum)[8]) {
  const int hidden = params.shape.hidden;
  for (int first = 0; first < terms.count; first += kRowsInFlight) {
    LogCodes codes[kRowsInFlight];
    LogHeader headers[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (first + i < terms.count) {
        const LogRow row{rows + static_cast<int64_t>(terms.column[first + i]) * 2 * hidden, hidden};
        const auto* lower = reinterpret_cast<const uint32_t*>(row.lower(vector));
        const auto* header = reinterpret_cast<const float*>(row.header(vector));
        codes[i] = {make_uint2(__ldcg(lower), __ldcg(lower + 1)), __ldcg(row.upper(vector))};
        headers[i] = {__ldcg(header), __ldcg(header + 1)};
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (first + i < terms.count) add_weighted(sum, codes[i], headers[i], terms.weight[first + i]);
    }
  }
}

// Whether a rank's rows can be used; `words` are its LowLatencySent. Reports why not: they are of another dispatch, or
// in another format than this rank's call asks for.
template <bool kLogFmt>
__device__ bool is_same_call(const SumRowsParams& params, const LowLatencyNumber& own, int rank, const uint4& words) {
  const auto report = [&](CallField field, int64_t mine, int64_t theirs) {
    if (own.call == 0) return false;  // this rank refuses the call
    report_other_call(params.domain.fault, KernelName::kLowLatencyCombine, field, params.domain.rank, rank, mine,
                      theirs);
    return false;
  };
  if (words.y != own.call || words.z != own.counter) {
    return report(CallField::kHandle, as_one(own.call, own.counter), as_one(words.y, words.z));
  }
  if ((words.x & kLogFmtBit) != (kLogFmt ? kLogFmtBit : 0)) return report(CallField::kLogFmt, kLogFmt, !kLogFmt);
  return true;
}

// Item i is a part of token i % T.
template <bool kLogFmt, bool kBesideSend>
__device__ __forceinline__ void sum_tokens(const SumRowsParams& params, const CtaOfRole& cta) {
  __shared__ bool present[kMaxRanks], has_summed[kMaxRanks];
  __shared__ Terms terms;
  const LowLatencyDomain& domain = params.domain;
  LowLatencyProgress& progress = channel_of(domain, domain.rank).receive;
  const Waiter waiter(domain.fault, KernelName::kLowLatencyCombine, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, row_bytes = 2 * params.shape.hidden;
  const int num_items = params.num_tokens * sum_ctas_of_token(params.shape);
  uint32_t epoch = 0;  // of the threads that wait for a rank
  int64_t expert = -1;
  float weight = 0;
  const auto load_columns = [&](int item) {
    if (tid >= params.shape.num_topk || item >= num_items) return;
    const int64_t position = static_cast<int64_t>(item % params.num_tokens) * params.shape.num_topk + tid;
    expert = params.topk_idx[position];
    weight = params.topk_weights[position];
  };
  load_columns(cta.idx);
  if (tid < domain.num_ranks) {
    const LowLatencyNumber number = *params.number;
    uint4 sent = make_uint4(kLogFmt ? kLogFmtBit : 0, number.call, number.counter, 0);
    epoch = next_epoch(progress);
    // Every send waits for the weights of a late rank. That time is not counted for the other ranks.
    if (uint4 own; params.wait_stats != nullptr) wait_until_sent(domain, waiter, epoch, domain.rank, &own);
    const uint64_t started = ptx::clock_ns();
    const bool has_come = wait_until_sent(domain, waiter, epoch, tid, &sent);
    present[tid] = decide(domain, epoch, tid, has_come);
    if (present[tid] && !has_come) sent = ptx::load_acquire_system(sent_of(domain, domain.rank, tid));
    if (present[tid] && sent.x >= kTooManyRowsBit) {
      present[tid] = false;
      report_unsent(params, tid, sent.x);
    } else if (present[tid]) {
      present[tid] = is_same_call<kLogFmt>(params, number, tid, sent);
    }
    has_summed[tid] = params.num_tokens >= static_cast<int>(sent.x & kNoSums);
    if (params.wait_stats != nullptr && cta.idx == 0) add_to_wait_stats(params.wait_stats, tid, started);
  }
  if constexpr (!kBesideSend) ptx::wait_for_previous_kernel();
  __syncthreads();
  for (int item = cta.idx; item < num_items; item += cta.count) {
    if (tid < 32) find_terms(params, present, has_summed, expert, weight, terms);
    __syncthreads();
    load_columns(item + cta.count);
    const int64_t token = item % params.num_tokens;
    const int offset = (item / params.num_tokens * kSumThreads + tid) * 16;
    if (offset < row_bytes) {
      uint8_t* rows = buffer_of(domain, domain.rank) + token * params.shape.num_topk * row_bytes;
      float sum[8] = {};
      if constexpr (kLogFmt) {
        sum_logfmt_rows(params, rows, offset / 16, terms, sum);
      } else {
        sum_rows(params, rows + offset, terms, sum);
      }
      *reinterpret_cast<uint4*>(params.out + token * row_bytes + offset) = round_to_bf16(sum);
    }
    __syncthreads();
  }
  finish_quietly(progress, epoch, cta.count);
}

template <bool kLogFmt>
__global__ void __launch_bounds__(kSumThreads, kLogFmt ? 3 : 4)
    sum_rows_kernel(const __grid_constant__ SumRowsParams params) {
  sum_tokens<kLogFmt, false>(params, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)});
}

struct ReturnAndSumParams {
  ReturnRowsParams send;
  SumRowsParams sum;
  int num_send_ctas;
};

// Both halves of a call: the first CTAs send, the others sum what arrives. Only the others wait for whole ranks.
template <bool kLogFmt>
__global__ void __launch_bounds__(kSumThreads, kCombineCtasPerSm)
    combine_rows_kernel(const __grid_constant__ ReturnAndSumParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  const int num_sends = params.num_send_ctas, idx = blockIdx.x;
  if (idx < num_sends) {
    return_rows<kLogFmt, kCombineWarps>(params.send, {idx, num_sends}, stages);
  } else {
    sum_tokens<kLogFmt, true>(params.sum, {idx - num_sends, static_cast<int>(gridDim.x) - num_sends});
  }
}

// By whether rows cross as LogFMT.
constexpr void (*kReturnKernels[])(ReturnRowsParams) = {return_rows_kernel<false>, return_rows_kernel<true>};
constexpr void (*kReturnSignalledKernels[])(ReturnSignalledRowsParams) = {return_signalled_rows_kernel<false>,
                                                                          return_signalled_rows_kernel<true>};
constexpr void (*kSumKernels[])(SumRowsParams) = {sum_rows_kernel<false>, sum_rows_kernel<true>};
constexpr void (*kCombineKernels[])(ReturnAndSumParams) = {combine_rows_kernel<false>, combine_rows_kernel<true>};

// At least one: a refused call has no tokens, and a CTA publishes the refusal.
int num_units(const ReturnRowsParams& params) {
  return std::max(1, params.shape.max_tokens * params.domain.num_ranks * segments_of(params.shape));
}

int num_sum_ctas(const SumRowsParams& params) {
  return std::max(1, params.num_tokens) * sum_ctas_of_token(params.shape);
}

}  // namespace

void prepare_low_latency_combine() {
  for (const auto kernel : kReturnKernels) allow_shared_memory(kernel);
  for (const auto kernel : kReturnSignalledKernels) allow_shared_memory(kernel);
  for (const auto kernel : kCombineKernels) allow_shared_memory(kernel);
}

void launch_return_rows(const ReturnRowsParams& params, int num_device_sms, cudaStream_t stream) {
  launch_kernel(LaunchKind::kPlain, kReturnKernels[params.use_logfmt], params,
                std::min(num_device_sms, num_units(params)), kReturnWarps * 32, kReturnRingBytes, stream);
}

void launch_return_signalled_rows(const ReturnSignalledRowsParams& params, int num_sms, cudaStream_t stream) {
  launch_kernel(LaunchKind::kPlain, kReturnSignalledKernels[params.use_logfmt], params, num_sms, kReturnWarps * 32,
                kReturnRingBytes, stream);
}

void launch_sum_rows(const SumRowsParams& params, cudaStream_t stream) {
  launch_kernel(LaunchKind::kEarly, kSumKernels[params.use_logfmt], params, num_sum_ctas(params), kSumThreads, 0,
                stream);
}

void launch_combine_rows(const ReturnRowsParams& send, const SumRowsParams& sum, int num_device_sms,
                         cudaStream_t stream) {
  const int most = kCombineCtasPerSm * num_device_sms, num_sends = std::min(most, num_units(send));
  launch_kernel(LaunchKind::kPlain, kCombineKernels[send.use_logfmt], ReturnAndSumParams{send, sum, num_sends},
                num_sends + std::min(most, num_sum_ctas(sum)), kSumThreads, kCombineRingBytes, stream);
}

}  // namespace hybrid_ep
