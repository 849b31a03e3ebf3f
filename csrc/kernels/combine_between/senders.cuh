// What the sending warps of a combine between domains send, and what the reporting warp does with what has arrived.
//
//     domain of several ranks: runs of x ─ send_runs ─► arena of the rank that sums ─ report ─► flag there
//     rank alone in its domain: parts of x ─ send_runs ─► slot of a chunk ─ report ─► link, with the chunk's last part
#pragma once

#include "kernels/combine/chunk_reports.cuh"
#include "kernels/combine_between/part_claims.cuh"

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

  __device__ bool wait_next(Run&, bool*) { return false; }

  // The arena has room for all rows.
  __device__ bool is_ready(const Run&) const { return true; }
  __device__ bool wait_ready(const Run&) const { return true; }

  __device__ Blocks blocks(const Run& run) const { return {1, num_rows(run) * params_.row_bytes, 0}; }
  __device__ const uint8_t* from(const Run& run) const { return params_.rows + first_row(run) * params_.row_bytes; }
  __device__ uint8_t* to(const Run& run) const {
    return arena(run) + params_.slot.rows + first_target(run) * params_.row_bytes;
  }

  __device__ void finish(const Run& run) const {
    const int num_here = num_rows(run), num_floats = num_here * params_.num_weights;
    auto* target =
        reinterpret_cast<float*>(arena(run) + params_.slot.weights) + first_target(run) * params_.num_weights;
    const float* from = params_.weights + first_row(run) * params_.num_weights;
    for (int i = threadIdx.x % 32; i < num_floats; i += 32) target[i] = from[i];
    const int64_t num_absent = run_size(run) - num_here;
    send_zeros(target + num_floats, num_absent * params_.num_weights * sizeof(float));
    send_zeros(to(run) + num_here * params_.row_bytes, num_absent * params_.row_bytes);
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
  __device__ int run_size(const Run& run) const {
    return min(run_rows_, count_of(params_, run.source, me()) - run.number * run_rows_);
  }
  // Rows of the run that x has.
  __device__ int num_rows(const Run& run) const {
    return static_cast<int>(max(int64_t{0}, min(int64_t{run_size(run)}, params_.num_rows - first_row(run))));
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
  using Run = Part;
  static constexpr bool kLoadsEarly = true;

  __device__ PartsHome(const CombineBetweenParams& params, const CombineTables& tables, Streams& streams,
                       const Waiter& waiter, const Link& link, uint32_t epoch, int first_domain, ReportQueue& queue)
      : params_(params),
        tables_(tables),
        streams_(streams),
        waiter_(waiter),
        link_(link),
        queue_(queue),
        claims_(params, streams, waiter, link, epoch, first_domain, false) {}

  __device__ bool next(Part& part) { return claim(part, false); }
  __device__ bool wait_next(Part& part, bool* ok) {
    const bool has_part = claim(part, true);
    *ok = claims_.ok();
    return has_part;
  }

  // Whether the slot of the part's chunk is free: not always, if other warps have claimed parts at the same time.
  __device__ bool is_ready(const Part& part) const {
    return pass_on(threadIdx.x % 32 > 0 || is_free(part.domain, part_of(params_.record, part.begin)));
  }
  __device__ bool wait_ready(const Part& part) const {
    return pass_on(threadIdx.x % 32 > 0 || stream(part.domain).wait_free(chunk_of(part)));
  }

  __device__ Blocks blocks(const Part& part) const {
    if (are_rows_together(params_)) return {1, num_rows(part) * params_.row_bytes, 0};
    return {num_rows(part), params_.row_bytes, params_.record.num_bytes};
  }
  __device__ const uint8_t* from(const Part& part) const { return params_.rows + first_row(part) * params_.row_bytes; }
  __device__ uint8_t* to(const Part& part) const {
    return stream(part.domain).send_slot(chunk_of(part)) +
           part.begin % params_.record.per_chunk * params_.record.num_bytes;
  }

  // Writes weights, and zeros for rows that x does not have.
  __device__ void finish(const Part& part) const {
    const int lane = threadIdx.x % 32, num_weights = params_.num_weights, num_here = num_rows(part);
    if (num_weights == 0 && num_here == part.size()) return;
    uint8_t* target = to(part);
    for (int j = lane; j < part.size() * num_weights; j += 32) {
      const int i = j / num_weights;
      auto* weights = reinterpret_cast<float*>(target + i * params_.record.num_bytes + params_.record.weights);
      weights[j % num_weights] = i < num_here ? params_.weights[first_row(part) * num_weights + j] : 0.0f;
    }
    for (int i = num_here; i < part.size(); ++i) {
      auto* row = reinterpret_cast<uint4*>(target + i * params_.record.num_bytes);
      for (int j = lane; j < params_.row_bytes / 16; j += 32) row[j] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ void report(const Part& part) const {
    if (threadIdx.x % 32 == 0) push_report(queue_, part.domain << 16 | part.begin);
  }

 private:
  static_assert(kMaxTokens <= 1 << 16 && kMaxDomains < 1 << 15);

  __device__ ChunkStream<Link> stream(int domain) const {
    return {params_.between, waiter_, link_, domain, streams_.first};
  }
  __device__ int chunk_of(const Part& part) const { return kControlChunks + part.begin / params_.record.per_chunk; }

  __device__ bool claim(Part& part, bool waits) {
    return claims_.claim(part, waits, [&](int domain, int number) { return is_free(domain, number); });
  }
  // Whether the slot of a domain's part is free. One lane.
  __device__ bool is_free(int domain, int number) const {
    const int chunk = kControlChunks + number / parts_per_chunk(params_.record);
    int& num_free = streams_.num_free[threadIdx.x / 32][domain];
    if (chunk < num_free) return true;
    if (!stream(domain).is_free(chunk)) return false;
    num_free = chunk + stream(domain).num_with_credit(chunk);
    return true;
  }
  // Shares with the warp what lane 0 has seen and acquired.
  __device__ bool pass_on(bool is_free) const {
    is_free = __all_sync(kAllLanes, is_free);
    __syncwarp();
    return is_free;
  }

  __device__ int64_t first_row(const Part& part) const {
    return tables_.send_begin[part.domain] + static_cast<int64_t>(part.begin);
  }
  __device__ int num_rows(const Part& part) const {
    return static_cast<int>(max(int64_t{0}, min(int64_t{part.size()}, params_.num_rows - first_row(part))));
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  Streams& streams_;
  const Waiter& waiter_;
  const Link& link_;
  ReportQueue& queue_;
  PartClaims<Link> claims_;
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
