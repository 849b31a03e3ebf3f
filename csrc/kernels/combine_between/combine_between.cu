// Combine between domains: push to the rank that has forwarded a record, sum there, send home, sum again, in one
// persistent launch.
//
//     y ─ bulk copy ─► arena of the rank that sums ─ part_epoch ─► DomainSums ─ chunk ─ link ─► home: HomeSums ─►
//     out[t] own domain's part: DomainSums ─ own_sums, own_epoch ───────────────────────────────────► home: HomeSums
//
// Rows for the farthest domains leave first, so that the network begins while NVLink still moves the rest. A warp that
// sums for a domain serves no other one, and a warp at home that holds rows does not wait: so no credit waits for
// itself, however tokens are routed. What is summed stands in rows.cuh. Legend: T tokens, R ranks, D domains, G ranks
// of a domain.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/epilogue.cuh"
#include "device/row_mover.cuh"
#include "kernels/combine_between/rows.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

// Of a CTA.
constexpr int kPushWarps = 2, kHomeWarps = 4;
constexpr int kSumWarps = kDomainWarps + kHomeWarps;
constexpr int kThreads = (kPushWarps + kSumWarps) * 32;
constexpr int kPushRows = 16;  // that a warp pushes at once
constexpr int kRingsBytes = kPushWarps * RowMover::kRingBytes + kSumWarps * kSumRingBytes;

// What a rank tells its peers ahead of its records.
struct CombineHeader {
  uint32_t fails;  // ranks of the domain differ
  uint32_t call[kNumReadyWords];
};
static_assert(sizeof(CombineHeader) <= 16);

// Fills the tables. Collective over the CTA. Returns whether every rank of the domain can hold what it sums; the
// first CTA reports where not.
__device__ bool find_combine_bases_between(const CombineBetweenParams& params, const CombineTables& tables) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int size = grid.ranks_per_domain, num_domains = grid.num_domains, me = between.domain.rank;
  __shared__ int domain_rows[kMaxDomains];   // of x
  __shared__ int rank_rows[kMaxRanks];       // that each rank has for this one to sum
  const auto rows_for = [&](int g, int r) {  // that rank r has for rank g to sum
    int total = 0;
    for (int d = 0; d < num_domains; ++d) total += count_of(params, d * size + g, r);
    return total;
  };
  for (int d = threadIdx.x; d < num_domains; d += kThreads) {
    domain_rows[d] = 0;
    for (int g = 0; g < size; ++g) domain_rows[d] += count_of(params, d * size + g, me);
  }
  for (int r = threadIdx.x; r < size; r += kThreads) rank_rows[r] = r == me ? 0 : rows_for(me, r);
  __syncthreads();
  bool has_room = true;
  for (int d = threadIdx.x; d < num_domains; d += kThreads) {
    int begin = 0;
    for (int before = 0; before < d; ++before) begin += domain_rows[before];
    for (int g = 0; g < size; ++g) {
      tables.send_begin[d * size + g] = begin;
      begin += count_of(params, d * size + g, me);
    }
  }
  for (int g = threadIdx.x; g < size; g += kThreads) {
    int begin = 0, end = 0;
    for (int r = 0; r < size; ++r) {
      const int num_rows = r == g ? 0 : rows_for(g, r);
      if (r < me) begin += num_rows;
      end += num_rows;
    }
    for (int d = 0; d < num_domains; ++d) {
      tables.send_base[d * size + g] = begin;
      begin += count_of(params, d * size + g, me);
    }
    if (end <= params.slot.capacity) continue;
    has_room = false;
    if (blockIdx.x != 0) continue;
    report_fault(between.domain.fault, FaultKind::kOverflow, KernelName::kCombineBetween, WaitTag::kPartialRows, me, g,
                 params.slot.capacity, end);
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
  return __syncthreads_and(has_room);
}

// Tells all ranks what this one's call is, and learns whether theirs are the same. By the first CTA.
template <typename Link>
__device__ bool agree(const CombineBetweenParams& params, const Waiter& waiter, const Link& link, uint32_t epoch,
                      bool has_room, bool* is_same) {
  const BetweenDomain& between = params.between;
  const Domain& domain = between.domain;
  const Grid& grid = between.grid;
  const auto is_mine = [&](int word, uint32_t theirs, int peer) {
    const uint32_t mine = params.call[word];
    if (theirs != mine) {
      report_other_combine(domain.fault, KernelName::kCombineBetween, domain.rank, peer, word, mine, theirs);
    }
    return theirs == mine;
  };
  // This kernel runs, so nothing reads the arena's first slot any more: ranks of the domain may write it.
  for (int i = threadIdx.x; i < kNumReadyWords * domain.num_ranks; i += kThreads) {
    const int word = i % kNumReadyWords;
    ptx::store_release_system(&domain.control[i / kNumReadyWords]->ready[domain.rank][word],
                              static_cast<uint64_t>(params.call[word]) << 32 | epoch);
  }
  bool ok = true, same = has_room;
  for (int i = threadIdx.x; i < kNumReadyWords * domain.num_ranks; i += kThreads) {
    const int r = i / kNumReadyWords, word = i % kNumReadyWords;
    uint32_t theirs = params.call[word];
    ok &= waiter.until_epoch(&domain.control[domain.rank]->ready[r][word], epoch, r, WaitTag::kReady, &theirs);
    same &= is_mine(word, theirs, r);
  }
  same = __syncthreads_and(same);
  const int warp = threadIdx.x / 32, num_warps = kThreads / 32, lane = threadIdx.x % 32;
  for (int i = 1 + warp; i < grid.num_domains; i += num_warps) {
    const ChunkStream<Link> stream(between, waiter, link, (grid.domain_idx() + i) % grid.num_domains);
    ok &= lane > 0 || stream.wait_free(0);
    if (!__all_sync(kAllLanes, ok)) break;
    if (lane == 0) {
      *reinterpret_cast<CombineHeader*>(stream.send_slot(0)) = {!same, {params.call[0], params.call[1]}};
    }
    ok &= stream.send(0, 16, 1);
  }
  for (int i = 1 + warp; i < grid.num_domains && lane == 0; i += num_warps) {
    const int d = (grid.domain_idx() + i) % grid.num_domains;
    const ChunkStream<Link> stream(between, waiter, link, d);
    ok &= stream.wait(0);
    if (!ok) break;
    const CombineHeader theirs = *reinterpret_cast<const CombineHeader*>(stream.chunk(0));
    const int peer = kRankElsewhere + grid.peer_in(d);
    for (int word = 0; word < kNumReadyWords; ++word) same &= is_mine(word, theirs.call[word], peer);
    same &= !theirs.fails;
    ok &= stream.read_rows(0, 1, 1);
  }
  *is_same = __syncthreads_and(same);
  return __syncthreads_and(ok);
}

// Pushes the rows of x to the ranks that sum them, domain by domain, the own one last. Collective over a warp.
__device__ void push_rows(const CombineBetweenParams& params, const CombineTables& tables, uint32_t epoch,
                          RowMover& mover) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int lane = threadIdx.x % 32, size = grid.ranks_per_domain, num_peers = size - 1, me = between.domain.rank;
  WorkIndices<> items(&between.domain.control[me]->sent_items);
  int item = items.take(), first_item = 0;
  for (int i = 1; i <= grid.num_domains && num_peers > 0; ++i) {
    const int domain = (grid.domain_idx() + i) % grid.num_domains;
    const auto chunks_for = [&](int g) {
      return (count_of(params, domain * size + g, me) + kPushRows - 1) / kPushRows;
    };
    int most = 0;
    for (int g = lane; g < size; g += 32) most = max(most, g == me ? 0 : chunks_for(g));
    const int end_item = first_item + __reduce_max_sync(kAllLanes, most) * num_peers;
    for (; item < end_item; item = items.take()) {
      const int g = (me + 1 + (item - first_item) % num_peers) % size, chunk = (item - first_item) / num_peers;
      const int source = domain * size + g, begin = chunk * kPushRows;
      const int num_rows = min(kPushRows, count_of(params, source, me) - begin);
      if (num_rows <= 0) continue;
      const int64_t from = tables.send_begin[source] + begin, to = tables.send_base[source] + begin;
      uint8_t* slot = between.domain.arena[g];  // partial rows always land in the arena's first slot
      for (int row = 0; row < num_rows && from + row < params.num_rows; ++row) {
        uint8_t* target = slot + params.slot.rows + (to + row) * params.row_bytes;
        mover.move(params.rows + (from + row) * params.row_bytes, params.row_bytes, lane == 0 ? target : nullptr);
        auto* weights = reinterpret_cast<float*>(slot + params.slot.weights) + (to + row) * params.num_weights;
        for (int k = lane; k < params.num_weights; k += 32) {
          weights[k] = params.weights[(from + row) * params.num_weights + k];
        }
      }
      mover.finish();
      if (lane > 0) continue;
      uint32_t* sent = own_part<uint32_t>(between, between.layout.parts_sent) + domain * size + g;
      ptx::fence_acq_rel_system();
      if (ptx::add_acq_rel_gpu(sent, 1) + 1 < static_cast<uint32_t>(chunks_for(g))) continue;
      ptx::store_release_system(
          between_part<uint32_t>(between, g, between.layout.part_epoch) + me * grid.num_domains + domain, epoch);
    }
    first_item = end_item;
  }
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1)
    combine_between_kernel(const __grid_constant__ CombineBetweenParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t push_barriers[kPushWarps][RowMover::kStages], sum_barriers[kSumWarps][kSumStages];
  __shared__ Segment segments[kSumWarps][kSumStages];
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
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int* send_begin = reinterpret_cast<int*>(shared + kRingsBytes);
  const CombineTables tables{send_begin, send_begin + grid.num_ranks(), send_begin + 2 * grid.num_ranks()};

  // Agree with all ranks that their calls are the same.
  bool ok = true, is_same = true;
  const bool has_room = find_combine_bases_between(params, tables);
  uint64_t* decision = own_part<uint64_t>(between, between.layout.decisions) + 1;
  if (blockIdx.x == 0) {
    ok = agree(params, waiter, link, epoch, has_room, &is_same);
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

  // Push, sum for each domain, and sum at home, each warp in its role.
  const int sum_warp = warp - kPushWarps;
  uint8_t* sum_stages = shared + kPushWarps * RowMover::kRingBytes + sum_warp * kSumRingBytes;
  const bool sends = shared_status == kSent;
  if (sends && warp < kPushWarps) {
    RowMover mover(shared + warp * RowMover::kRingBytes, push_barriers[warp]);
    push_rows(params, tables, epoch, mover);
  } else if (sends && sum_warp < kDomainWarps) {
    const int number = blockIdx.x * kDomainWarps + sum_warp;
    DomainSums<Link> rows(params, tables, waiter, link, epoch, number % grid.num_domains);
    sum_rows(rows, sum_stages, sum_barriers[sum_warp], segments[sum_warp]);
    ok = rows.ok();
  } else if (sends) {
    HomeSums<Link> rows(params, waiter, own_waiter, link, epoch);
    RowRing<0> ring(sum_stages, sum_barriers[sum_warp], kSumStages, kSumSegmentBytes, lane);
    while (!rows.is_done()) sum_rows(rows, ring, segments[sum_warp]);
    ok = rows.ok();
  }

  // The last CTA moves the streams on and tidies up.
  if (!finish_cta(own, ok)) return;
  const auto num_chunks = [&](int num_records) {
    return shared_status == kSent ? (num_records + params.record.per_chunk - 1) / params.record.per_chunk : 0;
  };
  for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) {
    own_part<uint32_t>(between, between.layout.items)[d] = 0;
    if (d == grid.domain_idx()) continue;
    own_part<uint64_t>(between, between.layout.sent_chunks)[d] +=
        kControlChunks + num_chunks(params.route[params.parts.num_records + d]);
    own_part<uint64_t>(between, between.layout.read_chunks)[d] +=
        kControlChunks + num_chunks(params.route[params.parts.domain_counts + d]);
  }
  for (int i = threadIdx.x; i < grid.num_ranks(); i += kThreads) {
    own_part<uint32_t>(between, between.layout.parts_sent)[i] = 0;
  }
  if (threadIdx.x == 0) waiter.sends(link.end_call([&] { return waiter.expired(); }), domain.rank);
  end_kernel(own, own.combine_epoch, epoch);
}

}  // namespace

void prepare_combine_between() {
  allow_shared_memory(combine_between_kernel<ProxyLink>);
  allow_shared_memory(combine_between_kernel<MappedLink>);
}

void launch_combine_between(const CombineBetweenParams& params, int num_sms, cudaStream_t stream) {
  const int table_bytes = 3 * params.between.grid.num_ranks() * static_cast<int>(sizeof(int));
  const auto kernel =
      params.between.link.is_mapped ? combine_between_kernel<MappedLink> : combine_between_kernel<ProxyLink>;
  launch_kernel(LaunchKind::kCooperative, kernel, params, dim3(num_sms), kThreads, kRingsBytes + table_bytes, stream);
}

}  // namespace hybrid_ep
