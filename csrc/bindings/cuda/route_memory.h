// Memory that is cut into pieces for the routes of handles, because an allocation costs the host more than the rest of
// a route.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

namespace hybrid_ep::bindings {

class RouteMemory {
 public:
  struct Piece {
    pybind11::object chunk;   // a Chunk of hybrid_ep/engine/cuda/route.py, which the piece is cut from
    pybind11::object memory;  // of the chunk
    uintptr_t address;
  };

  // `make_chunk` takes a number of bytes and the current stream, and returns a Chunk.
  explicit RouteMemory(pybind11::object make_chunk);

  // `stream` is the current one, which writes it. `alone`: no other piece is cut from the chunk.
  // What a captured graph uses, nothing else may.
  Piece take(int64_t num_ints, uintptr_t stream, bool alone);
  // Drops the chunks. Their pieces stay as they are.
  void clear() { chunks_.clear(); }

 private:
  struct Rest {
    Piece next;
    uintptr_t end;
  };

  // A piece of the last chunk of `stream`; nullopt: too little is left of it.
  std::optional<Piece> cut(int64_t num_bytes, uintptr_t stream);

  pybind11::object make_chunk_;
  std::unordered_map<uintptr_t, Rest> chunks_;  // by stream
};

}  // namespace hybrid_ep::bindings
