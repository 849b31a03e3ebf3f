// Combine inside a domain: push to the source, sum there, in one persistent launch.
//
//     rows of source i ─ bulk load ─► shared memory ─ bulk store ─► i's arena ─ chunk_epoch ─┐
//     send_slot[t] ─► partial rows of token t from each rank ─► fp32 sum in rank order ◄─────┘ ─► + bias ─► out[t]
//
// The rows of one source are one run of x, and land as one run in the source's arena, so the push copies chunks. Rows
// that this rank sent to itself are not moved: the sum reads them from x. Pushing, and not pulling, lets x be any
// memory. The first warps of a CTA send, the others sum (partial_rows.cuh). From experts, x is a sum itself, which
// further CTAs make meanwhile (expert_rows.cuh). Legend: T tokens, R ranks, N received rows, H hidden, W weights.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/row_ring.cuh"
#include "device/wait.cuh"
#include "kernels/expert_rows.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "kernels/partial_rows.cuh"

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

constexpr int kSumWarps = 9;
constexpr int kCombineWarps = kSendWarps + kSumWarps;
constexpr int kCombineThreads = kCombineWarps * 32;
constexpr int kRingBytes = kSendWarps * kSendRingBytes + kSumWarps * kSumRingBytes;
static_assert(kCombineWarps * kSumRingBytes <= kRingBytes);  // a CTA of sums of experts
static_assert(kRingBytes <= kDynamicSharedBytes);
static_assert(kMaxRanks * kMaxRanks * sizeof(int32_t) <= kRingBytes);  // the matrix of counts

// A run of rows that goes to one source and is reported by one flag.
struct Chunk {
  int source, chunk;
  int num_rows;  // 0: the chunk is reported, but nothing is sent: all of it lies beyond a bound, or ranks' calls differ
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

// Sends each `stride`-th chunk of rows from the `first` on home, all sources in turn, so that no source waits for
// another's rows. Collective over a warp, which has a ring of its own. Returns false if a rank has not come.
template <bool kFromExperts>
__device__ bool send_rows(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint32_t epoch,
                          int first, int stride, uint8_t* stages, uint64_t* barriers) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int lane = threadIdx.x % 32;
  const int num_peers = domain.num_ranks - 1;
  bool ok = true, is_same = true;
  const uint32_t record_bytes = params.record_bytes;
  for (int r = lane; r < domain.num_ranks; r += 32) {
    if (r == domain.rank) continue;
    uint32_t theirs = record_bytes;  // also of a rank that has ended this call and begun another
    ok &= waiter.until_epoch(&own.ready[r], epoch, r, WaitTag::kReady, &theirs);
    if (theirs == record_bytes) continue;
    is_same = false;
    if (first > 0) continue;  // one warp reports
    report_fault(domain.fault, FaultKind::kOtherCall, KernelName::kCombine, WaitTag::kRecordBytes, domain.rank, r,
                 record_bytes, theirs);
  }
  if (!__all_sync(kAllLanes, ok)) return false;
  is_same = __all_sync(kAllLanes, is_same);

  RowRing<kSendStoresInFlight> ring(stages, barriers, kSendStages, kPieceBytes, lane);
  const int num_items = (routes.max_count + kRowsPerChunk - 1) / kRowsPerChunk * num_peers;
  int item = first;
  const auto next_chunk = [&](Chunk& next) {
    for (; item < num_items; item += stride) {
      next.chunk = item / num_peers;
      next.source = (domain.rank + 1 + item % num_peers) % domain.num_ranks;
      const int begin = next.chunk * kRowsPerChunk, count = routes.send_count[next.source] - begin;
      if (count <= 0) continue;
      next.from = routes.send_begin[next.source] + begin;
      next.to = routes.send_base[next.source] + begin;
      const int64_t room = min(params.num_rows - next.from, params.slot.capacity - next.to);
      next.num_rows = is_same ? max(0, min(min(count, kRowsPerChunk), static_cast<int>(room))) : 0;
      item += stride;
      if constexpr (kFromExperts) {
        const uint32_t* row_epoch = params.experts.row_epoch + next.from;
        if (lane < next.num_rows) {
          ok = waiter.until_epoch(row_epoch + lane, epoch, domain.rank, WaitTag::kPartialRows);
        }
        ok = __all_sync(kAllLanes, ok);
        ptx::fence_global_for_bulk();  // lane 0 loads what others have waited for
      }
      return ok;
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
  return ok;
}

// kRanksPerLane: 1 where a warp has a lane for every rank.
template <int kRanksPerLane, bool kFromExperts>
__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Routes routes;
  __shared__ uint64_t send_barriers[kSendWarps][kSendStages], sum_barriers[kCombineWarps][kSumStages];
  __shared__ Segment segments[kCombineWarps][kSumStages];
  __shared__ int started_before;
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kCombine, domain.rank, domain.timeout_ns, domain.control,
                      domain.num_ranks);
  const uint32_t epoch = ptx::load_acquire_gpu(&own.combine_epoch) + 1;

  // This kernel runs, so nothing reads the arena's first slot any more: peers may write it.
  if (blockIdx.x == 0) {
    for (int r = threadIdx.x; r < domain.num_ranks; r += kCombineThreads) {
      ptx::store_release_system(&domain.control[r]->ready[domain.rank],
                                static_cast<uint64_t>(params.record_bytes) << 32 | epoch);
    }
  }
  find_bases(params, routes, reinterpret_cast<int32_t*>(shared));
  ptx::fence_shared_for_bulk();  // the rings take over the matrix's memory
  __syncthreads();

  const int warp = threadIdx.x / 32;
  int cta = blockIdx.x;
  if constexpr (kFromExperts) {
    // CTAs that have started wait for none that has not: the first sum rows of experts, and these wait for nothing.
    if (threadIdx.x == 0) started_before = ptx::add_relaxed_gpu(&own.started_ctas, 1);
    __syncthreads();
    const int num_expert_ctas = gridDim.x - params.num_sms;
    cta = started_before - num_expert_ctas;
    if (cta < 0) {
      ExpertRows rows(params, routes, epoch, warp * num_expert_ctas + started_before, kCombineWarps * num_expert_ctas);
      sum_rows(rows, shared + warp * kSumRingBytes, sum_barriers[warp], segments[warp]);
    }
  }
  bool ok = true;
  if (cta >= 0 && warp < kSendWarps) {
    // Neighbouring chunks and tokens go to different CTAs: they are there together.
    ok = send_rows<kFromExperts>(params, routes, waiter, epoch, cta * kSendWarps + warp, params.num_sms * kSendWarps,
                                 shared + warp * kSendRingBytes, send_barriers[warp]);
  } else if (cta >= 0) {
    PartialRows<kRanksPerLane, kFromExperts> rows(
        params, routes, waiter, epoch, (warp - kSendWarps) * params.num_sms + cta, kSumWarps * params.num_sms);
    sum_rows(rows, shared + kSendWarps * kSendRingBytes + (warp - kSendWarps) * kSumRingBytes, sum_barriers[warp],
             segments[warp]);
    ok = rows.ok();
  }
  if (finish_cta(own, ok)) end_kernel(own, own.combine_epoch, epoch);
}

// With and without experts.
constexpr void (*kKernels[])(CombineParams) = {combine_kernel<1, false>, combine_kernel<1, true>};
constexpr void (*kKernelsOfManyRanks[])(CombineParams) = {combine_kernel<kMaxRanksPerLane, false>,
                                                          combine_kernel<kMaxRanksPerLane, true>};

}  // namespace

void prepare_combine() {
  for (const auto kernel : kKernels) allow_shared_memory(kernel);
  for (const auto kernel : kKernelsOfManyRanks) allow_shared_memory(kernel);
}

void launch_combine(const CombineParams& params, int num_expert_sms, cudaStream_t stream) {
  const auto kernel = (params.domain.num_ranks <= 32 ? kKernels : kKernelsOfManyRanks)[num_expert_sms > 0];
  if (num_expert_sms == 0) {
    launch_cooperative(kernel, params, params.num_sms, kCombineThreads, kRingBytes, stream);
    return;
  }
  // Not all of these CTAs need to run at once, so that they share the GPU with other kernels.
  const int num_ctas = params.num_sms + num_expert_sms;
  kernel<<<num_ctas, kCombineThreads, kRingBytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of combine_kernel");
}

}  // namespace hybrid_ep
