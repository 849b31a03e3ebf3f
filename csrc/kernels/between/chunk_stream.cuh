// The stream of chunks between this rank and its peer in another domain: layout/between_layout.h.
//
//     sender: wait_free(n) ─► send_slot(n) ─ write_rows(n) ─► receiver: wait(n) ─► chunk(n) ─ read_rows(n) ─► credit
//
// Several warps may write a chunk's rows, and several may read them. The one that writes the last row sends the chunk,
// and the one that reads the last row returns the credit.
//
// A chunk's flag names the use of its slot, so that chunks may come in any order.
#pragma once

#include "device/lanes.cuh"
#include "device/wait.cuh"
#include "kernels/between/params.h"
#include "transport/links.cuh"

namespace hybrid_ep {
namespace {

// A fault names a rank of this domain by its domain rank, and any other rank by this constant + its global rank.
constexpr int kRankElsewhere = kMaxRanks;

// A CTA that waits for another CTA of this rank waits this much longer. The other CTA waits for another rank, and must
// report first.
__device__ Waiter waiter_of_own(const Domain& domain, KernelName kernel) {
  return {domain.fault, kernel, domain.rank, domain.timeout_ns + 2 * kListenNs, domain.control, domain.num_ranks};
}

template <typename T>
__device__ T* between_part(const BetweenDomain& between, int domain_rank, int64_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(between.domain.control[domain_rank] + 1) + offset);
}
template <typename T>
__device__ T* own_part(const BetweenDomain& between, int64_t offset) {
  return between_part<T>(between, between.domain.rank, offset);
}

template <typename Link>
class ChunkStream {
 public:
  __device__ ChunkStream(const BetweenDomain& between, const Waiter& waiter, const Link& link, int domain)
      : between_(between),
        waiter_(waiter),
        link_(link),
        domain_(domain),
        peer_(kRankElsewhere + between.grid.peer_in(domain)),
        shape_(between.link.layout.rings[kStreamRing]),
        sent_before_(own_part<uint64_t>(between, between.layout.sent_chunks)[domain]),
        read_before_(own_part<uint64_t>(between, between.layout.read_chunks)[domain]) {}

  // Chunks are numbered within the call.

  // Whether the peer has read the last chunk of this slot. By any thread, which may then write the slot.
  __device__ bool is_free(int chunk) const {
    const uint64_t number = sent_before_ + chunk;
    const auto lap = number / shape_.num_slots;
    const int group = slot_of(number) / static_cast<int>(shape_.slots_per_credit);
    return lap == 0 || link_.poll_credit(kStreamRing, domain_, group) >= lap;
  }

  // Waits until is_free(chunk).
  __device__ bool wait_free(int chunk) const {
    return waiter_.until([&] { return is_free(chunk); }, lost(), static_cast<uint32_t>(chunk), peer_,
                         WaitTag::kCredits);
  }

  __device__ uint8_t* send_slot(int chunk) const {
    return link_.send_slot(kStreamRing, domain_, slot_of(sent_before_ + chunk));
  }

  // Sends what the lanes and their bulk stores have written. Collective over the warp.
  __device__ bool send(int chunk, uint32_t num_bytes, int num_rows) const {
    const uint64_t number = sent_before_ + chunk;
    const uint64_t word = (number / shape_.num_slots + 1) << 16 | static_cast<uint32_t>(num_rows);
    __syncwarp();
    bool ok = true;
    if (threadIdx.x % 32 == 0) {
      ok = link_.put_signal(kStreamRing, domain_, slot_of(number), num_bytes, word, gives_up()) || give_up_command();
    }
    return __all_sync(kAllLanes, ok);
  }

  // Counts rows of a chunk as written, of `num_rows` in all, and sends the chunk of num_bytes if all are. Collective
  // over the warp, after its bulk stores.
  __device__ bool write_rows(int chunk, int num_written, int num_rows, uint32_t num_bytes) const {
    if (num_written < num_rows) {
      uint32_t* rows_written = own_part<uint32_t>(between_, between_.layout.rows_written) +
                               domain_ * static_cast<int>(shape_.num_slots) + slot_of(sent_before_ + chunk);
      bool is_last = false;
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        is_last = ptx::add_acq_rel_gpu(rows_written, num_written) + num_written == static_cast<uint32_t>(num_rows);
        if (is_last) *rows_written = 0;
      }
      if (__ballot_sync(kAllLanes, is_last) == 0) return true;
    }
    return send(chunk, num_bytes, num_rows);
  }

  // Whether the chunk has arrived. Acquires for the calling thread.
  __device__ bool is_here(int chunk) const {
    const uint64_t number = read_before_ + chunk;
    return link_.poll(kStreamRing, domain_, slot_of(number)) >> 16 == number / shape_.num_slots + 1;
  }

  // Waits until the chunk has arrived.
  __device__ bool wait(int chunk) const {
    return waiter_.until([&] { return is_here(chunk); }, lost(), static_cast<uint32_t>(chunk), peer_,
                         WaitTag::kRecords);
  }

  __device__ const uint8_t* chunk(int chunk) const {
    return link_.recv_slot(kStreamRing, domain_, slot_of(read_before_ + chunk));
  }

  // Counts rows of a chunk as read, of `num_rows` in all, and returns the credit of a group that has been read. One
  // thread, after all reads.
  __device__ bool read_rows(int chunk, int num_read, int num_rows) const {
    const uint64_t number = read_before_ + chunk;
    const int slot = slot_of(number), num_slots = static_cast<int>(shape_.num_slots);
    if (num_read < num_rows) {
      uint32_t* rows_read = own_part<uint32_t>(between_, between_.layout.rows_read) + domain_ * num_slots + slot;
      if (ptx::add_acq_rel_gpu(rows_read, num_read) + num_read < static_cast<uint32_t>(num_rows)) return true;
      *rows_read = 0;
    }
    const int group = slot / static_cast<int>(shape_.slots_per_credit);
    uint32_t* slots_read = own_part<uint32_t>(between_, between_.layout.slots_read) + domain_ * num_slots + group;
    if (ptx::add_acq_rel_gpu(slots_read, 1) + 1 < shape_.slots_per_credit) return true;
    *slots_read = 0;
    return link_.credit(kStreamRing, domain_, group, number / shape_.num_slots + 1, gives_up()) || give_up_command();
  }

  // Returns a function for Waiter::until: 0 while the link works, otherwise the failure as Waiter::lose takes it.
  __device__ auto lost() const {
    return [this]() -> uint32_t {
      const uint32_t failure = link_.failure();
      return failure < failure_word(0) ? failure
                                       : 2 + kRankElsewhere + between_.grid.peer_in(failure - failure_word(0));
    };
  }

 private:
  __device__ int slot_of(uint64_t number) const { return static_cast<int>(number % shape_.num_slots); }
  __device__ auto gives_up() const {
    return [this] { return waiter_.expired() || link_.failure() != 0; };
  }
  // Called when a FIFO is full.
  __device__ bool give_up_command() const {
    const uint32_t found = lost()();
    return found != 0 ? waiter_.lose(found, peer_, WaitTag::kCommands, 0) : waiter_.sends(false, peer_);
  }

  const BetweenDomain& between_;
  const Waiter& waiter_;
  const Link& link_;
  const int domain_, peer_;
  const RingShape& shape_;
  const uint64_t sent_before_, read_before_;
};

}  // namespace
}  // namespace hybrid_ep
