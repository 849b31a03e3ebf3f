#include "runtime/between.h"

#include "common/check.h"
#include "common/cuda_check.h"
#include "common/device_guard.h"
#include "runtime/proxy_call.h"
#include "runtime/sm_model.h"

namespace hybrid_ep {

RecordLayout record_of(const DispatchShape& plan) {
  const RowFormat& format = plan.format;
  return RecordLayout::of(format.rows.bytes(), format.scales.num, plan.num_topk, format.experts.num,
                          format.weights.num);
}

RecordLayout record_of(const CombinePlan& plan) {
  return RecordLayout::of(plan.widths.rows, 0, 0, 0, plan.num_weights);
}

BetweenCommunicator::BetweenCommunicator(Communicator& domain, const Grid& grid, Proxy& proxy,
                                         const LinkKernels& kernels)
    : domain_(domain),
      grid_(grid),
      layout_(BetweenLayout::of(grid)),
      proxy_(proxy),
      link_(proxy.view()),
      kernels_(kernels) {
  require(grid.num_domains >= 2 && grid.num_domains <= kMaxDomains, "domains", grid.num_domains, "2 … 64");
  require(grid.num_ranks() <= kMaxExperts, "ranks", grid.num_ranks(), "1 … 2048");
  require(grid.ranks_per_domain == domain.domain().num_ranks, "ranks of a domain", grid.ranks_per_domain,
          "those of the communicator");
  const DeviceGuard guard(domain_.device());
  kernels_.prepare_dispatch();
  kernels_.prepare_combine();
}

BetweenDomain BetweenCommunicator::between_domain() const { return {grid_, domain_.domain(), layout_, link_}; }

uint32_t BetweenCommunicator::dispatch(const DispatchShape& plan, const DispatchTensors& tensors, int held_capacity,
                                       int handle, int slot_idx, cudaStream_t stream) {
  const DeviceGuard guard(domain_.device());
  DispatchBetweenParams params{};
  domain_.fill(params, plan, tensors);
  params.between = between_domain();
  params.num_mapped_ranks = plan.call.num_mapped_ranks;
  params.makes_route = plan.makes_route;
  params.record = record_of(plan);
  write_fields(params.call, plan, params.between.domain.arena_number, params.slot.capacity, handle);
  params.slot_idx = slot_idx;
  params.held_capacity = held_capacity;
  params.route = tensors.route;
  params.parts = BetweenRoute::of(grid_, plan.num_tokens, plan.num_topk, plan.num_experts, held_capacity);
  params.refusal = plan.call.refusal;
  params.refused_value = plan.call.refused_value;
  if (plan.makes_route) {
    launch_index_tokens({grid_, params.between.domain.control[params.between.domain.rank], tensors.topk_idx,
                         plan.num_tokens, plan.num_topk, plan.num_experts, tensors.route, params.parts},
                        stream);
  }
  launch_in_proxy_call(proxy_, link_, stream,
                       [&] { kernels_.dispatch(params, between_sms(plan.num_sms, domain_.num_device_sms()), stream); });
  return params.counts_epoch;
}

void BetweenCommunicator::stream_chunks(int num_chunks, uint32_t chunk_bytes, int num_sms, cudaStream_t stream) {
  require(num_chunks >= 0, "chunks", num_chunks, "≥ 0");
  require(chunk_bytes > 0 && chunk_bytes <= kChunkSlotBytes && chunk_bytes % kRowAlignBytes == 0, "bytes of a chunk",
          chunk_bytes, "multiples of 16 up to 262144");
  const DeviceGuard guard(domain_.device());
  launch_in_proxy_call(proxy_, link_, stream, [&] {
    kernels_.stream_chunks({between_domain(), num_chunks, chunk_bytes}, between_sms(num_sms, domain_.num_device_sms()),
                           stream);
  });
}

void BetweenCommunicator::combine(const CombinePlan& plan, const CombineTensors& tensors, const OwnSums& own,
                                  int held_capacity, int handle, cudaStream_t stream) {
  const DeviceGuard guard(domain_.device());
  CombineBetweenParams params{};
  domain_.fill(params, plan, tensors, handle);
  params.between = between_domain();
  params.own_sums = own.rows;
  params.own_weights = own.weights;
  params.num_topk = plan.num_topk;
  const bool sends_over_nvlink = link_.is_mapped || grid_.ranks_per_domain > 1;
  if (!sends_over_nvlink) params.window_bytes = 0;
  params.record = record_of(plan);
  params.route = tensors.route;
  params.parts = BetweenRoute::of(grid_, plan.num_tokens, plan.num_topk, plan.num_experts, held_capacity);
  launch_in_proxy_call(proxy_, link_, stream,
                       [&] { kernels_.combine(params, between_sms(plan.num_sms, domain_.num_device_sms()), stream); });
}

}  // namespace hybrid_ep
