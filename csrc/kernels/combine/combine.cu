// Combine inside a domain: push to the source, sum there, in one persistent launch.
//
//     rows of source i ─ bulk load ─► shared memory ─ bulk store ─► i's arena ─ chunk_epoch ─┐
//     send_slot[t] ─► partial rows of token t from each rank ─► fp32 sum in rank order ◄─────┘ ─► + bias ─► out[t]
//
// The rows of one source are one run of x, and one run in the source's arena, so the push copies chunks. Rows of this
// rank's own tokens are not moved: the sum reads them from x. The kernel pushes, so x may be any memory. The first
// warps of a CTA send, one reports chunks that have arrived, the others sum (partial_rows.cuh). Warps claim work by
// index, because SMs do not get equal parts of the wire and a token waits for its last row. From experts, x is itself a
// sum, which further CTAs make (expert_rows.cuh). Legend: T tokens, R ranks, N received rows, H hidden, W weights.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/row_ring.cuh"
#include "device/wait.cuh"
#include "device/work_index.cuh"
#include "kernels/combine/chunk_reports.cuh"
#include "kernels/combine/expert_rows.cuh"
#include "kernels/combine/partial_rows.cuh"
#include "kernels/combine/ready.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr int kCombineSendWarps = 2;  // of a CTA
// A warp sends pieces of chunks through a ring. If it is paced, it has at most kWindow pieces on the wire, and all
// warps together have window_bytes. More bytes would wait inside the GPU and delay the loads of the sums. Longer pieces
// delay them too. Otherwise half of a ring is loaded while the other half is sent.
constexpr int kWindow = 5;
constexpr int kSendRingBytes = 48 * 1024;
constexpr int kMinPieceBytes = 1024;
constexpr int kMaxPieceBytes = kSendRingBytes / (kWindow + 2);
static_assert(kMaxTokens / kRowsPerChunk <= kMaxChunksOfSource);

constexpr int kSumWarps = 9;
constexpr int kCombineWarps = kCombineSendWarps + 1 + kSumWarps;  // one reports; 12 warps: 168 registers a thread
constexpr int kCombineThreads = kCombineWarps * 32;
constexpr int kRingBytes = kCombineSendWarps * kSendRingBytes + kSumWarps * kSumRingBytes;
static_assert(kCombineWarps * kSumRingBytes <= kRingBytes);  // a CTA of sums of experts
static_assert(kRingBytes <= kDynamicSharedBytes);
static_assert(kMaxRanks * kMaxRanks * sizeof(int32_t) <= kRingBytes);  // the matrix of counts

// A run of rows for one source, with one flag.
struct Chunk {
  int source, index;
  int num_rows;  // 0: only reported, because all of it lies beyond a bound
  int64_t from;  // row of x
  int64_t to;    // row of the source's arena
};

// How a sending warp cuts chunks into pieces. Those of a whole chunk are of equal size, but for the last one.
struct Pieces {
  int num_bytes;  // of each
  bool are_paced;

  __device__ Pieces(int chunk_bytes, int window_bytes, int num_sms) {
    const int share = window_bytes / (num_sms * kCombineSendWarps * kWindow);
    const bool fills_window = share > 0 && share <= kMaxPieceBytes;
    const int most = fills_window ? max(share, kMinPieceBytes) : kSendRingBytes / (2 * kWindow);
    const int num = max(kWindow, (chunk_bytes - 1) / most + 1);
    num_bytes = (chunk_bytes - 1) / (num * kLineBytes) * kLineBytes + kLineBytes;
    are_paced = fills_window && num > kWindow;
  }
};

// Walks the pieces of a run of rows. A piece fits into a stage.
class PieceWalk {
 public:
  __device__ PieceWalk(int num_bytes, int piece_bytes) : num_bytes_(num_bytes), piece_bytes_(piece_bytes) {}

  __device__ bool has_next() const { return offset_ < num_bytes_; }
  __device__ int offset() const { return offset_; }
  __device__ int num_bytes() const { return min(piece_bytes_, num_bytes_ - offset_); }
  __device__ void advance() { offset_ += piece_bytes_; }

 private:
  int num_bytes_, piece_bytes_;
  int offset_ = 0;
};

// Hands out chunks of all sources in turn, so that no source waits for another's rows.
class Chunks {
 public:
  __device__ Chunks(const CombineParams& params, const CombineRoutes& routes)
      : params_(params), routes_(routes), items_(&params.domain.control[params.domain.rank]->sent_items) {}

  // Collective over a warp. Returns false if there are no more.
  __device__ bool next(Chunk& chunk) {
    const Domain& domain = params_.domain;
    const int num_peers = domain.num_ranks - 1;
    const int num_items = (routes_.max_count + kRowsPerChunk - 1) / kRowsPerChunk * num_peers;
    while (true) {
      const int item = items_.take();
      if (item >= num_items) return false;
      chunk.index = item / num_peers;
      chunk.source = (domain.rank + 1 + item % num_peers) % domain.num_ranks;
      const int begin = chunk.index * kRowsPerChunk, count = routes_.send_count[chunk.source] - begin;
      if (count <= 0) continue;
      chunk.from = routes_.send_begin[chunk.source] + begin;
      chunk.to = routes_.send_base[chunk.source] + begin;
      const int64_t limit = min(params_.num_rows - chunk.from, params_.slot.capacity - chunk.to);
      chunk.num_rows = max(0, min(min(count, kRowsPerChunk), static_cast<int>(limit)));
      return true;
    }
  }

 private:
  const CombineParams& params_;
  const CombineRoutes& routes_;
  WorkIndices<> items_;
};

// Sends chunks of rows home. Collective over a warp, which has a ring and a queue of its own. Returns false if a rank
// has not come. `cta` counts the CTAs that send.
template <bool kFromExperts>
__device__ bool send_rows(const CombineParams& params, const CombineRoutes& routes, const Waiter& waiter,
                          uint32_t epoch, int cta, uint8_t* stages, uint64_t* barriers, ReportQueue& queue) {
  const Domain& domain = params.domain;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool reports = cta + warp == 0;
  Chunks chunks(params, routes);
  bool is_same;
  if (!wait_until_ready(domain, KernelName::kCombine, params.call, waiter, epoch, reports, &is_same)) return false;
  if (!is_same) {
    raise_all_flags(domain, epoch, cta * kCombineSendWarps + warp, params.num_sms * kCombineSendWarps);
    return true;
  }

  // The first pieces of the next chunk are loaded while this one is sent, so that no load is waited for.
  const Pieces pieces(kRowsPerChunk * params.row_bytes, params.window_bytes, params.num_sms);
  RowRing<kWindow> ring(stages, barriers, min(kSendRingBytes / pieces.num_bytes, kMaxStages), pieces.num_bytes, lane);
  Chunk chunk{}, next{};
  bool has_chunk = chunks.next(chunk), has_next = false;
  const auto pieces_of = [&](const Chunk& of) { return PieceWalk(of.num_rows * params.row_bytes, pieces.num_bytes); };
  PieceWalk asked = pieces_of(chunk);
  bool is_in_next = false;
  int num_ahead = 0;
  const auto ask_ahead = [&] {
    while (num_ahead < ring.num_ahead()) {
      // Sums of experts may not be made yet. A complete chunk does not wait for another.
      if (!asked.has_next() && !kFromExperts && has_next && !is_in_next) {
        asked = pieces_of(next);
        is_in_next = true;
      }
      if (!asked.has_next()) return;
      ring.fetch(params.rows + (is_in_next ? next : chunk).from * params.row_bytes + asked.offset(), asked.num_bytes());
      asked.advance();
      ++num_ahead;
    }
  };

  // A chunk is reported while the first pieces of the next one are sent. So the wire is not idle while a warp waits for
  // a chunk to arrive.
  Chunk sent{};
  bool has_sent = false;
  const auto report = [&] {
    __syncwarp();
    if (lane == 0) push_report(queue, report_of(sent.source, sent.index));
    has_sent = false;
  };

  bool ok = true;
  while (has_chunk) {
    if constexpr (kFromExperts) {
      const uint32_t* row_epoch = params.experts.row_epoch + chunk.from;
      if (lane < chunk.num_rows) {
        ok = waiter.until_equal(row_epoch + lane, epoch, domain.rank, WaitTag::kPartialRows);
      }
      ok = __all_sync(kAllLanes, ok);
      if (!ok) break;
      __syncwarp();
      ptx::fence_global_for_bulk();  // lane 0 loads rows whose flags other lanes have waited for
    }
    ask_ahead();
    has_next = chunks.next(next);
    uint8_t* slot = domain.arena[chunk.source];  // partial rows are always written into the arena's first slot
    uint8_t* target = slot + params.slot.rows + chunk.to * params.row_bytes;
    int num_sent = 0;
    for (PieceWalk piece = pieces_of(chunk); piece.has_next(); piece.advance()) {
      const uint8_t* stage = ring.wait();
      if (lane == 0) ptx::bulk_store(target + piece.offset(), stage, piece.num_bytes());
      ring.release();
      ++num_sent;
      if (pieces.are_paced || num_sent == kWindow) ptx::bulk_wait_written<kWindow>();
      --num_ahead;
      ask_ahead();
      if (has_sent && num_sent == kWindow) report();
    }
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
    if (!is_in_next) asked = pieces_of(chunk);
    has_next = is_in_next = false;
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
  __shared__ CombineRoutes routes;
  __shared__ uint64_t send_barriers[kCombineSendWarps][kMaxStages], sum_barriers[kCombineWarps][kSumStages];
  __shared__ Segment segments[kCombineWarps][kSumStages];
  __shared__ int started_before;
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kCombine, domain.rank, domain.timeout_ns, domain.control,
                      domain.num_ranks);
  const uint32_t epoch = next_epoch(ptx::load_acquire_gpu(&own.combine_epoch));

  // A CTA must not wait for one that has not started. The first CTAs to start sum rows of experts and wait for nothing.
  int cta = blockIdx.x;  // among those that combine
  bool is_first = cta == 0;
  if constexpr (kFromExperts) {
    if (threadIdx.x == 0) started_before = ptx::add_relaxed_gpu(&own.started_ctas, 1);
    __syncthreads();
    is_first = started_before == 0;
    cta = started_before - (gridDim.x - params.num_sms);
  }

  if (is_first) publish_ready(domain, params.call, epoch);
  find_combine_bases(params, routes, reinterpret_cast<int32_t*>(shared));
  ptx::fence_shared_for_bulk();  // the rings take over the matrix's memory
  __syncthreads();

  const int warp = threadIdx.x / 32;
  if constexpr (kFromExperts) {
    const int num_expert_ctas = gridDim.x - params.num_sms;
    if (cta < 0) {
      ExpertRows rows(params, routes, epoch, warp * num_expert_ctas + started_before, kCombineWarps * num_expert_ctas);
      sum_rows(rows, shared + warp * kSumRingBytes, sum_barriers[warp], segments[warp]);
    }
  }
  bool ok = true;
  if (cta >= 0 && warp < kCombineSendWarps) {
    ok = send_rows<kFromExperts>(params, routes, waiter, epoch, cta, shared + warp * kSendRingBytes,
                                 send_barriers[warp], own.report_queues[cta][warp]);
    if (threadIdx.x % 32 == 0) push_report(own.report_queues[cta][warp], kLastReport);
  } else if (cta >= 0 && warp == kCombineSendWarps) {
    report_chunks<kCombineSendWarps>(domain, epoch, own.report_queues[cta]);
  } else if (cta >= 0) {
    // Peers send their rows when all ranks are ready. If one is not, the senders' report must come first.
    const Waiter row_waiter(domain.fault, KernelName::kCombine, domain.rank, domain.timeout_ns + kListenNs,
                            domain.control, domain.num_ranks);
    PartialRows<kRanksPerLane, kFromExperts> rows(params, routes, row_waiter, epoch, kSumWarps * params.num_sms);
    const int ring = warp - kCombineSendWarps - 1;
    sum_rows(rows, shared + kCombineSendWarps * kSendRingBytes + ring * kSumRingBytes, sum_barriers[ring],
             segments[ring]);
    ok = rows.ok();
  }
  if (finish_cta(own, ok)) end_kernel(waiter, own, own.combine_epoch, epoch);
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
    launch_kernel(LaunchKind::kCooperative, kernel, params, params.num_sms, kCombineThreads, kRingBytes, stream);
    return;
  }
  // Not all of these CTAs need to run at once, so that they share the GPU with other kernels.
  const int num_ctas = params.num_sms + num_expert_sms;
  launch_kernel(LaunchKind::kPlain, kernel, params, num_ctas, kCombineThreads, kRingBytes, stream);
}

}  // namespace hybrid_ep
