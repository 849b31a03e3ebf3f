// The link between domains alone: chunks of one size to every peer and from every peer, by the commands, flags and
// credits of a dispatch, and no rows. For the benchmark, which sets a whole call beside it.
//
//     send slot ─ put_signal ─ link ─► receive slot ─ flag ─► credit
//
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/work_index.cuh"
#include "kernels/between/chunk_stream.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

// Warps of a CTA, by role.
constexpr int kSendWarps = 2, kReceiveWarps = 2;
constexpr int kThreads = (kSendWarps + kReceiveWarps) * 32;
constexpr int kPieceBytes = 4096;

struct alignas(kLineBytes) Piece {
  uint4 vectors[kPieceBytes / sizeof(uint4)];
};

// Writes a chunk from shared memory. Collective over the warp.
__device__ void fill_chunk(uint8_t* chunk, uint32_t num_bytes, const Piece& piece) {
  for (uint32_t offset = threadIdx.x % 32 * kPieceBytes; offset < num_bytes; offset += 32 * kPieceBytes) {
    ptx::bulk_store(chunk + offset, &piece, min(static_cast<uint32_t>(kPieceBytes), num_bytes - offset));
  }
  ptx::bulk_commit();
  ptx::bulk_wait_written<0>();
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1) stream_chunks_kernel(const __grid_constant__ StreamChunksParams params) {
  __shared__ Piece piece;
  for (uint32_t i = threadIdx.x; i < kPieceBytes / sizeof(uint4); i += kThreads) piece.vectors[i] = {0, 0, 0, 0};
  ptx::fence_shared_for_bulk();
  __syncthreads();
  const BetweenDomain& between = params.between;
  const Domain& domain = between.domain;
  const Grid& grid = between.grid;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kStreamChunks, domain.rank, domain.timeout_ns, domain.control,
                      domain.num_ranks);
  const Link link(between.link, blockIdx.x);
  const uint32_t epoch = next_epoch(ptx::load_relaxed_gpu(&own.dispatch_epoch));
  const int lane = threadIdx.x % 32, num_peers = grid.num_domains - 1, num_items = params.num_chunks * num_peers;
  const bool sends = threadIdx.x / 32 < kSendWarps;
  WorkIndices<> items(sends ? &own.sent_items : &own.summed_tokens);
  bool ok = true;
  for (int i = items.take(); i < num_items && ok; i = items.take()) {
    const ChunkStream<Link> stream(between, waiter, link, (grid.domain_idx() + 1 + i % num_peers) % grid.num_domains);
    const int chunk = i / num_peers;
    ok = __all_sync(
        kAllLanes, lane > 0 || (sends ? stream.wait_free(chunk) : stream.wait(chunk) && stream.read_rows(chunk, 1, 1)));
    if (!ok || !sends) continue;
    fill_chunk(stream.send_slot(chunk), params.chunk_bytes, piece);
    ok = stream.send(chunk, params.chunk_bytes, 1);
  }

  if (!finish_cta(own, ok)) return;
  for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) {
    if (d != grid.domain_idx()) advance_stream(between, d, params.num_chunks, params.num_chunks);
  }
  if (threadIdx.x == 0) waiter.sends(link.end_call([&] { return waiter.expired(); }), domain.rank);
  end_kernel(waiter, own, own.dispatch_epoch, epoch);
}

}  // namespace

void launch_stream_chunks(const StreamChunksParams& params, int num_sms, cudaStream_t stream) {
  const auto kernel =
      kernel_for(params.between.link, [](auto link) { return stream_chunks_kernel<typename decltype(link)::type>; });
  launch_kernel(LaunchKind::kCooperative, kernel, params, dim3(num_sms), kThreads, 0, stream);
}

}  // namespace hybrid_ep
