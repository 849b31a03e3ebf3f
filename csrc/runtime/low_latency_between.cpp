#include "runtime/low_latency_between.h"

#include "common/check.h"
#include "common/device_guard.h"
#include "runtime/proxy_call.h"

namespace hybrid_ep {

OwnTables OwnTables::of(const LowLatencyPlan& plan) {
  OwnTables tables{};
  tables.row_of = plan.results.num_ints;
  tables.num_received =
      tables.row_of + static_cast<int64_t>(plan.num_ranks) * plan.shape.max_tokens * plan.shape.num_topk;
  tables.num_ints = (tables.num_received + plan.num_ranks + 1) / 2 * 2;
  return tables;
}

LowLatencyBetweenRegion::LowLatencyBetweenRegion(const Communicator& communicator, const Grid& grid, int group_size,
                                                 const std::vector<uintptr_t>& memory,
                                                 const LowLatencyCapacity& capacity, bool takes_masks, Proxy& proxy,
                                                 const LinkKernels& kernels)
    : LowLatencyRegion(communicator, memory, capacity, takes_masks),
      peers_{{grid.rank, grid.num_ranks() / group_size, group_size}, grid.ranks_per_domain, capacity.region_bytes()},
      proxy_(proxy),
      link_(proxy.view()),
      kernels_(kernels) {
  require(grid.num_domains >= 2 && grid.num_domains <= kMaxDomains, "domains", grid.num_domains, "2 … 64");
  require(grid.num_ranks() <= kMaxRanks, "ranks", grid.num_ranks(), "up to 72");
  require(group_size == 1 || group_size == grid.ranks_per_domain, "ranks of a group", group_size,
          "1, or those of a domain");
  require(peers_.grid.num_domains == link_.layout.num_domains, "groups", peers_.grid.num_domains,
          "those that the link joins");
  require(link_.layout.num_near * group_size == grid.ranks_per_domain, "groups of a domain", link_.layout.num_near,
          "those that the link does not join");
  require(grid.ranks_per_domain == domain_.num_ranks, "ranks of a domain", grid.ranks_per_domain,
          "those of the communicator");
  require(link_.layout.num_rings == 2, "rings", link_.layout.num_rings, "one for each kind of call");
  for (int ring = 0; ring < 2; ++ring) {
    require(link_.layout.rings[ring].num_slots == kLowLatencyBuffers && link_.layout.rings[ring].slots_per_credit == 1,
            "slots of a ring", link_.layout.rings[ring].num_slots, "one for each buffer, each with a credit");
  }
  const DeviceGuard guard(device_);
  kernels_.prepare_low_latency_dispatch();
  domain_.rank = grid.rank;
  domain_.num_ranks = grid.num_ranks();
  for (int r = 0; r < domain_.num_ranks; ++r) {
    domain_.region[r] =
        reinterpret_cast<uint8_t*>(memory[peers_.is_in_domain(r) ? r % grid.ranks_per_domain : grid.domain_rank()]);
  }
  receive_timeout_ns_ = domain_.timeout_ns + 2 * kForwardNs;
}

bool LowLatencyBetweenRegion::covers(const LowLatencyPlan& plan) const {
  const PeerChunkBytes needed = PeerChunkBytes::of(plan.shape, peers_.grid.ranks_per_domain);
  return LowLatencyRegion::covers(plan) &&
         needed.tokens <= link_.layout.rings[ring_of(LowLatencyKind::kDispatch)].slot_bytes &&
         needed.rows <= link_.layout.rings[ring_of(LowLatencyKind::kCombine)].slot_bytes;
}

RowTables LowLatencyBetweenRegion::tables_of(const LowLatencyPlan& plan, const int32_t* results) const {
  const OwnTables tables = OwnTables::of(plan);
  return {results + tables.row_of, results + tables.num_received};
}

void LowLatencyBetweenRegion::fill(LowLatencyBetweenParams& params, const LowLatencyPlan& plan, LowLatencyKind kind,
                                   int buffer_idx, cudaStream_t stream) {
  params.domain = begin(plan, kind, buffer_idx, stream);
  params.peers = peers_;
  params.shape = plan.shape;
  params.link = link_;
}

void LowLatencyBetweenRegion::ship_tokens(const LowLatencyPlan& plan, const LowLatencyDispatch& call,
                                          cudaStream_t stream) {
  const DeviceGuard guard(device_);
  ShipTokensParams params{};
  fill(params, plan, LowLatencyKind::kDispatch, call.buffer_idx, stream);
  params.message = plan.message;
  params.topk_idx = call.topk_idx;
  params.num_tokens = call.num_tokens;
  launch_in_proxy_call(proxy_, link_, stream, [&] { kernels_.ship_tokens(params, num_device_sms_, stream); });
}

void LowLatencyBetweenRegion::forward_tokens(const LowLatencyPlan& plan, const LowLatencyDispatch& call,
                                             cudaStream_t stream) {
  const DeviceGuard guard(device_);
  ForwardTokensParams params{};
  fill(params, plan, LowLatencyKind::kDispatch, call.buffer_idx, stream);
  params.message = plan.message;
  params.call = plan.call;
  params.wait_stats = call.wait_stats;
  launch_in_proxy_call(proxy_, link_, stream, [&] { kernels_.forward_tokens(params, num_device_sms_, stream); });
}

void LowLatencyBetweenRegion::dispatch(const LowLatencyPlan& plan, const LowLatencyDispatch& call, Halves halves,
                                       cudaStream_t stream) {
  if (halves != Halves::kReceive) {
    LowLatencyRegion::dispatch(plan, call, Halves::kSend, stream);
    ship_tokens(plan, call, stream);
  }
  if (halves == Halves::kSend) return;
  forward_tokens(plan, call, stream);
  // Beside the kernel that forwards, unless both would count the same waits.
  const bool is_early = call.wait_stats == nullptr && plan.shape.max_tokens > 0;
  receive_tokens(plan, call, is_early, stream);
}

ShipRowsParams LowLatencyBetweenRegion::ship_rows_params(const LowLatencyPlan& plan, const LowLatencyCombine& call,
                                                         cudaStream_t stream) {
  ShipRowsParams params{};
  fill(params, plan, LowLatencyKind::kCombine, call.buffer_idx, stream);
  const LowLatencyResults& results = plan.results;
  params.rows = call.rows;
  params.row_of = call.results + results.row_of;
  params.src_info = call.results + results.src_info;
  params.layout_range = reinterpret_cast<const int64_t*>(call.results + results.layout_range);
  params.num_received = call.results + results.num_received;
  params.num_too_many = call.results + results.num_too_many;
  params.number = number_of(plan, call.results);
  params.use_logfmt = call.use_logfmt;
  const OwnTables tables = OwnTables::of(plan);
  params.own_row_of = call.results + tables.row_of;
  params.own_num_received = call.results + tables.num_received;
  params.ships = true;
  return params;
}

void LowLatencyBetweenRegion::send_rows(const LowLatencyPlan& plan, const LowLatencyCombine& call,
                                        cudaStream_t stream) {
  {
    const DeviceGuard guard(device_);
    const ShipRowsParams params = ship_rows_params(plan, call, stream);
    launch_in_proxy_call(proxy_, link_, stream, [&] { kernels_.ship_rows(params, num_device_sms_, stream); });
  }
  LowLatencyRegion::combine(plan, call, Halves::kSend, stream);
}

void LowLatencyBetweenRegion::send_signalled_rows(const LowLatencyPlan& plan, const LowLatencyCombine& call,
                                                  cudaStream_t stream) {
  const DeviceGuard guard(device_);
  ShipRowsParams params = ship_rows_params(plan, call, stream);
  params.ships = false;
  kernels_.ship_rows(params, num_device_sms_, stream);
  LowLatencyRegion::combine(plan, call, Halves::kSend, stream);
  // That kernel has waited for the signals of all rows.
  params.own_row_of = params.own_num_received = nullptr;
  params.ships = params.follows_own = true;
  launch_in_proxy_call(proxy_, link_, stream, [&] { kernels_.ship_rows(params, num_device_sms_, stream); });
}

void LowLatencyBetweenRegion::forward_rows(const LowLatencyPlan& plan, const LowLatencyCombine& call,
                                           cudaStream_t stream) {
  const DeviceGuard guard(device_);
  ForwardRowsParams params{};
  fill(params, plan, LowLatencyKind::kCombine, call.buffer_idx, stream);
  params.wait_stats = call.wait_stats;
  launch_in_proxy_call(proxy_, link_, stream, [&] { kernels_.forward_rows(params, num_device_sms_, stream); });
}

void LowLatencyBetweenRegion::combine(const LowLatencyPlan& plan, const LowLatencyCombine& call, Halves halves,
                                      cudaStream_t stream) {
  if (halves != Halves::kReceive && call.signals.raised != nullptr) {
    send_signalled_rows(plan, call, stream);
  } else if (halves != Halves::kReceive) {
    send_rows(plan, call, stream);
  }
  if (halves == Halves::kSend) return;
  forward_rows(plan, call, stream);
  LowLatencyCombine sum = call;
  sum.wait_stats = nullptr;  // the kernel that forwards has counted the waits
  LowLatencyRegion::combine(plan, sum, Halves::kReceive, stream);
}

}  // namespace hybrid_ep
