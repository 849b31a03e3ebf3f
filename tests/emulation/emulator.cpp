#include "emulator.h"

#include <malloc.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace emulated {
namespace {

// Not a power of two: the tops of all stacks would compete for a few lines of the caches.
constexpr size_t kStackBytes = (128 << 10) + 320;
constexpr unsigned kWarpSize = 32;
constexpr size_t kCtasAtATime = 8;  // of a launch that is not cooperative
constexpr int kIdleRounds = 16;     // rounds of all threads without news before a CTA sleeps
// The sleep grows with each round, to a hundredth or so of the time that the CTA has waited: what comes soon is noticed
// soon, and CTAs that wait long leave the cores to those that work.
constexpr std::chrono::microseconds kSleepPerRound{10}, kLongestSleep{10000};
constexpr unsigned kRoundsPerTurn = 4;  // on average, of a CTA with work
constexpr unsigned kStallRounds = 64, kCtasPerStall = 4;
constexpr size_t kNumLoaded = 16;  // flags that one thread polls in turn

// The next CTA gets the rows of the last one. The system would have to map and clear their pages again.
const bool keeps_memory = mallopt(M_MMAP_THRESHOLD, 16 << 20) == 1 && mallopt(M_TRIM_THRESHOLD, 1 << 30) == 1;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

std::atomic<uint32_t> num_launches{0};
std::string left_out;

using Stack = std::unique_ptr<uint8_t[]>;  // not initialised, so that only what is used takes memory

// Stacks that no CTA uses. They are never given back: the memory of an arena of malloc is, also where it is used again.
class Stacks {
 public:
  Stack take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return Stack(new uint8_t[kStackBytes]);
    Stack stack = std::move(free_.back());
    free_.pop_back();
    return stack;
  }

  void give(Stack stack) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(stack));
  }

 private:
  std::mutex mutex_;
  std::vector<Stack> free_;
};

Stacks stacks;

// What each CTA of each launch draws from: another turn of threads and another pace of copies, the same in every run.
std::mt19937 random_of(Index cta) {
  const char* given = std::getenv("HYBRID_EP_EMULATION_SEED");
  std::seed_seq seeds{given == nullptr ? 0u : static_cast<uint32_t>(std::strtoul(given, nullptr, 10)),
                      num_launches.load(), cta.x, cta.y};
  return std::mt19937(seeds);
}

// One CTA in kCtasPerStall stalls, as if its thread were preempted: once, in one of its first kStallRounds rounds, for
// at least half of so many microseconds. 0: none does.
unsigned longest_stall_us() {
  const char* given = std::getenv("HYBRID_EP_EMULATION_STALLS");
  return given == nullptr ? 0 : std::atoi(given);
}

// Bulk stores that one commit has bound together.
struct Group {
  int reads_left = 0, writes_left = 0;
};

struct Copy {
  void* to;
  const void* from;
  uint32_t num_bytes;
  Barrier* barrier;              // of a load
  std::shared_ptr<Group> group;  // of a store
  std::vector<uint8_t> read;     // what a store has taken from shared memory, once it has
};

struct Warp {
  uint64_t values[kWarpSize], results[kWarpSize];
  unsigned arrived = 0;
  uint64_t generation = 0;
};

// What a thread has last seen in a flag or counter.
struct Loaded {
  const void* address = nullptr;
  uint64_t value = 0;
};

// A place of the code and a stack. The compiler's own jumps save no more than these, while those of libc also look for
// cleanups of the thread, which took a tenth of the time.
using Place = void* [5];

[[noreturn, gnu::noipa]] void jump(Place to) { __builtin_longjmp(to, 1); }

// Returns when something jumps to `from`. noipa: callers expect that a call changes the registers that calls may
// change.
[[gnu::noipa]] void leave(Place from, Place to) {
  if (__builtin_setjmp(from) == 0) jump(to);
}

[[gnu::noipa]] void begin(Place from, const ucontext_t& context) {
  if (__builtin_setjmp(from) == 0) setcontext(&context);
}

// A fiber waits while the word has the value; null: it does not wait. Beside each other, because every round reads all.
struct Wait {
  const uint64_t* word = nullptr;
  uint64_t value = 0;
};

constexpr uint64_t kNever = 0;  // what a fiber that has ended waits for

struct Fiber {
  Place place;  // where it goes on
  bool has_begun = false;
  Wait* wait;
  Stack stack;
  Index index;
  unsigned lane = 0;
  Warp* warp = nullptr;
  Loaded loaded[kNumLoaded];    // by a hash of the address
  std::shared_ptr<Group> open;  // once it has a store
  std::vector<std::shared_ptr<Group>> groups;
};

class Cta {
 public:
  Cta(const Grid& grid, Index index, const std::function<void()>& kernel)
      : grid_(grid), index_(index), kernel_(kernel), random_(random_of(index)) {
    const unsigned num_threads = grid.threads.x;
    if (num_threads % kWarpSize != 0) fail("a CTA has a warp that is not full");
    shared_.resize(static_cast<size_t>(grid.shared_bytes) + 128);
    warps_.resize(num_threads / kWarpSize);
    fibers_.resize(num_threads);
    waits_.resize(num_threads);
    copies_per_switch_ = static_cast<int>(random_() % 3);
    const unsigned longest_us = longest_stall_us();
    if (longest_us == 0 || random_() % kCtasPerStall != 0) return;
    rounds_to_stall_ = random_() % kStallRounds;
    stall_ = std::chrono::microseconds(longest_us - random_() % (longest_us / 2 + 1));
  }

  void run() {
    current_cta = this;
    for (unsigned i = 0; i < fibers_.size(); ++i) {
      Fiber& fiber = fibers_[i];
      fiber.index = {i, 0, 0};
      fiber.lane = i % kWarpSize;
      fiber.warp = &warps_[i / kWarpSize];
      fiber.wait = &waits_[i];
      fiber.stack = stacks.take();
    }
    getcontext(&start_);  // a system call
    num_running_ = fibers_.size();
    int idle_rounds = 0;
    while (num_running_ > 0) {
      if (rounds_to_stall_-- == 0) std::this_thread::sleep_for(stall_);
      has_news_ = false;
      const size_t first = random_() % fibers_.size();
      for (size_t i = 0; i < fibers_.size(); ++i) {
        const size_t next = (first + i) % fibers_.size();
        const Wait& wait = waits_[next];
        if (wait.word == nullptr || *wait.word != wait.value) go_on(fibers_[next]);
        for (int c = 0; c < copies_per_switch_; ++c) progress();
      }
      progress();
      idle_rounds = has_news_ ? 0 : idle_rounds + 1;
      if (idle_rounds < kIdleRounds) {
        // To other CTAs and ranks; seldom while there is work, because a switch takes as long as a round.
        if (idle_rounds > 0 || random_() % kRoundsPerTurn == 0) std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::min(kSleepPerRound * idle_rounds, kLongestSleep));
      }
    }
    for (const Copy& copy : copies_) {
      if (copy.group == nullptr || copy.read.empty()) fail("a CTA has ended while a copy still uses its shared memory");
    }
    while (!copies_.empty()) progress();
    for (Fiber& fiber : fibers_) stacks.give(std::move(fiber.stack));
  }

  Fiber& current() { return *current_; }
  void yield() { leave(current_->place, scheduler_); }

  // The same until a word of the CTA has another value.
  void wait_while(const uint64_t& word, uint64_t value) {
    *current_->wait = {&word, value};
    while (word == value) yield();
    current_->wait->word = nullptr;
  }

  unsigned count(bool value) {
    if (num_running_ < fibers_.size()) fail("a thread waits in a barrier of the CTA for one that has ended");
    ++arrived_;
    num_true_ += value;
    const uint64_t generation = generation_;
    if (arrived_ == fibers_.size()) {
      result_ = num_true_;
      arrived_ = num_true_ = 0;
      ++generation_;
      has_news_ = true;
    }
    wait_while(generation_, generation);
    return result_;
  }

  const uint64_t* exchange(uint64_t value) {
    Warp& warp = *current_->warp;
    warp.values[current_->lane] = value;
    const uint64_t generation = warp.generation;
    if (++warp.arrived == kWarpSize) {
      std::copy(warp.values, warp.values + kWarpSize, warp.results);
      warp.arrived = 0;
      ++warp.generation;
      has_news_ = true;
    }
    wait_while(warp.generation, generation);
    return warp.results;
  }

  void note_load(const void* address, uint64_t value) {
    Loaded& last = current_->loaded[reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15u >> 60];
    if (last.address == address && last.value == value) return;
    last = {address, value};
    has_news_ = true;
  }

  void add(Copy copy) { copies_.push_back(std::move(copy)); }

  Index index() const { return index_; }
  const Grid& grid() const { return grid_; }
  uint8_t* shared() { return shared_.data() + (128 - reinterpret_cast<uintptr_t>(shared_.data()) % 128) % 128; }

  static thread_local Cta* current_cta;

 private:
  static void enter() {
    Cta& cta = *current_cta;
    cta.kernel_();
    if (cta.arrived_ > 0) fail("a thread has ended that others wait for in a barrier of the CTA");
    *cta.current_->wait = {&kNever, 0};
    cta.has_news_ = true;
    --cta.num_running_;
    jump(cta.scheduler_);
  }

  // Switches to a thread until it waits or ends. A jump makes no system call, unlike swapcontext; a context is only
  // what a thread starts with.
  void go_on(Fiber& fiber) {
    current_ = &fiber;
    if (fiber.has_begun) return leave(scheduler_, fiber.place);
    fiber.has_begun = true;
    start_.uc_stack.ss_sp = fiber.stack.get();
    start_.uc_stack.ss_size = kStackBytes;
    start_.uc_link = nullptr;
    makecontext(&start_, &Cta::enter, 0);
    begin(scheduler_, start_);
  }

  // One step of one copy.
  void progress() {
    if (copies_.empty()) return;
    has_news_ = true;
    const size_t i = random_() % copies_.size();
    Copy& copy = copies_[i];
    if (copy.group != nullptr && copy.read.empty()) {
      const auto* from = static_cast<const uint8_t*>(copy.from);
      copy.read.assign(from, from + copy.num_bytes);
      --copy.group->reads_left;
      return;
    }
    if (copy.group != nullptr) {
      std::memcpy(copy.to, copy.read.data(), copy.num_bytes);
      __atomic_thread_fence(__ATOMIC_RELEASE);
      --copy.group->writes_left;
    } else {
      std::memcpy(copy.to, copy.from, copy.num_bytes);
      copy.barrier->bytes_left -= static_cast<int32_t>(copy.num_bytes);
      copy.barrier->update();
    }
    std::swap(copy, copies_.back());
    copies_.pop_back();
  }

  const Grid& grid_;
  Index index_;
  const std::function<void()>& kernel_;
  std::mt19937 random_;
  std::vector<uint8_t> shared_;
  std::vector<Warp> warps_;
  std::vector<Fiber> fibers_;
  std::vector<Wait> waits_;  // of each fiber
  std::vector<Copy> copies_;
  Place scheduler_;
  ucontext_t start_;  // of the fiber that begins
  Fiber* current_ = nullptr;
  size_t num_running_ = 0, arrived_ = 0;
  unsigned num_true_ = 0, result_ = 0;
  uint64_t generation_ = 0;
  bool has_news_ = false;  // in this round of all threads
  int64_t rounds_to_stall_ = -1;
  std::chrono::microseconds stall_{0};
  int copies_per_switch_;  // with 0, one in a round of all threads
};

thread_local Cta* Cta::current_cta = nullptr;

}  // namespace

const Index& thread_index() { return Cta::current_cta->current().index; }
const Index& block_index() {
  static thread_local Index index;
  index = Cta::current_cta->index();
  return index;
}
const Index& block_size() { return Cta::current_cta->grid().threads; }
const Index& grid_size() { return Cta::current_cta->grid().ctas; }
uint8_t* dynamic_shared() { return Cta::current_cta->shared(); }
void yield() { Cta::current_cta->yield(); }

void note_load(const void* address, uint64_t value) { Cta::current_cta->note_load(address, value); }
const uint64_t* exchange(uint64_t value) { return Cta::current_cta->exchange(value); }

unsigned count_in_block(bool value) { return Cta::current_cta->count(value); }

void load_later(void* shared, const void* global, uint32_t num_bytes, Barrier* barrier) {
  if (reinterpret_cast<uintptr_t>(global) < 4096) fail("a bulk load from nowhere");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || num_bytes % 16 != 0 || num_bytes == 0) {
    fail("a bulk load that is not of multiples of 16 bytes");
  }
  Cta::current_cta->add({shared, global, num_bytes, barrier, nullptr, {}});
}

void store_later(void* global, const void* shared, uint32_t num_bytes) {
  if (reinterpret_cast<uintptr_t>(global) < 4096) fail("a bulk store to nowhere");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || num_bytes % 16 != 0 || num_bytes == 0) {
    fail("a bulk store that is not of multiples of 16 bytes");
  }
  std::shared_ptr<Group>& group = Cta::current_cta->current().open;
  if (group == nullptr) group = std::make_shared<Group>();
  ++group->reads_left;
  ++group->writes_left;
  Cta::current_cta->add({global, shared, num_bytes, nullptr, group, {}});
}

void commit_stores() {
  Fiber& fiber = Cta::current_cta->current();
  fiber.groups.push_back(fiber.open != nullptr ? std::move(fiber.open) : std::make_shared<Group>());
}

namespace {
void wait_stores(int num_pending, int Group::* left) {
  Fiber& fiber = Cta::current_cta->current();
  const auto is_done = [&] {
    for (size_t i = 0; i + num_pending < fiber.groups.size(); ++i) {
      if ((*fiber.groups[i]).*left > 0) return false;
    }
    return true;
  };
  while (!is_done()) yield();
  const auto is_pending = [](const std::shared_ptr<Group>& group) { return group->writes_left > 0; };
  fiber.groups.erase(fiber.groups.begin(), std::find_if(fiber.groups.begin(), fiber.groups.end(), is_pending));
}
}  // namespace

void wait_stores_read(int num_pending) { wait_stores(num_pending, &Group::reads_left); }
void wait_stores_written(int num_pending) { wait_stores(num_pending, &Group::writes_left); }

bool end_process() {
  kill(getpid(), SIGKILL);
  return false;
}

bool leaves_out(const char* step) { return !left_out.empty() && left_out == step; }

int num_sms() {
  const char* given = std::getenv("HYBRID_EP_EMULATION_SMS");
  return given == nullptr ? 3 : std::atoi(given);
}

void launch(const Grid& grid, const std::function<void()>& kernel) {
  ++num_launches;
  const char* given = std::getenv("HYBRID_EP_EMULATION_WITHOUT");
  left_out = given == nullptr ? "" : given;
  std::vector<Index> indices;
  for (unsigned y = 0; y < grid.ctas.y; ++y) {
    for (unsigned x = 0; x < grid.ctas.x; ++x) indices.push_back({x, y, 0});
  }
  const size_t at_a_time = grid.is_cooperative ? indices.size() : kCtasAtATime;
  for (size_t begin = 0; begin < indices.size(); begin += at_a_time) {
    std::vector<std::thread> threads;
    for (size_t i = begin; i < std::min(begin + at_a_time, indices.size()); ++i) {
      threads.emplace_back([&, i] { Cta(grid, indices[i], kernel).run(); });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) int64_t emulated_num_records() { return emulated::num_records; }
extern "C" __attribute__((visibility("default"))) int64_t emulated_num_waits() { return emulated::num_waits; }
