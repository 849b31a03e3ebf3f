// Weights in the columns of top-k indices as probabilities of all experts, and back.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "bindings/cuda/current_stream.h"
#include "bindings/cuda/fast_call.h"
#include "bindings/cuda/new_tensor.h"

namespace hybrid_ep::bindings {

// For any number of tokens. Each call takes top-k indices, and weights or probabilities. It makes a tensor and launches
// on the current stream.
class TopkProbs {
 public:
  TopkProbs(int num_topk, int num_experts, const pybind11::object& device, int device_index,
            pybind11::object current_stream, bool by_python);

  // The columns of one expert are summed.
  pybind11::object sum_weights(FastArguments arguments) const { return to_probs(arguments, /*adds_columns=*/true, 0); }
  // The same, and a copy of the top-k indices.
  std::pair<pybind11::object, pybind11::object> sum_weights_and_copy(FastArguments arguments) const;
  // The columns of one expert have equal values.
  pybind11::object place_weights(FastArguments arguments) const {
    return to_probs(arguments, /*adds_columns=*/false, 0);
  }
  pybind11::object to_weights(FastArguments arguments) const;

 private:
  // `copy_at`: where a copy of the top-k indices goes; 0: nowhere.
  pybind11::object to_probs(FastArguments arguments, bool adds_columns, uintptr_t copy_at) const;

  int num_topk_, num_experts_;
  NewTensor make_topk_idx_, make_weights_, make_probs_;
  int device_;
  CurrentStream stream_;
};

}  // namespace hybrid_ep::bindings
