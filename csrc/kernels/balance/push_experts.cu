// Copies experts to spare slots that peers can write, in one persistent launch.
//
//     experts[e] ─ bulk load ─► shared memory ─ bulk store ─► spare[b] of the replica's rank ─ one flag for each rank
//
// All warps push. The last CTA tells every other rank that this rank has written all that it pushes, and waits for the
// flags of the others. To ranks and in epochs the call is a combine, as in copy_experts.cu: a flag is that of the first
// chunk. Legend: as there.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/row_ring.cuh"
#include "device/wait.cuh"
#include "device/work_index.cuh"
#include "kernels/balance/copy_experts.h"
#include "kernels/balance/replicas.cuh"
#include "kernels/combine/chunk_reports.cuh"
#include "kernels/combine/ready.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

constexpr int kWarps = 8, kStages = 4, kStoresInFlight = 2;
constexpr int kRingBytes = kStages * kPushedChunkBytes;
constexpr int kThreads = kWarps * 32, kSharedBytes = kWarps * kRingBytes;

struct Replicas {
  uint32_t checksum;  // of the mapping
  Entries pushed;     // slots for experts of this rank; those of the next ranks first, its own last
};

// Collective over the CTA: a warp for each part.
__device__ void find_replicas(const CopyExpertsParams& params, Replicas& replicas) {
  const int num_slots = params.num_slots, rank = params.domain.rank, warp = threadIdx.x / 32;
  if (warp == 0) {
    collect(
        params, (rank + 1) * num_slots, params.domain.num_ranks * num_slots,
        [&](int expert) { return expert / params.num_local == rank; }, replicas.pushed);
  } else if (warp == 1) {
    const uint32_t checksum = checksum_of_mapping(params);
    if (threadIdx.x % 32 == 0) replicas.checksum = checksum;
  }
  __syncthreads();
}

// Pushes chunks of this rank's experts, which warps claim by work index. Every function is collective over a warp.
class ChunkPusher {
 public:
  // Begins to load the first chunks.
  __device__ ChunkPusher(const CopyExpertsParams& params, const Entries& entries, uint8_t* stages, uint64_t* barriers)
      : params_(params),
        entries_(entries),
        num_items_(entries.count * params.num_chunks),
        items_(&params.domain.control[params.domain.rank]->sent_items),
        ring_(stages, barriers, kStages, kPushedChunkBytes, threadIdx.x % 32) {
    for (int i = 0; i < ring_.num_ahead(); ++i) fetch();
  }

  // Stores all chunks, and waits until they have arrived.
  __device__ void push() {
    for (; num_ahead_ > 0; --num_ahead_) {
      const uint8_t* stage = ring_.wait();
      if (static_cast<int>(threadIdx.x % 32) == ring_.stage()) ptx::bulk_store(target_, stage, num_bytes_);
      ring_.release();
      fetch();
    }
    ptx::bulk_wait_written<0>();
  }

  // Takes the place of push() where nothing is sent.
  __device__ void drop() { ring_.drop(num_ahead_); }

 private:
  // Claims a chunk and begins to load it, unless there are no more.
  __device__ void fetch() {
    if (!has_more_) return;
    const int item = items_.take();
    has_more_ = item < num_items_;
    if (!has_more_) return;
    const int i = item % entries_.count, entry = entries_.numbers[i], slot = entry % params_.num_slots;
    const int chunk = params_.first_chunk + item / entries_.count;
    const auto [tensor, offset, num_bytes] = place_of(params_, chunk, kPushedChunkBytes);
    const int64_t expert = entries_.experts[i] - params_.domain.rank * params_.num_local;
    if (static_cast<int>(threadIdx.x % 32) == ring_.load_stage()) {
      target_ = tensor->peers[entry / params_.num_slots] + tensor->peer_offset + slot * tensor->item_bytes + offset;
      num_bytes_ = num_bytes;
    }
    const uint8_t* source = tensor->experts + expert * tensor->item_bytes + offset;
    if (is_aligned_for_bulk(source, num_bytes)) {
      ring_.fetch(source, num_bytes);
    } else {
      ring_.fill(source, num_bytes);
    }
    ++num_ahead_;
  }

  const CopyExpertsParams& params_;
  const Entries& entries_;
  const int num_items_;
  WorkIndices<2> items_;
  RowRing<kStoresInFlight> ring_;
  // Lane s knows where the chunk in stage s goes, and stores it.
  uint8_t* target_ = nullptr;
  int num_bytes_ = 0;
  int num_ahead_ = 0;  // chunks fetched and not stored
  bool has_more_ = true;
};

__global__ void __launch_bounds__(kThreads, 1) push_experts_kernel(const __grid_constant__ CopyExpertsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Replicas replicas;
  __shared__ uint64_t barriers[kWarps][kStages];
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  // Ranks that disagree may have other numbers of launches: the first one has told all of them.
  if (params.is_further && own.copy_refused != 0) return;
  const uint32_t epoch = next_epoch(ptx::load_acquire_gpu(&own.combine_epoch));
  const int warp = threadIdx.x / 32;
  const auto make_waiter = [&](uint64_t timeout_ns) {
    return Waiter(domain.fault, KernelName::kCopyExperts, domain.rank, timeout_ns, domain.control, domain.num_ranks);
  };
  // If a rank is not ready, the others must report it first: this one waits for what they would have sent.
  const Waiter waiter = make_waiter(domain.timeout_ns), end_waiter = make_waiter(domain.timeout_ns + kListenNs);

  find_replicas(params, replicas);
  const uint32_t call[kNumReadyWords] = {kCopiesExperts | params.sizes, kCopiesExperts | replicas.checksum >> 1};
  if (blockIdx.x == 0) publish_ready(domain, call, epoch);
  ChunkPusher chunks(params, replicas.pushed, stages + warp * kRingBytes, barriers[warp]);
  const bool reports = blockIdx.x == 0 && warp == 0;
  bool is_same = true;
  bool ok = wait_until_ready(domain, KernelName::kCopyExperts, call, waiter, epoch, reports, &is_same);
  if (ok && is_same) {
    chunks.push();
  } else {
    chunks.drop();
    // Some rank may make a combine, or stage its experts.
    if (ok) raise_all_flags(domain, epoch, blockIdx.x * kWarps + warp, gridDim.x * kWarps);
  }
  is_same = __syncthreads_and(is_same);
  if (!finish_cta(own, ok)) return;
  if (is_same && own.failed == 0) {
    for (int r = threadIdx.x; r < domain.num_ranks; r += kThreads) {
      if (r != domain.rank) ptx::store_release_system(&domain.control[r]->chunk_epoch[domain.rank][0], epoch);
    }
    for (int r = threadIdx.x; r < domain.num_ranks; r += kThreads) {
      if (r == domain.rank) continue;
      ok &= end_waiter.until_equal(&own.chunk_epoch[r][0], epoch, r, WaitTag::kExperts);
    }
    ok = __syncthreads_and(ok);
    if (!ok && threadIdx.x == 0) own.failed = 1;
  }
  if (threadIdx.x == 0) own.copy_refused = !is_same;
  end_kernel(waiter, own, own.combine_epoch, epoch);
}

}  // namespace

void prepare_push_experts() { allow_shared_memory(push_experts_kernel, kSharedBytes); }

void launch_push_experts(const CopyExpertsParams& params, int num_sms, cudaStream_t stream) {
  launch_kernel(LaunchKind::kPlain, push_experts_kernel, params, num_sms, kThreads, kSharedBytes, stream);
}

}  // namespace hybrid_ep
