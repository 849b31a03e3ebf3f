// Launches the kernels of one rank in its domain. Holds the addresses of all ranks' memory, the pinned host counts and
// the fault record.
//
// Calls are collective and in the same order at all ranks; one communicator runs one call at a time, which the caller
// ensures by stream order. Nothing here allocates device memory or synchronises the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/balance/copy_experts.h"
#include "kernels/params.h"
#include "layout/epoch.h"
#include "runtime/plan.h"

namespace hybrid_ep {

// A fault, in words that an error message can use.
struct Fault {
  FaultKind kind;
  std::string kernel, tag;
  int peer, witness;
  int64_t expected, seen;
  double waited_s;          // of a timeout
  std::vector<int> missed;  // of a timeout: ranks that were waited for in vain, as `peer` names them
};

class Communicator {
 public:
  // `control` are the ranks' control blocks as this process maps them; they are zero before any rank makes its first
  // call.
  Communicator(int rank, const std::vector<uintptr_t>& control, int device, double timeout_s);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Names the arena that later calls use: each rank's base address, the bytes of a slot, and its number, which is equal
  // at all ranks.
  void set_arena(const std::vector<uintptr_t>& arena, int64_t slot_bytes, int number);

  // Rows of these widths that a slot of the arena holds.
  int num_records(const DispatchShape& plan) const;

  // SMs of a dispatch that does not ask for a number.
  int default_dispatch_sms() const;

  // `handle` is the number of the handle's dispatch; kAbsent where the call makes its route. `slots_wanted` is
  // published to all ranks, which read it by slots_agreed(); kInGraph if the stream is captured. Returns the epoch that
  // the host counts will have, or 0 if the host need not wait: neither for counts, nor for a slot that must grow.
  uint32_t dispatch(const DispatchPlan& plan, const DispatchTensors& tensors, int handle, int slot_idx,
                    int slots_wanted, cudaStream_t stream);
  static constexpr int kInGraph = -1;

  // The most slots that any rank wanted kPoolReportLag dispatches before the next one, graphs excepted. All ranks read
  // the same number, so all can grow their pools before the same call. Waits for that dispatch if its kernel has not
  // run; the GPU then has kPoolReportLag dispatches to do. 0 while `stream` is captured and in the first calls. Throws
  // CudaError if the stream has failed.
  int slots_agreed(cudaStream_t stream) const;

  // Completes the expert-major rows of a dispatch in place: copies each of the num_recv rows to its other experts,
  // zeroes padding up to num_rows, and writes `tensors`. num_sms = 0: all SMs.
  void duplicate(const DispatchPlan& plan, const DuplicateTensors& tensors, int slot_idx, int num_rows, int num_recv,
                 int num_sms, cudaStream_t stream);
  void combine(const CombinePlan& plan, const CombineTensors& tensors, const ExpertTensors& experts, int handle,
               cudaStream_t stream);

  // Names memory that the other ranks can write: num_bytes from `begin` on, which rank r has at peers[r]; `peers` is
  // [R] in device memory. All ranks name theirs in the same order. It must outlive the communicator's calls.
  void add_peer_memory(uint8_t* begin, int64_t num_bytes, uint8_t* const* peers);

  // Copies experts to the spare slots of all ranks: directly if the slots of all tensors are in peer memory, otherwise
  // through the arena's first slot, which stages staging_bytes(). num_sms = 0: the default. `mapping` is
  // [R, num_slots] in device memory.
  // only_compares: the ranks compare the call, and copy nothing.
  void copy_experts(std::vector<ExpertTensor> tensors, const int64_t* mapping, int num_slots, int num_local,
                    int num_sms, bool only_compares, cudaStream_t stream);
  int64_t staging_bytes(const std::vector<ExpertTensor>& tensors, int num_slots) const;
  // SMs of a copy that does not ask for a number.
  int default_copy_sms() const;

  // Waits, without a device synchronisation, until the call with this epoch, which runs on `stream`, has written the
  // host counts. The next call overwrites them. The timeout begins with the call's kernel, however long the stream
  // needs to reach it. Returns nullptr if the call has failed and a fault is recorded, and as soon as this or an
  // earlier call has lost a rank. Also if nothing is written long after the kernel's own deadline or after its end.
  // Throws CudaError if the stream has failed.
  const HostCounts* wait_for_host_counts(uint32_t counts_epoch, cudaStream_t stream) const;

  // What calls inside the domain have in common with those between domains. A dispatch that tells the host its counts
  // takes the next epoch of the host counts.
  void fill(CommonDispatchParams& params, const DispatchShape& plan, const DispatchTensors& tensors);
  void fill(CommonCombineParams& params, const CombinePlan& plan, const CombineTensors& tensors, int handle) const;

  const Domain& domain() const { return domain_; }
  int device() const { return device_; }
  int num_device_sms() const { return num_device_sms_; }
  // The most bytes of a kernel's stores on the wire at once; 0: no limit.
  int most_bytes_on_wire() const;

  // The first fault since the last call of this function, if any. Does not synchronise, as the next function.
  std::optional<Fault> take_fault();
  bool has_fault() const;

 private:
  struct PeerMemory {
    uint8_t* begin;
    int64_t num_bytes;
    uint8_t* const* peers;
  };
  // The number of the peer memory that holds all spare slots of a tensor, or −1 if they must be staged.
  int peer_memory_of(const ExpertTensor& tensor, int num_slots) const;
  bool can_push(const std::vector<ExpertTensor>& tensors, int num_slots) const;

  PoolReports* pool_reports_ = nullptr;
  uint32_t pool_calls_ = 0;  // dispatches, graphs excepted; wraps

  Domain domain_{};
  std::vector<PeerMemory> peer_memory_;
  int device_;
  int num_device_sms_ = 0;
  bool is_hopper_ = false;
  double timeout_s_;
  HostCounts* host_counts_ = nullptr;
  FaultRecord* fault_ = nullptr;
  uint32_t counts_epoch_ = 0;
};

}  // namespace hybrid_ep
