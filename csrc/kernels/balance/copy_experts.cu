// Copies experts to the spare slots of other ranks of a domain, in one persistent launch.
//
//     experts[e] ─ bulk load ─► shared memory ─ bulk store ─► staging of the replica's rank ─ chunk_epoch ─┐
//     spare[b] ◄─ bulk store ─ shared memory ◄─ bulk load ─ staging, or own experts ◄──────────────────────┘
//
// For spare slots in ordinary memory, which peers cannot write; push_experts.cu is for others. A source pushes into the
// first slot of the receiver's arena, and the receiver copies what has arrived on: chunk by chunk, so that both go on
// at the same time. The first warps of a CTA push, one reports chunks that have arrived (chunk_reports.cuh), the others
// copy. To ranks and in epochs the call is a combine: both use the same slot, flags and numbers of calls. Legend: R
// ranks, B spare slots of a rank, LE local experts.
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

constexpr int kPieceBytes = 4096;
// If it is paced, a warp that pushes has at most kPushWindow pieces on the wire. With 16 SMs that fills the wire. More
// would wait inside the GPU and delay the warps that copy.
constexpr int kPushWarps = 6, kPushStages = 4, kPushWindow = 2;
constexpr int kCopyWarps = 7, kCopyStages = 3, kCopyStoresInFlight = 1;
static_assert(kPushWindow * kPieceBytes <= kExpertChunkBytes);
constexpr int kThreads = (kPushWarps + 1 + kCopyWarps) * 32;
constexpr int kPushRingBytes = kPushStages * kPieceBytes, kCopyRingBytes = kCopyStages * kPieceBytes;
constexpr int kRingBytes = kPushWarps * kPushRingBytes + kCopyWarps * kCopyRingBytes;
static_assert(kPushWarps <= kMaxReportQueues);

// The work of this rank, as the mapping says it.
struct Replicas {
  uint32_t checksum;  // of the mapping
  Entries pushed;     // slots of other ranks for experts of this rank; those of the next ranks first
  Entries copied;     // slots of this rank
};
constexpr int kBarrierBytes = (kPushWarps * kPushStages + kCopyWarps * kCopyStages) * sizeof(uint64_t);
static_assert(kRingBytes + sizeof(Replicas) + kBarrierBytes + 1024 <= kMaxSharedBytes);  // and what finish_cta declares

// Collective over the CTA: a warp for each part.
__device__ void find_replicas(const CopyExpertsParams& params, Replicas& replicas) {
  const int num_slots = params.num_slots, rank = params.domain.rank, warp = threadIdx.x / 32;
  if (warp == 0) {
    collect(
        params, (rank + 1) * num_slots, (params.domain.num_ranks - 1) * num_slots,
        [&](int expert) { return expert / params.num_local == rank; }, replicas.pushed);
  } else if (warp == 1) {
    collect(params, rank * num_slots, num_slots, [](int) { return true; }, replicas.copied);
  } else if (warp == 2) {
    const uint32_t checksum = checksum_of_mapping(params);
    if (threadIdx.x % 32 == 0) replicas.checksum = checksum;
  }
  __syncthreads();
}

// A part of one tensor of one expert.
struct Chunk {
  const uint8_t* source;
  uint8_t* target;
  int num_bytes;
  int peer;   // the rank that gets it, or that has sent it
  int index;  // among the chunks that the receiver stages
  bool is_here;
};

__device__ uint8_t* staged_at(const Domain& domain, int rank, int index) {
  return domain.arena[rank] + static_cast<int64_t>(index) * kExpertChunkBytes;
}
__device__ int padded(int num_bytes) { return (num_bytes + 15) / 16 * 16; }

// Chunks of this rank's experts for other ranks. Of move_chunks; all of it is collective over a warp.
class PushedChunks {
 public:
  static constexpr int kStages = kPushStages, kStoresInFlight = kPushWindow;

  __device__ PushedChunks(const CopyExpertsParams& params, const Entries& entries, ReportQueue& queue)
      : params_(params),
        entries_(entries),
        queue_(queue),
        items_(&params.domain.control[params.domain.rank]->sent_items) {}

  __device__ bool next(Chunk& chunk) {
    const int item = items_.take();
    if (item >= entries_.count * params_.num_chunks) return false;
    const int i = item % entries_.count, entry = entries_.numbers[i], number = item / entries_.count;
    const Place place = place_of(params_, params_.first_chunk + number, kExpertChunkBytes);
    const int64_t expert = entries_.experts[i] - params_.domain.rank * params_.num_local;
    chunk.peer = entry / params_.num_slots;
    chunk.index = entry % params_.num_slots * params_.num_chunks + number;
    chunk.source = place.tensor->experts + expert * place.tensor->item_bytes + place.offset;
    chunk.target = staged_at(params_.domain, chunk.peer, chunk.index);
    chunk.num_bytes = place.num_bytes;
    return true;
  }

  __device__ bool is_here(Chunk&) const { return true; }
  __device__ bool wait(Chunk&) const { return true; }

  __device__ int num_loaded(int, int num_bytes) const { return num_bytes; }
  __device__ void store(const Chunk& chunk, int offset, const uint8_t* stage, int num_bytes) const {
    if (threadIdx.x % 32 == 0) ptx::bulk_store(chunk.target + offset, stage, padded(num_bytes));
  }

  // A chunk is reported while the first pieces of the next one are sent, so that the wire is never idle to know that a
  // chunk has arrived.
  __device__ void end_piece() {
    const bool reports = ++num_pieces_ == kPushWindow && has_sent_;
    if (params_.is_paced || reports) ptx::bulk_wait_written<kPushWindow>();
    if (reports) report();
  }
  __device__ void end_chunk(const Chunk& chunk) {
    if (has_sent_) finish();  // this chunk was too short to report the one before
    sent_ = report_of(chunk.peer, chunk.index);
    has_sent_ = true;
    num_pieces_ = 0;
  }
  __device__ void finish() {
    ptx::bulk_wait_written<0>();
    if (has_sent_) report();
  }

 private:
  __device__ void report() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) push_report(queue_, sent_);
    has_sent_ = false;
  }

  const CopyExpertsParams& params_;
  const Entries& entries_;
  ReportQueue& queue_;
  WorkIndices<> items_;
  int32_t sent_ = 0;
  bool has_sent_ = false;
  int num_pieces_ = 0;
};

// Chunks for this rank's spare slots. Likewise.
class CopiedChunks {
 public:
  static constexpr int kStages = kCopyStages, kStoresInFlight = kCopyStoresInFlight;

  __device__ CopiedChunks(const CopyExpertsParams& params, const Entries& entries, const Waiter& waiter, uint32_t epoch)
      : params_(params),
        entries_(entries),
        waiter_(waiter),
        epoch_(epoch),
        items_(&params.domain.control[params.domain.rank]->summed_tokens) {}

  __device__ bool next(Chunk& chunk) {
    const int item = items_.take(), rank = params_.domain.rank;
    if (item >= entries_.count * params_.num_chunks) return false;
    const int i = item % entries_.count, number = item / entries_.count;
    const int slot = entries_.numbers[i] - rank * params_.num_slots, expert = entries_.experts[i];
    const Place place = place_of(params_, params_.first_chunk + number, kExpertChunkBytes);
    chunk.peer = expert / params_.num_local;
    chunk.index = slot * params_.num_chunks + number;
    chunk.is_here = chunk.peer == rank;
    chunk.source = staged_at(params_.domain, rank, chunk.index);
    if (chunk.is_here) {
      const int64_t local = expert - rank * params_.num_local;
      chunk.source = place.tensor->experts + local * place.tensor->item_bytes + place.offset;
    }
    chunk.target = place.tensor->spare + slot * place.tensor->item_bytes + place.offset;
    chunk.num_bytes = place.num_bytes;
    return true;
  }

  __device__ bool is_here(Chunk& chunk) const {
    if (!chunk.is_here) accept(chunk, threadIdx.x % 32 == 0 && ptx::load_acquire_system(flag_of(chunk)) == epoch_);
    return chunk.is_here;
  }
  __device__ bool wait(Chunk& chunk) const {
    if (chunk.is_here) return true;
    accept(chunk, threadIdx.x % 32 == 0 && waiter_.until_equal(flag_of(chunk), epoch_, chunk.peer, WaitTag::kExperts));
    return chunk.is_here;
  }

  // Staged chunks are padded.
  __device__ int num_loaded(int peer, int num_bytes) const {
    return peer == params_.domain.rank ? num_bytes : padded(num_bytes);
  }
  __device__ void store(const Chunk& chunk, int offset, const uint8_t* stage, int num_bytes) const {
    uint8_t* target = chunk.target + offset;
    if (!is_aligned_for_bulk(target, num_bytes)) {
      copy_bytes(target, stage, num_bytes);
    } else if (threadIdx.x % 32 == 0) {
      ptx::bulk_store(target, stage, num_bytes);
    }
  }

  __device__ void end_piece() const {}
  __device__ void end_chunk(const Chunk&) const {}
  __device__ void finish() const { ptx::bulk_wait_written<0>(); }

 private:
  // Not every call raises it: it is compared for equality.
  __device__ const uint32_t* flag_of(const Chunk& chunk) const {
    return &params_.domain.control[params_.domain.rank]->chunk_epoch[chunk.peer][chunk.index];
  }
  // Lane 0 has seen whether the chunk is here, and loads it.
  __device__ void accept(Chunk& chunk, bool has_come) const {
    if (has_come) ptx::fence_global_for_bulk();
    chunk.is_here = __shfl_sync(kAllLanes, has_come, 0);
  }

  const CopyExpertsParams& params_;
  const Entries& entries_;
  const Waiter& waiter_;
  const uint32_t epoch_;
  WorkIndices<> items_;
};

// Moves chunks through a ring until there are no more. The first pieces of the next chunk are loaded while this one is
// stored, if it is here. Collective over a warp. Returns false if a rank has not come.
template <typename Chunks>
__device__ bool move_chunks(Chunks& chunks, uint8_t* stages, uint64_t* barriers) {
  RowRing<Chunks::kStoresInFlight> ring(stages, barriers, Chunks::kStages, kPieceBytes, threadIdx.x % 32);
  Chunk chunk{}, next{};
  bool has_chunk = chunks.next(chunk), ok = true;
  int asked = 0, num_ahead = 0;  // bytes of the chunk, and pieces
  while (has_chunk) {
    ok = chunks.wait(chunk);
    if (!ok) break;
    const bool has_next = chunks.next(next);
    int asked_next = 0;
    const auto ask = [&] {
      for (; num_ahead < ring.num_ahead(); ++num_ahead) {
        const bool is_next = asked >= chunk.num_bytes;
        if (is_next && (!has_next || asked_next >= next.num_bytes || !chunks.is_here(next))) return;
        const int begin = is_next ? asked_next : asked;
        const int num_left = (is_next ? next.num_bytes : chunk.num_bytes) - begin;
        const int num_bytes = chunks.num_loaded(is_next ? next.peer : chunk.peer, min(kPieceBytes, num_left));
        const uint8_t* source = (is_next ? next.source : chunk.source) + begin;
        if (is_aligned_for_bulk(source, num_bytes)) {
          ring.fetch(source, num_bytes);
        } else {
          ring.fill(source, num_bytes);
        }
        (is_next ? asked_next : asked) += kPieceBytes;
      }
    };
    ask();
    for (int offset = 0; offset < chunk.num_bytes; offset += kPieceBytes) {
      chunks.store(chunk, offset, ring.wait(), min(kPieceBytes, chunk.num_bytes - offset));
      ring.release();
      --num_ahead;
      ask();
      chunks.end_piece();
    }
    chunks.end_chunk(chunk);
    chunk = next;
    has_chunk = has_next;
    asked = asked_next;
  }
  chunks.finish();
  return ok;
}

__global__ void __launch_bounds__(kThreads, 1) copy_experts_kernel(const __grid_constant__ CopyExpertsParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Replicas replicas;
  __shared__ uint64_t push_barriers[kPushWarps][kPushStages], copy_barriers[kCopyWarps][kCopyStages];
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  // Ranks that disagree may have other numbers of launches: the first one has told all of them.
  if (params.is_further && own.copy_refused != 0) return;
  const uint32_t epoch = next_epoch(ptx::load_acquire_gpu(&own.combine_epoch));
  const int warp = threadIdx.x / 32;
  const bool pushes = warp < kPushWarps;
  // If a rank is not ready, the warps that push must report it first: others wait for what it would have sent.
  const Waiter waiter(domain.fault, KernelName::kCopyExperts, domain.rank, domain.timeout_ns + (pushes ? 0 : kListenNs),
                      domain.control, domain.num_ranks);

  find_replicas(params, replicas);
  const uint32_t call[kNumReadyWords] = {kCopiesExperts | params.sizes, kCopiesExperts | replicas.checksum >> 1};
  if (blockIdx.x == 0) publish_ready(domain, call, epoch);
  bool ok = true, is_same = true;
  if (warp != kPushWarps) {
    const bool reports = blockIdx.x == 0 && warp == 0;
    ok = wait_until_ready(domain, KernelName::kCopyExperts, call, waiter, epoch, reports, &is_same);
  }
  if (pushes) {
    ReportQueue& queue = own.report_queues[blockIdx.x][warp];
    if (ok && is_same) {
      PushedChunks chunks(params, replicas.pushed, queue);
      move_chunks(chunks, shared + warp * kPushRingBytes, push_barriers[warp]);
    } else if (ok) {  // some rank may make a combine
      raise_all_flags(domain, epoch, blockIdx.x * kPushWarps + warp, gridDim.x * kPushWarps);
    }
    if (threadIdx.x % 32 == 0) push_report(queue, kLastReport);
  } else if (warp == kPushWarps) {
    report_chunks<kPushWarps>(own.report_queues[blockIdx.x],
                              [&](int32_t report) { raise_flag(domain, epoch, report); });
  } else if (ok && is_same) {
    const int ring = warp - kPushWarps - 1;
    CopiedChunks chunks(params, replicas.copied, waiter, epoch);
    ok = move_chunks(chunks, shared + kPushWarps * kPushRingBytes + ring * kCopyRingBytes, copy_barriers[ring]);
  }
  is_same = __syncthreads_and(is_same);
  if (!finish_cta(own, ok)) return;
  if (threadIdx.x == 0) own.copy_refused = !is_same;
  end_kernel(waiter, own, own.combine_epoch, epoch);
}

}  // namespace

void prepare_copy_experts() { allow_shared_memory(copy_experts_kernel, kRingBytes); }

void launch_copy_experts(const CopyExpertsParams& params, int num_sms, cudaStream_t stream) {
  launch_kernel(LaunchKind::kCooperative, copy_experts_kernel, params, num_sms, kThreads, kRingBytes, stream);
}

}  // namespace hybrid_ep
