// The send of a low-latency combine while experts still write their rows: warps take the packed rows in the order in
// which experts write them, and wait for signals. Legend: combine.cu.
#pragma once

#include "kernels/low_latency/return_rows.cuh"

namespace hybrid_ep {
namespace {

// A segment of a packed row that is being loaded, and its destination.
struct Piece {
  uint8_t* target;  // nullptr: to a rank that takes no part
  int num_bytes;
  int begin;  // in the row
};

// Iterates over the packed rows, a segment at a time, in the order in which experts write them. Collective over the
// warp.
class SignalledRows {
 public:
  __device__ SignalledRows(const ReturnSignalledRowsParams& params, int first, int step)
      : params_(params), step_(step), next_(first), expert_(-1) {
    enter_next_expert();
  }

  __device__ bool has_next() const { return expert_ < num_local(); }

  // Returns whether the next segment's signal has been raised. With `waits` it waits for the signal first.
  __device__ bool is_raised(const Waiter& waiter, bool waits) {
    const int row = next_ / num_segments();
    if (row < num_raised_) return true;
    const uint32_t* signal = params_.signals.raised + signal_idx();
    bool raised = false;
    if (threadIdx.x % 32 == 0) {
      raised = waits ? waiter.until_raised(signal, params_.signals.expected)
                     : Waiter::has_been_raised(signal, params_.signals.expected);
      if (raised) ptx::fence_global_for_bulk();
    }
    raised = __shfl_sync(kAllLanes, raised, 0);
    if (raised) num_raised_ = (row / params_.signals.rows_per_signal + 1) * params_.signals.rows_per_signal;
    return raised;
  }

  // Index of the next segment's signal.
  __device__ int signal_idx() const {
    const int row = next_ / num_segments();
    return expert_ * params_.signals.num_per_expert + row / params_.signals.rows_per_signal;
  }

  // Begins to load the next segment, and advances.
  __device__ Piece fetch(SegmentRing& ring, const bool* present) {
    const LowLatencyShape& shape = params_.shape;
    const int lane = threadIdx.x % 32, row_bytes = 2 * shape.hidden;
    const int row = next_ / num_segments(), begin = next_ % num_segments() * kSegmentBytes;
    const int packed_row = expert_ * capacity() + row;
    Piece piece{nullptr, min(kSegmentBytes, row_bytes - begin), begin};
    ring.fetch(params_.rows + static_cast<int64_t>(packed_row) * row_bytes + begin, piece.num_bytes);
    int source = -1;
    for (int r = lane; r < params_.domain.num_ranks; r += 32) {
      const int64_t range = params_.layout_range[expert_ * params_.domain.num_ranks + r];
      const int its_begin = static_cast<int>(range >> 32), its_count = static_cast<int>(range);
      if (row >= its_begin && row < its_begin + its_count) source = r;
    }
    source = __reduce_max_sync(kAllLanes, source);
    const int token = params_.src_info[packed_row];
    int column = -1;
    for (int k = lane; k < shape.num_topk && source >= 0; k += 32) {
      if (params_.row_of[(source * shape.max_tokens + token) * shape.num_topk + k] == packed_row) column = k;
    }
    column = __reduce_max_sync(kAllLanes, column);
    if (column >= 0 && present[source]) {
      const int64_t cell = static_cast<int64_t>(token) * shape.num_topk + column;
      piece.target = buffer_of(params_.domain, source) + cell * row_bytes + begin;
    }
    next_ += step_;
    if (next_ >= num_items_) enter_next_expert();
    return piece;
  }

  __device__ void give_up() { expert_ = num_local(); }

 private:
  __device__ int num_local() const { return params_.shape.num_experts / params_.domain.num_ranks; }
  __device__ int capacity() const { return params_.shape.max_tokens * params_.domain.num_ranks; }
  __device__ int num_segments() const { return segments_of(params_.shape); }

  // Items are numbered across all experts, so that warps share them evenly.
  __device__ void enter_next_expert() {
    do {
      if (expert_ >= 0) next_ -= num_items_;
      if (++expert_ == num_local()) return;
      // Dispatch has reported an expert with more rows than its capacity.
      num_items_ = min(params_.count[expert_], capacity()) * num_segments();
    } while (next_ >= num_items_);
    num_raised_ = 0;
  }

  const ReturnSignalledRowsParams& params_;
  int step_, next_, expert_;
  int num_items_ = 0, num_raised_ = 0;  // of this expert: segments, and rows that are known to be written
};

template <bool kLogFmt>
__device__ __forceinline__ void return_signalled_rows(const ReturnSignalledRowsParams& params, const CtaOfRole& cta,
                                                      uint8_t* stages) {
  __shared__ uint64_t barriers[kReturnWarps * kReturnStages];
  __shared__ bool present[kMaxRanks];
  __shared__ uint32_t epoch;
  __shared__ Piece pieces[kReturnWarps][kReturnStages];
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

}  // namespace
}  // namespace hybrid_ep
