#include <fcntl.h>
#include <nvshmem.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr auto kPause = std::chrono::microseconds(200);
constexpr size_t kHeaderBytes = 4096;  // of a file; its first word counts who has mapped it
constexpr int kMaxDelayUs = 300;
constexpr auto kLongQuiet = std::chrono::seconds(1);

// Memory of one size at every PE: a file for each, which all map.
struct Allocation {
  size_t num_bytes;
  std::vector<uint8_t*> parts;  // by PE
};

struct Put {
  uint8_t* to;
  const uint8_t* from;
  size_t num_bytes;
  uint64_t *flag, word;
};

struct World {
  int pe = -1, num_pes = 0;
  std::string name;
  std::vector<Allocation> allocations;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Put> puts;
  size_t num_open = 0;  // puts that are not complete
};

World& world() {
  static auto* it = new World();  // its thread runs until the process ends
  return *it;
}

// What a test lets go wrong here: no put is complete any more, or flags are not written.
enum class Fault { kNone, kStopped, kWithoutSignals };
std::atomic<Fault> fault = Fault::kNone;

// Reads it from the environment. At each put, while the host waits for the kernel: then Python changes no variable,
// which a thread that reads them must not meet.
void read_fault() {
  const char* given = std::getenv("HYBRID_EP_EMULATION_NVSHMEM");
  const std::string name = given == nullptr ? "" : given;
  fault = name == "stopped" ? Fault::kStopped : name == "without signals" ? Fault::kWithoutSignals : Fault::kNone;
}

void carry_out_puts() {
  World& w = world();
  std::mt19937 random(static_cast<unsigned>(w.pe));
  std::unique_lock lock(w.mutex);
  while (true) {
    w.changed.wait(lock, [&] { return !w.puts.empty(); });
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % kMaxDelayUs));
    lock.lock();
    const size_t chosen = random() % w.puts.size();
    const Put put = w.puts[chosen];
    w.puts.erase(w.puts.begin() + static_cast<std::ptrdiff_t>(chosen));
    lock.unlock();
    while (fault == Fault::kStopped) std::this_thread::sleep_for(kPause);
    if (put.num_bytes > 0) std::memcpy(put.to, put.from, put.num_bytes);
    if (fault != Fault::kWithoutSignals) __atomic_store_n(put.flag, put.word, __ATOMIC_RELEASE);
    lock.lock();
    --w.num_open;
    w.changed.notify_all();
  }
}

// Where the peer has what this PE has at an address of the heap.
template <typename T>
T* at_peer(T* address, int pe) {
  World& w = world();
  auto* byte = reinterpret_cast<uint8_t*>(address);
  for (const Allocation& allocation : w.allocations) {
    const uint8_t* own = allocation.parts[w.pe];
    if (byte >= own && byte < own + allocation.num_bytes) {
      return reinterpret_cast<T*>(allocation.parts[pe] + (byte - own));
    }
  }
  std::abort();  // not on the heap
}

uint8_t* map(const std::string& path, size_t num_bytes, bool creates) {
  while (true) {
    const int file = open(path.c_str(), creates ? O_RDWR | O_CREAT : O_RDWR, 0600);
    struct stat state{};
    if (file >= 0 && creates && ftruncate(file, static_cast<off_t>(num_bytes)) != 0) std::abort();
    if (file >= 0 && fstat(file, &state) == 0 && static_cast<size_t>(state.st_size) == num_bytes) {
      void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      close(file);
      return memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
    }
    if (file >= 0) close(file);
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::string name = "hybrid_ep_nvshmem_" + std::to_string(getpid()) + "_" + std::to_string(now);
  std::memcpy(id->name, name.c_str(), name.size() + 1);
  return 0;
}

int nvshmemx_set_attr_uniqueid_args(int rank, int num_ranks, const nvshmemx_uniqueid_t* id,
                                    nvshmemx_init_attr_t* attributes) {
  *attributes = {rank, num_ranks, *id};
  return 0;
}

int nvshmemi_init_thread(int, int*, unsigned, nvshmemx_init_attr_t* attributes, nvshmemi_version_t) {
  World& w = world();
  w.pe = attributes->rank;
  w.num_pes = attributes->num_ranks;
  w.name = attributes->id.name;
  std::thread(carry_out_puts).detach();
  return 0;
}

int nvshmem_my_pe() { return world().pe; }
int nvshmem_n_pes() { return world().num_pes; }

void* nvshmem_malloc(size_t num_bytes) {
  World& w = world();
  const auto path = [&](int pe) {
    return "/dev/shm/" + w.name + "_" + std::to_string(w.allocations.size()) + "_" + std::to_string(pe);
  };
  Allocation allocation{num_bytes, {}};
  auto* num_mapped = reinterpret_cast<int*>(map(path(w.pe), kHeaderBytes + num_bytes, true));
  for (int pe = 0; pe < w.num_pes; ++pe) {
    uint8_t* file = map(path(pe), kHeaderBytes + num_bytes, false);
    if (file == nullptr) return nullptr;
    allocation.parts.push_back(file + kHeaderBytes);
    __atomic_fetch_add(reinterpret_cast<int*>(file), 1, __ATOMIC_ACQ_REL);
  }
  while (__atomic_load_n(num_mapped, __ATOMIC_ACQUIRE) < w.num_pes) std::this_thread::sleep_for(kPause);
  unlink(path(w.pe).c_str());
  w.allocations.push_back(allocation);
  return allocation.parts[w.pe];
}

void nvshmem_putmem_signal_nbi(void* to, const void* from, size_t num_bytes, uint64_t* flag, uint64_t word, int,
                               int pe) {
  World& w = world();
  uint8_t* target = num_bytes == 0 ? nullptr : at_peer(static_cast<uint8_t*>(to), pe);
  read_fault();
  const std::lock_guard lock(w.mutex);
  w.puts.push_back({target, static_cast<const uint8_t*>(from), num_bytes, at_peer(flag, pe), word});
  ++w.num_open;
  w.changed.notify_all();
}

// Peers are mapped where a test asks for it: all, or those with even numbers. Of the own PE it is the address itself.
void* nvshmem_ptr(const void* address, int pe) {
  const char* given = std::getenv("HYBRID_EP_EMULATION_NVSHMEM_MAPS");
  const bool is_mapped = given != nullptr && (std::strcmp(given, "all") == 0 || pe % 2 == 0);
  if (pe != world().pe && !is_mapped) return nullptr;
  return at_peer(static_cast<uint8_t*>(const_cast<void*>(address)), pe);
}

void nvshmemx_signal_op(uint64_t* flag, uint64_t word, int op, int pe) {
  nvshmem_putmem_signal_nbi(nullptr, nullptr, 0, flag, word, op, pe);
}

// A launch of the emulator ends before the next call of the host. So the stream of a quiet that waits for long is busy
// until all puts are complete.
void nvshmem_quiet() {
  World& w = world();
  std::unique_lock lock(w.mutex);
  const auto is_quiet = [&] { return w.num_open == 0; };
  if (w.changed.wait_for(lock, kLongQuiet, is_quiet)) return;
  emulated::stream_is_busy = [&w] {
    const std::lock_guard again(w.mutex);
    return w.num_open != 0;
  };
}
