// Sums of rows through shared memory: one warp asks for pieces of rows by bulk loads, a group of warps adds them in
// fp32, and one warp stores the rounded sums.
//
//     RingLoader.push ─ bulk load ─► stage ─► RingSummer.sum_part: Σ pieces ─► out stage ─► RingStorer ─ bulk store ─►
//
// The copy engine keeps as many bytes on their way as the ring has room for, which loads of single threads do not. A
// part is as much of a row as the group holds in registers; its pieces are the same part of each row that is added, in
// the order in which they are pushed. All three walk through the same parts. Who stores waits for stores to arrive,
// which takes longer than a sum: therefore a warp of its own.
#pragma once

#include "device/bf16.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/row_ring_limits.h"

namespace hybrid_ep {

constexpr int kSumVectors = 4;  // 16-byte vectors of a part that a thread adds
constexpr int kSumThreads = kSumWarps * 32;
static_assert(kPartBytes == kSumVectors * kSumThreads * 16);

// Where the pieces of a part end.
enum PieceKind : uint8_t {
  kMore = 0,
  kLast = 1,     // the last piece of its part
  kNothing = 2,  // no piece: the part is zero
};

// In shared memory.
struct SumBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t out_full[kOutStages], out_empty[kOutStages];
  uint8_t kinds[kMaxStages];

  // By any threads, before a barrier of the CTA.
  __device__ void init(int num_stages, int thread, int num_threads) {
    for (int i = thread; i < num_stages; i += num_threads) {
      ptx::barrier_init(full + i, 1);
      ptx::barrier_init(empty + i, kSumWarps);
    }
    for (int i = thread; i < kOutStages; i += num_threads) {
      ptx::barrier_init(out_full + i, kSumWarps);
      ptx::barrier_init(out_empty + i, 1);
    }
    ptx::fence_barrier_init();
  }
};

// A place in a ring of stages, and the parity of its round.
struct RingPlace {
  int stage;
  uint32_t parity;

  __device__ void advance(int num_stages) {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  }
};

// The dynamic shared memory of one ring.
struct SumRing {
  __device__ SumRing(uint8_t* memory, SumBarriers& barriers, int num_stages, int row_bytes)
      : in(memory), barriers(barriers), num_stages(num_stages), stage_bytes(min(row_bytes, kPartBytes)) {}

  __device__ uint8_t* out() const { return in + num_stages * stage_bytes; }
  __device__ uint8_t* end() const { return out() + kOutStages * stage_bytes; }

  uint8_t* in;
  SumBarriers& barriers;
  int num_stages, stage_bytes;
};

// Collective over one warp.
class RingLoader {
 public:
  __device__ explicit RingLoader(const SumRing& ring) : ring_(ring) {}

  __device__ void push(const uint8_t* piece, int num_bytes, int kind) {
    SumBarriers& barriers = ring_.barriers;
    ptx::barrier_wait(barriers.empty + place_.stage, place_.parity);
    if (threadIdx.x % 32 == 0) {
      barriers.kinds[place_.stage] = static_cast<uint8_t>(kind);
      if (kind & kNothing) {
        ptx::barrier_arrive(barriers.full + place_.stage);
      } else {
        ptx::barrier_expect(barriers.full + place_.stage, num_bytes);
        ptx::bulk_load(ring_.in + place_.stage * ring_.stage_bytes, piece, num_bytes, barriers.full + place_.stage);
      }
    }
    place_.advance(ring_.num_stages);
  }
  __device__ void push_nothing() { push(nullptr, 0, kLast | kNothing); }

 private:
  const SumRing& ring_;
  RingPlace place_{0, 1};  // the ring is empty at first
};

// Collective over kSumWarps warps, whose threads are counted by `thread`.
class RingSummer {
 public:
  __device__ RingSummer(const SumRing& ring, int thread) : ring_(ring), thread_(thread) {}

  // Sums the next part and hands it to the storer.
  __device__ void sum_part(int num_bytes) {
    SumBarriers& barriers = ring_.barriers;
    float sum[kSumVectors][8] = {};
    for (int kind = kMore; kind == kMore;) {
      ptx::barrier_wait(barriers.full + in_.stage, in_.parity);
      kind = barriers.kinds[in_.stage];
      const uint8_t* piece = ring_.in + in_.stage * ring_.stage_bytes;
      const int end = kind & kNothing ? 0 : num_bytes;
      uint4 vectors[kSumVectors];
#pragma unroll
      for (int v = 0; v < kSumVectors; ++v) {
        const int offset = (v * kSumThreads + thread_) * 16;
        vectors[v] = offset < end ? *reinterpret_cast<const uint4*>(piece + offset) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int v = 0; v < kSumVectors; ++v) add_bf16(sum[v], vectors[v]);
      arrive(barriers.empty + in_.stage);
      in_.advance(ring_.num_stages);
    }
    ptx::barrier_wait(barriers.out_empty + out_.stage, out_.parity);
    uint8_t* out = ring_.out() + out_.stage * ring_.stage_bytes;
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) {
      const int offset = (v * kSumThreads + thread_) * 16;
      if (offset < num_bytes) *reinterpret_cast<uint4*>(out + offset) = round_to_bf16(sum[v]);
    }
    ptx::fence_shared_for_bulk();
    arrive(barriers.out_full + out_.stage);
    out_.advance(kOutStages);
  }

 private:
  // By each warp, once all its lanes are there.
  __device__ void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (thread_ % 32 == 0) ptx::barrier_arrive(barrier);
  }

  const SumRing& ring_;
  int thread_;
  RingPlace in_{0, 0}, out_{0, 1};
};

// Collective over one warp; its lane 0 stores.
class RingStorer {
 public:
  __device__ RingStorer(const SumRing& ring, int lane) : ring_(ring), lane_(lane) {}

  // Stores the next part as one group of lane 0; nullptr drops it.
  __device__ void store(uint8_t* target, int num_bytes) {
    SumBarriers& barriers = ring_.barriers;
    ptx::barrier_wait(barriers.out_full + place_.stage, place_.parity);
    if (lane_ == 0) {
      if (target != nullptr) ptx::bulk_store(target, ring_.out() + place_.stage * ring_.stage_bytes, num_bytes);
      ptx::bulk_commit();
      // The stage before has been read when at most this store has not.
      ptx::bulk_wait_read<1>();
      if (has_before_) ptx::barrier_arrive(barriers.out_empty + (place_.stage + kOutStages - 1) % kOutStages);
    }
    has_before_ = true;
    place_.advance(kOutStages);
  }

 private:
  const SumRing& ring_;
  int lane_;
  RingPlace place_{0, 0};
  bool has_before_ = false;
};

}  // namespace hybrid_ep
