#include "runtime/communicator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "common/capture.h"
#include "common/check.h"
#include "common/cuda_check.h"
#include "common/device_guard.h"
#include "kernels/launch.h"
#include "runtime/sm_model.h"

namespace hybrid_ep {
namespace {

constexpr double kHostCountsGraceS = 10;  // for the kernel to report, on top of its own timeout
constexpr int kTurnsPerQuery = 1 << 16;
constexpr double kStreamQueryS = 1;  // between queries of a stream that has not reached the call

const char* name_of(KernelName kernel) {
  switch (kernel) {
    case KernelName::kDispatch:
      return "dispatch";
    case KernelName::kCombine:
      return "combine";
    case KernelName::kLowLatencyDispatch:
      return "low_latency_dispatch";
    case KernelName::kLowLatencyCombine:
      return "low_latency_combine";
    case KernelName::kDispatchBetween:
      return "dispatch between domains";
    case KernelName::kStreamChunks:
      return "link alone";
    case KernelName::kCombineBetween:
      return "combine between domains";
    case KernelName::kCopyExperts:
      return "copy of experts";
  }
  return "unknown";
}

const char* name_of(WaitTag tag) {
  switch (tag) {
    case WaitTag::kGrid:
      return "CTAs of its own grid";
    case WaitTag::kCounts:
      return "counts";
    case WaitTag::kRows:
      return "rows";
    case WaitTag::kRoutes:
      return "routes";
    case WaitTag::kReady:
      return "ready for partial rows";
    case WaitTag::kPartialRows:
      return "partial rows";
    case WaitTag::kFreeSlots:
      return "free slots for rows";
    case WaitTag::kWeights:
      return "weights";
    case WaitTag::kRecords:
      return "records of another domain";
    case WaitTag::kCredits:
      return "credits of another domain";
    case WaitTag::kCommands:
      return "free slots for commands of the proxy";
    case WaitTag::kHeld:
      return "records to forward";
    case WaitTag::kSignals:
      return "rows of experts";
    case WaitTag::kExperts:
      return "weights of experts";
  }
  return "unknown";
}

// Whether the stream has work to do. It does not break another thread's capture.
bool is_busy(int device, cudaStream_t stream) {
  const DeviceGuard guard(device);
  const RelaxedCaptureMode relaxed;
  return !is_done(cudaStreamQuery(stream), "cudaStreamQuery");
}

// What one launch copies of each expert: some of the chunks of some of its tensors.
struct ExpertLaunch {
  int first_tensor, num_tensors, first_chunk, num_chunks;
};

std::vector<ExpertLaunch> launches_of(const std::vector<ExpertTensor>& tensors, int chunk_bytes, int most_chunks) {
  const int num_tensors = static_cast<int>(tensors.size());
  std::vector<ExpertLaunch> launches;
  for (int first = 0; first < num_tensors; first += kMaxExpertTensors) {
    const int count = std::min(kMaxExpertTensors, num_tensors - first);
    int num_chunks = 0;
    for (int t = first; t < first + count; ++t) num_chunks += tensors[t].num_chunks(chunk_bytes);
    for (int chunk = 0; chunk < num_chunks; chunk += most_chunks) {
      launches.push_back({first, count, chunk, std::min(most_chunks, num_chunks - chunk)});
    }
  }
  return launches;
}

// A checksum of what must be equal at all ranks, in the bits below those of arena_bits().
class Checksum {
 public:
  void add(int64_t value) { sum_ = (sum_ ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15; }
  uint32_t bits() const { return static_cast<uint32_t>(sum_ >> (64 - kArenaShift)); }

 private:
  uint64_t sum_ = 0;
};

template <typename T>
T* pinned() {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  return new (memory) T{};
}

}  // namespace

Communicator::Communicator(int rank, const std::vector<uintptr_t>& control, int device, double timeout_s)
    : device_(device), timeout_s_(timeout_s) {
  const int num_ranks = static_cast<int>(control.size());
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "ranks of the domain", num_ranks, "1 … 72");
  require(rank >= 0 && rank < num_ranks, "rank", rank, "a rank of the domain");
  const DeviceGuard guard(device_);
  check_cuda(cudaDeviceGetAttribute(&num_device_sms_, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  is_hopper_ = major == 9;
  prepare_dispatch();
  prepare_combine();
  prepare_duplicate();
  prepare_copy_experts();
  prepare_push_experts();
  host_counts_ = pinned<HostCounts>();
  pool_reports_ = pinned<PoolReports>();
  fault_ = pinned<FaultRecord>();
  domain_.rank = rank;
  domain_.num_ranks = num_ranks;
  domain_.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  domain_.fault = fault_;
  for (int r = 0; r < num_ranks; ++r) domain_.control[r] = reinterpret_cast<ControlBlock*>(control[r]);
}

Communicator::~Communicator() {
  const RelaxedCaptureMode relaxed;
  cudaFreeHost(host_counts_);
  cudaFreeHost(pool_reports_);
  cudaFreeHost(fault_);
}

void Communicator::set_arena(const std::vector<uintptr_t>& arena, int64_t slot_bytes, int number) {
  require(static_cast<int>(arena.size()) == domain_.num_ranks, "addresses of the arena", arena.size(),
          "one for each rank");
  domain_.slot_bytes = slot_bytes;
  domain_.arena_number = number;
  for (int r = 0; r < domain_.num_ranks; ++r) domain_.arena[r] = reinterpret_cast<uint8_t*>(arena[r]);
}

int Communicator::num_records(const DispatchShape& plan) const {
  return plan.slot_layout(domain_.slot_bytes).num_records;
}

int Communicator::default_dispatch_sms() const {
  return dispatch_sms(0, domain_.num_ranks, is_hopper_, num_device_sms_);
}

void Communicator::fill(CommonDispatchParams& params, const DispatchShape& plan, const DispatchTensors& tensors) {
  params.rows = tensors.rows;
  params.topk_idx = tensors.topk_idx;
  params.topk_weights = tensors.topk_weights;
  params.scales = tensors.scales;
  params.mapping_checksum = tensors.mapping_checksum;
  params.num_tokens = plan.num_tokens;
  params.num_topk = plan.num_topk;
  params.num_experts = plan.num_experts;
  params.row_bytes = static_cast<int>(plan.format.rows.bytes());
  params.num_scales = plan.format.scales.num;
  params.has_weights = plan.format.weights.num > 0;
  params.range_first = plan.range_first;
  params.range_step = plan.range_step;
  params.range_size = plan.range_size;
  params.slot = plan.slot_layout(domain_.slot_bytes);
  // A call that waits for the host takes what fits; the host grows the arena if that is not enough.
  params.is_bounded = !plan.waits_for_counts;
  params.row_limit = params.is_bounded ? std::min(plan.row_limit, params.slot.capacity) : params.slot.capacity;
  params.common_bound = plan.call.common_bound;
  params.max_tokens = plan.call.max_tokens;
  if (plan.waits_for_counts || params.common_bound > params.slot.capacity) {
    params.host_counts = host_counts_;
    params.counts_epoch = counts_epoch_ = next_epoch(counts_epoch_);
  }
}

void Communicator::fill(CommonCombineParams& params, const CombinePlan& plan, const CombineTensors& tensors,
                        int handle) const {
  params.rows = tensors.rows;
  params.weights = tensors.weights;
  params.bias[0] = tensors.bias[0];
  params.bias[1] = tensors.bias[1];
  params.out = tensors.out;
  params.out_weights = tensors.out_weights;
  params.num_tokens = plan.num_tokens;
  params.num_rows = tensors.num_rows;
  params.row_bytes = static_cast<int>(plan.widths.rows);
  params.num_weights = plan.num_weights;
  write_call(params.call, plan, domain_.arena_number, handle);
  params.slot = make_slot_layout(plan.widths, domain_.slot_bytes);
  params.window_bytes = most_bytes_on_wire();
}

uint32_t Communicator::dispatch(const DispatchPlan& plan, const DispatchTensors& tensors, int handle, int slot_idx,
                                int slots_wanted, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const bool is_permuted = plan.pad_multiple > 0, is_new = plan.makes_route;
  const auto part = [&](bool is_there, int64_t offset) { return is_there ? tensors.route + offset : nullptr; };
  DispatchParams params{};
  fill(params, plan, tensors);
  params.domain = domain_;
  // An empty tensor has no address, and to the kernel no address means a route that is read.
  if (is_new && params.topk_idx == nullptr) params.topk_idx = reinterpret_cast<int64_t*>(tensors.route);
  params.call[CountRow::kSlotIdx] = slot_idx;
  params.call[CountRow::kRowLimit] = params.row_limit;
  params.call[CountRow::kRefusal] = static_cast<int>(plan.call.refusal);
  params.call[CountRow::kRefusedValue] = plan.call.refused_value;
  params.call[CountRow::kSlotsWanted] = std::max(slots_wanted, 0);
  if (slots_wanted != kInGraph) {
    params.pool_call = pool_calls_ + 1;
    params.pool_report = &pool_reports_->words[pool_calls_ % kPoolReportLag];
  }
  write_fields(params.call + CountRow::kFirstField, plan, domain_.arena_number, params.slot.capacity, handle);
  params.pad_multiple = plan.pad_multiple;
  params.rank_prefix = part(true, plan.route.rank_prefix);
  params.send_slot = part(true, plan.route.send_slot);
  params.send_list = part(true, plan.route.send_list);
  params.dst_row = part(is_permuted, plan.route.dst_row);
  params.num_tokens_per_expert = part(is_new, plan.route.num_tokens_per_expert);
  params.returned_counts = reinterpret_cast<int64_t*>(part(is_new && is_permuted, plan.route.returned_counts));
  params.overflow = part(is_new && is_permuted, plan.route.overflow);
  params.reports_overflow = is_new && !plan.call.drops_rows;
  params.kept_topk_idx = reinterpret_cast<int64_t*>(part(is_new, plan.route.topk_idx));
  params.expert_row = part(is_new && is_permuted, plan.route.expert_row);
  const int counter_bytes =
      is_new ? (kDispatchThreads / 32 + 2) * params.num_experts * static_cast<int>(sizeof(int)) : 0;
  const LaunchShape shape =
      dispatch_shape(params.row_bytes, counter_bytes, plan.num_sms, domain_.num_ranks, is_hopper_, num_device_sms_);
  params.num_send_warps = shape.num_send_warps;
  params.num_stages = shape.num_stages;
  params.rings_begin = shape.rings_begin;
  params.rings_overlap = shape.rings_overlap;
  launch_dispatch(params, shape.num_sms, shape.shared_bytes, stream);
  if (slots_wanted != kInGraph) ++pool_calls_;
  return params.counts_epoch;
}

int Communicator::slots_agreed(cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  if (capture_of(stream).id != 0 || pool_calls_ < kPoolReportLag) return 0;
  // The next call is number pool_calls_ + 1, and takes this word.
  const auto* word = const_cast<const volatile uint64_t*>(&pool_reports_->words[pool_calls_ % kPoolReportLag]);
  const uint32_t number = pool_calls_ + 1 - kPoolReportLag;
  for (int turn = 1; static_cast<uint32_t>(*word) != number; ++turn) {
    std::this_thread::yield();
    if (turn % kTurnsPerQuery == 0) is_busy(device_, stream);  // for errors of the stream
  }
  return static_cast<int>(*word >> 32);
}

void Communicator::duplicate(const DispatchPlan& plan, const DuplicateTensors& tensors, int slot_idx, int num_rows,
                             int num_recv, int num_sms, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const SlotLayout layout = plan.slot_layout(domain_.slot_bytes);
  require(num_rows >= 0 && num_rows <= layout.capacity, "rows of a result", num_rows, "what a slot holds");
  uint8_t* slot = domain_.arena[domain_.rank] + slot_idx * domain_.slot_bytes;
  DuplicateParams params{};
  params.rows = slot + layout.rows;
  const KeptRows kept = kept_rows(tensors.kept, num_recv, plan.num_topk);
  params.dst_row = plan.makes_route ? reinterpret_cast<int32_t*>(slot + layout.experts) : kept.dst_row;
  params.kept_dst_row = plan.makes_route ? kept.dst_row : nullptr;
  params.row_epoch = kept.row_epoch;
  params.weights = reinterpret_cast<float*>(slot + layout.weights);
  params.scales = reinterpret_cast<uint32_t*>(slot + layout.scales);
  params.probs = tensors.probs;
  params.permuted_scales = tensors.scales;
  params.rank_prefix = tensors.route + plan.route.rank_prefix;
  params.num_local_experts = plan.num_experts / plan.num_ranks;
  params.num_tokens_per_expert = tensors.route + plan.route.num_tokens_per_expert;
  params.num_rows_per_expert = params.num_tokens_per_expert + params.num_local_experts;
  params.rank = domain_.rank;
  params.num_ranks = domain_.num_ranks;
  params.num_topk = plan.num_topk;
  params.row_bytes = static_cast<int>(plan.format.rows.bytes());
  params.num_scales = plan.format.scales.num;
  params.row_limit = num_rows;
  params.recv_limit = num_recv;
  launch_duplicate(params, num_sms > 0 ? std::min(num_sms, num_device_sms_) : num_device_sms_, stream);
}

void Communicator::combine(const CombinePlan& plan, const CombineTensors& tensors, const ExpertTensors& experts,
                           int handle, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const RouteLayout route = make_route_layout(domain_.num_ranks, plan.num_tokens, 0, 0, false);
  CombineParams params{};
  fill(params, plan, tensors, handle);
  params.domain = domain_;
  params.send_slot = tensors.route + route.send_slot;
  params.rank_prefix = tensors.route + route.rank_prefix;
  params.num_sms = combine_sms(plan.num_sms, domain_.num_ranks, num_device_sms_);
  int num_expert_sms = 0;
  if (experts.num_rows) {
    num_expert_sms = expert_sms(plan.num_expert_sms, params.num_sms, plan.num_topk, domain_.num_ranks, num_device_sms_);
    const KeptRows kept = kept_rows(experts.kept, tensors.num_rows, plan.num_topk);
    params.experts = {experts.rows,    experts.probs,  kept.dst_row,  tensors.rows,
                      tensors.weights, kept.row_epoch, plan.num_topk, *experts.num_rows};
  }
  launch_combine(params, num_expert_sms, stream);
}

int Communicator::most_bytes_on_wire() const { return window_bytes(is_hopper_); }

int Communicator::default_copy_sms() const { return copy_sms(0, num_device_sms_); }

void Communicator::add_peer_memory(uint8_t* begin, int64_t num_bytes, uint8_t* const* peers) {
  peer_memory_.push_back({begin, num_bytes, peers});
}

int Communicator::peer_memory_of(const ExpertTensor& tensor, int num_slots) const {
  const auto is_aligned = [](uint64_t value) { return value % kRowAlignBytes == 0; };
  if (!is_aligned(reinterpret_cast<uintptr_t>(tensor.spare)) || !is_aligned(tensor.item_bytes)) return -1;
  for (size_t i = 0; i < peer_memory_.size(); ++i) {
    const auto& [begin, num_bytes, peers] = peer_memory_[i];
    if (tensor.spare >= begin && tensor.spare + num_slots * tensor.item_bytes <= begin + num_bytes) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

bool Communicator::can_push(const std::vector<ExpertTensor>& tensors, int num_slots) const {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const ExpertTensor& tensor) { return peer_memory_of(tensor, num_slots) >= 0; });
}

int64_t Communicator::staging_bytes(const std::vector<ExpertTensor>& tensors, int num_slots) const {
  int64_t num_bytes = 0;
  if (can_push(tensors, num_slots)) return num_bytes;
  for (const ExpertLaunch& launch : launches_of(tensors, kExpertChunkBytes, max_chunks_of_launch(num_slots))) {
    num_bytes = std::max(num_bytes, staged_bytes(num_slots, launch.num_chunks));
  }
  return num_bytes;
}

void Communicator::copy_experts(std::vector<ExpertTensor> tensors, const int64_t* mapping, int num_slots, int num_local,
                                int num_sms, bool only_compares, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const int64_t num_entries = static_cast<int64_t>(domain_.num_ranks) * num_slots;
  require(num_entries <= kMaxReplicas, "spare slots of all ranks", num_entries, "≤ 2048");
  const bool pushes = can_push(tensors, num_slots);
  const int64_t staged = staging_bytes(tensors, num_slots);
  require(only_compares || staged <= domain_.slot_bytes, "bytes of staged experts", staged, "what a slot holds");
  CopyExpertsParams params{};
  params.domain = domain_;
  params.mapping = mapping;
  params.num_slots = num_slots;
  params.num_local = num_local;
  params.is_paced = most_bytes_on_wire() > 0;
  Checksum checksum;
  checksum.add(num_slots);
  checksum.add(num_local);
  for (ExpertTensor& tensor : tensors) {
    checksum.add(tensor.item_bytes);
    if (!pushes) continue;
    const int number = peer_memory_of(tensor, num_slots);
    tensor.peers = peer_memory_[number].peers;
    tensor.peer_offset = tensor.spare - peer_memory_[number].begin;
    checksum.add(number);
    checksum.add(tensor.peer_offset);
  }
  params.sizes = arena_bits(domain_.arena_number) | checksum.bits();
  const int chunk_bytes = pushes ? kPushedChunkBytes : kExpertChunkBytes;
  const int most_chunks = pushes ? kMaxPushedChunks : max_chunks_of_launch(num_slots);
  for (const ExpertLaunch& launch : launches_of(tensors, chunk_bytes, most_chunks)) {
    params.num_tensors = launch.num_tensors;
    for (int t = 0, end = 0; t < launch.num_tensors; ++t) {
      params.tensors[t] = tensors[launch.first_tensor + t];
      params.end_chunk[t] = end += params.tensors[t].num_chunks(chunk_bytes);
    }
    params.first_chunk = launch.first_chunk;
    params.num_chunks = only_compares ? 0 : launch.num_chunks;
    (pushes ? launch_push_experts : launch_copy_experts)(params, copy_sms(num_sms, num_device_sms_), stream);
    if (only_compares) return;
    params.is_further = true;
  }
}

const HostCounts* Communicator::wait_for_host_counts(uint32_t counts_epoch, cudaStream_t stream) const {
  using Clock = std::chrono::steady_clock;
  const auto* written = reinterpret_cast<const volatile uint32_t*>(&host_counts_->epoch);
  const auto* started = reinterpret_cast<const volatile uint32_t*>(&host_counts_->started);
  const auto after = [](double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  bool has_started = false;
  auto deadline = after(kStreamQueryS);
  while (*written != counts_epoch) {
    for (int i = 0; i < 64 && *written != counts_epoch; ++i) std::this_thread::yield();
    if (has_fault() && (fault_->kind == FaultKind::kTimeout || fault_->kind == FaultKind::kTransport)) return nullptr;
    if (!has_started && *started == counts_epoch) {
      has_started = true;
      deadline = after(timeout_s_ + kHostCountsGraceS);
    }
    if (Clock::now() < deadline) continue;
    if (has_started || !is_busy(device_, stream)) break;
    deadline = after(kStreamQueryS);
  }
  if (*written != counts_epoch) return nullptr;
  std::atomic_thread_fence(std::memory_order_acquire);
  if (host_counts_->status != kFailed) return host_counts_;
  // The kernel may still read which ranks the others wait for, before it records the fault.
  deadline = after(timeout_s_ + kHostCountsGraceS);
  while (!has_fault() && Clock::now() < deadline) std::this_thread::yield();
  return nullptr;
}

bool Communicator::has_fault() const {
  if (*reinterpret_cast<const volatile uint32_t*>(&fault_->written) == 0) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

std::optional<Fault> Communicator::take_fault() {
  if (!has_fault()) return std::nullopt;
  const bool is_other_call = fault_->kind == FaultKind::kOtherCall;
  const char* tag = is_other_call ? key_of(static_cast<CallField>(fault_->tag)) : name_of(fault_->tag);
  const int divisor = !is_other_call && is_of_send(fault_->tag) ? kSendTimeoutDivisor : 1;
  Fault fault{fault_->kind, name_of(fault_->kernel), tag, fault_->peer, fault_->witness, fault_->expected,
              fault_->seen, timeout_s_ / divisor,    {}};
  for (int peer = 0; peer < 32 * kMissedWords; ++peer) {
    if (fault_->missed[peer / 32] >> peer % 32 & 1) fault.missed.push_back(peer);
  }
  std::fill(std::begin(fault_->missed), std::end(fault_->missed), 0u);
  // `claimed` is cleared last, because a kernel may claim the record at once.
  volatile FaultRecord& record = *fault_;
  record.written = 0;
  std::atomic_thread_fence(std::memory_order_release);
  record.claimed = 0;
  return fault;
}

}  // namespace hybrid_ep
