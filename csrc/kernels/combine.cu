// Combine inside a domain: push to the source, sum there, in one persistent launch.
//
//     rows of source i ─ combine_send.cuh ─► i's arena ─ chunk_epoch ─┐
//     send_slot[t] ─► partial rows of token t from each rank ─────────┴─► ring of sums, ranks ascending ─► out[t]
//
// Pushing, and not pulling, lets x be any memory. Of a CTA's warps some sum what arrives and the others send. Legend: T
// tokens, R ranks, N received rows, H hidden, W weights.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "kernels/combine_send.cuh"

namespace hybrid_ep {
namespace {

constexpr int kMaxCellsPerLane = (kMaxRanks + 31) / 32;

// All of it follows from the matrix of counts, which every rank has: nothing needs to be exchanged. Collective over the
// CTA; `prefix` is scratch for the matrix.
__device__ void find_bases(const CombineParams& params, Routes& routes, int32_t* prefix) {
  const int me = params.domain.rank, num_ranks = params.domain.num_ranks;
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += blockDim.x) prefix[i] = params.rank_prefix[i];
  __syncthreads();
  const auto count = [&](int from, int to) {
    return prefix[from * num_ranks + to] - (from > 0 ? prefix[(from - 1) * num_ranks + to] : 0);
  };
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    routes.send_begin[r] = r > 0 ? prefix[(r - 1) * num_ranks + me] : 0;
    routes.send_count[r] = count(r, me);
    // A source keeps the partial rows of each rank in ascending order of rank, itself left out where they stay in x.
    const auto partial_rows = [&](int source, int j) {
      return source != j || moves_own_rows(params) ? count(source, j) : 0;
    };
    int send_base = 0, recv_base = 0;
    for (int j = 0; j < me; ++j) send_base += partial_rows(r, j);
    for (int j = 0; j < r; ++j) recv_base += partial_rows(me, j);
    routes.send_base[r] = send_base;
    routes.recv_base[r] = recv_base;
    // Only a rank's arena that was sized by a bound can be too small.
    const int recv_end = recv_base + partial_rows(me, r);
    if (blockIdx.x == 0 && recv_end > params.slot.capacity) {
      report_fault(params.domain.fault, FaultKind::kOverflow, KernelName::kCombine, WaitTag::kPartialRows, me, r,
                   params.slot.capacity, recv_end);
    }
  }
  __syncthreads();
}

// The partial rows of a few tokens, one cell for each token and rank, dealt to the lanes of a warp: lane's cell q is
// cell lane + 32 q, of token cell / R of the batch and rank cell % R. With up to 32 ranks a batch has as many tokens as
// fit, so that their flags are read at once; with more it has one token.
template <int kCellsPerLane>
struct Batch {
  int64_t row[kCellsPerLane];  // where the partial row stands, or −1
};

__device__ int tokens_per_batch(const CombineParams& params) { return max(1, 32 / params.domain.num_ranks); }

// Waits until the partial rows at these places are there. Returns false where it gave up.
template <int kCellsPerLane>
__device__ bool find_rows(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint32_t epoch,
                          const int (&places)[kCellsPerLane], int lane, Batch<kCellsPerLane>& batch) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  bool ok = true;
#pragma unroll
  for (int q = 0; q < kCellsPerLane; ++q) {
    const int r = (lane + 32 * q) % domain.num_ranks, place = places[q];
    batch.row[q] = -1;
    if (place < 0) continue;
    const bool is_local = r == domain.rank && !moves_own_rows(params);
    if (!is_local && !waiter.until_epoch(&own.chunk_epoch[r][place / kRowsPerChunk], epoch, r, WaitTag::kPartialRows)) {
      ok = false;  // the row is left out, so that whoever adds need not know
      continue;
    }
    const int64_t row = (is_local ? routes.send_begin[r] : routes.recv_base[r]) + place;
    if (row < (is_local ? params.num_rows : params.slot.capacity)) batch.row[q] = row;
  }
  return __all_sync(kAllLanes, ok);
}

// Walks the ranks that one token of a batch has partial rows of, ascending, over and over; all lanes together.
template <int kCellsPerLane>
class SourceWalk {
 public:
  __device__ SourceWalk(const CombineParams& params, const Batch<kCellsPerLane>& batch, int token_of_batch, int lane)
      : params_(params), batch_(batch), first_cell_(token_of_batch * params.domain.num_ranks) {
#pragma unroll
    for (int q = 0; q < kCellsPerLane; ++q) {
      const int rank = lane + 32 * q - first_cell_;
      const bool is_mine = rank >= 0 && rank < params.domain.num_ranks;
      present_[q] = __ballot_sync(kAllLanes, is_mine && batch.row[q] >= 0);
      num_sources_ += __popc(present_[q]);
    }
    restart();
  }

  __device__ int num_sources() const { return num_sources_; }

  __device__ void restart() {
#pragma unroll
    for (int q = 0; q < kCellsPerLane; ++q) left_[q] = present_[q];
  }

  // The next source: true if it is this rank's own row in x, and which row. There must be one left.
  __device__ bool next(int64_t& row) {
#pragma unroll
    for (int q = 0; q < kCellsPerLane; ++q) {
      if (left_[q] == 0) continue;
      const int lane = __ffs(left_[q]) - 1;
      left_[q] &= left_[q] - 1;
      row = __shfl_sync(kAllLanes, batch_.row[q], lane);
      return 32 * q + lane - first_cell_ == params_.domain.rank && !moves_own_rows(params_);
    }
    return false;
  }

 private:
  const CombineParams& params_;
  const Batch<kCellsPerLane>& batch_;
  int first_cell_;
  unsigned present_[kCellsPerLane], left_[kCellsPerLane];
  int num_sources_ = 0;
};

// Sums the weights of a batch, a lane for each token and column.
template <int kCellsPerLane>
__device__ void sum_weights(const CombineParams& params, const Batch<kCellsPerLane>& batch, int64_t first, int lane) {
  const int num_ranks = params.domain.num_ranks, num_weights = params.num_weights;
  const float* arrived = reinterpret_cast<const float*>(params.domain.arena[params.domain.rank] + params.slot.weights);
  for (int begin = 0; begin < tokens_per_batch(params) * num_weights; begin += 32) {
    const int token_of_batch = (begin + lane) / num_weights, k = (begin + lane) % num_weights;
    const int64_t token = first + static_cast<int64_t>(token_of_batch) * gridDim.x;
    const bool is_there = token_of_batch < tokens_per_batch(params) && token < params.num_tokens;
    float sum = 0;
#pragma unroll
    for (int q = 0; q < kCellsPerLane; ++q) {
      const int end = kCellsPerLane == 1 ? num_ranks : min(32, num_ranks - 32 * q);
#pragma unroll 4
      for (int i = 0; i < end; ++i) {
        const int64_t row = __shfl_sync(kAllLanes, batch.row[q], (token_of_batch * num_ranks + i) % 32);
        const bool is_local = 32 * q + i == params.domain.rank && !moves_own_rows(params);
        const float* weights = is_local ? params.weights : arrived;
        if (is_there && row >= 0) sum += __ldcg(weights + row * num_weights + k);
      }
    }
    if (is_there) params.out_weights[token * num_weights + k] = sum;
  }
}

// One warp asks for what each token's sum is made of: partial rows by rank, then the biases. It also sums the weights.
// Neighbouring tokens go to different CTAs: their rows arrive together.
template <int kCellsPerLane>
__device__ bool load_partial_rows(const CombineParams& params, const Routes& routes, const Waiter& waiter,
                                  const SumRing& ring, uint32_t epoch, int lane) {
  const int num_ranks = params.domain.num_ranks, batch_tokens = tokens_per_batch(params);
  const uint8_t* arrived = params.domain.arena[params.domain.rank] + params.slot.rows;
  const int num_biases = (params.bias[0] != nullptr) + (params.bias[1] != nullptr);
  RingLoader loader(ring);
  const auto push_token = [&](int64_t token, SourceWalk<kCellsPerLane> walk) {
    const int num_pieces = walk.num_sources() + num_biases;
    for (int begin = 0; begin < params.row_bytes; begin += kPartBytes) {
      const int num_bytes = min(kPartBytes, params.row_bytes - begin);
      if (num_pieces == 0) loader.push_nothing();
      walk.restart();
      for (int i = 0; i < num_pieces; ++i) {
        const uint8_t* from = arrived;
        int64_t row = token;
        if (i >= walk.num_sources()) {
          from = params.bias[i - walk.num_sources()];
        } else if (walk.next(row)) {
          from = params.rows;
        }
        loader.push(from + row * params.row_bytes + begin, num_bytes, i + 1 == num_pieces ? kLast : kMore);
      }
    }
  };
  // The places are known one batch ahead.
  int places[kCellsPerLane];
  const auto load_places = [&](int64_t first) {
#pragma unroll
    for (int q = 0; q < kCellsPerLane; ++q) {
      const int cell = lane + 32 * q;
      const int64_t token = first + cell / num_ranks * gridDim.x;
      const bool is_there = cell < batch_tokens * num_ranks && token < params.num_tokens;
      places[q] = is_there ? params.send_slot[token * num_ranks + cell % num_ranks] : -1;
    }
  };
  bool ok = true;
  load_places(blockIdx.x);
  for (int64_t first = blockIdx.x; first < params.num_tokens; first += gridDim.x * batch_tokens) {
    Batch<kCellsPerLane> batch;
    ok &= find_rows(params, routes, waiter, epoch, places, lane, batch);
    ptx::fence_global_for_bulk();
    load_places(first + gridDim.x * batch_tokens);
    if (params.num_weights > 0) sum_weights(params, batch, first, lane);
    for (int i = 0; i < batch_tokens && first + i * gridDim.x < params.num_tokens; ++i) {
      push_token(first + i * gridDim.x, SourceWalk<kCellsPerLane>(params, batch, i, lane));
    }
  }
  return ok;
}

// A group of warps adds, and one warp stores.
__device__ void sum_partial_rows(const CombineParams& params, const SumRing& ring, int thread) {
  RingSummer summer(ring, thread);
  for (int64_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
    for (int begin = 0; begin < params.row_bytes; begin += kPartBytes) {
      summer.sum_part(min(kPartBytes, params.row_bytes - begin));
    }
  }
}

__device__ void store_tokens(const CombineParams& params, const SumRing& ring, int lane) {
  RingStorer storer(ring, lane);
  for (int64_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
    for (int begin = 0; begin < params.row_bytes; begin += kPartBytes) {
      storer.store(params.out + token * params.row_bytes + begin, min(kPartBytes, params.row_bytes - begin));
    }
  }
  ptx::bulk_wait_written<0>();
}

// kCellsPerLane: 1 where a warp has a lane for every rank. kFromExperts: x is expert-major.
template <int kCellsPerLane, bool kFromExperts>
__global__ void __launch_bounds__(combine_threads(kFromExperts), 1)
    combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Routes routes;
  __shared__ SumBarriers reduce_barriers, send_barriers;
  __shared__ uint64_t row_barriers[kMaxSendWarps * kMaxStages];
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kCombine, domain.rank, domain.timeout_ns);
  const uint32_t epoch = ptx::load_acquire_gpu(&own.combine_epoch) + 1;

  // This kernel runs, so nothing reads the arena's first slot any more: peers may write it.
  if (blockIdx.x == 0) {
    for (int r = threadIdx.x; r < domain.num_ranks; r += blockDim.x) {
      ptx::store_release_system(&domain.control[r]->ready_epoch[domain.rank], epoch);
    }
  }
  find_bases(params, routes, reinterpret_cast<int32_t*>(shared));
  reduce_barriers.init(params.num_sum_stages, threadIdx.x, blockDim.x);
  if constexpr (kFromExperts) send_barriers.init(params.num_stages, threadIdx.x, blockDim.x);
  ptx::fence_shared_for_bulk();  // the rings take over the matrix's memory
  __syncthreads();

  // Warps: one that loads for the sums, those that add, one that stores; then those that send, in the same way or as
  // rows are.
  const SumRing reduce_ring(shared, reduce_barriers, params.num_sum_stages, params.row_bytes);
  const int lane = threadIdx.x % 32;
  const bool sends = threadIdx.x >= kRingWarps * 32;
  const int thread = threadIdx.x - (sends ? kRingWarps * 32 : 0), warp = thread / 32;
  bool ok = true;
  if (!sends) {
    if (warp == 0) {
      ok = load_partial_rows<kCellsPerLane>(params, routes, waiter, reduce_ring, epoch, lane);
    } else if (warp <= kSumWarps) {
      sum_partial_rows(params, reduce_ring, thread - 32);
    } else {
      store_tokens(params, reduce_ring, lane);
    }
  } else if constexpr (kFromExperts) {
    const SumRing send_ring(reduce_ring.end(), send_barriers, params.num_stages, params.row_bytes);
    if (warp == 0) {
      load_expert_rows(params, routes, send_ring, lane);
    } else if (warp <= kSumWarps) {
      sum_expert_rows(params, routes, send_ring, thread - 32);
    } else {
      ok = store_sums(params, routes, waiter, send_ring, epoch, lane);
    }
  } else if (warp < params.num_send_warps) {
    ok = send_rows(params, routes, waiter, reduce_ring.end(), row_barriers, epoch, warp, lane);
  }
  if (finish_cta(own, ok)) end_kernel(own, own.combine_epoch, epoch);
}

}  // namespace

void prepare_combine() {
  allow_shared_memory(combine_kernel<1, false>);
  allow_shared_memory(combine_kernel<1, true>);
  allow_shared_memory(combine_kernel<kMaxCellsPerLane, false>);
  allow_shared_memory(combine_kernel<kMaxCellsPerLane, true>);
}

void launch_combine(const CombineParams& params, int num_sms, int shared_bytes, cudaStream_t stream) {
  const bool from_experts = params.places != nullptr;
  const auto kernel =
      params.domain.num_ranks <= 32
          ? (from_experts ? combine_kernel<1, true> : combine_kernel<1, false>)
          : (from_experts ? combine_kernel<kMaxCellsPerLane, true> : combine_kernel<kMaxCellsPerLane, false>);
  launch_cooperative(kernel, params, num_sms, combine_threads(from_experts), shared_bytes, stream);
}

}  // namespace hybrid_ep
