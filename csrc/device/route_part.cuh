// The columns of a part of a token's route: low_latency_layout.h.
#pragma once

#include "layout/low_latency_layout.h"

namespace hybrid_ep {

__device__ inline void set_column(RoutePart& part, int column, uint32_t expert) {
  const int word = RoutePart::kBits * column / 32, shift = RoutePart::kBits * column % 32;
  part.experts[word] |= expert << shift;
  if (shift + RoutePart::kBits > 32) part.experts[word + 1] |= expert >> (32 - shift);
}

__device__ inline int column_of(const RoutePart& part, int column) {
  const int word = RoutePart::kBits * column / 32, shift = RoutePart::kBits * column % 32;
  uint32_t expert = part.experts[word] >> shift;
  if (shift + RoutePart::kBits > 32) expert |= part.experts[word + 1] << (32 - shift);
  return static_cast<int>(expert & RoutePart::kNoExpert);
}

}  // namespace hybrid_ep
