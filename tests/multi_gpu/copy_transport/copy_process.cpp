// The process that copies for one rank: copy_process FD PCI_BUS_ID, where FD is the memory of its CopyQueue.
//
// It is a process of its own because CUDA calls of a rank wait for each other. While a rank copies pageable memory, or
// loads a kernel, no other thread of it can start a copy; and the kernel that is waited for may need that copy.
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "copy_queue.h"

namespace {

constexpr uint64_t kNumWords = 1 << 16;

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  std::fprintf(stderr, "copy_process: %s returned %s\n", call, name == nullptr ? "an unknown error" : name);
  std::exit(1);
}

// Copies run on two streams in turn, so two copies may end in any order. A fence joins the streams.
class Copier {
 public:
  explicit Copier(const char* pci_bus_id) {
    CUdevice device;
    CUcontext context;
    check(cuInit(0), "cuInit");
    check(cuDeviceGetByPCIBusId(&device, pci_bus_id), "cuDeviceGetByPCIBusId");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    for (Lane& lane : lanes_) {
      check(cuStreamCreate(&lane.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      check(cuEventCreate(&lane.event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    }
    check(cuMemAllocHost(reinterpret_cast<void**>(&words_), kNumWords * sizeof(uint64_t)), "cuMemAllocHost");
  }

  void map(const CUipcMemHandle& ipc) {
    CUdeviceptr base;
    check(cuIpcOpenMemHandle(&base, ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle");
    allocations_.push_back(base);
  }

  void copy(const Place& to, const Place& from, uint64_t num_bytes) {
    check(cuMemcpyAsync(address_of(to), address_of(from), num_bytes, next_stream()), "cuMemcpyAsync");
  }

  void write(const Place& to, uint64_t value, uint64_t num_bytes) {
    const uint64_t slot = num_writes_++ % kNumWords;
    if (slot == 0) finish();  // no copy reads a slot any more
    words_[slot] = value;
    check(cuMemcpyHtoDAsync(address_of(to), &words_[slot], num_bytes, next_stream()), "cuMemcpyHtoDAsync");
  }

  void fence() {
    for (const Lane& lane : lanes_) check(cuEventRecord(lane.event, lane.stream), "cuEventRecord");
    for (const Lane& lane : lanes_) {
      for (const Lane& other : lanes_) check(cuStreamWaitEvent(lane.stream, other.event, 0), "cuStreamWaitEvent");
    }
  }

  void finish() {
    for (const Lane& lane : lanes_) check(cuStreamSynchronize(lane.stream), "cuStreamSynchronize");
  }

 private:
  struct Lane {
    CUstream stream;
    CUevent event;
  };

  CUdeviceptr address_of(const Place& place) const { return allocations_[place.allocation] + place.offset; }
  CUstream next_stream() { return lanes_[num_copies_++ % 2].stream; }

  Lane lanes_[2];
  uint64_t num_copies_ = 0;
  uint64_t* words_ = nullptr;  // pinned: the values that were last written
  uint64_t num_writes_ = 0;
  std::vector<CUdeviceptr> allocations_;
};

}  // namespace

int main(int num_arguments, char** arguments) {
  if (num_arguments != 4) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);                    // ends with its rank
  if (getppid() != std::atoi(arguments[3])) return 1;  // which may have ended before
  void* memory = mmap(nullptr, sizeof(CopyQueue), PROT_READ | PROT_WRITE, MAP_SHARED, std::atoi(arguments[1]), 0);
  if (memory == MAP_FAILED) return 2;
  auto* queue = static_cast<CopyQueue*>(memory);
  Copier copier(arguments[2]);
  for (uint64_t number = 0;; ++number) {
    while (queue->num_added.load(std::memory_order_acquire) == number) std::this_thread::yield();
    const Command command = queue->slots[number % CopyQueue::kNumSlots];
    queue->num_taken.store(number + 1, std::memory_order_release);
    switch (command.kind) {
      case CommandKind::kMap:
        copier.map(command.ipc);
        break;
      case CommandKind::kCopy:
        copier.copy(command.to, command.from, command.num_bytes);
        break;
      case CommandKind::kWrite:
        copier.write(command.to, command.value, command.num_bytes);
        break;
      case CommandKind::kFence:
        copier.fence();
        break;
      case CommandKind::kFinish:
        copier.finish();
        queue->num_finished.fetch_add(1, std::memory_order_release);
        break;
    }
  }
}
