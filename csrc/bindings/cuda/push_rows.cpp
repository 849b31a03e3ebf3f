// The wire probe of `hybrid-ep bench`.
#include "kernels/push_rows/push_rows.h"

#include <algorithm>

#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {

void add_push_rows(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "push_rows",
      [](uintptr_t rows, uintptr_t dst_rows, const std::vector<uintptr_t>& memory, uintptr_t progress, int num_rows,
         int num_dst_rows, int row_bytes, int num_sms, uintptr_t stream) {
        if (memory.empty() || memory.size() > kMaxRanks) throw py::value_error("memory of 1 … 72 ranks");
        if (num_dst_rows < 1 || num_dst_rows > kMaxTopk) throw py::value_error("num_dst_rows is not 1 … 32");
        if (row_bytes < kRowAlignBytes || row_bytes > kMaxRowBytes || row_bytes % kRowAlignBytes != 0) {
          throw py::value_error("row_bytes is not a multiple of 16 up to 32768");
        }
        PushRowsParams params{};
        params.rows = pointer<uint8_t>(rows);
        params.dst_rows = pointer<int64_t>(dst_rows);
        std::transform(memory.begin(), memory.end(), params.memory, pointer<uint8_t>);
        params.progress = pointer<PushProgress>(progress);
        params.num_rows = num_rows;
        params.num_dst_rows = num_dst_rows;
        params.row_bytes = row_bytes;
        launch_push_rows(params, num_sms, stream_of(stream));
      },
      py::kw_only(), py::arg("rows"), py::arg("dst_rows"), py::arg("memory"), py::arg("progress"), py::arg("num_rows"),
      py::arg("num_dst_rows"), py::arg("row_bytes"), py::arg("num_sms"), py::arg("stream"));
}

}  // namespace hybrid_ep::bindings
