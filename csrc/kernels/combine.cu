// Combine inside a domain: push to the source, sum there, in one persistent launch.
//
//     rows of source i ─ bulk load ─► shared memory ─ bulk store ─► i's arena ─ chunk_epoch ─┐
//     send_slot[t] ─► partial rows of token t from each rank ─► fp32 sum in rank order ◄─────┘ ─► + bias ─► out[t]
//
// The rows of one source are one run of x, and land as one run in the source's arena, so the push copies chunks. Rows
// that this rank sent to itself are not moved: the sum reads them from x. Pushing, and not pulling, lets x be any
// memory. The first warps of a CTA send, the others sum. Legend: T tokens, R ranks, N received rows, H hidden, W
// weights.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/pipelined_sum.cuh"
#include "device/row_ring.cuh"
#include "device/wait.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kRowsBeforeReport = 4;  // of the next chunk: how long rows are on the wire
static_assert(kRowsBeforeReport <= kRowsPerChunk);
constexpr int kMaxRanksPerLane = (kMaxRanks + 31) / 32;

struct Routes {
  int send_begin[kMaxRanks];  // first row of x that belongs to source i
  int send_count[kMaxRanks];  // rows of x that belong to source i
  int send_base[kMaxRanks];   // first row of this rank in i's arena
  int recv_base[kMaxRanks];   // first row of rank j in this rank's arena
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
    routes.recv_base[r] = recv_base;
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

// Sends chunks of rows home, all sources in turn, so that no source waits for another's rows.
__device__ bool send_rows(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint8_t* shared,
                          uint64_t* barriers, uint32_t epoch) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

  RowRing<kCombineStoresInFlight> ring(shared + static_cast<int64_t>(warp) * params.num_stages * params.row_bytes,
                                       barriers + warp * params.num_stages, params.num_stages, params.row_bytes, lane);
  const int num_items = (max_count + kRowsPerChunk - 1) / kRowsPerChunk * num_peers;
  const int stride = gridDim.x * params.num_send_warps;
  int item = blockIdx.x * params.num_send_warps + warp;
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
  const auto fetch = [&](const Chunk& chunk, int i) {
    if (i < chunk.num_rows) ring.fetch(params.rows + (chunk.from + i) * params.row_bytes);
  };

  // A chunk is reported while the first rows of the next one leave, so that the wire need not run dry to know that all
  // of it has arrived.
  Chunk sent{};
  bool has_sent = false;
  const auto report = [&] {
    __syncwarp();
    if (lane == 0) {
      ptx::store_release_system(&domain.control[sent.source]->chunk_epoch[domain.rank][sent.chunk], epoch);
    }
    has_sent = false;
  };

  Chunk chunk{}, next{};
  bool has_chunk = next_chunk(chunk);
  for (int i = 0; has_chunk && i < ring.num_ahead(); ++i) fetch(chunk, i);
  while (has_chunk) {
    uint8_t* slot = domain.arena[chunk.source];  // partial rows always land in the arena's first slot
    uint8_t* target = slot + params.slot.rows + chunk.to * params.row_bytes;
    for (int i = 0; i < chunk.num_rows; ++i) {
      const uint8_t* stage = ring.wait();
      if (lane == 0) ptx::bulk_store(target + static_cast<int64_t>(i) * params.row_bytes, stage, params.row_bytes);
      ring.release();
      fetch(chunk, i + ring.num_ahead());
      if (has_sent && i + 1 == kRowsBeforeReport) {
        ptx::bulk_wait_written<kRowsBeforeReport>();
        report();
      }
    }
    const bool has_next = next_chunk(next);
    for (int i = 0; has_next && i < ring.num_ahead(); ++i) fetch(next, i);
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

// One lane's view of the partial rows of a token: rank base + lane's row, or −1.
template <int kRanksPerLane>
struct Sources {
  int64_t row[kRanksPerLane];
};

// Reads where the partial rows of a token stand, and waits until they are there. Lane r waits for rank r.
template <int kRanksPerLane>
__device__ bool find_sources(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint32_t epoch,
                             const int (&places)[kRanksPerLane], int lane, Sources<kRanksPerLane>& sources) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  bool ok = true;
#pragma unroll
  for (int q = 0; q < kRanksPerLane; ++q) {
    const int r = lane + 32 * q, place = places[q];
    sources.row[q] = -1;
    if (place < 0) continue;
    const bool is_local = r == domain.rank;
    if (!is_local) {
      ok &= waiter.until_epoch(&own.chunk_epoch[r][place / kRowsPerChunk], epoch, r, WaitTag::kPartialRows);
    }
    const int64_t row = (is_local ? routes.send_begin[r] : routes.recv_base[r]) + place;
    if (row < (is_local ? params.num_rows : params.slot.capacity)) sources.row[q] = row;
  }
  return __all_sync(kAllLanes, ok);
}

// Walks the ranks that a token has partial rows of, ascending, over and over; all lanes together.
template <int kRanksPerLane>
class SourceWalk {
 public:
  __device__ SourceWalk(const CombineParams& params, const Sources<kRanksPerLane>& sources)
      : params_(params), sources_(sources) {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      present_[q] = __ballot_sync(kAllLanes, sources.row[q] >= 0);
      num_sources_ += __popc(present_[q]);
    }
    restart();
  }

  __device__ int num_sources() const { return num_sources_; }

  __device__ void restart() {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) left_[q] = present_[q];
  }

  // The next source: true if it is this rank's own row in x, and which row. There must be one left.
  __device__ bool next(int64_t& row) {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      if (left_[q] == 0) continue;
      const int lane = __ffs(left_[q]) - 1;
      left_[q] &= left_[q] - 1;
      row = __shfl_sync(kAllLanes, sources_.row[q], lane);
      return 32 * q + lane == params_.domain.rank;
    }
    return false;
  }

 private:
  const CombineParams& params_;
  const Sources<kRanksPerLane>& sources_;
  unsigned present_[kRanksPerLane], left_[kRanksPerLane];
  int num_sources_ = 0;
};

template <int kRanksPerLane>
__device__ void sum_weights(const CombineParams& params, SourceWalk<kRanksPerLane>& walk, int64_t token, int lane) {
  const float* arrived = reinterpret_cast<const float*>(params.domain.arena[params.domain.rank] + params.slot.weights);
  for (int begin = 0; begin < params.num_weights; begin += 32) {
    const int k = begin + lane;
    float sum = 0;
    walk.restart();
    for (int i = 0; i < walk.num_sources(); ++i) {
      int64_t row;
      const float* weights = walk.next(row) ? params.weights : arrived;
      if (k < params.num_weights) sum += __ldcg(weights + row * params.num_weights + k);
    }
    if (k < params.num_weights) params.out_weights[token * params.num_weights + k] = sum;
  }
}

// Sums one token: segments of the row in turn, in each the ranks ascending.
template <int kRanksPerLane>
__device__ void sum_rows(const CombineParams& params, SourceWalk<kRanksPerLane>& walk, int64_t token, int lane) {
  const uint8_t* arrived = params.domain.arena[params.domain.rank] + params.slot.rows;
  const auto load = [&](int segment, int source, uint4(&vectors)[kSumVectors]) {
    if (source == 0) walk.restart();
    int64_t row;
    const uint8_t* from = walk.next(row) ? params.rows : arrived;
    from += row * params.row_bytes;
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) {
      const int offset = segment * kSumSegmentBytes + (v * 32 + lane) * 16;
      vectors[v] = offset < params.row_bytes ? ptx::load_streaming(from + offset) : make_uint4(0, 0, 0, 0);
    }
  };
  const auto store = [&](int segment, float (&sum)[kSumVectors][8]) {
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) {
      const int offset = segment * kSumSegmentBytes + (v * 32 + lane) * 16;
      if (offset >= params.row_bytes) continue;
      const int64_t position = token * params.row_bytes + offset;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (params.bias[b] != nullptr) add_bf16(sum[v], ptx::load_streaming(params.bias[b] + position));
      }
      *reinterpret_cast<uint4*>(params.out + position) = round_to_bf16(sum[v]);
    }
  };
  const int num_segments = (params.row_bytes + kSumSegmentBytes - 1) / kSumSegmentBytes;
  sum_pipelined(num_segments, walk.num_sources(), load, store);
}

// Sums this rank's tokens as their partial rows arrive; a warp takes a token at a time.
template <int kRanksPerLane>
__device__ bool reduce_tokens(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint32_t epoch) {
  const int num_ranks = params.domain.num_ranks, lane = threadIdx.x % 32;
  const int num_warps = kCombineThreads / 32 - params.num_send_warps;
  const int warp = threadIdx.x / 32 - params.num_send_warps;
  const int stride = gridDim.x * num_warps;
  int places[kRanksPerLane];
  const auto load_places = [&](int64_t token) {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      const int r = lane + 32 * q;
      places[q] = token < params.num_tokens && r < num_ranks ? params.send_slot[token * num_ranks + r] : -1;
    }
  };
  // Neighbouring tokens go to different CTAs: their rows arrive together.
  int64_t token = static_cast<int64_t>(warp) * gridDim.x + blockIdx.x;
  load_places(token);
  for (; token < params.num_tokens; token += stride) {
    Sources<kRanksPerLane> sources;
    if (!find_sources(params, routes, waiter, epoch, places, lane, sources)) return false;
    load_places(token + stride);
    SourceWalk<kRanksPerLane> walk(params, sources);
    if (params.num_weights > 0) sum_weights(params, walk, token, lane);
    sum_rows(params, walk, token, lane);
  }
  return true;
}

// kRanksPerLane: 1 where a warp has a lane for every rank.
template <int kRanksPerLane>
__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Routes routes;
  __shared__ uint64_t barriers[kMaxSendWarps * kMaxStages];
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
  const bool sends = static_cast<int>(threadIdx.x) / 32 < params.num_send_warps;
  const bool ok = sends ? send_rows(params, routes, waiter, shared, barriers, epoch)
                        : reduce_tokens<kRanksPerLane>(params, routes, waiter, epoch);
  if (finish_cta(own, ok)) end_kernel(own, own.combine_epoch, epoch);
}

}  // namespace

void prepare_combine() {
  allow_shared_memory(combine_kernel<1>);
  allow_shared_memory(combine_kernel<kMaxRanksPerLane>);
}

void launch_combine(const CombineParams& params, int num_sms, int shared_bytes, cudaStream_t stream) {
  const auto kernel = params.domain.num_ranks <= 32 ? combine_kernel<1> : combine_kernel<kMaxRanksPerLane>;
  launch_cooperative(kernel, params, num_sms, kCombineThreads, shared_bytes, stream);
}

}  // namespace hybrid_ep
