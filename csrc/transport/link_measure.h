// Measures a link alone, with a host thread instead of kernels: chunks to and from every peer at once, with
// flags and credits as kernels use them.
#pragma once

#include <cstdint>

#include "transport/host_writer.h"
#include "transport/proxy.h"

namespace hybrid_ep {

struct ChunkRun {
  int ring;
  int num_out, num_in;  // chunks to each peer, and from each
  uint32_t num_bytes;   // of a chunk
  uint32_t epoch;       // not 0, another one in each run
  bool verifies;        // fills chunks and compares what comes
  double timeout_s;
};

struct ChunkFigures {
  double seconds;
  uint64_t num_sent, num_received, num_wrong;  // chunks; fewer than asked for where the link has failed or time is over
};

// Collective over the domains of the link; the writer's proxy has an open call.
ChunkFigures run_chunks(HostWriter& writer, const FailureReport& failure, const ChunkRun& run);

// Returns the median time in ns from a command in the FIFO until the writer sees that its work request is posted. Sends
// flags without chunks to slot 0 of ring 0 of one peer.
double median_post_ns(HostWriter& writer, int peer, int num);

}  // namespace hybrid_ep
