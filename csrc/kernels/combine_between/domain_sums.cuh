// The sum at the rank that has forwarded a token: the partial rows of this domain.
//
//     arena, y ─ partial rows of a record, ranks ascending ─► fp32 ─► bf16 ─► record of a chunk home, or own_sums[i]
//
// A single partial row is its own sum, and is copied: the sum at home turns −0 into 0, as a sum of one row would. A
// rank that is alone in its domain has nothing to sum here: PartsHome of senders.cuh sends its rows of y. Legend: i-th
// token of this rank that has rows in this domain.
#pragma once

#include "kernels/combine/sum_rows.cuh"
#include "kernels/combine_between/part_claims.cuh"

namespace hybrid_ep {
namespace {

// Sums, for sum_rows, the partial rows of what the peers have sent here and of this rank's own tokens that stay. A warp
// claims part after part of chunks, of any domain whose next slot is free. It holds no rows while it waits for a
// credit, which may depend on its rows for other domains. Rows are named `domain << kIndexBits | index`, for the warp
// looks ahead over the end of a part.
template <typename Link>
class DomainSums {
 public:
  static constexpr int kSourcesPerLane = 1;
  static constexpr bool kCopies = true;

  // `last_flags`: of the warp, kMaxRanks in shared memory.
  __device__ DomainSums(const CombineBetweenParams& params, const CombineTables& tables, const Streams& streams,
                        int* last_flags, const Waiter& waiter, const Link& link, uint32_t epoch, int first_domain)
      : params_(params),
        tables_(tables),
        streams_(streams),
        waiter_(waiter),
        link_(link),
        epoch_(epoch),
        claims_(params, streams, waiter, link, epoch, first_domain, true),
        last_flags_(last_flags),
        run_rows_(rows_per_run(params)) {
    for (int r = threadIdx.x % 32; r < params.between.grid.ranks_per_domain; r += 32) last_flags_[r] = -1;
    __syncwarp();
  }

  __device__ int row() const { return row_; }
  __device__ int begin() const { return 0; }
  __device__ int end() const { return params_.row_bytes; }
  __device__ bool ok() const { return ok_; }
  __device__ bool is_done() const { return !ok_ || claims_.is_done(); }

  __device__ bool next(SourceWalk<1, uint8_t>& walk) {
    while (next_index_ < part_end_ || claim()) {
      if (!slot_is_free()) return false;
      const int destination = destination_here(next_destination_);
      if (!rows_are_here(destination)) return false;
      const uint8_t* rows[1] = {find_row(domain_, destination, params_.rows, params_.slot.rows, params_.row_bytes)};
      walk = SourceWalk<1, uint8_t>(rows);
      if (walk.is_done() && num_open_ > 0) return false;  // rows end in order, and this one needs no load
      row_ = domain_ << kIndexBits | next_index_++;
      if (__popc(__ballot_sync(kAllLanes, rows[0] != nullptr)) == 1) row_ |= kIsCopy;
      ++num_open_;
      if (next_index_ < part_end_) next_destination_ = load_destination(domain_, next_index_);
      if (!walk.is_done()) return true;
      store_nothing(*this, row_);
    }
    return false;
  }

  template <int kVectors>
  __device__ void store(int row, int offset, const float (&sum)[kVectors][8]) {
    store_vectors(result_of(row), params_.row_bytes, offset, sum);
  }

  static __device__ bool is_copy(int row) { return (row & kIsCopy) != 0; }

  // Copies bytes of the only partial row from shared memory, which may be overwritten when it returns.
  __device__ void copy(int row, int offset, const uint8_t* stage, int num_bytes) {
    uint8_t* result = result_of(row);
    if (threadIdx.x % 32 > 0) return;
    ptx::bulk_store(result + offset, stage, num_bytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }

  __device__ void finish(int row) {
    --num_open_;
    if (params_.num_weights > 0) sum_weights_of(row);
    note_stored(row);
    const StoredPart& part = stored_;
    if ((row & ~kIsCopy) < part.end - 1) return;
    ptx::bulk_wait_written<0>();
    __syncwarp();
    const int domain = domain_of(row);
    if (is_own(domain)) {
      auto* own_epoch = own_part<uint32_t>(params_.between, params_.between.layout.own_epoch);
      if (threadIdx.x % 32 == 0) ptx::store_release_gpu(own_epoch + part_of(params_.record, index_of(row)), epoch_);
      return;
    }
    const int num_rows = part.end - part.begin;
    ok_ =
        __all_sync(kAllLanes, ok_) && stream(domain).write_rows(kControlChunks + part.chunk, num_rows, part.chunk_rows,
                                                                part.chunk_rows * params_.record.num_bytes);
  }

 private:
  static constexpr int kIndexBits = 16, kIsCopy = 1 << 30;
  static_assert(kMaxTokens <= 1 << kIndexBits && kMaxDomains << kIndexBits <= kIsCopy);

  // A part whose rows are being stored. The warp may have looked ahead to the rows of a later one.
  struct StoredPart {
    int begin, end;         // as rows are named
    int chunk, chunk_rows;  // of its domain
    uint8_t* results;       // of its rows, result_bytes apart
    int result_bytes;
  };

  static __device__ int domain_of(int row) { return (row & ~kIsCopy) >> kIndexBits; }
  static __device__ int index_of(int row) { return row & ((1 << kIndexBits) - 1); }

  __device__ bool is_own(int domain) const { return domain == params_.between.grid.domain_idx(); }
  __device__ int num_records(int domain) const { return streams_.num_records[domain]; }
  __device__ ChunkStream<Link> stream(int domain) const {
    return {params_.between, waiter_, link_, domain, streams_.first};
  }
  __device__ bool is_free(int domain, int part) const {
    return is_own(domain) || stream(domain).is_free(kControlChunks + part / parts_per_chunk(params_.record));
  }

  // Claims a part. Waits for one whose slot is free only if the warp holds no rows. Returns false if it has none.
  __device__ bool claim() {
    Part part;
    if (!ok_ || !claims_.claim(part, num_open_ == 0, [&](int domain, int number) { return is_free(domain, number); })) {
      ok_ &= claims_.ok();
      return false;
    }
    domain_ = part.domain;
    next_index_ = part.begin;
    part_end_ = part.end;
    next_destination_ = load_destination(domain_, next_index_);
    has_slot_ = false;
    return true;
  }

  // Whether the slot of the warp's part is free; waits for it if the warp holds no rows. Collective.
  __device__ bool slot_is_free() {
    if (has_slot_) return true;
    const int chunk = next_index_ / params_.record.per_chunk;
    has_slot_ = __all_sync(kAllLanes, is_free(domain_, part_of(params_.record, next_index_)));
    if (has_slot_ || num_open_ > 0) return has_slot_;
    ok_ = __all_sync(kAllLanes, threadIdx.x % 32 > 0 || stream(domain_).wait_free(kControlChunks + chunk));
    __syncwarp();  // passes on what lane 0 has acquired
    has_slot_ = ok_;
    return ok_;
  }

  // The flag of the run of a lane's destination; −1: the row is this rank's own, or there is none.
  __device__ int flag_of(int destination) const {
    if (destination < 0) return -1;
    const BetweenDomain& between = params_.between;
    const int r = rank_in_domain(destination);
    if (r == between.domain.rank) return -1;
    return first_flag(params_, run_rows_, domain_, r, tables_.recv_base[domain_ * between.grid.ranks_per_domain + r]) +
           index_of_destination(static_cast<uint32_t>(destination)) / run_rows_;
  }

  // Whether the partial rows of a record have arrived; waits for them if the warp holds no other rows.
  __device__ bool rows_are_here(int destination) {
    const int flag = flag_of(destination), r = flag < 0 ? 0 : rank_in_domain(destination);
    const bool is_new = flag >= 0 && last_flags_[r] != flag;
    if (__ballot_sync(kAllLanes, is_new) == 0) return true;
    const uint32_t* word = run_flags(*params_.between.domain.control[params_.between.domain.rank]) + flag;
    bool is_here = !is_new || ptx::load_acquire_system(word) == epoch_;
    if (!__all_sync(kAllLanes, is_here)) {
      if (num_open_ > 0) return false;
      is_here = is_here || waiter_.until_equal(word, epoch_, r, WaitTag::kPartialRows);
      ok_ = __all_sync(kAllLanes, is_here);
      if (!ok_) return false;
    }
    if (is_new) last_flags_[r] = flag;
    __syncwarp();
    ptx::fence_global_for_bulk();  // lane 0 loads what others have waited for
    return true;
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

  // The lane-th destination of the record in this domain, ascending; −1: none.
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

  // Makes stored_ the part of a row. Rows end in order, so the first row of a new part is its begin.
  __device__ void note_stored(int row) {
    row &= ~kIsCopy;
    if (row >= stored_.begin && row < stored_.end) return;
    const int domain = domain_of(row), begin = index_of(row), per_chunk = params_.record.per_chunk;
    const int chunk = begin / per_chunk, in_chunk = begin % per_chunk, num_records = this->num_records(domain);
    stored_ = {row,     row - begin + end_of_part(params_.record, begin, num_records),
               chunk,   min(per_chunk, num_records - begin + in_chunk),
               nullptr, 0};
    if (is_own(domain)) {
      stored_.result_bytes = params_.row_bytes;
      stored_.results = params_.own_sums + static_cast<int64_t>(begin) * params_.row_bytes;
    } else {
      stored_.result_bytes = params_.record.num_bytes;
      stored_.results = stream(domain).send_slot(kControlChunks + chunk) + in_chunk * params_.record.num_bytes;
    }
  }

  __device__ uint8_t* result_of(int row) {
    note_stored(row);
    return stored_.results + ((row & ~kIsCopy) - stored_.begin) * stored_.result_bytes;
  }

  __device__ void sum_weights_of(int row) {
    const int domain = domain_of(row), index = index_of(row);
    const float* of_rank[1] = {find_row(domain, destination_here(load_destination(domain, index)), params_.weights,
                                        params_.slot.weights, params_.num_weights)};
    auto* result = is_own(domain) ? params_.own_weights + static_cast<int64_t>(index) * params_.num_weights
                                  : reinterpret_cast<float*>(result_of(row) + params_.record.weights);
    sum_weights(SourceWalk<1, float>(of_rank), params_.num_weights, result);
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  const Streams& streams_;
  const Waiter& waiter_;
  const Link& link_;
  const uint32_t epoch_;
  PartClaims<Link> claims_;
  int* const last_flags_;  // for each rank the flag that was seen last, of a run that has arrived
  const int run_rows_;
  int domain_ = 0, next_index_ = 0, part_end_ = 0;
  int next_destination_ = -1;  // of the next record, as the route has it; loaded while the row before is summed
  int row_ = -1;
  StoredPart stored_{};
  int num_open_ = 0;       // rows that are not summed yet
  bool has_slot_ = false;  // the slot of the part's chunk is free
  bool ok_ = true;
};

}  // namespace
}  // namespace hybrid_ep
