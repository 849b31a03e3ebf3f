// Combine between domains, in one persistent launch: push rows to the rank that has forwarded the token, sum there,
// send the sum to the token's home rank, sum again.
//
//     y ─ bulk copy ─► arena of the rank that sums ─ rows_pushed ─► DomainSums ─ chunk ─ link ─► home: HomeSums ─►
//     out[t] part of this domain: DomainSums ─ own_sums, own_epoch ────────────────────────────────────► home: HomeSums
//
// A rank that is alone in its domain has nothing to push or sum for it, and sends its rows home:
//
//     y ─ bulk copy ─► chunk ─ link ─► home: HomeSums ─► out[t]
//
// Rows for all domains are pushed in turn, chunk by chunk, and the count of rows pushed is published to the rank that
// sums. So network, NVLink and sums overlap from the first chunk on. A warp that holds rows which are not summed yet
// never waits, so no credit waits for itself, however tokens are routed. rows.cuh defines what is summed. Legend: T
// tokens, R ranks, D domains, G ranks of a domain.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/epilogue.cuh"
#include "device/row_mover.cuh"
#include "kernels/between/records.cuh"
#include "kernels/combine/ready.cuh"
#include "kernels/combine_between/rows.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

// Of a CTA. A warp that has no rows left in its role goes on to the next role: push, sum for each domain, sum at home.
constexpr int kPushWarps = 2, kDomainWarps = 4, kHomeWarps = 6;
constexpr int kSendWarps = 4;  // of a rank that is alone in its domain; the others sum at home
constexpr int kWarps = kPushWarps + kDomainWarps + kHomeWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kPushRows = 16;                  // that a warp pushes at once
constexpr int kMaxTokensPerTurn = 4;           // that a warp at home takes at once
constexpr int kWarpRingBytes = kSumRingBytes;  // of a warp, in each of its roles
static_assert(kWarpRingBytes >= RowMover::kRingBytes);

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
    for (int word = 0; word < kNumReadyWords; ++word) {
      const uint32_t mine = params.call[word], theirs = call[word];
      if (theirs == mine) continue;
      same = false;
      report_other_ready(domain.fault, KernelName::kCombineBetween, domain.rank, kRankElsewhere + rank, word, mine,
                         theirs);
    }
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

// Pushes the rows of x to the ranks that sum them: of every peer in every domain its first chunk, then its second one,
// and so on. Returns false if another warp does not push. Collective over a warp.
__device__ bool push_rows(const CombineBetweenParams& params, const CombineTables& tables, const Waiter& waiter,
                          uint32_t epoch, RowMover& mover) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int lane = threadIdx.x % 32, size = grid.ranks_per_domain, num_peers = size - 1, me = between.domain.rank;
  int most_rows = 0;  // for one source
  for (int source = lane; source < grid.num_ranks(); source += 32) {
    if (source % size != me) most_rows = max(most_rows, count_of(params, source, me));
  }
  const int most_chunks = (__reduce_max_sync(kAllLanes, most_rows) + kPushRows - 1) / kPushRows;
  const int num_streams = num_peers * grid.num_domains;
  WorkIndices<> items(&between.domain.control[me]->sent_items);
  for (int item = items.take(); item < most_chunks * num_streams; item = items.take()) {
    const int chunk = item / num_streams, stream = item % num_streams;
    const int g = (me + 1 + stream % num_peers) % size;
    const int domain = (grid.domain_idx() + 1 + stream / num_peers) % grid.num_domains;
    const int source = domain * size + g, begin = chunk * kPushRows, num_rows = count_of(params, source, me);
    if (begin >= num_rows) continue;
    const int end = min(begin + kPushRows, num_rows);
    uint8_t* slot = between.domain.arena[g];  // partial rows always land in the arena's first slot
    const auto row_of = [&](int i) {
      const int64_t row = tables.send_begin[source] + i;
      return i < end && row < params.num_rows ? params.rows + row * params.row_bytes : nullptr;
    };
    for (int i = begin; row_of(i) != nullptr; ++i) {
      const int64_t from = tables.send_begin[source] + i, to = tables.send_base[source] + i;
      uint8_t* target = slot + params.slot.rows + to * params.row_bytes;
      mover.move(row_of(i), params.row_bytes, lane == 0 ? target : nullptr, row_of(i + 1));
      auto* weights = reinterpret_cast<float*>(slot + params.slot.weights) + to * params.num_weights;
      for (int k = lane; k < params.num_weights; k += 32) weights[k] = params.weights[from * params.num_weights + k];
    }
    mover.finish();
    // Chunks of a source are published in order, so one count of rows covers all.
    bool ok = true;
    if (lane == 0) {
      uint32_t* pushed = own_part<uint32_t>(between, between.layout.pushed) + source;
      uint64_t* published =
          between_part<uint64_t>(between, g, between.layout.rows_pushed) + me * grid.num_domains + domain;
      ptx::fence_acq_rel_system();
      ok = waiter.until_count(pushed, chunk, WaitTag::kGrid);
      if (ok) {
        ptx::store_release_system(published, static_cast<uint64_t>(end) << 32 | epoch);
        ptx::store_release_gpu(pushed, chunk + 1);
      }
    }
    if (!__all_sync(kAllLanes, ok)) return false;
  }
  return true;
}

// Sends the rows of x home by a rank that is alone in its domain: each is the only partial row of its record. The rows
// for a domain are consecutive, as its records are. Returns false if a peer gives no credit. Collective over a warp.
template <typename Link>
__device__ bool send_rows(const CombineBetweenParams& params, const CombineTables& tables, const Waiter& waiter,
                          const Link& link, RowMover& mover) {
  const BetweenDomain& between = params.between;
  const int lane = threadIdx.x % 32;
  const RecordLayout& layout = params.record;
  Records records(between.grid, layout, kControlChunks, params.route + params.parts.num_records,
                  own_part<uint32_t>(between, between.layout.items));
  const auto row_of = [&](const Record& record) {
    return tables.send_begin[record.domain] + static_cast<int64_t>(record.index);
  };
  const auto address_of = [&](int64_t row) {
    return row < params.num_rows ? params.rows + row * params.row_bytes : nullptr;
  };
  Record record, next;
  uint8_t* target = nullptr;  // of the record
  for (bool has_record = records.next(record), has_next = false; has_record; has_record = has_next, record = next) {
    const ChunkStream<Link> stream(between, waiter, link, record.domain);
    if (record.is_first()) {
      if (!__all_sync(kAllLanes, lane > 0 || stream.wait_free(record.chunk))) return false;
      __syncwarp();
      target = stream.send_slot(record.chunk) + record.index % layout.per_chunk * layout.num_bytes;
    }
    has_next = records.next(next);
    const int64_t row = row_of(record);
    if (row < params.num_rows) {
      mover.move(address_of(row), params.row_bytes, lane == 0 ? target : nullptr,
                 has_next ? address_of(row_of(next)) : nullptr);
    } else {
      for (int i = lane; i < params.row_bytes / 16; i += 32)
        reinterpret_cast<uint4*>(target)[i] = make_uint4(0, 0, 0, 0);
    }
    for (int k = lane; k < params.num_weights; k += 32) {
      reinterpret_cast<float*>(target + layout.weights)[k] =
          row < params.num_rows ? params.weights[row * params.num_weights + k] : 0.0f;
    }
    target += layout.num_bytes;
    if (!record.is_last()) continue;
    const int num_rows = record.num_chunk_records;
    mover.finish();
    if (!stream.write_rows(record.chunk, record.part_size(), num_rows, num_rows * layout.num_bytes)) return false;
  }
  return true;
}

// Sums all rows of a warp in a role. Returns false if some do not come.
template <typename Rows>
__device__ bool sum_all(Rows& rows, RowRing<0>& ring, Segment* segments) {
  while (!rows.is_done()) sum_rows(rows, ring, segments);
  return rows.ok();
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1)
    combine_between_kernel(const __grid_constant__ CombineBetweenParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t push_barriers[kWarps][RowMover::kStages], sum_barriers[kWarps][kSumStages];
  __shared__ Segment segments[kWarps][kSumStages];
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
  int* send_begin = reinterpret_cast<int*>(shared + kWarps * kWarpRingBytes);
  const CombineTables tables{send_begin, send_begin + grid.num_ranks(), send_begin + 2 * grid.num_ranks(),
                             send_begin + 3 * grid.num_ranks()};

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

  // Push, sum for each domain, and sum at home, each warp from its role on.
  if (shared_status == kSent) {
    const bool is_alone = is_alone_in_domain(params);
    uint8_t* stages = shared + warp * kWarpRingBytes;
    if (warp < (is_alone ? kSendWarps : kPushWarps)) {
      RowMover mover(stages, push_barriers[warp]);
      ok = is_alone ? send_rows(params, tables, waiter, link, mover)
                    : push_rows(params, tables, own_waiter, epoch, mover);
    }
    RowRing<0> ring(stages, sum_barriers[warp], kSumStages, kSumSegmentBytes, threadIdx.x % 32);
    if (ok && !is_alone && warp < kPushWarps + kDomainWarps) {
      const int number = blockIdx.x * (kPushWarps + kDomainWarps) + warp;
      DomainSums<Link> rows(params, tables, waiter, link, epoch, number % grid.num_domains);
      ok = sum_all(rows, ring, segments[warp]);
    }
    if (ok) {
      const int num_warps = kWarps * gridDim.x;
      const int per_turn = min(max(params.num_tokens / (2 * num_warps), 1), kMaxTokensPerTurn);
      HomeSums<Link> rows(params, tables, waiter, own_waiter, link, epoch, per_turn);
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
    own_part<uint64_t>(between, between.layout.sent_chunks)[d] +=
        kControlChunks + sent_chunks(params.route[params.parts.num_records + d]);
    own_part<uint64_t>(between, between.layout.read_chunks)[d] +=
        kControlChunks + sent_chunks(params.route[params.parts.domain_counts + d]);
  }
  for (int i = threadIdx.x; i < grid.num_ranks(); i += kThreads) {
    own_part<uint32_t>(between, between.layout.pushed)[i] = 0;
  }
  if (threadIdx.x == 0) waiter.sends(link.end_call([&] { return waiter.expired(); }), domain.rank);
  end_kernel(waiter, own, own.combine_epoch, epoch);
}

}  // namespace

void prepare_combine_between() {
  for_each_link([](auto link) { allow_shared_memory(combine_between_kernel<typename decltype(link)::type>); });
}

void launch_combine_between(const CombineBetweenParams& params, int num_sms, cudaStream_t stream) {
  const Grid& grid = params.between.grid;
  const int table_bytes = (3 * grid.num_ranks() + grid.num_domains) * static_cast<int>(sizeof(int));
  const auto kernel =
      kernel_for(params.between.link, [](auto link) { return combine_between_kernel<typename decltype(link)::type>; });
  launch_kernel(LaunchKind::kCooperative, kernel, params, dim3(num_sms), kThreads,
                kWarps * kWarpRingBytes + table_bytes, stream);
}

}  // namespace hybrid_ep
