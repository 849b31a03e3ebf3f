// The two sums of a combine between domains: at the rank that has forwarded a token, the partial rows of this domain;
// at the token's home rank, the sums of all domains.
//
//     arena, y ─ partial rows of a record, ranks ascending ─► fp32 ─► bf16 ─► record of a chunk home, or own_sums[t]
//     chunks, own_sums[t] ─ the sum of each domain, domains ascending ─► fp32 ─► + bias ─► out[t]
//
// A single partial row is its own sum, and is copied: the sum at home turns −0 into 0, as a sum of one row would. A
// rank that is alone in its domain sums nothing for it: PartsHome of senders.cuh sends its rows of y, and the
// sum at home reads the partial rows of its own tokens in y.
//
// Legend: T tokens, K top-k, W columns of weights, R ranks, D domains, G ranks of a domain.
#pragma once

#include "device/work_index.cuh"
#include "kernels/between/chunk_stream.cuh"
#include "kernels/combine/sum_rows.cuh"

namespace hybrid_ep {
namespace {

constexpr int kControlChunks = 1;  // of a call, ahead of its records

// Row offsets of a combine, which every rank computes from the counts of the dispatch.
struct CombineTables {
  int* send_begin;  // [R] first row of x that belongs to each source
  int* send_base;   // [R] where it goes in the arena of the rank that sums for the source
  int* recv_base;   // [D, G] first row, in this rank's arena, of each rank for its peer in each domain; own rows in x
  int* held_begin;  // [D] where the records of each domain begin in what the route holds
};

__device__ int count_of(const CombineBetweenParams& params, int source, int domain_rank) {
  return params
      .route[params.parts.counts + static_cast<int64_t>(source) * params.between.grid.ranks_per_domain + domain_rank];
}

// Sums, for sum_rows, the partial rows of what the peers have sent here and of this rank's own tokens that stay. A warp
// claims chunk after chunk, of any domain whose next slot is free. It holds no rows while it waits for a credit, which
// may depend on its chunks to other domains. Rows are named `domain << kIndexBits | index`, for the warp
// looks ahead over the end of a chunk.
template <typename Link>
class DomainSums {
 public:
  static constexpr int kSourcesPerLane = 1;
  static constexpr bool kCopies = true;

  __device__ DomainSums(const CombineBetweenParams& params, const CombineTables& tables, const Waiter& waiter,
                        const Link& link, uint32_t epoch, int first_domain)
      : params_(params),
        tables_(tables),
        waiter_(waiter),
        link_(link),
        epoch_(epoch),
        chunks_(own_part<uint32_t>(params.between, params.between.layout.items)),
        turn_(first_domain) {}

  __device__ int row() const { return row_; }
  __device__ int begin() const { return 0; }
  __device__ int end() const { return params_.row_bytes; }
  __device__ bool ok() const { return ok_; }
  // Whether next() will return nothing more.
  __device__ bool is_done() const { return !ok_ || all_claimed_; }

  __device__ bool next(SourceWalk<1, uint8_t>& walk) {
    while (next_index_ < chunk_end_ || claim()) {
      if (!slot_is_free()) return false;
      const int destination = destination_here(next_destination_);
      if (!rows_are_here(destination)) return false;
      const uint8_t* rows[1] = {find_row(domain_, destination, params_.rows, params_.slot.rows, params_.row_bytes)};
      row_ = domain_ << kIndexBits | next_index_++;
      if (__popc(__ballot_sync(kAllLanes, rows[0] != nullptr)) == 1) row_ |= kIsCopy;
      ++num_open_;
      if (next_index_ < chunk_end_) next_destination_ = load_destination(domain_, next_index_);
      walk = SourceWalk<1, uint8_t>(rows);
      if (!walk.is_done()) return true;
      store_nothing(*this, row_);
    }
    return false;
  }

  template <int kVectors>
  __device__ void store(int row, int offset, const float (&sum)[kVectors][8]) {
    if (row != stored_row_) result_ = result_of(row);  // it takes divisions of 64 bits
    stored_row_ = row;
    store_vectors(result_, params_.row_bytes, offset, sum);
  }

  static __device__ bool is_copy(int row) { return (row & kIsCopy) != 0; }

  // Copies bytes of the only partial row from shared memory, which may be overwritten when it returns.
  __device__ void copy(int row, int offset, const uint8_t* stage, int num_bytes) {
    if (row != stored_row_) result_ = result_of(row);
    stored_row_ = row;
    if (threadIdx.x % 32 > 0) return;
    ptx::bulk_store(result_ + offset, stage, num_bytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }

  // NOTE: the warp may have looked ahead to later rows, so everything here is computed from the row.
  __device__ void finish(int row) {
    const int domain = domain_of(row), index = index_of(row), per_chunk = params_.record.per_chunk;
    --num_open_;
    if (params_.num_weights > 0) sum_weights_of(row);
    const int chunk = index / per_chunk, num_rows = min(per_chunk, num_records(domain) - chunk * per_chunk);
    if (index < chunk * per_chunk + num_rows - 1) return;
    ptx::bulk_wait_written<0>();
    __syncwarp();
    if (is_own(domain)) {
      auto* own_epoch = own_part<uint32_t>(params_.between, params_.between.layout.own_epoch);
      if (threadIdx.x % 32 == 0) ptx::store_release_gpu(own_epoch + chunk, epoch_);
      return;
    }
    ok_ = __all_sync(kAllLanes, ok_) &&
          stream(domain).send(kControlChunks + chunk, num_rows * params_.record.num_bytes, num_rows);
  }

 private:
  static constexpr int kIndexBits = 16, kIsCopy = 1 << 30;
  static_assert(kMaxTokens <= 1 << kIndexBits && kMaxDomains << kIndexBits <= kIsCopy);

  static __device__ int domain_of(int row) { return (row & ~kIsCopy) >> kIndexBits; }
  static __device__ int index_of(int row) { return row & ((1 << kIndexBits) - 1); }

  __device__ bool is_own(int domain) const { return domain == params_.between.grid.domain_idx(); }
  __device__ int num_records(int domain) const {
    return params_.route[(is_own(domain) ? params_.parts.domain_counts : params_.parts.num_records) + domain];
  }
  __device__ ChunkStream<Link> stream(int domain) const { return {params_.between, waiter_, link_, domain}; }
  __device__ bool is_free(int domain, int chunk) const {
    return is_own(domain) || stream(domain).is_free(kControlChunks + chunk);
  }

  // Claims a chunk. Waits for one that has a free slot only if the warp holds no rows. Returns false if it has none.
  __device__ bool claim() {
    while (ok_ && !all_claimed_) {
      int blocked = -1;
      if (claim_free_chunk(blocked)) return true;
      if (all_claimed_ || num_open_ > 0) return false;
      if (blocked < 0) continue;  // other warps have claimed the last chunks of a domain
      const ChunkStream<Link> waits_for = stream(blocked);
      const int peer = kRankElsewhere + params_.between.grid.peer_in(blocked);
      const bool is_free = threadIdx.x % 32 > 0 || waiter_.until([&] { return has_free_chunk(); }, waits_for.lost(),
                                                                 epoch_, peer, WaitTag::kCredits);
      ok_ = __all_sync(kAllLanes, is_free);
    }
    return false;
  }

  // Claims the next chunk of the first domain, from the warp's turn on, that has one with a free slot. `blocked` is a
  // domain whose slot is not free. If other warps claim at the same time, the warp gets a later chunk, whose slot may
  // not be free yet. Collective.
  __device__ bool claim_free_chunk(int& blocked) {
    const int num_domains = params_.between.grid.num_domains, per_chunk = params_.record.per_chunk;
    bool is_left = false;
    for (int first = 0; first < num_domains; first += 32) {
      const int i = first + threadIdx.x % 32, domain = (turn_ + i) % num_domains;
      const int chunk = i < num_domains ? static_cast<int>(ptx::load_relaxed_gpu(chunks_ + domain)) : 0;
      const int end = i < num_domains ? num_records(domain) : 0;
      const bool has_chunk = chunk * per_chunk < end, can_claim = has_chunk && is_free(domain, chunk);
      is_left |= __ballot_sync(kAllLanes, has_chunk) != 0;
      for (unsigned left = __ballot_sync(kAllLanes, can_claim); left != 0; left &= left - 1) {
        const int holder = __ffs(left) - 1;
        const bool claims = static_cast<int>(threadIdx.x % 32) == holder;
        const int claimed = claims ? static_cast<int>(ptx::increment_relaxed_gpu(chunks_ + domain)) : 0;
        const int first_record = __shfl_sync(kAllLanes, claimed, holder) * per_chunk;
        const int num_records = __shfl_sync(kAllLanes, end, holder);
        if (first_record >= num_records) continue;
        begin_chunk(__shfl_sync(kAllLanes, domain, holder), first_record, num_records);
        return true;
      }
      const unsigned without_slot = __ballot_sync(kAllLanes, has_chunk && !can_claim);
      if (without_slot != 0 && blocked < 0) blocked = __shfl_sync(kAllLanes, domain, __ffs(without_slot) - 1);
    }
    all_claimed_ = !is_left;
    return false;
  }

  __device__ void begin_chunk(int domain, int first, int num_records) {
    domain_ = domain;
    next_index_ = first;
    chunk_end_ = min(first + params_.record.per_chunk, num_records);
    turn_ = domain + 1;
    next_destination_ = load_destination(domain, first);
    has_slot_ = false;
    note_pushed();
  }

  // Whether the slot of the warp's chunk is free; waits for it if the warp holds no rows. Collective.
  __device__ bool slot_is_free() {
    if (has_slot_) return true;
    const int chunk = next_index_ / params_.record.per_chunk;
    has_slot_ = __all_sync(kAllLanes, is_free(domain_, chunk));
    if (has_slot_ || num_open_ > 0) return has_slot_;
    ok_ = __all_sync(kAllLanes, threadIdx.x % 32 > 0 || stream(domain_).wait_free(kControlChunks + chunk));
    __syncwarp();  // passes on what lane 0 has acquired
    has_slot_ = ok_;
    return ok_;
  }

  // Whether some domain has a chunk with a free slot, or none has one that is not claimed. One thread.
  __device__ bool has_free_chunk() const {
    bool is_left = false;
    for (int domain = 0; domain < params_.between.grid.num_domains; ++domain) {
      const int chunk = static_cast<int>(ptx::load_relaxed_gpu(chunks_ + domain));
      if (chunk * params_.record.per_chunk >= num_records(domain)) continue;
      if (is_free(domain, chunk)) return true;
      is_left = true;
    }
    return !is_left;
  }

  // Rows of the chunk's domain that a rank has pushed here. Acquires for the calling thread.
  __device__ int rows_pushed(int r) const {
    const BetweenDomain& between = params_.between;
    const uint64_t word = ptx::load_acquire_system(own_part<uint64_t>(between, between.layout.rows_pushed) +
                                                   r * between.grid.num_domains + domain_);
    return static_cast<uint32_t>(word) == epoch_ ? static_cast<int>(word >> 32) : 0;
  }

  // Reads how many rows each rank has pushed. Collective.
  __device__ void note_pushed() {
    const BetweenDomain& between = params_.between;
#pragma unroll
    for (int q = 0; q < kMaxRanksPerLane; ++q) {
      const int r = threadIdx.x % 32 + 32 * q;
      pushed_[q] = r < between.grid.ranks_per_domain && r != between.domain.rank ? rows_pushed(r) : 0;
    }
    __syncwarp();
    ptx::fence_global_for_bulk();  // lane 0 loads what others have waited for
  }

  // Whether the partial row of the lane's destination is noted as pushed. Collective.
  __device__ bool is_noted(int destination) const {
    const int r = destination < 0 ? params_.between.domain.rank : rank_in_domain(destination);
    int pushed = 0;
#pragma unroll
    for (int q = 0; q < kMaxRanksPerLane; ++q) {
      const int noted = __shfl_sync(kAllLanes, pushed_[q], r % 32);
      if (q == r / 32) pushed = noted;
    }
    return r == params_.between.domain.rank || pushed > index_of_destination(static_cast<uint32_t>(destination));
  }

  // Whether the partial rows of a record have arrived; waits for them if the warp holds no other rows.
  __device__ bool rows_are_here(int destination) {
    if (__all_sync(kAllLanes, is_noted(destination))) return true;
    note_pushed();
    const bool is_here = is_noted(destination);
    if (__all_sync(kAllLanes, is_here)) return true;
    if (num_open_ > 0) return false;
    const int index = index_of_destination(static_cast<uint32_t>(destination)), r = rank_in_domain(destination);
    ok_ = is_here ||
          waiter_.until([&] { return rows_pushed(r) > index; }, [] { return 0u; }, epoch_, r, WaitTag::kPartialRows);
    ok_ = __all_sync(kAllLanes, ok_);
    note_pushed();
    return ok_;
  }

  __device__ int token_of(int domain, int index) const {
    return params_.route[params_.parts.domain_list + static_cast<int64_t>(domain) * params_.num_tokens + index];
  }

  // The lane-th destination of a record, in whatever domain; −1: none.
  __device__ int load_destination(int domain, int index) const {
    const int lane = threadIdx.x % 32;
    if (lane >= params_.num_topk) return -1;
    const int64_t row = is_own(domain) ? token_of(domain, index) : tables_.held_begin[domain] + index;
    const int64_t begin = is_own(domain) ? params_.parts.destinations : params_.parts.held;
    return params_.route[begin + row * params_.num_topk + lane];
  }

  // The lane-th of those in this domain, ascending; −1: none.
  __device__ int destination_here(int destination) const {
    const int r = rank_in_domain(destination);
    const bool is_here = destination >= 0 && r >= 0 && r < params_.between.grid.ranks_per_domain;
    return sort_over_lanes(is_here ? destination : -1);
  }

  __device__ int rank_in_domain(int destination) const {
    const Grid& grid = params_.between.grid;
    return rank_of_destination(static_cast<uint32_t>(destination)) - grid.domain_idx() * grid.ranks_per_domain;
  }

  // The address of a destination's partial row, or nullptr: in this rank's own `rows`, or in the part of the arena that
  // begins at `offset`.
  template <typename T>
  __device__ const T* find_row(int domain, int destination, const T* rows, int64_t offset, int width) const {
    const BetweenDomain& between = params_.between;
    if (destination < 0) return nullptr;
    const int r = rank_in_domain(destination);
    const int64_t row = static_cast<int64_t>(tables_.recv_base[domain * between.grid.ranks_per_domain + r]) +
                        index_of_destination(static_cast<uint32_t>(destination));
    if (r == between.domain.rank) return row < params_.num_rows ? rows + row * width : nullptr;
    return reinterpret_cast<const T*>(between.domain.arena[between.domain.rank] + offset) + row * width;
  }

  __device__ uint8_t* result_of(int row) const {
    const int domain = domain_of(row), index = index_of(row), per_chunk = params_.record.per_chunk;
    if (is_own(domain)) return params_.own_sums + static_cast<int64_t>(token_of(domain, index)) * params_.row_bytes;
    return stream(domain).send_slot(kControlChunks + index / per_chunk) + index % per_chunk * params_.record.num_bytes;
  }

  __device__ void sum_weights_of(int row) const {
    const int domain = domain_of(row), index = index_of(row);
    const float* of_rank[1] = {find_row(domain, destination_here(load_destination(domain, index)), params_.weights,
                                        params_.slot.weights, params_.num_weights)};
    auto* result = is_own(domain)
                       ? params_.own_weights + static_cast<int64_t>(token_of(domain, index)) * params_.num_weights
                       : reinterpret_cast<float*>(result_of(row) + params_.record.weights);
    sum_weights(SourceWalk<1, float>(of_rank), params_.num_weights, result);
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  const Waiter& waiter_;
  const Link& link_;
  const uint32_t epoch_;
  uint32_t* const chunks_;  // [D] claimed of each domain
  int turn_;                // domain that is asked first for a chunk
  int domain_ = 0, next_index_ = 0, chunk_end_ = 0;
  int next_destination_ = -1;     // of the next record, as the route has it; loaded while the row before is summed
  int pushed_[kMaxRanksPerLane];  // rows for the chunk's domain that ranks lane, lane + 32, … are known to have pushed
  int row_ = -1, stored_row_ = -1;
  uint8_t* result_ = nullptr;  // of the row that was last stored to
  int num_open_ = 0;           // rows that are not summed yet
  bool has_slot_ = false;      // the chunk's slot is free
  bool all_claimed_ = false, ok_ = true;
};

// Sums this rank's tokens from the sums of all domains, for sum_rows. A warp that holds rows which are not summed yet
// never waits: their chunk may be what another one waits for. For the same reason it counts the rows that it has read
// before it waits. kDomainsPerLane: 1 where a warp has a lane for every domain. kIsAlone: this rank is alone in its
// domain.
template <typename Link, int kDomainsPerLane, bool kIsAlone>
class HomeSums {
 public:
  static constexpr int kSourcesPerLane = kDomainsPerLane;
  static constexpr bool kCopies = false;

  __device__ HomeSums(const CombineBetweenParams& params, const CombineTables& tables, const Waiter& waiter,
                      const Waiter& own_waiter, const Link& link, uint32_t epoch)
      : params_(params),
        tables_(tables),
        waiter_(waiter),
        own_waiter_(own_waiter),
        link_(link),
        epoch_(epoch),
        own_epoch_(own_part<uint32_t>(params.between, params.between.layout.own_epoch)),
        tokens_(&params.between.domain.control[params.between.domain.rank]->summed_tokens) {
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      known_chunk_[q] = read_chunk_[q] = counted_chunk_[q] = -1;
      const int domain = domain_of_lane(q);
      const bool is_peer = domain < params.between.grid.num_domains && !is_own(domain);
      first_read_[q] = is_peer ? next_place(params.between, params.between.layout.next_read, domain).pack() : 0;
    }
    advance();
  }

  __device__ int row() const { return token_; }
  __device__ int begin() const { return 0; }
  __device__ int end() const { return params_.row_bytes; }
  __device__ bool ok() const { return ok_; }
  // Whether next() will return nothing more.
  __device__ bool is_done() const { return !ok_ || next_token_ >= params_.num_tokens; }

  __device__ bool next(SourceWalk<kSourcesPerLane, uint8_t>& walk) {
    count_reads();
    ok_ = __all_sync(kAllLanes, ok_);
    while (!is_done()) {
      if (!sums_are_here()) {
        if (num_open_ > 0 || !ok_) return false;
        wait_for_sums();
        continue;
      }
      const uint8_t* rows[kSourcesPerLane];
#pragma unroll
      for (int q = 0; q < kSourcesPerLane; ++q) rows[q] = find_row(q);
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
      walk = SourceWalk<kSourcesPerLane, uint8_t>(rows);
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
      const auto chunk = static_cast<int>(open_[q] & kNoChunk);
      open_[q] >>= kChunkBits;
      if (chunk == kNoChunk) continue;
      if (read_chunk_[q] >= 0) count_read(q);
      read_chunk_[q] = chunk;
    }
    ok_ = __all_sync(kAllLanes, ok_);
  }

  // Returns credits for what the warp has read. Collective; called once more after the last row.
  __device__ void return_reads() {
    count_reads();
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) finish_count(q);
    ok_ = __all_sync(kAllLanes, ok_);
  }

 private:
  static constexpr int kChunkBits = 16, kNoChunk = (1 << kChunkBits) - 1;
  static_assert((kSumStages + 1) * kChunkBits <= 64);  // sum_rows looks a stage further before it finishes a row
  static_assert(kMaxTokens / kMinRecordsPerChunk < kNoChunk);

  __device__ bool is_own(int domain) const { return domain == params_.between.grid.domain_idx(); }
  __device__ bool is_in_place(int domain) const { return kIsAlone && is_own(domain); }
  __device__ int domain_of_lane(int q) const { return threadIdx.x % 32 + 32 * q; }
  // Of the lane's q-th domain: of what comes from there.
  __device__ ChunkStream<Link> stream(int q) const {
    return {params_.between, waiter_, link_, domain_of_lane(q), {}, RingPlace::unpack(first_read_[q])};
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
    if (is_own(domain)) return params_.own_sums + static_cast<int64_t>(next_token_) * params_.row_bytes;
    return known_rows_[q] + (index - known_chunk_[q] * per_chunk) * params_.record.num_bytes;
  }
  __device__ const float* find_weights(int q, const uint8_t* row) const {
    const int domain = domain_of_lane(q);
    if (is_in_place(domain)) return params_.weights + row_in_place(indices_[q]) * params_.num_weights;
    if (is_own(domain)) return params_.own_weights + static_cast<int64_t>(next_token_) * params_.num_weights;
    return reinterpret_cast<const float*>(row + params_.record.weights);
  }
  __device__ int64_t row_in_place(int index) const {
    return tables_.send_begin[params_.between.grid.rank] + static_cast<int64_t>(index);
  }

  // Notes from which chunks the rows of the next token come.
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
    next_token_ = tokens_.take();
    if (next_token_ >= params_.num_tokens) return;
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) indices_[q] = index_in(next_token_, domain_of_lane(q));
  }

  // Whether a chunk of sums has arrived. Acquires for the calling thread.
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
      const int chunk = indices_[q] / params_.record.per_chunk;
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
      const int domain = domain_of_lane(q), chunk = indices_[q] / params_.record.per_chunk;
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

  // Counts the rows that were read last. The fence of a count waits for the warp's stores, so this comes well after
  // them.
  __device__ void count_reads() {
#pragma unroll
    for (int q = 0; q < kSourcesPerLane; ++q) {
      if (read_chunk_[q] >= 0) count_read(q);
    }
  }

  // Begins to count the row that was read last, and completes the count before.
  __device__ void count_read(int q) {
    finish_count(q);
    counted_[q] = stream(q).count_row(kControlChunks + read_chunk_[q]);
    counted_chunk_[q] = read_chunk_[q];
    read_chunk_[q] = -1;
  }

  __device__ void finish_count(int q) {
    if (counted_chunk_[q] < 0) return;
    const int per_chunk = params_.record.per_chunk;
    const int num_rows = params_.route[params_.parts.domain_counts + domain_of_lane(q)] - counted_chunk_[q] * per_chunk;
    ok_ &= stream(q).finish_count(kControlChunks + counted_chunk_[q], counted_[q], min(per_chunk, num_rows));
    counted_chunk_[q] = -1;
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  const Waiter &waiter_, &own_waiter_;
  const Link& link_;
  const uint32_t epoch_;
  const uint32_t* const own_epoch_;
  WorkIndices<> tokens_;
  int token_ = -1, next_token_ = -1;
  int indices_[kSourcesPerLane];                // of the next token, in domains lane, lane + 32, …; −1: none
  int known_chunk_[kSourcesPerLane];            // the last one that is known to have arrived
  const uint8_t* known_rows_[kSourcesPerLane];  // its rows, if another domain has sent it
  int read_chunk_[kSourcesPerLane];             // of the row that was read last and is not counted yet; −1: none
  int counted_chunk_[kSourcesPerLane];          // of the row whose count is not complete yet; −1: none
  uint32_t counted_[kSourcesPerLane];           // what that count has returned
  uint64_t first_read_[kSourcesPerLane];        // RingPlace, packed, of the call's first chunk
  int num_open_ = 0;                            // tokens whose rows are not all read
  // Of each its chunk from the lane's domain, or kNoChunk where no row is counted; the oldest in the lowest bits.
  uint64_t open_[kSourcesPerLane] = {};
  bool ok_ = true;
};

}  // namespace
}  // namespace hybrid_ep
