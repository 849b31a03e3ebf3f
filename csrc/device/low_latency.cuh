// What the low-latency kernels share: where a buffer is, who takes part, and how a kernel ends. A kernel may send and
// receive, by different CTAs.
#pragma once

#include "device/wait.cuh"
#include "layout/low_latency_layout.h"

namespace hybrid_ep {

constexpr int kVectorsPerLane = 4;  // 16-byte vectors of a row that a lane moves at once
constexpr int kSegmentBytes = kVectorsPerLane * 32 * 16;
constexpr int kMaxAnnouncements = 2 * kLowLatencyBuffers * kMaxRanks;  // of free buffers by a kernel, a thread each

// Which of the CTAs with one role this is: of those that send, or of those that receive.
struct CtaOfRole {
  int idx, count;
};

__device__ inline LowLatencyControl& control_of(const LowLatencyDomain& domain, int rank) {
  return *reinterpret_cast<LowLatencyControl*>(domain.region[rank]);
}
__device__ inline LowLatencyChannel& channel_of(const LowLatencyDomain& domain, int rank) {
  return control_of(domain, rank).channels[static_cast<int>(domain.kind)][domain.buffer_idx];
}
// The route parts of a dispatch buffer.
__device__ inline uint4* routes_of(const LowLatencyDomain& domain, int rank) {
  return reinterpret_cast<uint4*>(domain.region[rank] + domain.routes_begin);
}
// Flags of slots: the epoch of the last call whose row has arrived.
__device__ inline uint32_t* flags_of(const LowLatencyDomain& domain, int rank) {
  return reinterpret_cast<uint32_t*>(domain.region[rank] + domain.flags_begin);
}
__device__ inline uint8_t* buffer_of(const LowLatencyDomain& domain, int rank) {
  return domain.region[rank] + domain.buffer_begin;
}

// The Waiter of a kernel that sends. Its deadline is half of the timeout, and that of a kernel that receives all of it.
// So a sender that gives a rank up still sends in time, and the others do not give the sender up.
__device__ inline Waiter waiter_of_send(const LowLatencyDomain& domain, KernelName kernel) {
  return {domain.fault, kernel, domain.rank, domain.timeout_ns / kSendTimeoutDivisor};
}

// Epoch of the call that begins. NOTE: only the threads that wait for a rank load it. ptxas keeps a value that all
// threads load in a uniform register, and would wait for it before the loads of the flags.
__device__ inline uint32_t next_epoch(const LowLatencyProgress& progress) {
  return next_epoch(ptx::load_relaxed_gpu(&progress.epoch));
}

// Adds the time since `started` to the statistics of a rank. Both halves of a call may do so at once.
__device__ inline void add_to_wait_stats(int64_t* wait_stats, int rank, uint64_t started) {
  atomicAdd(reinterpret_cast<unsigned long long*>(wait_stats + rank), (ptx::clock_ns() - started) / 1000);
}

// Publishes to every rank how many calls of each buffer this rank has read. The first CTA that sends does it, with its
// first threads. Earlier kernels have ended by then, so they need no fence.
__device__ inline void announce_free_buffers(const LowLatencyDomain& domain, int num_threads = kMaxAnnouncements) {
  if (static_cast<int>(threadIdx.x) >= num_threads) return;
  LowLatencyChannel* own = &control_of(domain, domain.rank).channels[0][0];
  for (int i = threadIdx.x; i < 2 * kLowLatencyBuffers * domain.num_ranks;
       i += min(num_threads, static_cast<int>(blockDim.x))) {
    const int channel = i / domain.num_ranks, r = i % domain.num_ranks;
    LowLatencyChannel& there = (&control_of(domain, r).channels[0][0])[channel];
    ptx::store_relaxed_system(&there.free_epoch[domain.rank], ptx::load_relaxed_gpu(&own[channel].receive.epoch));
  }
}

__device__ inline volatile int32_t& mask_of(const LowLatencyDomain& domain, int r) {
  return control_of(domain, domain.rank).masked[r];
}
__device__ inline bool is_masked(const LowLatencyDomain& domain, int r) { return mask_of(domain, r) != 0; }

// Masks a rank that did not come, so that kernels already queued do not wait for it again. The host decides whether the
// mask lasts.
__device__ inline void mask(const LowLatencyDomain& domain, int r) {
  if (r != domain.rank) mask_of(domain, r) = 1;
}

// Thread r runs `wait`, which waits for rank r and returns whether it came. A rank that did not come is masked. Returns
// whether the rank takes part.
template <typename Wait>
__device__ bool takes_part(const LowLatencyDomain& domain, int r, Wait&& wait) {
  if (is_masked(domain, r)) return false;
  if (wait()) return true;
  mask(domain, r);
  return false;
}

// Waits until rank r has read the rows that the previous call left in the buffer. A rank that has also ended this call
// has given this one up, and uses the buffer for a later call. Where ranks are masked, it is left out.
__device__ inline bool wait_until_free(const LowLatencyDomain& domain, const Waiter& waiter, uint32_t epoch, int r) {
  const uint32_t* flag = &channel_of(domain, domain.rank).free_epoch[r];
  const uint32_t before = previous_epoch(epoch);
  const auto has_gone_on = [&](uint32_t seen) { return domain.takes_masks && has_reached_epoch(seen, epoch); };
  // Every call begins with this, so both are loaded at once.
  const bool is_left_out = is_masked(domain, r);
  const uint32_t seen = ptx::load_acquire_system(flag);
  if (is_left_out) return false;
  if (has_reached_epoch(seen, before) && !has_gone_on(seen)) return true;
  return takes_part(domain, r, [&] {
    if (!waiter.until_epoch(flag, before, r, WaitTag::kFreeSlots)) return false;
    const uint32_t now = ptx::load_acquire_system(flag);
    return !has_gone_on(now) || waiter.give_up(r, WaitTag::kFreeSlots, epoch - 1, now);
  });
}

// What rank `from` publishes to rank `at` when it begins to send: a LowLatencyBegun.
__device__ inline uint4* begun_of(const LowLatencyDomain& domain, int at, int from) {
  return reinterpret_cast<uint4*>(&channel_of(domain, at).begun[from]);
}

// Decides for all CTAs that receive whether rank r takes part in the call. The first CTA that asks decides: CTAs have
// deadlines of their own, and one may have given up a rank that another one has seen. `has_come`: whether all that this
// CTA waits for has come. If the function returns true, it has come in any case.
__device__ inline bool decide(const LowLatencyDomain& domain, uint32_t epoch, int r, bool has_come) {
  if (!domain.takes_masks) return has_come;
  uint64_t* decided = &channel_of(domain, domain.rank).decided[r];
  const uint64_t proposed = static_cast<uint64_t>(has_come) << 32 | epoch;
  uint64_t word = ptx::load_relaxed_system(decided);
  if (static_cast<uint32_t>(word) != epoch) {
    const uint64_t before = atomicCAS(reinterpret_cast<unsigned long long*>(decided), word, proposed);
    word = before == word ? proposed : before;
  }
  return word >> 32 != 0;
}

// Waits until rank r has begun to send. If it takes part, writes its LowLatencyBegun to *begun.
__device__ inline bool wait_until_begun(const LowLatencyDomain& domain, const Waiter& waiter, uint32_t epoch, int r,
                                        uint4* begun) {
  const uint4* words = begun_of(domain, domain.rank, r);
  return takes_part(domain, r, [&] { return waiter.until_epoch_relaxed(words, epoch, r, WaitTag::kRoutes, begun); });
}

// Waits until the weights of rank r's tokens have arrived.
__device__ inline bool wait_for_weights(const LowLatencyDomain& domain, const Waiter& waiter, uint32_t epoch, int r) {
  const uint32_t* flag = &channel_of(domain, domain.rank).weights_epoch[r];
  return takes_part(domain, r, [&] { return waiter.until_epoch(flag, epoch, r, WaitTag::kWeights); });
}

// What rank `from` publishes to rank `at` when its rows of a combine have arrived there: a LowLatencySent.
__device__ inline uint4* sent_of(const LowLatencyDomain& domain, int at, int from) {
  return reinterpret_cast<uint4*>(&channel_of(domain, at).sent[from]);
}

// Waits until the rows of rank r have arrived. If it takes part, writes its LowLatencySent to *sent.
__device__ inline bool wait_until_sent(const LowLatencyDomain& domain, const Waiter& waiter, uint32_t epoch, int r,
                                       uint4* sent) {
  const uint4* words = sent_of(domain, domain.rank, r);
  return takes_part(domain, r, [&] { return waiter.until_epoch(words, epoch, r, WaitTag::kPartialRows, sent); });
}

// Collective over the CTA, at the end of a combine that sends. The last CTA of the grid publishes its LowLatencySent at
// every rank that takes part, with the value that value() returns in its thread 0. `has_lost` in any thread: this CTA
// left a rank out and sent it nothing. CTAs may differ in that, because each has its own deadline.
template <typename Value>
__device__ void finish_send(const LowLatencyDomain& domain, const bool* present, uint32_t epoch, Value&& value,
                            const LowLatencyNumber& dispatch, bool has_lost, uint32_t num_ctas) {
  constexpr uint32_t kLost = 1u << 16;  // above any number of CTAs
  LowLatencyProgress& progress = channel_of(domain, domain.rank).send;
  has_lost = __syncthreads_or(has_lost);
  if (threadIdx.x != 0) return;
  const uint32_t before = ptx::add_acq_rel_gpu(&progress.finished_ctas, has_lost ? kLost + 1 : 1);
  if (before % kLost != num_ctas - 1) return;
  ptx::fence_acq_rel_system();
  has_lost = has_lost || before >= kLost;
  const uint4 sent = make_uint4(value(), dispatch.call, dispatch.counter, epoch);
  for (int r = 0; r < domain.num_ranks; ++r) {
    if (!present[r] || (has_lost && is_masked(domain, r))) continue;
    ptx::store_relaxed_system(sent_of(domain, r, domain.rank), sent);
  }
  progress.finished_ctas = 0;
  progress.epoch = epoch;
}

// Collective over the CTA, at the end of one of the num_ctas of a role that signals no rank. The call counts even if a
// wait was given up, so that ranks stay in step.
__device__ inline void finish_quietly(LowLatencyProgress& progress, uint32_t epoch, uint32_t num_ctas) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // NOTE: no fence. Only the epoch must be seen, and every CTA has read it before it comes here.
  if (ptx::add_relaxed_gpu(&progress.finished_ctas, 1) != num_ctas - 1) return;
  progress.finished_ctas = 0;
  progress.epoch = epoch;
}

// Ends a role like finish_quietly(). CTAs of the other role of this kernel wait for its writes by
// wait_for_other_role().
__device__ inline void finish_for_other_role(LowLatencyProgress& progress, uint32_t epoch, uint32_t num_ctas) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (ptx::add_acq_rel_gpu(&progress.finished_ctas, 1) != num_ctas - 1) return;
  progress.finished_ctas = 0;
  ptx::store_release_gpu(&progress.epoch, epoch);
}

// Collective over the CTA: waits until the CTAs of the other role have finished. They wait for no CTA of this kernel
// and come first in the grid, so they end even where the device has no room for all CTAs at once.
__device__ inline void wait_for_other_role(const LowLatencyProgress& progress, const Waiter& waiter, uint32_t epoch,
                                           int rank) {
  if (threadIdx.x == 0) waiter.until_epoch(&progress.epoch, epoch, rank, WaitTag::kRoutes);
  __syncthreads();
}

}  // namespace hybrid_ep
