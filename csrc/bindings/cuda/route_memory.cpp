#include "bindings/cuda/route_memory.h"

#include <algorithm>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

constexpr int64_t kPieceAlignBytes = 128;           // a cache line
constexpr int64_t kChunkBytes = int64_t{16} << 20;  // some forty routes of 4096 tokens, or eight of expert-major calls

}  // namespace

RouteMemory::RouteMemory(py::object make_chunk) : make_chunk_(std::move(make_chunk)) {}

std::optional<RouteMemory::Piece> RouteMemory::cut(int64_t num_bytes, uintptr_t stream) {
  const auto found = chunks_.find(stream);
  if (found == chunks_.end()) return std::nullopt;
  Rest& rest = found->second;
  if (static_cast<int64_t>(rest.end - rest.next.address) < num_bytes) return std::nullopt;
  Piece piece = rest.next;
  rest.next.address += num_bytes;
  return piece;
}

RouteMemory::Piece RouteMemory::take(int64_t num_ints, uintptr_t stream, bool alone) {
  constexpr int64_t kUnit = kPieceAlignBytes / sizeof(int32_t);
  const int64_t num_bytes = (num_ints + kUnit - 1) / kUnit * kPieceAlignBytes;
  if (!alone) {
    if (std::optional<Piece> piece = cut(num_bytes, stream)) return *std::move(piece);
  }
  const int64_t chunk_bytes = alone ? num_bytes : std::max(num_bytes, kChunkBytes);
  const py::object chunk = make_chunk_(chunk_bytes, stream), memory = chunk.attr("memory");
  const uintptr_t begin = address_of(memory);
  if (!alone) chunks_[stream] = {{chunk, memory, begin + num_bytes}, begin + chunk_bytes};
  return {chunk, memory, begin};
}

void add_route_memory(py::module_& module) {
  py::class_<RouteMemory>(module, "RouteMemory")
      .def(py::init<py::object>(), py::arg("make_chunk"))
      .def(
          "take",
          [](RouteMemory& self, int64_t num_ints, uintptr_t stream, bool alone) {
            const RouteMemory::Piece piece = self.take(num_ints, stream, alone);
            return py::make_tuple(piece.chunk, piece.address);
          },
          py::arg("num_ints"), py::arg("stream"), py::kw_only(), py::arg("alone"))
      .def("clear", &RouteMemory::clear);
}

}  // namespace hybrid_ep::bindings
