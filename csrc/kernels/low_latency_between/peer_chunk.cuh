// What the kernels that ship and forward share: a call's chunk to and from each peer, and how such a kernel ends.
//
//     sender: wait_free ─► out() ─ send ─► peer: wait ─► in() ─ credit
//
// The layout of chunks and the words of the link are in layout/low_latency_between_layout.h.
#pragma once

#include "device/lanes.cuh"
#include "device/low_latency.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency_between/low_latency_between.h"
#include "transport/links.cuh"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
static_assert(kThreads >= kMaxRanks);  // a thread waits for a rank

__device__ LowLatencyBetweenControl& between_control(const LowLatencyBetweenParams& params, int rank) {
  return *reinterpret_cast<LowLatencyBetweenControl*>(params.domain.region[rank] + params.peers.control_begin);
}
__device__ LowLatencyBetweenChannel& between_channel(const LowLatencyBetweenParams& params, int rank) {
  return between_control(params, rank).channels[static_cast<int>(params.domain.kind)][params.domain.buffer_idx];
}

template <typename Link>
class PeerChunk {
 public:
  // `domain` is another one than this rank's.
  __device__ PeerChunk(const LowLatencyBetweenParams& params, const Waiter& waiter, const Link& link, uint32_t epoch,
                       int domain)
      : params_(params),
        waiter_(waiter),
        link_(link),
        epoch_(epoch),
        session_(between_control(params, params.domain.rank).session),
        first_epoch_(between_control(params, params.domain.rank).first_epoch),
        ring_(static_cast<int>(params.domain.kind)),
        domain_(domain),
        peer_(params.peers.grid.peer_in(domain)) {}

  __device__ int peer() const { return peer_; }

  // Waits until the peer has forwarded this buffer's chunk of the call before; leaves a peer out that does not come.
  // Called by any thread, which may then write to out().
  __device__ bool wait_free() const {
    const auto is_free = [&] {
      const uint64_t credit = link_.poll_credit(ring_, domain_, slot());
      if (static_cast<uint32_t>(credit) != session_) return epoch_ == first_epoch_;
      return has_reached_epoch(static_cast<uint32_t>(credit >> 32), previous_epoch(epoch_));
    };
    return takes_part(params_.domain, peer_,
                      [&] { return waiter_.until(is_free, lost(), epoch_, peer_, WaitTag::kFreeSlots); });
  }

  __device__ uint8_t* out() const { return link_.send_slot(ring_, domain_, slot()); }

  // Sends what this thread has written or observed.
  __device__ void send(int64_t num_bytes) const {
    const auto size = static_cast<uint32_t>((num_bytes + 15) / 16 * 16);
    if (!link_.put_signal(ring_, domain_, slot(), size, peer_word(epoch_, session_), gives_up())) give_up_command();
  }

  // Waits until the peer's chunk is here; leaves a peer out whose chunk does not come. Acquires for the calling thread.
  __device__ bool wait() const {
    return takes_part(params_.domain, peer_, [&] {
      return waiter_.until([&] { return is_here(); }, lost(), epoch_, peer_, WaitTag::kRecords);
    });
  }

  __device__ const uint8_t* in() const { return link_.recv_slot(ring_, domain_, slot()); }

  // Lets the peer send its next chunk of this buffer. One thread, after all reads.
  __device__ void credit() const {
    if (!link_.credit(ring_, domain_, slot(), peer_word(epoch_, session_), gives_up())) give_up_command();
  }

 private:
  __device__ int slot() const { return params_.domain.buffer_idx; }
  __device__ bool is_here() const { return link_.poll(ring_, domain_, slot()) == peer_word(epoch_, session_); }
  // `lost` of Waiter::lose.
  __device__ auto lost() const {
    return [this]() -> uint32_t {
      const uint32_t failure = link_.failure();
      return failure < failure_word(0) ? failure : 2 + params_.peers.grid.peer_in(failure - failure_word(0));
    };
  }
  __device__ auto gives_up() const {
    return [this] { return waiter_.expired() || link_.failure() != 0; };
  }
  // A command found its FIFO full.
  __device__ void give_up_command() const {
    const uint32_t found = lost()();
    if (found != 0) {
      waiter_.lose(found, peer_, WaitTag::kCommands, epoch_);
    } else {
      waiter_.sends(false, peer_);
    }
  }

  const LowLatencyBetweenParams& params_;
  const Waiter& waiter_;
  const Link& link_;
  const uint32_t epoch_, session_, first_epoch_;
  const int ring_, domain_, peer_;
};

// Collective over the CTA: waits for the chunk of each other domain, a thread for each. Writes whether it has come, and
// how long it was waited for. `read(d, header)` runs in that thread if it has.
template <typename ChunkOf, typename Read>
__device__ void wait_for_chunks(const LowLatencyPeers& peers, bool* came, uint32_t* waited_us, ChunkOf&& chunk_of,
                                Read&& read) {
  const int d = threadIdx.x;
  if (d < peers.grid.num_domains) {
    const uint64_t started = ptx::clock_ns();
    came[d] = !peers.is_near(d) && chunk_of(d).wait();
    waited_us[d] = static_cast<uint32_t>((ptx::clock_ns() - started) / 1000);
    if (came[d]) read(d, *reinterpret_cast<const PeerHeader*>(chunk_of(d).in()));
  }
  __syncthreads();
}

// Collective over the CTA. Makes what it has written visible at system scope. True in the last of so many CTAs, which
// then sees what all have written.
__device__ inline bool is_last_cta(LowLatencyBetweenChannel& own, unsigned num_ctas) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_acq_rel_system();
    is_last = ptx::add_acq_rel_gpu(&own.finished_ctas, 1) == num_ctas - 1;
    if (is_last) own.finished_ctas = 0;
  }
  __syncthreads();
  return is_last;
}

// How a kernel of this folder starts. In a captured graph a host function stands ahead of it where a proxy carries the
// commands.
inline LaunchKind launch_kind(const LinkView& link) { return link.is_mapped ? LaunchKind::kEarly : LaunchKind::kPlain; }

// Collective over the last CTA, as its last step: ends the proxy's call.
template <typename Link>
__device__ void end_call(const LowLatencyBetweenParams& params, const Waiter& waiter, const Link& link) {
  __syncthreads();
  if (threadIdx.x == 0) waiter.sends(link.end_call([&] { return waiter.expired(); }), params.domain.rank);
}

// Collective over the last CTA of a kernel that forwards: publishes that the next call may write this rank's memory for
// the ranks of other domains.
__device__ inline void free_own_memory(const LowLatencyBetweenParams& params, uint32_t epoch) {
  LowLatencyChannel& own = channel_of(params.domain, params.domain.rank);
  const int r = threadIdx.x;
  if (r < params.domain.num_ranks && !params.peers.is_in_domain(r)) own.free_epoch[r] = epoch;
}

// Tells the ranks of the domain that the chunk of `source` has been forwarded, or why not, and how long it was waited
// for. A thread for each.
template <typename Link>
__device__ void tell_forwarded(const LowLatencyBetweenParams& params, const Link& link, uint32_t epoch, int source,
                               uint32_t waited_us) {
  const Grid& grid = params.peers.grid;
  const int rank = grid.domain_idx() * grid.ranks_per_domain + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) >= grid.ranks_per_domain || is_masked(params.domain, rank)) return;
  const FaultKind why = !is_masked(params.domain, source) ? FaultKind::kNone
                        : link.failure() != 0             ? FaultKind::kTransport
                                                          : FaultKind::kTimeout;
  ptx::store_relaxed_system(&between_channel(params, rank).forwarded[source],
                            static_cast<uint64_t>(Forwarded{why, waited_us}.pack()) << 32 | epoch);
}

// Waits, with a thread for each rank, for the ranks of the own domain and for the rows that they forward. Leaves out
// ranks whose rows do not come, so that the next kernel does not wait for them. Called by one CTA. `has_come(r)` tells
// whether rank r of the own domain has sent; `wait_for(waiter, r)` waits for it and reports. Adds to the statistics how
// long a rank was waited for, here or where its chunk came.
template <typename HasCome, typename WaitFor>
__device__ void wait_for_ranks(const LowLatencyBetweenParams& params, KernelName kernel, uint32_t epoch,
                               int64_t* wait_stats, HasCome&& has_come, WaitFor&& wait_for) {
  const LowLatencyDomain& ranks = params.domain;
  const Grid& grid = params.peers.grid;
  const int r = threadIdx.x, size = grid.ranks_per_domain;
  if (r >= grid.num_ranks() || is_masked(ranks, r)) return;
  const uint64_t started = ptx::clock_ns();
  const Waiter waiter(ranks.fault, kernel, ranks.rank, ranks.timeout_ns);
  if (params.peers.is_in_domain(r)) {
    takes_part(ranks, r, [&] { return wait_for(waiter, r); });
    if (wait_stats != nullptr) wait_stats[r] += static_cast<int64_t>((ptx::clock_ns() - started) / 1000);
    return;
  }
  const int forwarder = grid.domain_idx() * size + r % size;
  while (!has_come(forwarder) && !is_masked(ranks, forwarder) && !waiter.expired()) {
  }
  if (!has_come(forwarder)) {
    mask(ranks, r);  // another thread names the rank that is missing
    return;
  }
  const Waiter patient(ranks.fault, kernel, ranks.rank, ranks.timeout_ns + kForwardNs);
  uint64_t word = 0;
  if (!patient.until_equal(&between_channel(params, ranks.rank).forwarded[r], epoch, forwarder, WaitTag::kRecords,
                           &word)) {
    mask(ranks, r);
    mask(ranks, forwarder);
    return;
  }
  const Forwarded forwarded = Forwarded::unpack(static_cast<uint32_t>(word >> 32));
  if (forwarded.why != FaultKind::kNone) {
    report_fault(ranks.fault, forwarded.why, kernel, WaitTag::kRecords, ranks.rank, r, epoch, 0);
    mask(ranks, r);
  }
  if (wait_stats != nullptr) wait_stats[r] += forwarded.waited_us;
}

}  // namespace
}  // namespace hybrid_ep
