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
// Rows for all domains are pushed in turn, run by run, and each run has a flag at the rank that sums. So network,
// NVLink and sums overlap from the first chunk on. A warp that holds rows which are not summed yet never waits, so no
// credit waits for itself, however tokens are routed. Legend: T tokens, R ranks, D domains, G ranks of a domain.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/check.h"
#include "device/epilogue.cuh"
#include "kernels/combine/ready.cuh"
#include "kernels/combine_between/domain_sums.cuh"
#include "kernels/combine_between/home_sums.cuh"
#include "kernels/combine_between/senders.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

// Warps of a CTA: some send rows, one reports which rows have arrived, the others sum. Where a domain has several
// ranks, kDomainWarps of these sum for each domain. A warp that has no rows left in its role goes on: from sending to
// sums for each domain, and from these to sums at home.
constexpr int kSumWarps = 9, kDomainWarps = 5;
constexpr int kFirstSumWarp = kSendWarps + 1;
constexpr int kWarps = kFirstSumWarp + kSumWarps;
constexpr int kThreads = kWarps * 32;

// With many ranks the tables leave less shared memory for rings.
__host__ __device__ constexpr int num_sum_warps(int num_ranks) { return num_ranks > 1024 ? kSumWarps - 1 : kSumWarps; }
// Bytes of the rings of all warps; the tables follow.
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

// Makes the header for this rank's peers, once this rank knows the calls of its domain. Called by one thread.
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

// Publishes this rank's call to all ranks, and compares it with theirs. Called by the first CTA.
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

// kDomainsPerLane: 1 where a warp has a lane for every domain. kIsAlone: every rank is alone in its domain.
template <typename Link, int kDomainsPerLane, bool kIsAlone>
__global__ void __launch_bounds__(kThreads, 1)
    combine_between_kernel(const __grid_constant__ CombineBetweenParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t send_barriers[kSendWarps][kMaxStages], sum_barriers[kWarps][kSumStages];
  __shared__ Segment segments[kWarps][kSumStages];
  __shared__ int last_flags[kWarps][kMaxRanks];
  __shared__ Streams streams;
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

  streams.load(params);

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
      PartsHome<Link> parts(params, tables, streams, waiter, link, epoch,
                            (blockIdx.x * kSendWarps + warp) % grid.num_domains, queues[warp]);
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
        raise_run_flag(params, tables, epoch, report);
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
      DomainSums<Link> rows(params, tables, streams, last_flags[warp], waiter, link, epoch,
                            (blockIdx.x * kWarps + warp) % grid.num_domains);
      sum_rows(rows, ring, segments[warp]);
      ok = rows.ok();
    }
    if (ok) {
      HomeSums<Link, kDomainsPerLane, kIsAlone> rows(params, tables, streams, waiter, own_waiter, link, epoch,
                                                     gridDim.x * kWarps);
      sum_rows(rows, ring, segments[warp]);
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
