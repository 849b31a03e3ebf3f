// What the sending warps of a combine between domains send, and what the reporting warp does with what has arrived.
//
//     domain of several ranks: runs of x ─ send_runs ─► arena of the rank that sums ─ report ─► flag there
//     rank alone in its domain: parts of x ─ send_runs ─► slot of a chunk ─ report ─► link, with the chunk's last part
#pragma once

#include "kernels/combine/chunk_reports.cuh"
#include "kernels/combine_between/tables.cuh"

namespace hybrid_ep {
namespace {

// Runs of rows of x for one source, which go to the rank of this domain that sums for the source: what send_runs sends
// if a domain has several ranks. The first runs of all sources come first, then their second runs, and so on.
class RowsToSum {
 public:
  struct Run {
    int source, number;  // among the runs of its source
  };
  static constexpr bool kLoadsEarly = true;

  __device__ RowsToSum(const CombineBetweenParams& params, const CombineTables& tables, ReportQueue& queue)
      : params_(params),
        tables_(tables),
        queue_(queue),
        run_rows_(rows_per_run(params)),
        items_(&params.between.domain.control[params.between.domain.rank]->sent_items) {
    const Grid& grid = params.between.grid;
    int most_rows = 0;  // for one source
    for (int source = threadIdx.x % 32; source < grid.num_ranks(); source += 32) {
      if (source % grid.ranks_per_domain != me()) most_rows = max(most_rows, count_of(params, source, me()));
    }
    num_items_ = (__reduce_max_sync(kAllLanes, most_rows) + run_rows_ - 1) / run_rows_ * num_streams();
  }

  __device__ int run_bytes() const { return run_rows_ * params_.row_bytes; }

  __device__ bool next(Run& run) {
    const Grid& grid = params_.between.grid;
    const int size = grid.ranks_per_domain;
    for (int item = items_.take(); item < num_items_; item = items_.take()) {
      const int stream = item % num_streams();
      const int g = (me() + 1 + stream % (size - 1)) % size;
      const int domain = (grid.domain_idx() + 1 + stream / (size - 1)) % grid.num_domains;
      run = {domain * size + g, item / num_streams()};
      if (run.number * run_rows_ < count_of(params_, run.source, me())) return true;
    }
    return false;
  }

  // The arena has room for all rows.
  __device__ bool is_ready(const Run&) const { return true; }
  __device__ bool wait_ready(const Run&) const { return true; }

  __device__ Blocks blocks(const Run& run) const { return {1, num_rows(run) * params_.row_bytes, 0}; }
  __device__ const uint8_t* from(const Run& run) const { return params_.rows + first_row(run) * params_.row_bytes; }
  __device__ uint8_t* to(const Run& run) const {
    return arena(run) + params_.slot.rows + first_target(run) * params_.row_bytes;
  }

  __device__ void finish(const Run& run) const {
    const int num_floats = num_rows(run) * params_.num_weights;
    if (num_floats == 0) return;
    auto* to = reinterpret_cast<float*>(arena(run) + params_.slot.weights) + first_target(run) * params_.num_weights;
    const float* from = params_.weights + first_row(run) * params_.num_weights;
    for (int i = threadIdx.x % 32; i < num_floats; i += 32) to[i] = from[i];
  }

  __device__ void report(const Run& run) const {
    if (threadIdx.x % 32 == 0) push_report(queue_, run.source << 16 | run.number);
  }

 private:
  static_assert(kMaxTokens / kMinRunRows <= 1 << 16 && kMaxExperts < 1 << 15);  // at most as many ranks as experts

  __device__ int me() const { return params_.between.domain.rank; }
  __device__ int num_streams() const {
    return (params_.between.grid.ranks_per_domain - 1) * params_.between.grid.num_domains;
  }
  // Partial rows always land in the arena's first slot.
  __device__ uint8_t* arena(const Run& run) const {
    return params_.between.domain.arena[run.source % params_.between.grid.ranks_per_domain];
  }
  __device__ int64_t first_row(const Run& run) const {
    return tables_.send_begin[run.source] + static_cast<int64_t>(run.number) * run_rows_;
  }
  __device__ int64_t first_target(const Run& run) const {
    return tables_.send_base[run.source] + static_cast<int64_t>(run.number) * run_rows_;
  }
  // Rows of the run that x has.
  __device__ int num_rows(const Run& run) const {
    const int left = min(run_rows_, count_of(params_, run.source, me()) - run.number * run_rows_);
    return static_cast<int>(max(int64_t{0}, min(int64_t{left}, params_.num_rows - first_row(run))));
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  ReportQueue& queue_;
  const int run_rows_;
  WorkIndices<> items_;
  int num_items_;
};

// Raises the flag of a run that has arrived, as RowsToSum has reported it, at the rank that sums. One thread.
__device__ void raise_run_flag(const CombineBetweenParams& params, const CombineTables& tables, uint32_t epoch,
                               int32_t report) {
  const Domain& domain = params.between.domain;
  const Grid& grid = params.between.grid;
  const int source = report >> 16, number = report & 0xffff, size = grid.ranks_per_domain;
  const int flag =
      first_flag(params, rows_per_run(params), source / size, domain.rank, tables.send_base[source]) + number;
  ptx::store_release_system(run_flags(*domain.control[source % size]) + flag, epoch);
}

// Whether nothing stands between the rows of a chunk.
__device__ bool are_rows_together(const CombineBetweenParams& params) {
  return params.record.num_bytes == params.row_bytes;
}

// The parts of chunks that a rank which is alone in its domain sends home: what send_runs sends. Each row of x is the
// only partial row of its record. The rows for a domain are consecutive, as its records are.
template <typename Link>
class PartsHome {
 public:
  using Run = Record;
  static constexpr bool kLoadsEarly = true;

  __device__ PartsHome(const CombineBetweenParams& params, const CombineTables& tables, Streams& streams,
                       const Waiter& waiter, const Link& link, ReportQueue& queue)
      : params_(params),
        tables_(tables),
        streams_(streams),
        waiter_(waiter),
        link_(link),
        queue_(queue),
        records_(params.between.grid, params.record, kControlChunks, streams.num_records,
                 own_part<uint32_t>(params.between, params.between.layout.items)) {}

  __device__ bool next(Record& part) { return records_.next_part(part); }

  // Whether the slot of the part's chunk is free.
  __device__ bool is_ready(const Record& part) const {
    if (part.chunk < num_free(part)) return true;
    return note_free(part, threadIdx.x % 32 > 0 || stream(part).is_free(part.chunk));
  }
  __device__ bool wait_ready(const Record& part) const {
    return note_free(part, threadIdx.x % 32 > 0 || stream(part).wait_free(part.chunk));
  }

  __device__ Blocks blocks(const Record& part) const {
    if (are_rows_together(params_)) return {1, num_rows(part) * params_.row_bytes, 0};
    return {num_rows(part), params_.row_bytes, params_.record.num_bytes};
  }
  __device__ const uint8_t* from(const Record& part) const {
    return params_.rows + first_row(part) * params_.row_bytes;
  }
  __device__ uint8_t* to(const Record& part) const {
    return stream(part).send_slot(part.chunk) + part.begin % params_.record.per_chunk * params_.record.num_bytes;
  }

  // Writes weights, and zeros for rows that x does not have.
  __device__ void finish(const Record& part) const {
    const int lane = threadIdx.x % 32, num_weights = params_.num_weights, num_here = num_rows(part);
    if (num_weights == 0 && num_here == part.part_size()) return;
    uint8_t* target = to(part);
    for (int j = lane; j < part.part_size() * num_weights; j += 32) {
      const int i = j / num_weights;
      auto* weights = reinterpret_cast<float*>(target + i * params_.record.num_bytes + params_.record.weights);
      weights[j % num_weights] = i < num_here ? params_.weights[first_row(part) * num_weights + j] : 0.0f;
    }
    for (int i = num_here; i < part.part_size(); ++i) {
      auto* row = reinterpret_cast<uint4*>(target + i * params_.record.num_bytes);
      for (int j = lane; j < params_.row_bytes / 16; j += 32) row[j] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ void report(const Record& part) const {
    if (threadIdx.x % 32 == 0) push_report(queue_, part.domain << 16 | part.begin);
  }

 private:
  static_assert(kMaxTokens <= 1 << 16 && kMaxDomains < 1 << 15);

  __device__ ChunkStream<Link> stream(const Record& part) const {
    return {params_.between, waiter_, link_, part.domain, streams_.first};
  }
  __device__ int& num_free(const Record& part) const { return streams_.num_free[threadIdx.x / 32][part.domain]; }
  __device__ int64_t first_row(const Record& part) const {
    return tables_.send_begin[part.domain] + static_cast<int64_t>(part.begin);
  }
  __device__ int num_rows(const Record& part) const {
    return static_cast<int>(max(int64_t{0}, min(int64_t{part.part_size()}, params_.num_rows - first_row(part))));
  }
  // Shares with the warp what lane 0 has seen: whether the slot is free. Collective.
  __device__ bool note_free(const Record& part, bool is_free) const {
    is_free = __all_sync(kAllLanes, is_free);
    __syncwarp();  // all lanes have read the count; a vote orders no memory
    if (is_free && threadIdx.x % 32 == 0) num_free(part) = part.chunk + stream(part).num_with_credit(part.chunk);
    __syncwarp();
    return is_free;
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  Streams& streams_;
  const Waiter& waiter_;
  const Link& link_;
  ReportQueue& queue_;
  Records records_;
};

// Counts a part that has arrived, as PartsHome has reported it, and sends the chunk with the last one. One thread.
template <typename Link>
__device__ bool count_part(const CombineBetweenParams& params, const Streams& streams, const Waiter& waiter,
                           const Link& link, int32_t report) {
  const int domain = report >> 16, begin = report & 0xffff, per_chunk = params.record.per_chunk;
  const int chunk = begin / per_chunk, first = chunk * per_chunk;
  const int chunk_rows = min(per_chunk, streams.num_records[domain] - first);
  const int num_rows = min(kRowsOfPart, chunk_rows - (begin - first));
  const ChunkStream<Link> stream(params.between, waiter, link, domain, streams.first);
  return stream.write_rows_by_thread(kControlChunks + chunk, num_rows, chunk_rows,
                                     chunk_rows * params.record.num_bytes);
}

}  // namespace
}  // namespace hybrid_ep
