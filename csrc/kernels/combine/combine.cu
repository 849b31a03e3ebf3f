// Combine inside a domain: push to the source, sum there, in one persistent launch.
//
//     rows of source i ─ bulk load ─► shared memory ─ bulk store ─► i's arena ─ chunk_epoch ─┐
//     send_slot[t] ─► partial rows of token t from each rank ─► fp32 sum in rank order ◄─────┘ ─► + bias ─► out[t]
//
// The rows of one source are one run of x, and one run in the source's arena, so the push copies chunks. Rows of this
// rank's own tokens are not moved: the sum reads them from x. The kernel pushes, so x may be any memory. The first
// warps of a CTA send and then sum, one reports chunks that have arrived, the others sum (partial_rows.cuh). Warps
// claim work by index, because SMs do not get equal parts of the wire and a token waits for its last row. From experts,
// x is itself a sum, which further CTAs make (expert_rows.cuh). Legend: T tokens, R ranks, N received rows, H hidden, W
// weights.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/wait.cuh"
#include "device/work_index.cuh"
#include "kernels/combine/chunk_reports.cuh"
#include "kernels/combine/expert_rows.cuh"
#include "kernels/combine/partial_rows.cuh"
#include "kernels/combine/ready.cuh"
#include "kernels/combine/send_runs.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

static_assert(kMaxTokens / kRowsPerChunk <= kMaxChunksOfSource);

constexpr int kSumWarps = 9;
constexpr int kCombineWarps = kSendWarps + 1 + kSumWarps;  // one reports; 12 warps: 168 registers a thread
constexpr int kCombineThreads = kCombineWarps * 32;
constexpr int kRingBytes = kSendWarps * kSendRingBytes + kSumWarps * kSumRingBytes;
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

// The chunks of all sources in turn, so that no source waits for another's rows: what send_runs sends.
template <bool kFromExperts>
class Chunks {
 public:
  using Run = Chunk;
  static constexpr bool kLoadsEarly = !kFromExperts;  // sums of experts may not be made yet

  __device__ Chunks(const CombineParams& params, const CombineRoutes& routes, const Waiter& waiter, uint32_t epoch,
                    ReportQueue& queue)
      : params_(params),
        routes_(routes),
        waiter_(waiter),
        epoch_(epoch),
        queue_(queue),
        items_(&params.domain.control[params.domain.rank]->sent_items) {}

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

  __device__ bool wait_next(Chunk&, bool*) { return false; }

  // Experts' rows are ready once they are summed.
  __device__ bool is_ready(const Chunk& chunk) const {
    if constexpr (!kFromExperts) return true;
    const int lane = threadIdx.x % 32;
    const bool is_summed = lane >= chunk.num_rows || ptx::load_acquire_system(flag_of(chunk, lane)) == epoch_;
    return pass_on(is_summed);
  }
  __device__ bool wait_ready(const Chunk& chunk) const {
    const int lane = threadIdx.x % 32;
    return pass_on(lane >= chunk.num_rows ||
                   waiter_.until_equal(flag_of(chunk, lane), epoch_, params_.domain.rank, WaitTag::kPartialRows));
  }

  // All rows are one block.
  __device__ Blocks blocks(const Chunk& chunk) const { return {1, chunk.num_rows * params_.row_bytes, 0}; }
  __device__ const uint8_t* from(const Chunk& chunk) const { return params_.rows + chunk.from * params_.row_bytes; }
  __device__ uint8_t* to(const Chunk& chunk) const {
    return slot_at(chunk.source) + params_.slot.rows + chunk.to * params_.row_bytes;
  }
  __device__ void finish(const Chunk& chunk) const {
    const int num_weights = params_.num_weights, lane = threadIdx.x % 32;
    const float* weights = params_.weights + chunk.from * num_weights;
    auto* target = reinterpret_cast<float*>(slot_at(chunk.source) + params_.slot.weights) + chunk.to * num_weights;
    for (int j = lane; j < chunk.num_rows * num_weights; j += 32) target[j] = weights[j];
    if (chunk.num_rows == kRowsPerChunk) return;
    const int left = min(routes_.send_count[chunk.source] - chunk.index * kRowsPerChunk, kRowsPerChunk);
    const int64_t num_absent = min(int64_t{left}, params_.slot.capacity - chunk.to) - chunk.num_rows;
    send_zeros(target + chunk.num_rows * num_weights, num_absent * num_weights * sizeof(float));
    send_zeros(to(chunk) + chunk.num_rows * params_.row_bytes, num_absent * params_.row_bytes);
  }
  __device__ void report(const Chunk& chunk) const {
    if (threadIdx.x % 32 == 0) push_report(queue_, report_of(chunk.source, chunk.index));
  }

 private:
  __device__ const uint32_t* flag_of(const Chunk& chunk, int i) const {
    return params_.experts.row_epoch + chunk.from + i;
  }
  // Lane 0 loads rows whose flags other lanes have seen.
  __device__ bool pass_on(bool is_summed) const {
    is_summed = __all_sync(kAllLanes, is_summed);
    __syncwarp();
    ptx::fence_global_for_bulk();
    return is_summed;
  }

  // Partial rows are always written into the arena's first slot.
  __device__ uint8_t* slot_at(int source) const { return params_.domain.arena[source]; }

  const CombineParams& params_;
  const CombineRoutes& routes_;
  const Waiter& waiter_;
  const uint32_t epoch_;
  ReportQueue& queue_;
  WorkIndices<> items_;
};

// Sends chunks of rows home. Collective over a warp, which has a ring and a queue of its own. Returns false if a rank
// has not come. `cta` counts the CTAs that send.
template <bool kFromExperts>
__device__ bool send_rows(const CombineParams& params, const CombineRoutes& routes, const Waiter& waiter,
                          uint32_t epoch, int cta, uint8_t* stages, uint64_t* barriers, ReportQueue& queue) {
  const Domain& domain = params.domain;
  const int warp = threadIdx.x / 32;
  const bool reports = cta + warp == 0;
  Chunks<kFromExperts> chunks(params, routes, waiter, epoch, queue);
  bool is_same;
  if (!wait_until_ready(domain, KernelName::kCombine, params.call, waiter, epoch, reports, &is_same)) return false;
  if (!is_same) {
    raise_all_flags(domain, epoch, cta * kSendWarps + warp, params.num_sms * kSendWarps);
    return true;
  }
  const Pieces pieces(1, kRowsPerChunk * params.row_bytes, params.window_bytes, params.num_sms);
  return send_runs(chunks, pieces, stages, barriers);
}

// kRanksPerLane: 1 where a warp has a lane for every rank.
template <int kRanksPerLane, bool kFromExperts>
__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ CombineRoutes routes;
  __shared__ uint64_t send_barriers[kSendWarps][kMaxStages], sum_barriers[kCombineWarps][kSumStages];
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
  if (cta >= 0 && warp == kSendWarps) {
    report_chunks<kSendWarps>(own.report_queues[cta], [&](int32_t report) { raise_flag(domain, epoch, report); });
  } else if (cta >= 0) {
    // Peers send their rows when all ranks are ready. If one is not, the senders' report must come first.
    const Waiter row_waiter(domain.fault, KernelName::kCombine, domain.rank, domain.timeout_ns + kListenNs,
                            domain.control, domain.num_ranks);
    uint8_t* stages = shared + warp * kSendRingBytes;
    if (warp < kSendWarps) {
      ReportQueue& queue = own.report_queues[cta][warp];
      ok = send_rows<kFromExperts>(params, routes, waiter, epoch, cta, stages, send_barriers[warp], queue);
      if (threadIdx.x % 32 == 0) push_report(queue, kLastReport);
    } else {
      stages = shared + kSendWarps * kSendRingBytes + (warp - kSendWarps - 1) * kSumRingBytes;
    }
    if (ok) {
      PartialRows<kRanksPerLane, kFromExperts> rows(params, routes, row_waiter, epoch, kSumWarps * params.num_sms);
      sum_rows(rows, stages, sum_barriers[warp], segments[warp]);
      ok = rows.ok();
    }
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
