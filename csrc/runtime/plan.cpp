#include "runtime/plan.h"

#include <algorithm>

#include "common/check.h"
#include "layout/limits.h"

namespace hybrid_ep {
namespace {

// By number: bf16, e4m3, float32, int32, uint8. Not every version of DLPack has a code for e4m3, so e4m3 travels as
// bytes.
constexpr ElementType kElementTypes[] = {{kBfloat, 16}, {kFloat8, 8}, {kFloat, 32}, {kInt, 32}, {kBytes, 8}};
constexpr int kNumElementTypes = sizeof(kElementTypes) / sizeof(ElementType);

Columns columns(int num, int dtype) {
  if (dtype == kAbsent) return {0, {kFloat, 32}};
  require(dtype >= 0 && dtype < kNumElementTypes, "number of a dtype", dtype, "0 … 4");
  return {num, kElementTypes[dtype]};
}

DispatchCall call_of(const DispatchRequest& request) {
  const bool is_bounded = request.bound.has_value();
  DispatchCall call{};
  call.dtype = request.dtype;
  call.scale_dtype = request.scale_dtype;
  call.has_topk = request.has_topk;
  // Ranks may give different bounds along a handle, with a bound of them all, and of rows by expert.
  const bool is_alike = request.expert_range && !request.common_bound && request.pad_multiple == 0;
  call.num_worst_tokens = is_bounded && is_alike ? *request.bound : kAbsent;
  call.common_bound = is_bounded ? request.common_bound.value_or(*request.bound) : kAbsent;
  call.drops_rows = request.drops_rows;
  call.num_slots = request.num_slots.value_or(kAbsent);
  call.num_mapped_ranks = request.num_mapped_ranks.value_or(kAbsent);
  call.most_tokens = request.max_tokens.value_or(kAbsent);
  call.max_tokens = std::min(request.max_tokens.value_or(kMaxTokens), kMaxTokens);
  if (request.refusal) {
    call.refusal = FaultKind::kRefused;
    call.refused_value = *request.refusal;
  } else if (request.num_tokens > call.max_tokens) {
    call.refusal = FaultKind::kTooManyTokens;
    call.refused_value = request.num_tokens;
    call.allowed = call.max_tokens;
  } else if (is_bounded && *request.bound > call.common_bound) {
    call.refusal = FaultKind::kBadBound;
    call.refused_value = *request.bound;
    call.allowed = call.common_bound;
  }
  return call;
}

}  // namespace

int64_t bytes_of(int dtype) { return columns(1, dtype).bytes(); }

DispatchShape DispatchShape::of(const DispatchRequest& request, int rank, int num_ranks) {
  require(num_ranks >= 1, "ranks", num_ranks, "≥ 1");
  require(request.num_tokens >= 0, "tokens of a rank", request.num_tokens, "≥ 0");
  require(request.num_topk >= 1 && request.num_topk <= kMaxTopk, "top-k", request.num_topk, "1 … 32");
  require(request.num_experts >= 1 && request.num_experts <= kMaxExperts, "num_experts", request.num_experts,
          "1 … 2048");
  require(request.bound.value_or(0) >= 0, "bound", request.bound.value_or(0), "≥ 0");
  const bool makes_route = request.expert_range.has_value();
  DispatchShape shape{};
  shape.format.rows = columns(request.hidden, request.dtype);
  shape.format.experts = {makes_route ? request.num_topk : 0, {kInt, 64}};
  shape.format.weights = {request.has_weights ? request.num_topk : 0, {kFloat, 32}};
  shape.format.scales = columns(request.num_scales, request.scale_dtype);
  shape.makes_route = makes_route;
  shape.num_topk = request.num_topk;
  shape.num_experts = request.num_experts;
  // Every rank asks in the same way: for its own experts, or for one range that is equal at all ranks.
  const int num_local = request.num_experts / num_ranks;
  const ExpertRange range = request.expert_range.value_or(ExpertRange{});
  const bool asks_for_own = range.first == rank * num_local && range.end - range.first == num_local;
  shape.range_first = asks_for_own ? 0 : range.first;
  shape.range_step = asks_for_own ? num_local : 0;
  shape.range_size = range.end - range.first;
  shape.pad_multiple = request.pad_multiple;
  shape.row_limit = request.bound.value_or(0);
  shape.num_records = request.num_records;
  shape.waits_for_counts = !request.bound;
  shape.num_sms = request.num_sms.value_or(0);
  shape.call = call_of(request);
  shape.num_tokens = shape.call.refusal == FaultKind::kTooManyTokens ? 0 : request.num_tokens;
  return shape;
}

DispatchPlan DispatchPlan::of(const DispatchRequest& request, int rank, int num_ranks) {
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "ranks of the domain", num_ranks, "1 … 72");
  require(request.num_experts >= num_ranks, "num_experts", request.num_experts, "ranks … 2048");
  DispatchPlan plan{DispatchShape::of(request, rank, num_ranks), {}, num_ranks};
  const bool is_permuted = plan.pad_multiple > 0;
  if (is_permuted) plan.format.experts.type.bits = 32;  // rows of copies
  plan.route = make_route_layout(num_ranks, plan.num_tokens, plan.num_experts / num_ranks, plan.num_topk, is_permuted);
  return plan;
}

void write_fields(int32_t* fields, const DispatchShape& plan, int arena, int capacity, int handle) {
  const DispatchCall& call = plan.call;
  const auto write = [&](CallField field, int value) { fields[static_cast<int>(field)] = value; };
  write(CallField::kNumExperts, plan.num_experts);
  write(CallField::kNumTopk, plan.num_topk);
  write(CallField::kHasTopk, call.has_topk);
  write(CallField::kHasWeights, plan.format.weights.num > 0);
  write(CallField::kNumSlots, call.num_slots);
  write(CallField::kReplicaMapping, kAbsent);  // which kernels read from device memory
  write(CallField::kHidden, plan.format.rows.num);
  write(CallField::kDtype, call.dtype);
  write(CallField::kScaleDtype, call.scale_dtype);
  write(CallField::kNumScales, plan.format.scales.num);
  write(CallField::kMostTokens, call.most_tokens);
  write(CallField::kNumWorstTokens, call.num_worst_tokens);
  write(CallField::kIsBounded, !plan.waits_for_counts);
  write(CallField::kDropsRows, call.drops_rows);
  write(CallField::kArena, arena);
  // Bounds may differ between ranks as long as no slot must grow for one.
  write(CallField::kCommonBound, call.common_bound > capacity ? call.common_bound : kAbsent);
  write(CallField::kPadMultiple, plan.pad_multiple);
  write(CallField::kHandle, handle);
}

void write_call(uint32_t (&call)[kNumReadyWords], const CombinePlan& plan, int arena, int handle) {
  if (plan.refusal) {
    call[0] = kRefusesCall;
    call[1] = static_cast<uint32_t>(*plan.refusal);
    return;
  }
  const auto hidden = static_cast<uint32_t>(plan.widths.rows / 2);
  call[0] = arena_bits(arena) | hidden << kNumWeightsBits | static_cast<uint32_t>(plan.num_weights);
  call[1] = static_cast<uint32_t>(handle);
}

}  // namespace hybrid_ep
