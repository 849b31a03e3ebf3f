// Runs CUDA kernels on the CPU, so that their logic can be tested where there is no GPU: tests/emulation/README.md.
//
// A CTA is an operating system thread, its threads are fibers of that thread, switched where a real one would wait: in
// a collective, a barrier, or a poll. Bulk copies happen later, in an order and at a pace that the seed decides. What a
// GPU would let pass by luck is an error here: a CTA that ends while copies still use its shared memory, a load from
// nowhere, a barrier that not all threads reach.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>

namespace emulated {

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

// Of the running thread.
const Index& thread_index();
const Index& block_index();
const Index& block_size();
const Index& grid_size();
uint8_t* dynamic_shared();

// Lets the CTA's other threads run, and copies go on. Every wait calls it until its condition holds.
void yield();

// Every load of a flag or counter calls it with what it saw. A CTA whose threads only load again what they have seen
// waits for other CTAs or ranks. It sleeps then, and leaves them the cores.
void note_load(const void* address, uint64_t value);

// Collective over the warp: gives a value and returns those of all 32 lanes, until the next collective.
const uint64_t* exchange(uint64_t value);

// Collective over the CTA: returns in how many threads `value` is true.
unsigned count_in_block(bool value);

// The barrier that bulk loads complete on, in the eight bytes of an mbarrier.
struct Barrier {
  int32_t bytes_left;
  uint8_t arrivals, arrivals_left;
  uint16_t phase;

  void update() {
    if (arrivals_left > 0 || bytes_left != 0) return;
    phase ^= 1;
    arrivals_left = arrivals;
  }
};

void load_later(void* shared, const void* global, uint32_t num_bytes, Barrier* barrier);
void store_later(void* global, const void* shared, uint32_t num_bytes);
void commit_stores();
void wait_stores_read(int num_pending);
void wait_stores_written(int num_pending);

// SMs of the GPU.
int num_sms();

struct Grid {
  Index ctas, threads;
  int shared_bytes;
  bool is_cooperative;
};

// Whether the running launch leaves a step out: HYBRID_EP_EMULATION_WITHOUT names it, see steps.py.
bool leaves_out(const char* step);

// Whether a stream has work that a launch has left behind.
inline std::function<bool()> stream_is_busy;

// The capture that a stream belongs to; 0: none.
inline std::function<unsigned long long(void* stream)> capture_of;

// Called when a stream waits for an event, with the stream that the event was last recorded on.
inline std::function<void(void* stream, void* recorded_on)> on_wait;

// How often events were recorded, and streams have waited for one. A module exports them as emulated_num_records() and
// emulated_num_waits().
inline std::atomic<int64_t> num_records{0}, num_waits{0};

// Kills this process, as a rank that is lost inside a kernel: see steps.py. Returns false, as a wait that failed.
bool end_process();

// Runs a kernel to its end.
void launch(const Grid& grid, const std::function<void()>& kernel);

template <typename T>
uint64_t as_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulated
