// How a warp of a combine sends runs of rows to other GPUs, through a ring of its own.
//
//     run ─► pieces: bulk load ─► stage ─ bulk store ─► target ─► the run has arrived: reported
//
// If it is paced, a warp has at most kWindow pieces on the wire, and all warps together have window_bytes. More bytes
// would wait inside the GPU and delay the loads of sums. Longer pieces delay them too. With few SMs these are the
// limit, and not the wire. Then pieces are long, and half of a ring is loaded while the other half is sent.
#pragma once

#include <algorithm>

#include "device/row_ring.cuh"

namespace hybrid_ep {
namespace {

constexpr int kSendWarps = 2;  // of a CTA
constexpr int kSendRingBytes = 48 * 1024;
// Of a warp that is paced.
constexpr int kWindow = 5;
constexpr int kMinPieceBytes = 1024;
constexpr int kMaxPieceBytes = kSendRingBytes / (kWindow + 2);
// Of one that is not.
constexpr int kStoresInFlight = 3;
constexpr int kLongPieceBytes = kSendRingBytes / (2 * kStoresInFlight);

// Writes zeros for rows that x does not have, because a dispatch has dropped them. Collective over a warp; a multiple
// of 4 bytes.
__device__ void send_zeros(void* to, int64_t num_bytes) {
  for (int64_t i = threadIdx.x % 32; i < num_bytes / 4; i += 32) static_cast<uint32_t*>(to)[i] = 0;
}

// What a run copies: blocks that follow each other, to targets that are to_stride bytes apart.
struct Blocks {
  int num, num_bytes, to_stride;
};

// How blocks are cut into pieces, of equal size but for the last one of a block. A full run has num_blocks of
// block_bytes.
struct Pieces {
  int num_bytes;  // of each
  bool are_paced;

  __device__ Pieces(int num_blocks, int block_bytes, int window_bytes, int num_sms) {
    const int share = window_bytes / (num_sms * kSendWarps * kWindow);
    const bool fills_window = share > 0 && share <= kMaxPieceBytes;
    const int most = fills_window ? max(share, kMinPieceBytes) : kLongPieceBytes;
    const int num = max((kWindow - 1) / num_blocks + 1, (block_bytes - 1) / most + 1);  // of a block
    num_bytes = (block_bytes - 1) / (num * kLineBytes) * kLineBytes + kLineBytes;
    are_paced = fills_window && num * num_blocks > kWindow;
  }
};

// Walks the pieces of blocks. A piece fits into a stage.
class PieceWalk {
 public:
  __device__ PieceWalk(const Blocks& blocks, int piece_bytes) : blocks_(blocks), piece_bytes_(piece_bytes) {}

  __device__ bool has_next() const { return block_ < blocks_.num && blocks_.num_bytes > 0; }
  __device__ int from() const { return block_ * blocks_.num_bytes + offset_; }
  __device__ int to() const { return block_ * blocks_.to_stride + offset_; }
  __device__ int num_bytes() const { return min(piece_bytes_, blocks_.num_bytes - offset_); }
  __device__ void advance() {
    offset_ += piece_bytes_;
    if (offset_ < blocks_.num_bytes) return;
    offset_ = 0;
    ++block_;
  }

 private:
  Blocks blocks_;
  int piece_bytes_;
  int block_ = 0, offset_ = 0;
};

// Sends all runs of a warp, as send_runs() says.
template <bool kIsPaced, typename Runs>
__device__ bool send_pieces(Runs& runs, int piece_bytes, uint8_t* stages, uint64_t* barriers) {
  using Run = typename Runs::Run;
  constexpr int kInFlight = kIsPaced ? kWindow : kStoresInFlight;
  // A run is reported after as many pieces of the next one. By then it has mostly arrived.
  constexpr int kBeforeReport = kIsPaced ? kWindow : kStoresInFlight + 1;
  const int lane = threadIdx.x % 32;
  RowRing<kInFlight> ring(stages, barriers, min(kSendRingBytes / piece_bytes, kMaxStages), piece_bytes, lane);
  const auto pieces_of = [&](const Run& of) { return PieceWalk(runs.blocks(of), piece_bytes); };
  Run run{}, next{};
  bool ok = true, has_next = false;
  bool has_run = runs.next(run) || runs.wait_next(run, &ok);
  if (!has_run) return ok;

  // The first pieces of the next run are loaded while this one is sent, so that no load is waited for.
  PieceWalk asked = pieces_of(run);
  const uint8_t* asked_from = runs.from(run);
  bool is_in_next = false;
  int num_ahead = 0;
  const auto ask_ahead = [&] {
    while (num_ahead < ring.num_ahead()) {
      if (!asked.has_next() && Runs::kLoadsEarly && has_next && !is_in_next) {
        asked = pieces_of(next);
        asked_from = runs.from(next);
        is_in_next = true;
      }
      if (!asked.has_next()) return;
      ring.fetch(asked_from + asked.from(), asked.num_bytes());
      asked.advance();
      ++num_ahead;
    }
  };

  // A run is reported while the first pieces of the next one are sent. So the wire is not idle while a warp waits for a
  // run to arrive.
  Run sent{};
  bool has_sent = false;
  const auto report = [&] {
    __syncwarp();
    runs.report(sent);
    has_sent = false;
  };
  const auto report_now = [&] {
    if (!has_sent) return;
    ptx::bulk_wait_written<0>();
    report();
  };

  while (has_run) {
    if (!runs.is_ready(run)) {
      report_now();  // what the run waits for may wait for the one before
      ok = runs.wait_ready(run);
      if (!ok) break;
    }
    ask_ahead();
    has_next = runs.next(next);
    uint8_t* target = runs.to(run);
    int num_sent = 0;
    for (PieceWalk piece = pieces_of(run); piece.has_next(); piece.advance()) {
      const uint8_t* stage = ring.wait();
      if (lane == 0) ptx::bulk_store(target + piece.to(), stage, piece.num_bytes());
      ring.release();
      ++num_sent;
      if (kIsPaced || num_sent == kBeforeReport) ptx::bulk_wait_written<kBeforeReport>();
      --num_ahead;
      ask_ahead();
      if (has_sent && num_sent == kBeforeReport) report();
    }
    runs.finish(run);
    report_now();  // if this run was too short to report the one before
    sent = run;
    has_sent = true;
    run = next;
    has_run = has_next;
    if (!has_run) {
      report_now();  // what the warp waits for may wait for this run
      has_run = runs.wait_next(run, &ok);
    }
    if (!is_in_next) {
      asked = pieces_of(run);
      asked_from = runs.from(run);
    }
    has_next = is_in_next = false;
  }
  for (; num_ahead > 0; --num_ahead) {  // of a run that is not sent
    ring.wait();
    ring.release();
  }
  if (ok) report_now();
  return ok;
}

// Sends all runs of a warp. Collective over the warp, with kSendRingBytes of stages and kMaxStages barriers. Returns
// false if a wait was given up. What is sent:
//   Run                  a run of rows
//   next(run)            goes on to the next run, without a wait; false if there is none
//   wait_next(run, ok)   where next() has found none: waits for one; false if none is left, or with *ok false if the
//                        wait is given up. The warp holds no rows
//   is_ready(run)        whether it can be sent now
//   wait_ready(run)      waits until then; false if the wait is given up
//   kLoadsEarly          whether it can be loaded before it is ready
//   blocks(run), from(run), to(run)
//   finish(run)          stores what stands beside the rows
//   report(run)          once all of it has arrived
template <typename Runs>
__device__ bool send_runs(Runs& runs, const Pieces& pieces, uint8_t* stages, uint64_t* barriers) {
  return pieces.are_paced ? send_pieces<true>(runs, pieces.num_bytes, stages, barriers)
                          : send_pieces<false>(runs, pieces.num_bytes, stages, barriers);
}

}  // namespace
}  // namespace hybrid_ep
