// Combine between domains, in one persistent launch: push rows to the rank that has forwarded the token, sum there,
// send the sum to the token's home rank, sum again.
//
//     y ─ send_runs ─► arena of the rank that sums ─► DomainSums ─ chunk ─ link ─► home: HomeSums ─► out[t]
//     rows that this rank sums for itself ─────────► DomainSums ─ own_sums ──────► home: HomeSums ─► out[t]
//
// A rank that is alone in its domain has nothing to push or sum for it, and sends its rows home:
//
//     y ─ send_runs ─► chunk ─ link ─► home: HomeSums ─► out[t]
//
// Rows for all domains are pushed in turn, run by run, and the count of rows pushed is published to the rank that sums.
// So network, NVLink and sums overlap from the first chunk on. A warp that holds rows which are not summed yet never
// waits, so no credit waits for itself, however tokens are routed. rows.cuh defines what is summed. Legend: T tokens, R
// ranks, D domains, G ranks of a domain.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/check.h"
#include "device/epilogue.cuh"
#include "kernels/between/records.cuh"
#include "kernels/combine/chunk_reports.cuh"
#include "kernels/combine/ready.cuh"
#include "kernels/combine/send_runs.cuh"
#include "kernels/combine_between/rows.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

// Of a CTA: warps that send rows, one that reports which have arrived, and others that sum. Where a domain has several
// ranks, kDomainWarps of these sum for each domain. A warp that has no rows left in its role goes on: from sending to
// sums for each domain, and from these to sums at home.
constexpr int kSumWarps = 9, kDomainWarps = 4;
constexpr int kFirstSumWarp = kSendWarps + 1;
constexpr int kWarps = kFirstSumWarp + kSumWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kMinRunRows = 8;  // that a warp pushes at once

// With many ranks the tables leave less shared memory for rings.
__host__ __device__ constexpr int num_sum_warps(int num_ranks) { return num_ranks > 1024 ? kSumWarps - 1 : kSumWarps; }
// Of all warps; the tables follow.
__host__ __device__ constexpr int ring_bytes(int num_ranks) {
  return kSendWarps * kSendRingBytes + num_sum_warps(num_ranks) * kSumRingBytes;
}

constexpr int domains_per_lane(int num_domains) { return (num_domains + 31) / 32; }

// What a rank publishes to its peers ahead of its records: its call, and what is wrong in its domain. The ranks of a
// domain find that out together. Other ranks learn it from their peers.
struct CombineHeader {
  CallKind call_kind;  // first, as in CallHeader
  uint32_t call[kNumReadyWords];
  FaultKind kind;  // kOtherCall, kOverflow, or kNone
  int32_t rank;    // that makes another call, or whose slot is too small
  uint32_t other_call[kNumReadyWords];
  int32_t num_rows, capacity;  // of the slot
};
constexpr uint32_t kCombineHeaderBytes = 48;
static_assert(sizeof(CombineHeader) <= kCombineHeaderBytes);

// A slot that does not hold the rows that its rank sums.
struct FullSlot {
  int rank, num_rows;
};

__device__ unsigned long long pack(FullSlot slot) {
  return static_cast<unsigned long long>(slot.num_rows) << 32 | static_cast<uint32_t>(slot.rank);
}

// Fills the tables. Collective over the CTA. Returns the slot of this domain that lacks most rows; num_rows is 0 if all
// slots hold their rows.
__device__ FullSlot find_combine_bases_between(const CombineBetweenParams& params, const CombineTables& tables) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int size = grid.ranks_per_domain, num_domains = grid.num_domains, me = between.domain.rank;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ int domain_rows[kMaxDomains];   // of x
  __shared__ int rank_rows[kMaxRanks];       // that each rank has for this one to sum
  __shared__ unsigned long long full_slot;   // packed
  const auto rows_for = [&](int g, int r) {  // that rank r has for rank g to sum
    int total = 0;
#pragma unroll 8
    for (int d = 0; d < num_domains; ++d) total += count_of(params, d * size + g, r);
    return total;
  };
  for (int d = threadIdx.x; d < num_domains; d += kThreads) {
    domain_rows[d] = 0;
    for (int g = 0; g < size; ++g) domain_rows[d] += count_of(params, d * size + g, me);
  }
  for (int r = threadIdx.x; r < size; r += kThreads) rank_rows[r] = r == me ? 0 : rows_for(me, r);
  if (threadIdx.x == 0) full_slot = 0;
  __syncthreads();
  for (int d = threadIdx.x; d < num_domains; d += kThreads) {
    int begin = 0;
    for (int before = 0; before < d; ++before) begin += domain_rows[before];
    for (int g = 0; g < size; ++g) {
      tables.send_begin[d * size + g] = begin;
      begin += count_of(params, d * size + g, me);
    }
    tables.held_begin[d] = 0;
    for (int before = 0; before < d; ++before) {
      if (before != grid.domain_idx()) tables.held_begin[d] += params.route[params.parts.num_records + before];
    }
  }
  for (int g = warp; g < size; g += kThreads / 32) {
    int begin = 0, end = 0;  // of this rank's rows in the arena of rank g, and of all rows there
    for (int first = 0; first < size; first += 32) {
      const int r = first + lane, num_rows = r < size && r != g ? rows_for(g, r) : 0;
      begin += __reduce_add_sync(kAllLanes, r < me ? num_rows : 0);
      end += __reduce_add_sync(kAllLanes, num_rows);
    }
    for (int d = lane; d < num_domains; d += 32) {
      int base = begin;
      for (int before = 0; before < d; ++before) base += count_of(params, before * size + g, me);
      tables.send_base[d * size + g] = base;
    }
    if (lane == 0 && end > params.slot.capacity) atomicMax(&full_slot, pack({g, end}));
  }
  __syncthreads();
  for (int r = threadIdx.x; r < size; r += kThreads) {
    int begin = 0;
    for (int before = 0; before < r; ++before) begin += rank_rows[before];
    for (int d = 0; d < num_domains; ++d) {
      const int source = grid.peer_in(d);
      tables.recv_base[d * size + r] = r == me ? tables.send_begin[source] : begin;
      begin += count_of(params, source, r);
    }
  }
  __syncthreads();
  return {static_cast<int>(static_cast<uint32_t>(full_slot)), static_cast<int>(full_slot >> 32)};
}

// Reports that a slot is too small. Every rank reports it in the same words.
__device__ void report_full_slot(const Domain& domain, int peer, int num_rows, int capacity) {
  report_fault(domain.fault, FaultKind::kOverflow, KernelName::kCombineBetween, WaitTag::kPartialRows, domain.rank,
               peer, capacity, num_rows);
}

// What this rank tells its peers, once it knows the calls of its domain. By one thread.
__device__ CombineHeader make_header(const CombineBetweenParams& params, uint32_t epoch, FullSlot full_slot) {
  const Domain& domain = params.between.domain;
  const Grid& grid = params.between.grid;
  const int first_rank = grid.domain_idx() * grid.ranks_per_domain;
  CombineHeader header{CallKind::kCombine, {params.call[0], params.call[1]}, FaultKind::kNone, 0, {}, 0, 0};
  if (full_slot.num_rows > 0) {
    header.kind = FaultKind::kOverflow;
    header.rank = first_rank + full_slot.rank;
    header.num_rows = full_slot.num_rows;
    header.capacity = params.slot.capacity;
  }
  for (int r = 0; r < domain.num_ranks; ++r) {
    bool is_same = true;
    uint32_t call[kNumReadyWords];
    for (int word = 0; word < kNumReadyWords; ++word) {
      call[word] = ready_word(domain, epoch, r, word);
      is_same &= call[word] == params.call[word];
    }
    if (is_same) continue;
    header.kind = FaultKind::kOtherCall;
    header.rank = first_rank + r;
    for (int word = 0; word < kNumReadyWords; ++word) header.other_call[word] = call[word];
  }
  return header;
}

// Publishes this rank's call to all ranks, and compares it with theirs. By the first CTA.
template <typename Link>
__device__ bool agree(const CombineBetweenParams& params, const Waiter& waiter, const Link& link, uint32_t epoch,
                      FullSlot full_slot, bool* is_same) {
  __shared__ CombineHeader header;
  const BetweenDomain& between = params.between;
  const Domain& domain = between.domain;
  const Grid& grid = between.grid;
  const int warp = threadIdx.x / 32, num_warps = kThreads / 32, lane = threadIdx.x % 32;
  // Kernels run in order, so nothing reads the arena's first slot any more: ranks of the domain may write it.
  publish_ready(domain, params.call, epoch);
  if (threadIdx.x == 0 && full_slot.num_rows > 0) {
    report_full_slot(domain, full_slot.rank, full_slot.num_rows, params.slot.capacity);
  }
  bool same;
  bool ok = wait_until_ready(domain, KernelName::kCombineBetween, params.call, waiter, epoch, warp == 0, &same);
  same &= full_slot.num_rows == 0;
  if (threadIdx.x == 0) header = make_header(params, epoch, full_slot);
  __syncthreads();
  for (int i = 1 + warp; i < grid.num_domains; i += num_warps) {
    const ChunkStream<Link> stream(between, waiter, link, (grid.domain_idx() + i) % grid.num_domains);
    ok &= lane > 0 || stream.wait_free(0);
    if (!__all_sync(kAllLanes, ok)) break;
    if (lane == 0) *reinterpret_cast<CombineHeader*>(stream.send_slot(0)) = header;
    ok &= stream.send(0, kCombineHeaderBytes, 1);
  }
  const auto compare = [&](const uint32_t (&call)[kNumReadyWords], int rank) {
    if (call[0] == params.call[0] && call[1] == params.call[1]) return;
    same = false;
    report_other_ready(domain.fault, KernelName::kCombineBetween, domain.rank, kRankElsewhere + rank, params.call,
                       call);
  };
  for (int i = 1 + warp; i < grid.num_domains && lane == 0; i += num_warps) {
    const int d = (grid.domain_idx() + i) % grid.num_domains;
    const ChunkStream<Link> stream(between, waiter, link, d);
    ok &= stream.wait(0);
    if (!ok) break;
    const CombineHeader theirs = *reinterpret_cast<const CombineHeader*>(stream.chunk(0));
    if (theirs.call_kind == CallKind::kCombine) {
      compare(theirs.call, grid.peer_in(d));
      if (theirs.kind == FaultKind::kOtherCall) compare(theirs.other_call, theirs.rank);
      if (theirs.kind == FaultKind::kOverflow) {
        same = false;
        report_full_slot(domain, kRankElsewhere + theirs.rank, theirs.num_rows, theirs.capacity);
      }
    } else {  // the rest of its header is not that of a combine
      same = false;
      report_other_call(domain.fault, KernelName::kCombineBetween, CallField::kCall, domain.rank,
                        kRankElsewhere + grid.peer_in(d), static_cast<int>(CallKind::kCombine),
                        static_cast<int>(theirs.call_kind));
    }
    ok &= stream.read_rows(0, 1, 1);
  }
  *is_same = __syncthreads_and(same);
  return __syncthreads_and(ok);
}

// Runs of rows of x for one source, which go to the rank of this domain that sums for the source: what send_runs sends
// where a domain has several ranks. Of every source comes its first run, then its second one, and so on.
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
        run_rows_(rows_per_run(params, tables)),
        items_(&params.between.domain.control[params.between.domain.rank]->sent_items) {
    const Grid& grid = params.between.grid;
    int most_rows = 0;  // for one source
    for (int source = threadIdx.x % 32; source < grid.num_ranks(); source += 32) {
      if (source % grid.ranks_per_domain != me()) most_rows = max(most_rows, count_of(params, source, me()));
    }
    num_items_ = (__reduce_max_sync(kAllLanes, most_rows) + run_rows_ - 1) / run_rows_ * num_streams();
  }

  // Rows of a run: more than kMinRunRows only where the flags of runs would not suffice.
  static __device__ int rows_per_run(const CombineBetweenParams& params, const CombineTables& tables) {
    const int num_ranks = params.between.grid.num_ranks(), last = num_ranks - 1;
    const int num_rows = tables.send_begin[last] + count_of(params, last, params.between.domain.rank);
    int run_rows = kMinRunRows;
    while (num_rows / run_rows + num_ranks > kMaxRanks * kMaxChunksOfSource) run_rows *= 2;
    return run_rows;
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
  // That x has.
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

// Notes a run that has arrived, as RowsToSum has reported it, and publishes to the rank that sums how many rows have
// arrived before the first one that has not. Runs arrive in any order. One thread.
__device__ void publish_rows(const CombineBetweenParams& params, const CombineTables& tables, uint32_t epoch,
                             int32_t report) {
  constexpr uint32_t kIsTaken = 1u << 31;  // by a thread that publishes
  const BetweenDomain& between = params.between;
  const int source = report >> 16, number = report & 0xffff, size = between.grid.ranks_per_domain;
  const int me = between.domain.rank, num_rows = count_of(params, source, me);
  const int run_rows = RowsToSum::rows_per_run(params, tables);
  // Peers leave these flags of this rank alone in such a call.
  uint32_t* arrived = &between.domain.control[me]->chunk_epoch[0][0] + tables.send_begin[source] / run_rows + source;
  ptx::store_release_gpu(arrived + number, epoch);
  uint32_t* num_published = own_part<uint32_t>(between, between.layout.pushed) + source;
  uint32_t num = kIsTaken;
  // Who has taken the word gives it back without waiting for anybody, so this needs no deadline.
  while ((num & kIsTaken) != 0 || atomicCAS(num_published, num, num | kIsTaken) != num) {
    num = ptx::load_acquire_gpu(num_published);
  }
  ptx::fence_acq_rel_gpu();
  const uint32_t before = num;
  while (static_cast<int>(num) * run_rows < num_rows && ptx::load_acquire_gpu(arrived + num) == epoch) ++num;
  if (num > before) {
    const int end = min(static_cast<int>(num) * run_rows, num_rows);
    uint64_t* published = between_part<uint64_t>(between, source % size, between.layout.rows_pushed) +
                          me * between.grid.num_domains + source / size;
    ptx::store_release_system(published, static_cast<uint64_t>(end) << 32 | epoch);
  }
  ptx::store_release_gpu(num_published, num);
}

// What the warps of a CTA know of what goes to each domain, in shared memory. A load from global memory, or of a
// credit, takes as long as several pieces of a row.
struct SentStreams {
  RingPlace first_place[kMaxDomains];  // of the call's first chunk
  int num_records[kMaxDomains];
  int num_free[kSendWarps]
              [kMaxDomains];  // the first chunks of the call, of which a sending warp knows that they are free

  // Collective over the CTA; a barrier must follow.
  __device__ void load(const CombineBetweenParams& params) {
    for (int d = threadIdx.x; d < params.between.grid.num_domains; d += kThreads) {
      first_place[d] = next_place(params.between, params.between.layout.next_sent, d);
      num_records[d] = params.route[params.parts.num_records + d];
      for (int warp = 0; warp < kSendWarps; ++warp) num_free[warp][d] = 0;
    }
  }
};

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

  __device__ PartsHome(const CombineBetweenParams& params, const CombineTables& tables, SentStreams& streams,
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

  // Whether the slot is free.
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

  // Weights; and zeros for rows that x does not have.
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
    return {params_.between, waiter_, link_, part.domain, streams_.first_place[part.domain], {}};
  }
  __device__ int& num_free(const Record& part) const { return streams_.num_free[threadIdx.x / 32][part.domain]; }
  __device__ int64_t first_row(const Record& part) const {
    return tables_.send_begin[part.domain] + static_cast<int64_t>(part.begin);
  }
  __device__ int num_rows(const Record& part) const {
    return static_cast<int>(max(int64_t{0}, min(int64_t{part.part_size()}, params_.num_rows - first_row(part))));
  }
  // Of what lane 0 has seen. Collective.
  __device__ bool note_free(const Record& part, bool is_free) const {
    is_free = __all_sync(kAllLanes, is_free);
    if (is_free && threadIdx.x % 32 == 0) num_free(part) = part.chunk + stream(part).num_with_credit(part.chunk);
    __syncwarp();
    return is_free;
  }

  const CombineBetweenParams& params_;
  const CombineTables& tables_;
  SentStreams& streams_;
  const Waiter& waiter_;
  const Link& link_;
  ReportQueue& queue_;
  Records records_;
};

// Counts a part that has arrived, as PartsHome has reported it, and sends the chunk with the last one. One thread.
template <typename Link>
__device__ bool count_part(const CombineBetweenParams& params, const SentStreams& streams, const Waiter& waiter,
                           const Link& link, int32_t report) {
  const int domain = report >> 16, begin = report & 0xffff, per_chunk = params.record.per_chunk;
  const int chunk = begin / per_chunk, first = chunk * per_chunk;
  const int chunk_rows = min(per_chunk, streams.num_records[domain] - first);
  const int num_rows = min(kRowsOfPart, chunk_rows - (begin - first));
  const ChunkStream<Link> stream(params.between, waiter, link, domain, streams.first_place[domain], {});
  return stream.write_rows_by_thread(kControlChunks + chunk, num_rows, chunk_rows,
                                     chunk_rows * params.record.num_bytes);
}

// Sums all rows of a warp in a role. Returns false if some do not come.
template <typename Rows>
__device__ bool sum_all(Rows& rows, RowRing<0>& ring, Segment* segments) {
  while (!rows.is_done()) sum_rows(rows, ring, segments);
  return rows.ok();
}

// kDomainsPerLane: 1 where a warp has a lane for every domain. kIsAlone: every rank is alone in its domain.
template <typename Link, int kDomainsPerLane, bool kIsAlone>
__global__ void __launch_bounds__(kThreads, 1)
    combine_between_kernel(const __grid_constant__ CombineBetweenParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t send_barriers[kSendWarps][kMaxStages], sum_barriers[kWarps][kSumStages];
  __shared__ Segment segments[kWarps][kSumStages];
  __shared__ SentStreams streams;
  __shared__ int shared_status;
  const BetweenDomain& between = params.between;
  const Domain& domain = between.domain;
  const Grid& grid = between.grid;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kCombineBetween, domain.rank, domain.timeout_ns, domain.control,
                      domain.num_ranks);
  const Waiter own_waiter = waiter_of_own(domain, KernelName::kCombineBetween);
  const Link link(between.link, blockIdx.x);
  const uint32_t epoch = next_epoch(ptx::load_acquire_gpu(&own.combine_epoch));
  const int warp = threadIdx.x / 32;
  int* send_begin = reinterpret_cast<int*>(shared + ring_bytes(grid.num_ranks()));
  const CombineTables tables{send_begin, send_begin + grid.num_ranks(), send_begin + 2 * grid.num_ranks(),
                             send_begin + 3 * grid.num_ranks()};

  if constexpr (kIsAlone) streams.load(params);

  // Agree with all ranks that their calls are the same.
  bool ok = true, is_same = true;
  const FullSlot full_slot = find_combine_bases_between(params, tables);
  uint64_t* decision = own_part<uint64_t>(between, between.layout.decisions) + 1;
  if (blockIdx.x == 0) {
    ok = agree(params, waiter, link, epoch, full_slot, &is_same);
    if (threadIdx.x == 0) {
      shared_status = ok && is_same ? kSent : kFailed;
      ptx::store_release_system(decision, static_cast<uint64_t>(shared_status) << 32 | epoch);
    }
  } else if (threadIdx.x == 0) {
    uint64_t word = static_cast<uint64_t>(kFailed) << 32;
    ok = own_waiter.until_equal(decision, epoch, domain.rank, WaitTag::kGrid, &word);
    shared_status = ok ? static_cast<int>(word >> 32) : kFailed;
    ptx::fence_acq_rel_system();  // as the first CTA has seen every rank ready
  }
  __syncthreads();

  // Send, report what has arrived, and sum.
  ReportQueue* queues = own.report_queues[blockIdx.x];
  if (shared_status == kSent && warp < kSendWarps) {
    uint8_t* stages = shared + warp * kSendRingBytes;
    if constexpr (kIsAlone) {
      PartsHome<Link> parts(params, tables, streams, waiter, link, queues[warp]);
      const int num_blocks = are_rows_together(params) ? 1 : kRowsOfPart;
      const Pieces pieces(num_blocks, kRowsOfPart / num_blocks * params.row_bytes, params.window_bytes, gridDim.x);
      ok = send_runs(parts, pieces, stages, send_barriers[warp]);
    } else {
      RowsToSum rows(params, tables, queues[warp]);
      ok = send_runs(rows, Pieces(1, rows.run_bytes(), params.window_bytes, gridDim.x), stages, send_barriers[warp]);
    }
    if (threadIdx.x % 32 == 0) push_report(queues[warp], kLastReport);
  } else if (shared_status == kSent && warp == kSendWarps) {
    report_chunks<kSendWarps>(queues, [&](int32_t report) {
      if constexpr (kIsAlone) {
        ok &= count_part(params, streams, waiter, link, report);
      } else {
        publish_rows(params, tables, epoch, report);
      }
    });
  }
  const bool sums = warp < kSendWarps ? !kIsAlone && ok : warp > kSendWarps;
  if (shared_status == kSent && sums && warp < kFirstSumWarp + num_sum_warps(grid.num_ranks())) {
    uint8_t* stages =
        shared + (warp < kSendWarps ? warp * kSendRingBytes
                                    : kSendWarps * kSendRingBytes + (warp - kFirstSumWarp) * kSumRingBytes);
    RowRing<0> ring(stages, sum_barriers[warp], kSumStages, kSumSegmentBytes, threadIdx.x % 32);
    if (!kIsAlone && warp < kFirstSumWarp + kDomainWarps) {
      DomainSums<Link> rows(params, tables, waiter, link, epoch, (blockIdx.x * kWarps + warp) % grid.num_domains);
      ok = sum_all(rows, ring, segments[warp]);
    }
    if (ok) {
      HomeSums<Link, kDomainsPerLane, kIsAlone> rows(params, tables, waiter, own_waiter, link, epoch);
      sum_all(rows, ring, segments[warp]);
      rows.return_reads();
      ok = rows.ok();
    }
  }

  // The last CTA advances the streams and resets the counters.
  if (!finish_cta(own, ok)) return;
  const auto sent_chunks = [&](int num_records) {
    return shared_status == kSent ? num_chunks(params.record, num_records) : 0;
  };
  for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) {
    own_part<uint32_t>(between, between.layout.items)[d] = 0;
    if (d == grid.domain_idx()) continue;
    advance_stream(between, d, kControlChunks + sent_chunks(params.route[params.parts.num_records + d]),
                   kControlChunks + sent_chunks(params.route[params.parts.domain_counts + d]));
  }
  for (int i = threadIdx.x; i < grid.num_ranks(); i += kThreads) {
    own_part<uint32_t>(between, between.layout.pushed)[i] = 0;
  }
  if (threadIdx.x == 0) waiter.sends(link.end_call([&] { return waiter.expired(); }), domain.rank);
  end_kernel(waiter, own, own.combine_epoch, epoch);
}

template <typename Link>
auto kernel_of(const Grid& grid) {
  const bool is_alone = grid.ranks_per_domain == 1;
  require(grid.num_domains <= Link::kMostDomains, "domains", grid.num_domains, "fewer for this link");
  constexpr int kMost = domains_per_lane(Link::kMostDomains);
  if (domains_per_lane(grid.num_domains) == 1) {
    return is_alone ? combine_between_kernel<Link, 1, true> : combine_between_kernel<Link, 1, false>;
  }
  return is_alone ? combine_between_kernel<Link, kMost, true> : combine_between_kernel<Link, kMost, false>;
}

}  // namespace

void prepare_combine_between() {
  for_each_link([](auto link) {
    using Link = typename decltype(link)::type;
    for (const int num_domains : {1, Link::kMostDomains}) {
      for (const int num_ranks : {1, 2}) allow_shared_memory(kernel_of<Link>({0, num_domains, num_ranks}));
    }
  });
}

void launch_combine_between(const CombineBetweenParams& params, int num_sms, cudaStream_t stream) {
  const Grid& grid = params.between.grid;
  const int table_bytes = (3 * grid.num_ranks() + grid.num_domains) * static_cast<int>(sizeof(int));
  const auto kernel =
      kernel_for(params.between.link, [&](auto link) { return kernel_of<typename decltype(link)::type>(grid); });
  launch_kernel(LaunchKind::kCooperative, kernel, params, dim3(num_sms), kThreads,
                ring_bytes(grid.num_ranks()) + table_bytes, stream);
}

}  // namespace hybrid_ep
