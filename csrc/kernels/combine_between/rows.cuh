// What a combine between domains sums: at the rank that has forwarded a record, its partial rows of this domain; at
// home, the sums of all domains.
//
//     arena, y ─ partial rows of a record, ranks ascending ─► fp32 ─► bf16 ─► record of a chunk home, or own_sums[t]
//     chunks, own_sums[t] ─ the sum of each domain, domains ascending ─► fp32 ─► + bias ─► out[t]
//
// Legend: T tokens, K top-k, W columns of weights, R ranks, D domains, G ranks of a domain.
#pragma once

#include "device/work_index.cuh"
#include "kernels/between/chunk_stream.cuh"
#include "kernels/combine/sum_rows.cuh"

namespace hybrid_ep {
namespace {

constexpr int kControlChunks = 1;  // of a call, ahead of its records

// Where rows of a combine are and go, as every rank finds it from the counts of the dispatch.
struct CombineTables {
  int* send_begin;  // [R] first row of x that belongs to each source
  int* send_base;   // [R] where it goes in the arena of the rank that sums for the source
  int* recv_base;   // [D, G] first row, in this rank's arena, of each rank for its peer in each domain; own rows in x
};

__device__ int count_of(const CombineBetweenParams& params, int source, int domain_rank) {
  return params
      .route[params.parts.counts + static_cast<int64_t>(source) * params.between.grid.ranks_per_domain + domain_rank];
}

// Sums the partial rows of what the peer of one domain has sent here, or of this rank's own tokens that stay, for
// sum_rows. A warp serves one domain, so that none waits for another's credits.
template <typename Link>
class DomainSums {
 public:
  static constexpr int kSourcesPerLane = 1;

  __device__ DomainSums(const CombineBetweenParams& params, const CombineTables& tables, const Waiter& waiter,
                        const Link& link, uint32_t epoch, int domain)
      : params_(params),
        tables_(tables),
        waiter_(waiter),
        epoch_(epoch),
        domain_(domain),
        is_own_(domain == params.between.grid.domain_idx()),
        num_records_(is_own_ ? params.route[params.parts.domain_counts + domain]
                             : params.route[params.parts.num_records + domain]),
        stream_(params.between, waiter, link, is_own_ ? 0 : domain),
        chunks_(own_part<uint32_t>(params.between, params.between.layout.items) + domain) {
    for (int d = 0; d < domain; ++d) {
      if (d != params.between.grid.domain_idx()) held_begin_ += params.route[params.parts.num_records + d];
    }
  }

  __device__ int row() const { return index_; }
  __device__ int begin() const { return 0; }
  __device__ int end() const { return params_.row_bytes; }
  __device__ bool ok() const { return ok_; }

  __device__ bool next(SourceWalk<1, uint8_t>& walk) {
    while (ok_) {
      if (++index_ >= chunk_end_) {
        index_ = chunks_.take() * params_.record.per_chunk;
        chunk_end_ = min(index_ + params_.record.per_chunk, num_records_);
        if (index_ >= num_records_) return false;
      }
      if (!has_waited_) wait_for_ranks();
      if (!ok_) return false;
      const uint8_t* rows[1] = {find_row(params_.rows, params_.slot.rows, params_.row_bytes, index_)};
      walk = SourceWalk<1, uint8_t>(rows);
      if (!walk.is_done()) return true;
      store_nothing(*this, index_);
    }
    return false;
  }

  template <int kVectors>
  __device__ void store(int index, int offset, const float (&sum)[kVectors][8]) {
    if (!is_own_ && index / params_.record.per_chunk != free_chunk_) {
      free_chunk_ = index / params_.record.per_chunk;
      ok_ &= stream_.wait_free(kControlChunks + free_chunk_);
    }
    store_vectors(result_of(index), params_.row_bytes, offset, sum);
  }

  // NOTE: later rows may have been asked for, so everything here follows from the index.
  __device__ void finish(int index) {
    if (params_.num_weights > 0) sum_weights(index);
    const int num_records =
        min(params_.record.per_chunk, num_records_ - index / params_.record.per_chunk * params_.record.per_chunk);
    __syncwarp();
    if (is_own_) {
      auto* own_epoch = own_part<uint32_t>(params_.between, params_.between.layout.own_epoch);
      if (threadIdx.x % 32 == 0) ptx::store_release_gpu(&own_epoch[token_of(index)], epoch_);
    } else if (index % params_.record.per_chunk == num_records - 1) {
      ok_ = __all_sync(kAllLanes, ok_) && stream_.send(kControlChunks + index / params_.record.per_chunk,
                                                       num_records * params_.record.num_bytes, num_records);
    }
  }

 private:
  // Waits until every rank of the domain has pushed its rows for this domain.
  __device__ void wait_for_ranks() {
    const BetweenDomain& between = params_.between;
    const int size = between.grid.ranks_per_domain, source = between.grid.peer_in(domain_);
    const auto* part_epoch = own_part<uint32_t>(between, between.layout.part_epoch);
    for (int r = threadIdx.x % 32; r < size; r += 32) {
      if (r == between.domain.rank || count_of(params_, source, r) == 0) continue;
      ok_ &= waiter_.until_equal(part_epoch + r * between.grid.num_domains + domain_, epoch_, r, WaitTag::kPartialRows);
    }
    ok_ = __all_sync(kAllLanes, ok_);
    __syncwarp();
    ptx::fence_global_for_bulk();  // lane 0 loads what others have waited for
    has_waited_ = true;
  }

  __device__ int token_of(int index) const {
    return params_.route[params_.parts.domain_list + static_cast<int64_t>(domain_) * params_.num_tokens + index];
  }

  // Of the lane-th rank that has a partial row of the record, where that stands, or nullptr: in this rank's own `rows`,
  // or in the part of the arena that begins at `offset`.
  template <typename T>
  __device__ const T* find_row(const T* rows, int64_t offset, int width, int index) const {
    const BetweenDomain& between = params_.between;
    const Grid& grid = between.grid;
    const int lane = threadIdx.x % 32, first_rank = grid.domain_idx() * grid.ranks_per_domain;
    int destination = -1;
    if (lane < params_.num_topk) {
      destination =
          is_own_
              ? params_
                    .route[params_.parts.destinations + static_cast<int64_t>(token_of(index)) * params_.num_topk + lane]
              : params_.route[params_.parts.held + static_cast<int64_t>(held_begin_ + index) * params_.num_topk + lane];
      const int r = rank_of_destination(static_cast<uint32_t>(destination)) - first_rank;
      if (destination >= 0 && (r < 0 || r >= grid.ranks_per_domain)) destination = -1;
    }
    destination = sort_over_lanes(destination);
    if (destination < 0) return nullptr;
    const int r = rank_of_destination(static_cast<uint32_t>(destination)) - first_rank;
    const int64_t row = static_cast<int64_t>(tables_.recv_base[domain_ * grid.ranks_per_domain + r]) +
                        place_of_destination(static_cast<uint32_t>(destination));
    if (r == between.domain.rank) return row < params_.num_rows ? rows + row * width : nullptr;
    return reinterpret_cast<const T*>(between.domain.arena[between.domain.rank] + offset) + row * width;
  }

  __device__ uint8_t* result_of(int index) const {
    if (is_own_) return params_.own_sums + static_cast<int64_t>(token_of(index)) * params_.row_bytes;
    const int per_chunk = params_.record.per_chunk;
    return stream_.send_slot(kControlChunks + index / per_chunk) + index % per_chunk * params_.record.num_bytes;
  }

  __device__ void sum_weights(int index) const {
    const float* of_rank[1] = {find_row(params_.weights, params_.slot.weights, params_.num_weights, index)};
    SourceWalk<1, float> walk(of_rank);
    auto* result = is_own_ ? params_.own_weights + static_cast<int64_t>(token_of(index)) * params_.num_weights
                           : reinterpret_cast<float*>(result_of(index) + params_.record.weights);
    for (int begin = 0; begin < params_.num_weights; begin += 32) {
      const int k = begin + threadIdx.x % 32;
      float sum = 0;
      for (walk.restart(); !walk.is_done();) {
        const float* weights = walk.next();
        if (k < params_.num_weights) sum += __ldcg(weights + k);
      }
      if (k < params_.num_weights) result[k] = sum;
    }
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  const Waiter& waiter_;
  const uint32_t epoch_;
  const int domain_;
  const bool is_own_;
  const int num_records_;
  const ChunkStream<Link> stream_;
  WorkIndices<> chunks_;
  int held_begin_ = 0;
  int index_ = -1, chunk_end_ = 0;
  int free_chunk_ = -1;
  bool has_waited_ = false, ok_ = true;
};

// Sums this rank's tokens from the sums of all domains, for sum_rows. A warp that holds rows which are not summed yet
// never waits: their chunk may be what another one waits for.
template <typename Link>
class HomeSums {
 public:
  static constexpr int kSourcesPerLane = (kMaxDomains + 31) / 32;

  __device__ HomeSums(const CombineBetweenParams& params, const Waiter& waiter, const Waiter& own_waiter,
                      const Link& link, uint32_t epoch)
      : params_(params),
        waiter_(waiter),
        own_waiter_(own_waiter),
        link_(link),
        epoch_(epoch),
        tokens_(&params.between.domain.control[params.between.domain.rank]->summed_tokens),
        next_token_(tokens_.take()) {}

  __device__ int row() const { return token_; }
  __device__ int begin() const { return 0; }
  __device__ int end() const { return params_.row_bytes; }
  __device__ bool ok() const { return ok_; }
  // Whether next() has nothing more, now and later.
  __device__ bool is_done() const { return !ok_ || next_token_ >= params_.num_tokens; }

  __device__ bool next(SourceWalk<kSourcesPerLane, uint8_t>& walk) {
    while (!is_done()) {
      const uint8_t* rows[kSourcesPerLane];
      const float* weights[kSourcesPerLane];
      bool is_here = true;
#pragma unroll
      for (int q = 0; q < kSourcesPerLane; ++q) {
        rows[q] = nullptr;
        weights[q] = nullptr;
        const int domain = threadIdx.x % 32 + 32 * q, place = place_of(next_token_, domain);
        if (place < 0) continue;
        if (domain == params_.between.grid.domain_idx()) {
          const auto* own_epoch = own_part<uint32_t>(params_.between, params_.between.layout.own_epoch);
          if (num_open_ > 0) {
            is_here &= ptx::load_acquire_gpu(own_epoch + next_token_) == epoch_;
          } else {
            ok_ &= own_waiter_.until([&] { return ptx::load_acquire_gpu(own_epoch + next_token_) == epoch_; },
                                     [] { return false; }, epoch_, params_.between.domain.rank, WaitTag::kPartialRows);
          }
          rows[q] = params_.own_sums + static_cast<int64_t>(next_token_) * params_.row_bytes;
          weights[q] = params_.own_weights + static_cast<int64_t>(next_token_) * params_.num_weights;
          continue;
        }
        const ChunkStream<Link> stream(params_.between, waiter_, link_, domain);
        const int chunk = kControlChunks + place / params_.record.per_chunk;
        if (num_open_ > 0) {
          is_here &= stream.is_here(chunk);
        } else {
          ok_ &= stream.wait(chunk);
        }
        rows[q] = stream.chunk(chunk) + place % params_.record.per_chunk * params_.record.num_bytes;
        weights[q] = reinterpret_cast<const float*>(rows[q] + params_.record.weights);
      }
      ok_ = __all_sync(kAllLanes, ok_);
      if (!ok_ || !__all_sync(kAllLanes, is_here)) return false;
      __syncwarp();
      ptx::fence_global_for_bulk();  // lane 0 loads what others have waited for
      token_ = next_token_;
      next_token_ = tokens_.take();
      ++num_open_;
      if (params_.num_weights > 0) sum_weights(SourceWalk<kSourcesPerLane, float>(weights));
      walk = SourceWalk<kSourcesPerLane, uint8_t>(rows);
      if (!walk.is_done()) return true;
      store_nothing(*this, token_);
    }
    return false;
  }

  template <int kVectors>
  __device__ void store(int token, int offset, float (&sum)[kVectors][8]) const {
    const int64_t begin = static_cast<int64_t>(token) * params_.row_bytes;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if (params_.bias[b] == nullptr) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (offset + v * 512 >= params_.row_bytes) continue;
        add_bf16(sum[v], ptx::load_streaming(params_.bias[b] + begin + offset + v * 512));
      }
    }
    store_vectors(params_.out + begin, params_.row_bytes, offset, sum);
  }

  // All rows of the token have been read.
  __device__ void finish(int token) {
    __syncwarp();
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      const int domain = threadIdx.x % 32 + 32 * q, place = place_of(token, domain);
      if (place < 0 || domain == params_.between.grid.domain_idx()) continue;
      const int per_chunk = params_.record.per_chunk, chunk = place / per_chunk;
      const int left = params_.route[params_.parts.domain_counts + domain] - chunk * per_chunk;
      const ChunkStream<Link> stream(params_.between, waiter_, link_, domain);
      ok_ &= stream.read_rows(kControlChunks + chunk, 1, min(per_chunk, left));
    }
    ok_ = __all_sync(kAllLanes, ok_);
    --num_open_;
  }

 private:
  __device__ int place_of(int token, int domain) const {
    if (domain >= params_.between.grid.num_domains) return -1;
    return params_.route[params_.parts.domain_place + static_cast<int64_t>(domain) * params_.num_tokens + token];
  }

  __device__ void sum_weights(SourceWalk<kSourcesPerLane, float> walk) const {
    for (int begin = 0; begin < params_.num_weights; begin += 32) {
      const int k = begin + threadIdx.x % 32;
      float sum = 0;
      for (walk.restart(); !walk.is_done();) {
        const float* weights = walk.next();
        if (k < params_.num_weights) sum += __ldcg(weights + k);
      }
      if (k < params_.num_weights) params_.out_weights[static_cast<int64_t>(token_) * params_.num_weights + k] = sum;
    }
  }

  const CombineBetweenParams& params_;
  const Waiter &waiter_, &own_waiter_;
  const Link& link_;
  const uint32_t epoch_;
  WorkIndices<> tokens_;
  int token_ = -1, next_token_;
  int num_open_ = 0;  // tokens whose rows are not all read
  bool ok_ = true;
};

}  // namespace
}  // namespace hybrid_ep
