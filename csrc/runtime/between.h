// Launches the kernels between domains of one rank: with the communicator of its domain, and the link to its peers.
//
// Calls are collective over all domains. Otherwise they are like those of the Communicator, and use its host counts,
// fault record, arena and control blocks.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/link_kernels.h"
#include "runtime/communicator.h"
#include "transport/proxy.h"

namespace hybrid_ep {

// The record that crosses for each token.
RecordLayout record_of(const DispatchShape& plan);
RecordLayout record_of(const CombinePlan& plan);

// Scratch of a combine for each token's sum over the ranks of this domain, if there are several. `weights` is nullptr
// without weights.
struct OwnSums {
  uint8_t* rows;
  float* weights;
};

class BetweenCommunicator {
 public:
  // BetweenLayout::of(grid).num_bytes of zeros follow each ControlBlock of the domain's communicator.
  BetweenCommunicator(Communicator& domain, const Grid& grid, Proxy& proxy, const LinkKernels& kernels);

  // `handle` is as in Communicator::dispatch. Returns the epoch that the host counts will have if the call waits for
  // counts.
  uint32_t dispatch(const DispatchShape& plan, const DispatchTensors& tensors, int held_capacity, int handle,
                    int slot_idx, cudaStream_t stream);
  void combine(const CombinePlan& plan, const CombineTensors& tensors, const OwnSums& own, int held_capacity,
               int handle, cudaStream_t stream);
  // Measures the link alone: sends num_chunks chunks without rows to each peer, and takes as many from each.
  void stream_chunks(int num_chunks, uint32_t chunk_bytes, int num_sms, cudaStream_t stream);

 private:
  BetweenDomain between_domain() const;

  Communicator& domain_;
  const Grid grid_;
  const BetweenLayout layout_;
  Proxy& proxy_;
  const LinkView link_;
  const LinkKernels kernels_;
};

}  // namespace hybrid_ep
