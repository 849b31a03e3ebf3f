// How rows of a combine leave: as they are, or as sums over the experts of this rank. Part of combine.cu.
//
//     send_rows   x[n] ─ bulk load ─► ring ─ bulk store ─► row of the source's arena
//     send_sums   x[places of n, ascending] ─ ring of sums ─ bulk store ─► the same
//
// The rows of one source are one run, and land as one run in the source's arena, so both go by chunks: one flag tells
// that all rows of a chunk stand there. Each function runs on a CTA's sending warps. Legend: N received rows, P rows of
// expert-major x, K top-k, W weights.
#pragma once

#include "device/row_ring.cuh"
#include "device/sum_ring.cuh"
#include "device/wait.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
// Stores of the next chunk before a chunk is reported: how many the wire takes to know that what came before is there.
constexpr int kRowsBeforeReport = 4;
static_assert(kRowsBeforeReport <= kRowsPerChunk);

struct Routes {
  int send_begin[kMaxRanks];  // first received row that belongs to source i
  int send_count[kMaxRanks];  // received rows that belong to source i
  int send_base[kMaxRanks];   // first row of this rank in i's arena
  int recv_base[kMaxRanks];   // first row of rank j in this rank's arena
};

// Rows that this rank sent to itself are read from x where they are; sums have to be put down first, so they go through
// the arena like all others.
__device__ inline bool moves_own_rows(const CombineParams& params) { return params.places != nullptr; }

// A run of rows that goes to one source and is reported by one flag.
struct Chunk {
  int source, chunk;
  int num_rows;  // 0: all of the chunk's rows lie beyond a bound; they are not sent, but the chunk is reported
  int from;      // received row
  int to;        // row of the source's arena
};

// The chunks of one sender (a warp of send_rows, a CTA of send_sums): all sources in turn, so that no source waits for
// another's rows.
class ChunkWalk {
 public:
  // Collective over the warp.
  __device__ ChunkWalk(const CombineParams& params, const Routes& routes, int warp, int lane)
      : params_(params), routes_(routes) {
    const int num_ranks = params.domain.num_ranks;
    int max_count = 0;
    for (int r = lane; r < num_ranks; r += 32) {
      if (r != params.domain.rank || moves_own_rows(params)) max_count = max(max_count, routes.send_count[r]);
    }
    max_count = __reduce_max_sync(kAllLanes, max_count);
    num_sources_ = moves_own_rows(params) ? num_ranks : num_ranks - 1;
    num_items_ = (max_count + kRowsPerChunk - 1) / kRowsPerChunk * num_sources_;
    num_senders_ = moves_own_rows(params) ? gridDim.x : gridDim.x * params.num_send_warps;
    item_ = moves_own_rows(params) ? blockIdx.x : blockIdx.x * params.num_send_warps + warp;
  }

  // Returns false after the last chunk.
  __device__ bool next(Chunk& next) {
    const int rank = params_.domain.rank, num_ranks = params_.domain.num_ranks;
    for (; item_ < num_items_; item_ += num_senders_) {
      next.chunk = item_ / num_sources_;
      next.source = (rank + 1 + item_ % num_sources_) % num_ranks;
      const int begin = next.chunk * kRowsPerChunk, count = routes_.send_count[next.source] - begin;
      if (count <= 0) continue;
      next.from = routes_.send_begin[next.source] + begin;
      next.to = routes_.send_base[next.source] + begin;
      const int room = min(params_.num_rows - next.from, params_.slot.capacity - next.to);
      next.num_rows = max(0, min(min(count, kRowsPerChunk), room));
      item_ += num_senders_;
      return true;
    }
    return false;
  }

 private:
  const CombineParams& params_;
  const Routes& routes_;
  int num_sources_, num_items_, num_senders_, item_;
};

// Reports a chunk while the first stores of the next one leave, so that the wire need not run dry to know that all of
// it has arrived. `kStores` is how many those are.
template <int kStores>
class Reporter {
 public:
  __device__ Reporter(const Domain& domain, uint32_t epoch, int lane) : domain_(domain), epoch_(epoch), lane_(lane) {}

  // After each store of the present chunk, whose groups were committed.
  __device__ void note_store() {
    if (has_sent_ && ++num_stores_ == kStores) {
      ptx::bulk_wait_written<kStores>();
      report();
    }
  }
  // After the last store of a chunk.
  __device__ void note_chunk(const Chunk& chunk) {
    finish();  // this chunk was too short to report the one before
    sent_ = chunk;
    has_sent_ = true;
    num_stores_ = 0;
  }
  // Reports what is left.
  __device__ void finish() {
    if (!has_sent_) return;
    ptx::bulk_wait_written<0>();
    report();
  }

 private:
  __device__ void report() {
    __syncwarp();
    if (lane_ == 0) {
      ptx::store_release_system(&domain_.control[sent_.source]->chunk_epoch[domain_.rank][sent_.chunk], epoch_);
    }
    has_sent_ = false;
  }

  const Domain& domain_;
  uint32_t epoch_;
  int lane_;
  Chunk sent_{};
  bool has_sent_ = false;
  int num_stores_ = 0;
};

// Waits until every source's arena may be written. Collective over the warp.
__device__ inline bool wait_for_sources(const Domain& domain, const Waiter& waiter, uint32_t epoch, int lane) {
  const ControlBlock& own = *domain.control[domain.rank];
  bool ok = true;
  for (int r = lane; r < domain.num_ranks; r += 32) {
    if (r != domain.rank) ok &= waiter.until_epoch(&own.ready_epoch[r], epoch, r, WaitTag::kReady);
  }
  return __all_sync(kAllLanes, ok);
}

// Partial rows always land in the arena's first slot.
__device__ inline float* weights_at(const CombineParams& params, const Chunk& chunk) {
  uint8_t* slot = params.domain.arena[chunk.source];
  return reinterpret_cast<float*>(slot + params.slot.weights) + static_cast<int64_t>(chunk.to) * params.num_weights;
}
__device__ inline uint8_t* rows_at(const CombineParams& params, const Chunk& chunk) {
  return params.domain.arena[chunk.source] + params.slot.rows + static_cast<int64_t>(chunk.to) * params.row_bytes;
}

__device__ bool send_rows(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint8_t* shared,
                          uint64_t* barriers, uint32_t epoch, int warp, int lane) {
  if (!wait_for_sources(params.domain, waiter, epoch, lane)) return false;
  RowRing<kCombineStoresInFlight> ring(shared + static_cast<int64_t>(warp) * params.num_stages * params.row_bytes,
                                       barriers + warp * params.num_stages, params.num_stages, params.row_bytes, lane);
  const auto fetch = [&](const Chunk& chunk, int i) {
    if (i < chunk.num_rows) ring.fetch(params.rows + static_cast<int64_t>(chunk.from + i) * params.row_bytes);
  };
  ChunkWalk chunks(params, routes, warp, lane);
  Reporter<kRowsBeforeReport> reporter(params.domain, epoch, lane);
  Chunk chunk{}, next{};
  bool has_chunk = chunks.next(chunk);
  for (int i = 0; has_chunk && i < ring.num_ahead(); ++i) fetch(chunk, i);
  while (has_chunk) {
    uint8_t* target = rows_at(params, chunk);
    for (int i = 0; i < chunk.num_rows; ++i) {
      const uint8_t* stage = ring.wait();
      if (lane == 0) ptx::bulk_store(target + static_cast<int64_t>(i) * params.row_bytes, stage, params.row_bytes);
      ring.release();
      fetch(chunk, i + ring.num_ahead());
      reporter.note_store();
    }
    const bool has_next = chunks.next(next);
    for (int i = 0; has_next && i < ring.num_ahead(); ++i) fetch(next, i);
    if (params.num_weights > 0) {
      const float* weights = params.weights + static_cast<int64_t>(chunk.from) * params.num_weights;
      float* weights_target = weights_at(params, chunk);
      for (int j = lane; j < chunk.num_rows * params.num_weights; j += 32) weights_target[j] = weights[j];
    }
    reporter.note_chunk(chunk);
    chunk = next;
    has_chunk = has_next;
  }
  reporter.finish();
  return true;
}

// The received rows whose sums this CTA sends, with what the loads of each need: their places are asked for two rows
// ahead and their weights one row ahead. One warp walks; lane k stands for column k.
class RowWalk {
 public:
  struct Row {
    bool exists;
    Chunk chunk;
    int i;  // of the chunk
    int place;
    float weight;
  };

  __device__ RowWalk(const CombineParams& params, const Routes& routes, int lane)
      : params_(params), chunks_(params, routes, 0, lane), lane_(lane) {
    after_.exists = chunks_.next(after_.chunk);
    after_.i = -1;
    find_next();
    next_ = after_;
    load_weight(next_);
    find_next();
  }

  // Returns the next row; check `exists`.
  __device__ Row advance() {
    const Row row = next_;
    next_ = after_;
    load_weight(next_);
    find_next();
    return row;
  }

 private:
  __device__ void find_next() {
    while (after_.exists && ++after_.i >= after_.chunk.num_rows) {
      after_.exists = chunks_.next(after_.chunk);
      after_.i = -1;
    }
    after_.place = -1;
    if (after_.exists && lane_ < params_.num_topk) {
      after_.place = params_.places[static_cast<int64_t>(after_.chunk.from + after_.i) * params_.num_topk + lane_];
    }
  }
  __device__ void load_weight(Row& row) {
    if (row.place >= params_.row_limit) row.place = -1;
    row.weight = params_.num_weights > 0 && row.place >= 0 ? params_.weights[row.place] : 0.0f;
  }

  const CombineParams& params_;
  ChunkWalk chunks_;
  int lane_;
  Row next_, after_;
};

// One warp asks for what the sums are made of: each received row's places, ascending. Blocks ascend with the expert, so
// ascending places are ascending experts. It also sends the weights.
__device__ void load_expert_rows(const CombineParams& params, const Routes& routes, const SumRing& ring, int lane) {
  RingLoader loader(ring);
  RowWalk rows(params, routes, lane);
  for (RowWalk::Row row = rows.advance(); row.exists; row = rows.advance()) {
    if (params.num_weights > 0 && lane < params.num_topk) {
      weights_at(params, row.chunk)[row.i * params.num_topk + lane] = row.weight;
    }
    const int num_places = __popc(__ballot_sync(kAllLanes, row.place >= 0));
    for (int begin = 0; begin < params.row_bytes; begin += kPartBytes) {
      if (num_places == 0) loader.push_nothing();
      int place = -1;
      for (int p = 0; p < num_places; ++p) {
        // The lowest place above the one before.
        const unsigned left = row.place > place ? static_cast<unsigned>(row.place) : UINT32_MAX;
        place = static_cast<int>(__reduce_min_sync(kAllLanes, left));
        loader.push(params.rows + static_cast<int64_t>(place) * params.row_bytes + begin,
                    min(kPartBytes, params.row_bytes - begin), p + 1 == num_places ? kLast : kMore);
      }
    }
  }
}

// Walks through the parts that a CTA sends: visit(chunk, row of the chunk, begin, bytes), then end(chunk).
template <typename Visit, typename End>
__device__ void for_each_part(const CombineParams& params, const Routes& routes, int lane, Visit&& visit, End&& end) {
  ChunkWalk chunks(params, routes, 0, lane);
  for (Chunk chunk{}; chunks.next(chunk); end(chunk)) {
    for (int i = 0; i < chunk.num_rows; ++i) {
      for (int begin = 0; begin < params.row_bytes; begin += kPartBytes) {
        visit(chunk, i, begin, min(kPartBytes, params.row_bytes - begin));
      }
    }
  }
}

// A group of warps adds.
__device__ void sum_expert_rows(const CombineParams& params, const Routes& routes, const SumRing& ring, int thread) {
  RingSummer summer(ring, thread);
  for_each_part(
      params, routes, thread % 32, [&](const Chunk&, int, int, int num_bytes) { summer.sum_part(num_bytes); },
      [](const Chunk&) {});
}

// One warp sends the sums.
__device__ bool store_sums(const CombineParams& params, const Routes& routes, const Waiter& waiter, const SumRing& ring,
                           uint32_t epoch, int lane) {
  const bool ok = wait_for_sources(params.domain, waiter, epoch, lane);
  RingStorer storer(ring, lane);
  Reporter<kRowsBeforeReport> reporter(params.domain, epoch, lane);
  for_each_part(
      params, routes, lane,
      [&](const Chunk& chunk, int i, int begin, int num_bytes) {
        uint8_t* target = rows_at(params, chunk) + static_cast<int64_t>(i) * params.row_bytes + begin;
        storer.store(ok ? target : nullptr, num_bytes);
        if (ok) reporter.note_store();
      },
      [&](const Chunk& chunk) {
        if (ok) reporter.note_chunk(chunk);
      });
  if (ok) reporter.finish();
  return ok;
}

}  // namespace
}  // namespace hybrid_ep
