// How the warps of a combine between domains claim parts of chunks: the next part of any domain whose next slot is
// free.
//
//     [D] counters ─► a domain with a free slot ─► its next part
//
// A peer reads chunks in the order of its own tokens. So it may return a credit only after another peer has its chunks,
// and warps that all wait for one domain would wait for each other. Legend: D domains.
#pragma once

#include "kernels/combine_between/tables.cuh"

namespace hybrid_ep {
namespace {

// Records of a domain that a warp claims at once.
struct Part {
  int domain, begin, end;

  __device__ int size() const { return end - begin; }
};

// Collective over a warp. `is_free(domain, number)` is called by single lanes: whether the slot of a domain's part is
// free.
template <typename Link>
class PartClaims {
 public:
  // `first_domain` is asked first. `has_own`: this rank's own domain has parts, too.
  __device__ PartClaims(const CombineBetweenParams& params, const Streams& streams, const Waiter& waiter,
                        const Link& link, uint32_t epoch, int first_domain, bool has_own)
      : params_(params),
        streams_(streams),
        waiter_(waiter),
        link_(link),
        epoch_(epoch),
        numbers_(own_part<uint32_t>(params.between, params.between.layout.items)),
        has_own_(has_own),
        turn_(first_domain) {}

  // False: a wait was given up.
  __device__ bool ok() const { return ok_; }
  // Whether claim() will return nothing more.
  __device__ bool is_done() const { return !ok_ || all_claimed_; }

  // Claims a part. `waits`: if no slot is free, waits for one; a warp that holds rows must not. Returns false if there
  // is none.
  template <typename IsFree>
  __device__ bool claim(Part& part, bool waits, IsFree&& is_free) {
    while (!is_done()) {
      int blocked = -1;
      if (claim_free(part, blocked, is_free)) return true;
      if (all_claimed_ || !waits) return false;
      if (blocked < 0) continue;  // other warps have claimed the last parts of a domain
      const ChunkStream<Link> waits_for(params_.between, waiter_, link_, blocked, streams_.first);
      const int peer = kRankElsewhere + params_.between.grid.peer_in(blocked);
      const bool has_part = threadIdx.x % 32 > 0 || waiter_.until([&] { return has_free(is_free); }, waits_for.lost(),
                                                                  epoch_, peer, WaitTag::kCredits);
      ok_ = __all_sync(kAllLanes, has_part);
      __syncwarp();
    }
    return false;
  }

 private:
  __device__ int num_records(int domain) const {
    const Grid& grid = params_.between.grid;
    return domain == grid.domain_idx() && !has_own_ ? 0 : streams_.num_records[domain];
  }

  // Claims the next part of the first domain, from the warp's turn on, that has one with a free slot. `blocked` is a
  // domain whose slot is not free. If other warps claim at the same time, the warp gets a later part, whose slot may
  // not be free yet.
  template <typename IsFree>
  __device__ bool claim_free(Part& part, int& blocked, IsFree&& is_free) {
    const int num_domains = params_.between.grid.num_domains;
    bool is_left = false;
    for (int first = 0; first < num_domains; first += 32) {
      const int i = first + threadIdx.x % 32, domain = (turn_ + i) % num_domains;
      const int number = i < num_domains ? static_cast<int>(ptx::load_relaxed_gpu(numbers_ + domain)) : 0;
      const int end = i < num_domains ? num_records(domain) : 0;
      const bool has_part = first_record(params_.record, number) < end, can_claim = has_part && is_free(domain, number);
      __syncwarp();  // passes on what the lanes have acquired
      is_left |= __ballot_sync(kAllLanes, has_part) != 0;
      for (unsigned left = __ballot_sync(kAllLanes, can_claim); left != 0; left &= left - 1) {
        const int holder = __ffs(left) - 1;
        const bool claims = static_cast<int>(threadIdx.x % 32) == holder;
        const int claimed = claims ? static_cast<int>(ptx::increment_relaxed_gpu(numbers_ + domain)) : 0;
        const int begin = first_record(params_.record, __shfl_sync(kAllLanes, claimed, holder));
        const int num_records = __shfl_sync(kAllLanes, end, holder);
        if (begin >= num_records) continue;
        part = {__shfl_sync(kAllLanes, domain, holder), begin, end_of_part(params_.record, begin, num_records)};
        turn_ = part.domain + 1;
        return true;
      }
      const unsigned without_slot = __ballot_sync(kAllLanes, has_part && !can_claim);
      if (without_slot != 0 && blocked < 0) blocked = __shfl_sync(kAllLanes, domain, __ffs(without_slot) - 1);
    }
    all_claimed_ = !is_left;
    return false;
  }

  // Whether some domain has a part with a free slot, or none has one that is not claimed. One thread.
  template <typename IsFree>
  __device__ bool has_free(IsFree&& is_free) const {
    bool is_left = false;
    for (int domain = 0; domain < params_.between.grid.num_domains; ++domain) {
      const int number = static_cast<int>(ptx::load_relaxed_gpu(numbers_ + domain));
      if (first_record(params_.record, number) >= num_records(domain)) continue;
      if (is_free(domain, number)) return true;
      is_left = true;
    }
    return !is_left;
  }

  const CombineBetweenParams& params_;
  const Streams& streams_;
  const Waiter& waiter_;
  const Link& link_;
  const uint32_t epoch_;
  uint32_t* const numbers_;  // [D] parts claimed of each domain
  const bool has_own_;
  int turn_;  // domain that is asked first
  bool all_claimed_ = false, ok_ = true;
};

}  // namespace
}  // namespace hybrid_ep
