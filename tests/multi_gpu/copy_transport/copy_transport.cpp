// A remote transport of NVSHMEM between processes of one host, for tests. NVSHMEM gives it what it would give a NIC; a
// process beside each rank copies it into the peer's memory, which is shared by CUDA IPC.
//
// NVSHMEM 3 opens its transports by name. This library has the name of one of them, and is loaded before NVSHMEM looks
// for it. The structs below are the binary interface between NVSHMEM 3 and a transport; its packages have no header for
// that.
#include <cuda.h>
#include <dlfcn.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "copy_queue.h"

extern char** environ;

namespace {

constexpr int kInterfaceVersion = 30000;
constexpr int kHasEndpoints = 2;
constexpr int kHostCanWriteReadAndSignal = 1 << 4 | 1 << 5 | 1 << 6;
constexpr int kMostBytesOfHandle = 512;
constexpr int kFailed = 7;  // NVSHMEMX_ERROR_INTERNAL

enum Operation { kPut = 1, kPutWord = 2, kGet = 4 };
enum Atomic { kSet = 3, kSignal = 8, kSignalSet = 9 };

struct Handle {
  char bytes[kMostBytesOfHandle];
};
struct Memory {
  void* address;
  uint64_t offset;
  Handle* handle;
};
struct Verb {
  int operation;
  int returns_early;
  int is_on_stream;
  void* stream;
};
struct Amount {
  size_t num_elements;
  int bytes_per_element;
  ptrdiff_t source_stride;
  ptrdiff_t target_stride;
};
struct AtomicVerb {
  int operation;
  int fetches;
  int has_value;
  int compares;
};
struct AtomicMemory {
  Memory target;
  uint64_t return_flag;
  void* return_address;
  void* value_address;
  void* compare_address;
  uint64_t value;
  uint64_t compare;
  Handle* return_handle;
};
struct AtomicAmount {
  int type;
  int num_bytes;
};

struct Transport;
struct Operations {
  int (*can_reach)(int* access, void* peer, Transport*);
  int (*connect)(Transport*, int* devices, int num_devices);
  int (*take_memory)(Handle*, void* address, size_t num_bytes, Transport*, bool is_local);
  int (*give_memory_back)(Handle*, Transport*);
  int (*finalize)(Transport*);
  int (*show)(Transport*, int style);
  int (*progress)(Transport*);
  int (*move)(Transport*, int pe, Verb, Memory* remote, Memory* local, Amount, int is_proxy);
  int (*change)(Transport*, int pe, void*, AtomicVerb, AtomicMemory*, AtomicAmount, int is_proxy);
  int (*fence)(Transport*, int pe, int is_proxy);
  int (*quiet)(Transport*, int pe, int is_proxy);
  int (*make_consistent)(Transport*);
  int (*make_consistent_at_target)(Transport*);
  int (*add_remote_memory)(Transport*, int stride, Handle*, uint64_t offset, size_t num_bytes);
};
struct Transport {
  int interface_version;
  int kind;
  int* capabilities;
  Operations operations;
  void* bootstrap;
  void* state;
  void* shared_state;
  void* cache;
  char** device_paths;
  int attributes;
  int num_devices;
  bool atomics_are_complete_on_quiet;
  bool is_ready;
  bool needs_no_proxy;
  void* heap;
  size_t log2_granularity;
  uint64_t most_bytes;
  uint32_t least_atomic_bytes;
  int index;
  int own_pe;
  int num_pes;
  void* aliases;
  void* extended_memory;
};
static_assert(offsetof(Transport, state) == 0x88 && offsetof(Transport, attributes) == 0xa8);
static_assert(offsetof(Transport, most_bytes) == 0xc8 && offsetof(AtomicMemory, value) == 0x38);

// What a rank tells its peers of memory: the allocation that holds it.
struct Shared {
  CUipcMemHandle ipc;
  CUdeviceptr base;
};
static_assert(sizeof(Shared) <= sizeof(Handle));

bool succeeded(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return true;
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  std::fprintf(stderr, "copy_transport: %s returned %s\n", call, name == nullptr ? "an unknown error" : name);
  return false;
}

// This rank's copying process. NVSHMEM calls from the thread that starts it, and from its own one.
class Copies {
 public:
  bool start() {
    const int fd = memfd_create("copy_queue", 0);  // open in the process too
    if (fd < 0 || ftruncate(fd, sizeof(CopyQueue)) != 0) return false;
    void* memory = mmap(nullptr, sizeof(CopyQueue), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return false;
    queue_ = new (memory) CopyQueue{};
    CUdevice device;
    char pci_bus_id[32];
    if (!succeeded(cuCtxGetDevice(&device), "cuCtxGetDevice") ||
        !succeeded(cuDeviceGetPCIBusId(pci_bus_id, sizeof(pci_bus_id), device), "cuDeviceGetPCIBusId")) {
      return false;
    }
    Dl_info own;
    if (dladdr(reinterpret_cast<void*>(&succeeded), &own) == 0) return false;
    const std::string library = own.dli_fname;
    std::string program = library.substr(0, library.rfind('/')) + "/copy_process";
    std::string queue = std::to_string(fd), rank = std::to_string(getpid());
    char* arguments[] = {program.data(), queue.data(), pci_bus_id, rank.data(), nullptr};
    return posix_spawn(&process_, program.c_str(), nullptr, nullptr, arguments, environ) == 0;
  }

  // Maps the allocation of a PE.
  bool map(int pe, const Handle& handle) {
    const std::lock_guard lock(mutex_);
    Shared shared;
    std::memcpy(&shared, &handle, sizeof(shared));
    const int number = static_cast<int>(allocations_.size());
    if (!allocations_.try_emplace({pe, shared.base}, number).second) return true;
    Command command{};
    command.kind = CommandKind::kMap;
    command.ipc = shared.ipc;
    return add(command) && finish();
  }

  bool copy(int to_pe, const Memory& to, int from_pe, const Memory& from, uint64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    Command command{};
    command.kind = CommandKind::kCopy;
    command.num_bytes = num_bytes;
    return find(to_pe, to, command.to) && find(from_pe, from, command.from) && add_copy(command);
  }

  // Writes a value of at most 8 bytes.
  bool write(int pe, const Memory& to, const void* value, uint64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    Command command{};
    command.kind = CommandKind::kWrite;
    command.num_bytes = num_bytes;
    if (num_bytes > sizeof(command.value)) return false;
    std::memcpy(&command.value, value, num_bytes);
    return find(pe, to, command.to) && add_copy(command);
  }

  bool fence() {
    const std::lock_guard lock(mutex_);
    Command command{};
    command.kind = CommandKind::kFence;
    return add(command);
  }

  bool quiet() {
    const std::lock_guard lock(mutex_);
    return finish();
  }

  uint64_t num_copies() {
    const std::lock_guard lock(mutex_);
    return num_copies_;
  }

 private:
  bool find(int pe, const Memory& memory, Place& place) const {
    Shared shared;
    std::memcpy(&shared, memory.handle, sizeof(shared));
    const auto found = allocations_.find({pe, shared.base});
    if (found == allocations_.end()) {
      std::fprintf(stderr, "copy_transport: the memory of PE %d is not mapped\n", pe);
      return false;
    }
    place = {found->second, reinterpret_cast<CUdeviceptr>(memory.address) - shared.base};
    return true;
  }

  bool add_copy(const Command& command) {
    ++num_copies_;
    return add(command);
  }

  bool add(const Command& command) {
    const uint64_t number = queue_->num_added.load(std::memory_order_relaxed);
    while (number - queue_->num_taken.load(std::memory_order_acquire) == CopyQueue::kNumSlots) {
      if (!is_running()) return false;
    }
    queue_->slots[number % CopyQueue::kNumSlots] = command;
    queue_->num_added.store(number + 1, std::memory_order_release);
    return true;
  }

  bool finish() {
    Command command{};
    command.kind = CommandKind::kFinish;
    const uint64_t number = ++num_asked_;
    if (!add(command)) return false;
    while (queue_->num_finished.load(std::memory_order_acquire) < number) {
      if (!is_running()) return false;
    }
    return true;
  }

  bool is_running() const {
    std::this_thread::yield();
    return waitpid(process_, nullptr, WNOHANG) == 0;
  }

  std::mutex mutex_;
  CopyQueue* queue_ = nullptr;
  pid_t process_ = -1;
  uint64_t num_asked_ = 0;
  uint64_t num_copies_ = 0;
  std::map<std::pair<int, CUdeviceptr>, int> allocations_;
};

Copies copies;

int status_of(bool succeeded) { return succeeded ? 0 : kFailed; }

int reach(int* access, void*, Transport*) {
  *access = kHostCanWriteReadAndSignal;
  return 0;
}

int connect(Transport*, int*, int) { return 0; }

int share(Handle* handle, void* address, size_t, Transport*, bool) {
  Shared shared;
  if (!succeeded(cuMemGetAddressRange(&shared.base, nullptr, reinterpret_cast<CUdeviceptr>(address)),
                 "cuMemGetAddressRange") ||
      !succeeded(cuIpcGetMemHandle(&shared.ipc, shared.base), "cuIpcGetMemHandle")) {
    return kFailed;
  }
  std::memcpy(handle, &shared, sizeof(shared));
  return 0;
}

// `handles` has `stride` of each PE, one for each transport.
int map_all(Transport* transport, int stride, Handle* handles, uint64_t, size_t) {
  for (int pe = 0; pe < transport->num_pes; ++pe) {
    if (!copies.map(pe, handles[pe * stride + transport->index])) return kFailed;
  }
  return 0;
}

int keep(Handle*, Transport*) { return 0; }
int do_nothing(Transport*) { return 0; }
int show(Transport*, int) { return 0; }

int move(Transport* transport, int pe, Verb verb, Memory* remote, Memory* local, Amount amount, int) {
  const uint64_t num_bytes = amount.num_elements * amount.bytes_per_element;
  const int own_pe = transport->own_pe;
  if (verb.operation == kPut) return status_of(copies.copy(pe, *remote, own_pe, *local, num_bytes));
  if (verb.operation == kPutWord) return status_of(copies.write(pe, *remote, local->address, num_bytes));
  if (verb.operation == kGet) return status_of(copies.copy(own_pe, *local, pe, *remote, num_bytes));
  std::fprintf(stderr, "copy_transport: operation %d is not supported\n", verb.operation);
  return kFailed;
}

int set(Transport*, int pe, void*, AtomicVerb verb, AtomicMemory* memory, AtomicAmount amount, int) {
  if (verb.operation != kSet && verb.operation != kSignal && verb.operation != kSignalSet) {
    std::fprintf(stderr, "copy_transport: atomic %d is not supported\n", verb.operation);
    return kFailed;
  }
  return status_of(copies.write(pe, memory->target, &memory->value, amount.num_bytes));
}

int fence(Transport*, int, int) { return status_of(copies.fence()); }
int quiet(Transport*, int, int) { return status_of(copies.quiet()); }

Transport transport{};

}  // namespace

// NVSHMEM's entry into a transport.
extern "C" int nvshmemt_init(Transport** made, void*, int interface_version) {
  if (interface_version / 10000 != kInterfaceVersion / 10000 || !copies.start()) return kFailed;
  transport.interface_version = kInterfaceVersion;
  transport.attributes = kHasEndpoints;
  transport.num_devices = 1;
  transport.is_ready = true;
  transport.least_atomic_bytes = 8;
  transport.operations = {reach, connect, share, keep,  do_nothing, show,    do_nothing,
                          move,  set,     fence, quiet, nullptr,    nullptr, map_all};
  *made = &transport;
  return 0;
}

// How many copies this rank has asked for.
extern "C" uint64_t num_copies() { return copies.num_copies(); }
