// The state that the cuda engine keeps of a dispatch inside a domain, in a DispatchHandle.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace hybrid_ep::calls {

struct Route {
  pybind11::object chunk;  // the Chunk of hybrid_ep/engine/cuda/route.py that the route is a piece of
  uintptr_t address;       // of the piece; layout/route_layout.h has its layout
  int64_t counts_at;       // offset in it, in int32, of the tokens that arrived for each local expert
  int64_t topk_at;         // offset in it, in int32, of the top-k indices that were sent
  int num_recv;            // rows of the result: what arrived, or the bound
  int max_recv;            // most rows of the result at any rank; what the slots of a dispatch along it must hold
  int max_sent;            // most rows that any rank sends; what the slots of a combine must hold
  int num_sent_away;       // rows that this rank sends to others; 0 where the host did not learn it
  int num_from_away;       // rows that others send to this rank; likewise
  int num_records;         // of received rows, which slots hold beside the rows of copies; 0: as many as rows
  int number;              // of the dispatch that made it, equal at all ranks
  uintptr_t stream;        // that the dispatch ran on, and that the chunk belongs to

  // Must be called if `user`, the current stream, uses the route.
  void note_use(uintptr_t user) const {
    if (user != stream) chunk.attr("note_use")(user);
  }
};

}  // namespace hybrid_ep::calls
