// Combine inside a domain: push to the source, sum there, in one persistent launch.
//
//     rows of source i ─ bulk load ─► shared memory ─ bulk store ─► i's arena ─ chunk_epoch ─┐
//     send_slot[t] ─► partial rows of token t from each rank ─► fp32 sum in rank order ◄─────┘ ─► + bias ─► out[t]
//
// The rows of one source are one run of x, and land as one run in the source's arena, so the push copies chunks. Rows
// that this rank sent to itself are not moved: the sum reads them from x. Pushing, and not pulling, lets x be any
// memory. The first warps of a CTA send, the others sum (combine_sum.cuh). Legend: T tokens, R ranks, N received rows,
// H hidden, W weights.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/row_ring.cuh"
#include "device/wait.cuh"
#include "kernels/combine_sum.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr int kMaxRanksPerLane = (kMaxRanks + 31) / 32;

// The sending warps, each with a ring of pieces of rows.
constexpr int kSendWarps = 3;  // one stores to one destination at a time, which takes it longer than to several
constexpr int kSendStages = 4;
constexpr int kSendStoresInFlight = 2;
constexpr int kPieceBytes = 8192;
constexpr int kPiecesBeforeReport = 4;  // of the next chunk: how long pieces are on the wire
static_assert(kPiecesBeforeReport <= kRowsPerChunk);
constexpr int kSendRingBytes = kSendStages * kPieceBytes;

constexpr int kCombineThreads = (kSendWarps + kSumWarps) * 32;
constexpr int kRingBytes = kSendWarps * kSendRingBytes + kSumWarps * kSumRingBytes;
static_assert(kRingBytes <= kDynamicSharedBytes);
static_assert(kMaxRanks * kMaxRanks * sizeof(int32_t) <= kRingBytes);  // the matrix of counts

struct Routes {
  int send_begin[kMaxRanks];  // first row of x that belongs to source i
  int send_count[kMaxRanks];  // rows of x that belong to source i
  int send_base[kMaxRanks];   // first row of this rank in i's arena
  int recv_base[kMaxRanks];   // first row of rank j in this rank's arena; this rank's own in x
};

// All of it follows from the matrix of counts, which every rank has: nothing needs to be exchanged. Collective over the
// CTA; `prefix` is scratch for the matrix.
__device__ void find_bases(const CombineParams& params, Routes& routes, int32_t* prefix) {
  const int me = params.domain.rank, num_ranks = params.domain.num_ranks;
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += kCombineThreads) prefix[i] = params.rank_prefix[i];
  __syncthreads();
  const auto count = [&](int from, int to) {
    return prefix[from * num_ranks + to] - (from > 0 ? prefix[(from - 1) * num_ranks + to] : 0);
  };
  for (int r = threadIdx.x; r < num_ranks; r += kCombineThreads) {
    routes.send_begin[r] = r > 0 ? prefix[(r - 1) * num_ranks + me] : 0;
    routes.send_count[r] = count(r, me);
    // A source keeps the partial rows of each rank, itself left out, in ascending order of rank.
    int send_base = 0, recv_base = 0;
    for (int j = 0; j < me; ++j) send_base += j == r ? 0 : count(r, j);
    for (int j = 0; j < r; ++j) recv_base += j == me ? 0 : count(me, j);
    routes.send_base[r] = send_base;
    routes.recv_base[r] = r == me ? routes.send_begin[r] : recv_base;
    // Only a rank's arena that was sized by a bound can be too small.
    const int recv_end = recv_base + (r == me ? 0 : count(me, r));
    if (blockIdx.x == 0 && recv_end > params.slot.capacity) {
      report_fault(params.domain.fault, FaultKind::kOverflow, KernelName::kCombine, WaitTag::kPartialRows, me, r,
                   params.slot.capacity, recv_end);
    }
  }
  __syncthreads();
}

// A run of rows that goes to one source and is reported by one flag.
struct Chunk {
  int source, chunk;
  int num_rows;  // 0: all of the chunk's rows lie beyond a bound; they are not sent, but the chunk is reported
  int64_t from;  // row of x
  int64_t to;    // row of the source's arena
};

// Walks the pieces that a run of rows is cut into: no longer than a stage, and none of two rows.
class PieceWalk {
 public:
  __device__ PieceWalk(int num_rows, int row_bytes) : rows_left_(num_rows), row_bytes_(row_bytes) {}

  __device__ bool has_next() const { return rows_left_ > 0; }
  __device__ int64_t offset() const { return offset_; }
  __device__ int num_bytes() const { return min(kPieceBytes, row_bytes_ - begin_); }
  __device__ void advance() {
    offset_ += num_bytes();
    begin_ += kPieceBytes;
    if (begin_ < row_bytes_) return;
    begin_ = 0;
    --rows_left_;
  }

 private:
  int rows_left_, row_bytes_;
  int begin_ = 0;       // in its row
  int64_t offset_ = 0;  // in the run
};

// Sends chunks of rows home, all sources in turn, so that no source waits for another's rows. Collective over one of
// kSendWarps warps, which has a ring of its own. Returns false if a rank has not come.
__device__ bool send_rows(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint32_t epoch,
                          int warp, uint8_t* stages, uint64_t* barriers) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int lane = threadIdx.x % 32;
  const int num_peers = domain.num_ranks - 1;
  bool ok = true;
  int max_count = 0;
  for (int r = lane; r < domain.num_ranks; r += 32) {
    if (r == domain.rank) continue;
    ok &= waiter.until_epoch(&own.ready_epoch[r], epoch, r, WaitTag::kReady);
    max_count = max(max_count, routes.send_count[r]);
  }
  if (!__all_sync(kAllLanes, ok)) return false;
  max_count = __reduce_max_sync(kAllLanes, max_count);

  RowRing<kSendStoresInFlight> ring(stages, barriers, kSendStages, kPieceBytes, lane);
  const int num_items = (max_count + kRowsPerChunk - 1) / kRowsPerChunk * num_peers;
  const int stride = gridDim.x * kSendWarps;
  int item = blockIdx.x * kSendWarps + warp;
  const auto next_chunk = [&](Chunk& next) {
    for (; item < num_items; item += stride) {
      next.chunk = item / num_peers;
      next.source = (domain.rank + 1 + item % num_peers) % domain.num_ranks;
      const int begin = next.chunk * kRowsPerChunk, count = routes.send_count[next.source] - begin;
      if (count <= 0) continue;
      next.from = routes.send_begin[next.source] + begin;
      next.to = routes.send_base[next.source] + begin;
      const int64_t room = min(params.num_rows - next.from, params.slot.capacity - next.to);
      next.num_rows = max(0, min(min(count, kRowsPerChunk), static_cast<int>(room)));
      item += stride;
      return true;
    }
    return false;
  };
  const auto fetch = [&](const Chunk& chunk, PieceWalk& walk) {
    if (!walk.has_next()) return;
    ring.fetch(params.rows + chunk.from * params.row_bytes + walk.offset(), walk.num_bytes());
    walk.advance();
  };

  // A chunk is reported while the first pieces of the next one leave, so that the wire need not run dry to know that
  // all of it has arrived.
  Chunk sent{};
  bool has_sent = false;
  const auto report = [&] {
    __syncwarp();
    if (lane == 0) {
      ptx::store_release_system(&domain.control[sent.source]->chunk_epoch[domain.rank][sent.chunk], epoch);
    }
    has_sent = false;
  };

  Chunk chunk{};
  bool has_chunk = next_chunk(chunk);
  PieceWalk fetched(chunk.num_rows, params.row_bytes);
  for (int i = 0; has_chunk && i < ring.num_ahead(); ++i) fetch(chunk, fetched);
  while (has_chunk) {
    uint8_t* slot = domain.arena[chunk.source];  // partial rows always land in the arena's first slot
    uint8_t* target = slot + params.slot.rows + chunk.to * params.row_bytes;
    int num_sent = 0;
    for (PieceWalk piece(chunk.num_rows, params.row_bytes); piece.has_next(); piece.advance()) {
      const uint8_t* stage = ring.wait();
      if (lane == 0) ptx::bulk_store(target + piece.offset(), stage, piece.num_bytes());
      ring.release();
      fetch(chunk, fetched);
      if (has_sent && ++num_sent == kPiecesBeforeReport) {
        ptx::bulk_wait_written<kPiecesBeforeReport>();
        report();
      }
    }
    Chunk next{};
    const bool has_next = next_chunk(next);
    fetched = PieceWalk(next.num_rows, params.row_bytes);
    for (int i = 0; has_next && i < ring.num_ahead(); ++i) fetch(next, fetched);
    if (params.num_weights > 0) {
      const float* weights = params.weights + chunk.from * params.num_weights;
      auto* weights_target = reinterpret_cast<float*>(slot + params.slot.weights) + chunk.to * params.num_weights;
      for (int j = lane; j < chunk.num_rows * params.num_weights; j += 32) weights_target[j] = weights[j];
    }
    if (has_sent) {  // this chunk was too short to report the one before
      ptx::bulk_wait_written<0>();
      report();
    }
    sent = chunk;
    has_sent = true;
    chunk = next;
    has_chunk = has_next;
  }
  if (has_sent) {
    ptx::bulk_wait_written<0>();
    report();
  }
  return true;
}

// kRanksPerLane: 1 where a warp has a lane for every rank.
template <int kRanksPerLane>
__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Routes routes;
  __shared__ uint64_t send_barriers[kSendWarps][kSendStages], sum_barriers[kSumWarps][kSumStages];
  __shared__ Segment segments[kSumWarps][kSumStages];
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kCombine, domain.rank, domain.timeout_ns, domain.control,
                      domain.num_ranks);
  const uint32_t epoch = ptx::load_acquire_gpu(&own.combine_epoch) + 1;

  // This kernel runs, so nothing reads the arena's first slot any more: peers may write it.
  if (blockIdx.x == 0) {
    for (int r = threadIdx.x; r < domain.num_ranks; r += kCombineThreads) {
      ptx::store_release_system(&domain.control[r]->ready_epoch[domain.rank], epoch);
    }
  }
  find_bases(params, routes, reinterpret_cast<int32_t*>(shared));
  ptx::fence_shared_for_bulk();  // the rings take over the matrix's memory
  __syncthreads();
  bool ok;
  if (int warp = threadIdx.x / 32; warp < kSendWarps) {
    ok = send_rows(params, routes, waiter, epoch, warp, shared + warp * kSendRingBytes, send_barriers[warp]);
  } else {
    warp -= kSendWarps;
    uint8_t* stages = shared + kSendWarps * kSendRingBytes + warp * kSumRingBytes;
    ok = sum_tokens<kRanksPerLane>(params, routes.recv_base, waiter, epoch, warp, stages, sum_barriers[warp],
                                   segments[warp]);
  }
  if (finish_cta(own, ok)) end_kernel(own, own.combine_epoch, epoch);
}

}  // namespace

void prepare_combine() {
  allow_shared_memory(combine_kernel<1>);
  allow_shared_memory(combine_kernel<kMaxRanksPerLane>);
}

void launch_combine(const CombineParams& params, int num_sms, cudaStream_t stream) {
  const auto kernel = params.domain.num_ranks <= 32 ? combine_kernel<1> : combine_kernel<kMaxRanksPerLane>;
  launch_cooperative(kernel, params, num_sms, kCombineThreads, kRingBytes, stream);
}

}  // namespace hybrid_ep
