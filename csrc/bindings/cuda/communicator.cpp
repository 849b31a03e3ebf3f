#include "runtime/communicator.h"

#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

RowWidths dispatch_widths(int row_bytes, int num_scales, int num_topk, bool has_weights, bool is_permuted) {
  RowWidths widths{};
  widths.rows = row_bytes;
  widths.experts = static_cast<int64_t>(num_topk) * (is_permuted ? sizeof(int32_t) : sizeof(int64_t));
  widths.weights = has_weights ? static_cast<int64_t>(num_topk) * sizeof(float) : 0;
  widths.scales = static_cast<int64_t>(num_scales) * sizeof(uint32_t);
  return widths;
}

RowWidths combine_widths(int row_bytes, int num_weights) {
  RowWidths widths{};
  widths.rows = row_bytes;
  widths.weights = static_cast<int64_t>(num_weights) * sizeof(float);
  return widths;
}

}  // namespace

void add_communicator(py::module_& module) {
  py::class_<RowWidths>(module, "RowWidths")
      .def(
          "slot_bytes_for", [](const RowWidths& widths, int64_t num_rows) { return slot_bytes_for(widths, num_rows); },
          py::arg("num_rows"))
      .def_property_readonly("total", &RowWidths::total);
  module.def("dispatch_widths", &dispatch_widths, py::arg("row_bytes"), py::arg("num_scales"), py::arg("num_topk"),
             py::arg("has_weights"), py::arg("is_permuted"));
  module.def("combine_widths", &combine_widths, py::arg("row_bytes"), py::arg("num_weights"));

  py::class_<SlotLayout>(module, "SlotLayout")
      .def_readonly("rows", &SlotLayout::rows)
      .def_readonly("experts", &SlotLayout::experts)
      .def_readonly("weights", &SlotLayout::weights)
      .def_readonly("scales", &SlotLayout::scales)
      .def_readonly("capacity", &SlotLayout::capacity);

  py::enum_<FaultKind>(module, "FaultKind")
      .value("TIMEOUT", FaultKind::kTimeout)
      .value("BAD_EXPERT", FaultKind::kBadExpert)
      .value("OVERFLOW", FaultKind::kOverflow);
  py::class_<Fault>(module, "Fault")
      .def_readonly("kind", &Fault::kind)
      .def_readonly("kernel", &Fault::kernel)
      .def_readonly("tag", &Fault::tag)
      .def_readonly("peer", &Fault::peer)
      .def_readonly("witness", &Fault::witness)
      .def_readonly("expected", &Fault::expected)
      .def_readonly("seen", &Fault::seen);

  py::class_<Mailbox>(module, "Mail")
      .def_property_readonly("needs_room", [](const Mailbox& mail) { return mail.status == kNeedsRoom; })
      .def_property_readonly("failed", [](const Mailbox& mail) { return mail.status == kFailed; })
      .def_readonly("num_recv", &Mailbox::num_recv)
      .def_readonly("num_permuted", &Mailbox::num_permuted)
      .def_readonly("num_sent_away", &Mailbox::num_sent_away)
      .def_readonly("num_kept", &Mailbox::num_kept)
      .def_readonly("max_recv", &Mailbox::max_recv)
      .def_readonly("max_sent", &Mailbox::max_sent)
      .def_readonly("max_rows", &Mailbox::max_rows)
      .def("num_tokens_per_expert", [](const Mailbox& mail, int num_local_experts) {
        return std::vector<int32_t>(mail.num_tokens_per_expert, mail.num_tokens_per_expert + num_local_experts);
      });

  py::class_<Communicator>(module, "Communicator")
      .def(py::init<int, const std::vector<uintptr_t>&, int, double>(), py::kw_only(), py::arg("rank"),
           py::arg("control"), py::arg("device"), py::arg("timeout_s"))
      .def("set_arena", &Communicator::set_arena, py::arg("arena"), py::arg("slot_bytes"))
      .def("slot_layout", &Communicator::slot_layout, py::arg("widths"))
      .def(
          "dispatch",
          [](Communicator& self, const RowWidths& widths, uintptr_t rows, uintptr_t topk_idx, uintptr_t topk_weights,
             uintptr_t scales, int num_tokens, int num_topk, int num_experts, int row_bytes, int num_scales,
             int range_first, int range_step, int range_size, int slot_idx, int row_limit, int pad_multiple,
             uintptr_t send_slot, uintptr_t send_list, uintptr_t dst_row, uintptr_t rank_prefix, uintptr_t expert_place,
             uintptr_t first_mask, uintptr_t num_tokens_per_expert, uintptr_t overflow, bool waits_for_counts,
             int num_sms, uintptr_t stream) {
            DispatchParams params{};
            params.rows = pointer<uint8_t>(rows);
            params.topk_idx = pointer<int64_t>(topk_idx);
            params.topk_weights = pointer<float>(topk_weights);
            params.scales = pointer<uint32_t>(scales);
            params.num_tokens = num_tokens;
            params.num_topk = num_topk;
            params.num_experts = num_experts;
            params.row_bytes = row_bytes;
            params.num_scales = num_scales;
            params.range_first = range_first;
            params.range_step = range_step;
            params.range_size = range_size;
            params.slot_idx = slot_idx;
            params.row_limit = row_limit;
            params.is_bound = !waits_for_counts;
            params.pad_multiple = pad_multiple;
            params.send_slot = pointer<int32_t>(send_slot);
            params.send_list = pointer<int32_t>(send_list);
            params.dst_row = pointer<int32_t>(dst_row);
            params.rank_prefix = pointer<int32_t>(rank_prefix);
            params.expert_place = pointer<int32_t>(expert_place);
            params.first_mask = pointer<uint32_t>(first_mask);
            params.num_tokens_per_expert = pointer<int32_t>(num_tokens_per_expert);
            params.overflow = pointer<int32_t>(overflow);
            return self.dispatch(params, widths, waits_for_counts, num_sms, stream_of(stream));
          },
          py::kw_only(), py::arg("widths"), py::arg("rows"), py::arg("topk_idx"), py::arg("topk_weights"),
          py::arg("scales"), py::arg("num_tokens"), py::arg("num_topk"), py::arg("num_experts"), py::arg("row_bytes"),
          py::arg("num_scales"), py::arg("range_first"), py::arg("range_step"), py::arg("range_size"),
          py::arg("slot_idx"), py::arg("row_limit"), py::arg("pad_multiple"), py::arg("send_slot"),
          py::arg("send_list"), py::arg("dst_row"), py::arg("rank_prefix"), py::arg("expert_place"),
          py::arg("first_mask"), py::arg("num_tokens_per_expert"), py::arg("overflow"), py::arg("waits_for_counts"),
          py::arg("num_sms"), py::arg("stream"))
      .def(
          "combine",
          [](Communicator& self, const RowWidths& widths, uintptr_t rows, uintptr_t weights, uintptr_t bias_0,
             uintptr_t bias_1, uintptr_t out, uintptr_t out_weights, uintptr_t send_slot, uintptr_t rank_prefix,
             int num_tokens, int num_rows, int num_weights, int row_bytes, int num_sms, uintptr_t stream) {
            CombineParams params{};
            params.rows = pointer<uint8_t>(rows);
            params.weights = pointer<float>(weights);
            params.bias[0] = pointer<uint8_t>(bias_0);
            params.bias[1] = pointer<uint8_t>(bias_1);
            params.out = pointer<uint8_t>(out);
            params.out_weights = pointer<float>(out_weights);
            params.send_slot = pointer<int32_t>(send_slot);
            params.rank_prefix = pointer<int32_t>(rank_prefix);
            params.num_tokens = num_tokens;
            params.num_rows = num_rows;
            params.num_weights = num_weights;
            params.row_bytes = row_bytes;
            self.combine(params, widths, num_sms, stream_of(stream));
          },
          py::kw_only(), py::arg("widths"), py::arg("rows"), py::arg("weights"), py::arg("bias_0"), py::arg("bias_1"),
          py::arg("out"), py::arg("out_weights"), py::arg("send_slot"), py::arg("rank_prefix"), py::arg("num_tokens"),
          py::arg("num_rows"), py::arg("num_weights"), py::arg("row_bytes"), py::arg("num_sms"), py::arg("stream"))
      .def("wait_mailbox", &Communicator::wait_mailbox, py::arg("ticket"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("mail", &Communicator::mailbox, py::return_value_policy::reference_internal)
      .def("take_fault", &Communicator::take_fault);
}

}  // namespace hybrid_ep::bindings
