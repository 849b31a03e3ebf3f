// The sum at a token's home rank: the sums of all domains.
//
//     chunks, own_sums[i] ─ the sum of each domain, domains ascending ─► fp32 ─► + bias ─► out[t]
//
// A rank that is alone in its domain reads the partial rows of its own tokens in y. Legend: i-th token of this rank
// that has rows in its own domain.
#pragma once

#include "device/work_index.cuh"
#include "kernels/combine/sum_rows.cuh"
#include "kernels/combine_between/tables.cuh"

namespace hybrid_ep {
namespace {

// Sums this rank's tokens from the sums of all domains, for sum_rows. A warp that holds rows which are not summed yet
// never waits: another warp may wait for their chunk. For the same reason the warp counts the rows that it has read
// before it waits. A warp claims consecutive tokens, whose sums mostly come in one chunk of each domain. So it polls
// once for the chunk, and counts its rows at once. Towards the end it claims single tokens, so that all warps end
// together. kDomainsPerLane: 1 where a warp has a lane for every domain. kIsAlone: this rank is alone in its
// domain.
template <typename Link, int kDomainsPerLane, bool kIsAlone>
class HomeSums {
 public:
  static constexpr int kSourcesPerLane = kDomainsPerLane;
  static constexpr bool kCopies = false;

  __device__ HomeSums(const CombineBetweenParams& params, const CombineTables& tables, const Streams& streams,
                      const Waiter& waiter, const Waiter& own_waiter, const Link& link, uint32_t epoch, int num_warps)
      : params_(params),
        tables_(tables),
        streams_(streams),
        waiter_(waiter),
        own_waiter_(own_waiter),
        link_(link),
        epoch_(epoch),
        own_epoch_(own_part<uint32_t>(params.between, params.between.layout.own_epoch)),
        num_groups_(max(0, params.num_tokens / kTokensOfGroup - num_warps)),
        claims_(&params.between.domain.control[params.between.domain.rank]->summed_tokens) {
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) known_chunk_[q] = -1;
    advance();
  }

  __device__ int row() const { return token_; }
  __device__ int begin() const { return 0; }
  __device__ int end() const { return params_.row_bytes; }
  __device__ bool ok() const { return ok_; }
  __device__ bool is_done() const { return !ok_ || next_token_ >= params_.num_tokens; }

  __device__ bool next(SourceWalk<kSourcesPerLane, uint8_t>& walk) {
    count_ended_chunks();
    while (!is_done()) {
      if (!sums_are_here()) {
        if (num_open_ > 0 || !ok_) return false;
        wait_for_sums();
        continue;
      }
      const uint8_t* rows[kSourcesPerLane];
#pragma unroll
      for (int q = 0; q < kSourcesPerLane; ++q) rows[q] = find_row(q);
      walk = SourceWalk<kSourcesPerLane, uint8_t>(rows);
      if (walk.is_done() && num_open_ > 0) return false;  // tokens end in order, and this one needs no load
      if (params_.num_weights > 0) {
        const float* weights[kSourcesPerLane];
#pragma unroll
        for (int q = 0; q < kSourcesPerLane; ++q) weights[q] = rows[q] == nullptr ? nullptr : find_weights(q, rows[q]);
        sum_weights(SourceWalk<kSourcesPerLane, float>(weights), params_.num_weights,
                    params_.out_weights + static_cast<int64_t>(next_token_) * params_.num_weights);
      }
      token_ = next_token_;
      note_open();
      advance();
      if (!walk.is_done()) return true;
      store_nothing(*this, token_);
    }
    return false;
  }

  template <int kVectors>
  __device__ void store(int token, int offset, float (&sum)[kVectors][8]) const {
    store_with_bias(params_, token, offset, sum);
  }

  // All rows of the oldest open token have been read.
  __device__ void finish(int) {
    --num_open_;
    __syncwarp();  // weights have been read by all lanes
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      const int chunk = oldest_chunk(q);
      open_[q] >>= kChunkBits;
      if (chunk == kNoChunk) continue;
      if (chunk != read_chunk_[q]) count_reads(q);
      read_chunk_[q] = chunk;
      ++num_read_[q];
    }
    ok_ = __all_sync(kAllLanes, ok_);
  }

  // Counts all rows that the warp has read. It holds no others. Collective; called once more after the last row.
  __device__ void return_reads() {
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) count_reads(q);
    ok_ = __all_sync(kAllLanes, ok_);
  }

 private:
  static constexpr int kChunkBits = 16, kNoChunk = (1 << kChunkBits) - 1;
  static_assert((kSumStages + 1) * kChunkBits <= 64);  // sum_rows looks a stage further before it finishes a row
  static_assert(kMaxTokens / kMinRecordsPerChunk < kNoChunk);
  static constexpr int kTokensOfGroup = 4;  // that a warp claims at once

  __device__ bool is_own(int domain) const { return domain == params_.between.grid.domain_idx(); }
  __device__ bool is_in_place(int domain) const { return kIsAlone && is_own(domain); }
  __device__ int domain_of_lane(int q) const { return threadIdx.x % 32 + 32 * q; }
  // The stream of chunks from the lane's q-th domain.
  __device__ ChunkStream<Link> stream(int q) const {
    return {params_.between, waiter_, link_, domain_of_lane(q), streams_.first};
  }

  __device__ int index_in(int token, int domain) const {
    if (domain >= params_.between.grid.num_domains) return -1;
    return params_.route[params_.parts.list_index + static_cast<int64_t>(domain) * params_.num_tokens + token];
  }

  // The row of the next token from the lane's q-th domain, which has arrived; nullptr: there is none.
  __device__ const uint8_t* find_row(int q) const {
    const int domain = domain_of_lane(q), index = indices_[q], per_chunk = params_.record.per_chunk;
    if (index < 0) return nullptr;
    if (is_in_place(domain)) {
      const int64_t row = row_in_place(index);
      return row < params_.num_rows ? params_.rows + row * params_.row_bytes : nullptr;
    }
    if (is_own(domain)) return params_.own_sums + static_cast<int64_t>(index) * params_.row_bytes;
    return known_rows_[q] + (index - known_chunk_[q] * per_chunk) * params_.record.num_bytes;
  }
  __device__ const float* find_weights(int q, const uint8_t* row) const {
    const int domain = domain_of_lane(q);
    if (is_in_place(domain)) return params_.weights + row_in_place(indices_[q]) * params_.num_weights;
    if (is_own(domain)) return params_.own_weights + static_cast<int64_t>(indices_[q]) * params_.num_weights;
    return reinterpret_cast<const float*>(row + params_.record.weights);
  }
  __device__ int64_t row_in_place(int index) const {
    return tables_.send_begin[params_.between.grid.rank] + static_cast<int64_t>(index);
  }

  // Records from which chunks the rows of the next token come.
  __device__ void note_open() {
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      const bool is_counted = indices_[q] >= 0 && !is_own(domain_of_lane(q));
      open_[q] |= static_cast<uint64_t>(is_counted ? known_chunk_[q] : kNoChunk) << kChunkBits * num_open_;
    }
    ++num_open_;
  }

  // Goes on to the next token, and begins to load the indices of its sums.
  __device__ void advance() {
    if (++next_token_ >= claim_end_) {
      const int claim = claims_.take();
      next_token_ = claim + min(claim, num_groups_) * (kTokensOfGroup - 1);
      claim_end_ = next_token_ + (claim < num_groups_ ? kTokensOfGroup : 1);
    }
    if (next_token_ >= params_.num_tokens) return;
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) indices_[q] = index_in(next_token_, domain_of_lane(q));
  }

  // The chunk of the next token's sum from the lane's q-th domain; of the own domain, the part.
  __device__ int next_chunk(int q) const {
    return is_own(domain_of_lane(q)) ? part_of(params_.record, indices_[q]) : indices_[q] / params_.record.per_chunk;
  }

  // Whether a chunk of sums, or a part of the own domain's, has arrived. Acquires for the calling thread.
  __device__ bool is_here(int q, int chunk) const {
    const int domain = domain_of_lane(q);
    if (is_in_place(domain)) return true;
    if (is_own(domain)) return ptx::load_acquire_gpu(own_epoch_ + chunk) == epoch_;
    return stream(q).is_here(kControlChunks + chunk);
  }

  __device__ void note_here(int q, int chunk) {
    known_chunk_[q] = chunk;
    if (!is_own(domain_of_lane(q))) known_rows_[q] = stream(q).chunk(kControlChunks + chunk);
  }

  // Whether all sums of the next token have arrived. Collective.
  __device__ bool sums_are_here() {
    bool all_here = true, is_new = false;
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      const int chunk = next_chunk(q);
      if (indices_[q] < 0 || chunk == known_chunk_[q]) continue;
      if (is_here(q, chunk)) {
        note_here(q, chunk);
        is_new = true;
      } else {
        all_here = false;
      }
    }
    pass_on(is_new);
    return __all_sync(kAllLanes, all_here);
  }

  // Waits for the sums of the next token. The warp holds no rows.
  __device__ void wait_for_sums() {
    return_reads();
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      const int domain = domain_of_lane(q), chunk = next_chunk(q);
      if (indices_[q] < 0 || chunk == known_chunk_[q]) continue;
      if (is_own(domain)) {
        ok_ &= own_waiter_.until([&] { return is_here(q, chunk); }, [] { return 0u; }, epoch_,
                                 params_.between.domain.rank, WaitTag::kPartialRows);
      } else {
        ok_ &= stream(q).wait(kControlChunks + chunk);
      }
      note_here(q, chunk);
    }
    pass_on(true);
    ok_ = __all_sync(kAllLanes, ok_);
  }

  // Lane 0 loads what others have acquired.
  __device__ void pass_on(bool is_new) const {
    if (__ballot_sync(kAllLanes, is_new) == 0) return;
    __syncwarp();
    ptx::fence_global_for_bulk();
  }

  // The chunk of the lane's q-th domain that the oldest open token reads from, or kNoChunk.
  __device__ int oldest_chunk(int q) const { return static_cast<int>(open_[q] & kNoChunk); }

  // Counts the rows of chunks that no open token reads from. The fence of a count waits for the warp's stores, so this
  // comes well after them.
  __device__ void count_ended_chunks() {
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      if (num_open_ == 0 || oldest_chunk(q) != read_chunk_[q]) count_reads(q);
    }
    ok_ = __all_sync(kAllLanes, ok_);
  }

  // Counts the rows that were read last from the lane's q-th domain.
  __device__ void count_reads(int q) {
    if (num_read_[q] == 0) return;
    const int per_chunk = params_.record.per_chunk, chunk = read_chunk_[q];
    const int num_rows = params_.route[params_.parts.domain_counts + domain_of_lane(q)] - chunk * per_chunk;
    ok_ &= stream(q).read_rows(kControlChunks + chunk, num_read_[q], min(per_chunk, num_rows));
    num_read_[q] = 0;
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  const Streams& streams_;
  const Waiter &waiter_, &own_waiter_;
  const Link& link_;
  const uint32_t epoch_;
  const uint32_t* const own_epoch_;
  const int num_groups_;  // claims of a group of tokens, after which come claims of one token
  WorkIndices<> claims_;
  int token_ = -1, next_token_ = -1, claim_end_ = 0;
  int indices_[kSourcesPerLane];                // of the next token, in domains lane, lane + 32, …; −1: none
  int known_chunk_[kSourcesPerLane];            // the last one that is known to have arrived
  const uint8_t* known_rows_[kSourcesPerLane];  // its rows, if another domain has sent it
  int read_chunk_[kSourcesPerLane] = {};        // whose rows were read last
  int num_read_[kSourcesPerLane] = {};          // rows of it that are not counted yet
  int num_open_ = 0;                            // tokens whose rows are not all read
  // For each open token its chunk from the lane's domain, or kNoChunk where no row is counted; the oldest token is in
  // the lowest bits.
  uint64_t open_[kSourcesPerLane] = {};
  bool ok_ = true;
};

}  // namespace
}  // namespace hybrid_ep
