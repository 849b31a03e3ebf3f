// The proxy and the transports, in `_C` and in `_cuda`. The types are local to the module: each has its own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "common/check.h"
#include "transport/host_writer.h"
#include "transport/loopback_link.h"
#include "transport/proxy.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

using Shape = std::tuple<uint32_t, uint32_t, uint32_t>;

LinkLayout link_layout(int num_domains, int domain_idx, const std::vector<Shape>& rings) {
  std::vector<RingShape> shapes;
  for (const auto& [slot_bytes, num_slots, slots_per_credit] : rings) {
    shapes.push_back({slot_bytes, num_slots, slots_per_credit});
  }
  return make_link_layout(num_domains, domain_idx, shapes.data(), static_cast<int>(shapes.size()));
}

std::unique_ptr<Proxy> loopback_proxy(const LinkLayout& layout, const std::vector<uintptr_t>& windows,
                                      const std::vector<uintptr_t>& words, int num_fifos, int device,
                                      std::vector<int> cpus) {
  return std::make_unique<Proxy>(make_loopback_link(layout, {windows, words}),
                                 ProxyOptions{num_fifos, device, std::move(cpus)});
}

// Peers' addresses are bytes that may hold anything.
py::bytes address(const Proxy& self) { return self.address(); }

void connect(Proxy& self, const std::vector<py::bytes>& addresses, double timeout_s) {
  std::vector<std::string> texts(addresses.begin(), addresses.end());
  const py::gil_scoped_release release;
  self.connect(texts, timeout_s);
}

py::object failure(const Proxy& self) {
  const auto found = self.failure();
  if (!found) return py::none();
  return py::make_tuple(found->peer, found->device, found->detail);
}

py::dict counts(const Proxy& self) {
  using namespace py::literals;
  const ProxyCounts counts = self.counts();
  return py::dict("puts"_a = counts.puts, "credits"_a = counts.credits, "calls"_a = counts.calls,
                  "bytes"_a = counts.bytes, "sleeps"_a = counts.sleeps);
}

bool close(Proxy& self, double timeout_s) {
  const py::gil_scoped_release release;
  return self.close(timeout_s);
}

py::memoryview slot_memory(const HostWriter& self, uint8_t* memory, int ring, bool is_readonly) {
  return py::memoryview::from_memory(memory, self.view().layout.rings[ring].slot_bytes, is_readonly);
}

void require_slot(const LinkLayout& layout, int ring, int peer, int slot) {
  require(ring >= 0 && ring < layout.num_rings, "ring", ring, "a ring of the layout");
  require(peer >= 0 && peer < layout.num_domains && peer != layout.domain_idx, "peer", peer, "another domain");
  require(slot >= 0 && static_cast<uint32_t>(slot) < layout.rings[ring].num_slots, "slot", slot, "a slot of the ring");
}

void add_host_writer(py::module_& module) {
  py::class_<HostWriter>(module, "HostWriter", py::module_local())
      .def(py::init([](const Proxy& proxy, int fifo) { return HostWriter(proxy.view(), fifo); }), py::arg("proxy"),
           py::arg("fifo"), py::keep_alive<1, 2>())
      .def(
          "put",
          [](HostWriter& self, int ring, int peer, int slot, uint32_t num_bytes, uint64_t word) {
            return self.push({CommandKind::kPut, ring, peer, slot, num_bytes, word});
          },
          py::arg("ring"), py::arg("peer"), py::arg("slot"), py::arg("num_bytes"), py::arg("word"))
      .def(
          "credit",
          [](HostWriter& self, int ring, int peer, int group, uint64_t word) {
            return self.push({CommandKind::kCredit, ring, peer, group, 0, word});
          },
          py::arg("ring"), py::arg("peer"), py::arg("group"), py::arg("word"))
      .def("end_call", [](HostWriter& self) { return self.push({CommandKind::kEnd, 0, 0, 0, 0, 1}); })
      .def("poll", &HostWriter::poll, py::arg("ring"), py::arg("peer"), py::arg("slot"))
      .def("poll_credit", &HostWriter::poll_credit, py::arg("ring"), py::arg("peer"), py::arg("group"))
      .def(
          "send_slot",
          [](const HostWriter& self, int ring, int peer, int slot) {
            require_slot(self.view().layout, ring, peer, slot);
            return slot_memory(self, self.send_slot(ring, peer, slot), ring, false);
          },
          py::arg("ring"), py::arg("peer"), py::arg("slot"))
      .def(
          "recv_slot",
          [](const HostWriter& self, int ring, int peer, int slot) {
            require_slot(self.view().layout, ring, peer, slot);
            return slot_memory(self, const_cast<uint8_t*>(self.recv_slot(ring, peer, slot)), ring, true);
          },
          py::arg("ring"), py::arg("peer"), py::arg("slot"))
      .def_property_readonly("num_pushed", &HostWriter::num_pushed)
      .def_property_readonly("num_done", &HostWriter::num_done);
}

}  // namespace

void add_transport(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const LinkError& error) {
      // Python knows which rank the peer is: hybrid_ep/transport raises TransportError.
      PyErr_SetObject(PyExc_ConnectionError, py::make_tuple(error.peer, error.what()).ptr());
    }
  });
  py::class_<LinkLayout>(module, "LinkLayout", py::module_local())
      .def(py::init(&link_layout), py::kw_only(), py::arg("num_domains"), py::arg("domain_idx"), py::arg("rings"))
      .def_readonly("num_domains", &LinkLayout::num_domains)
      .def_readonly("domain_idx", &LinkLayout::domain_idx)
      .def_readonly("window_bytes", &LinkLayout::window_bytes)
      .def_readonly("num_words", &LinkLayout::num_words);
  py::class_<LinkView>(module, "LinkView", py::module_local());
  py::class_<Proxy>(module, "Proxy", py::module_local())
      .def("address", &address)
      .def("connect", &connect, py::arg("addresses"), py::arg("timeout_s"))
      .def("view", &Proxy::view)
      .def("begin_call", &Proxy::begin_call)
      .def_property_readonly("describe", [](Proxy& self) { return self.link().describe(); })
      .def_property_readonly("failure", &failure)
      .def_property_readonly("counts", &counts)
      .def("close", &close, py::arg("timeout_s"));
  module.def("loopback_proxy", &loopback_proxy, py::kw_only(), py::arg("layout"),
             py::arg("windows") = std::vector<uintptr_t>(), py::arg("words") = std::vector<uintptr_t>(),
             py::arg("num_fifos") = 8, py::arg("device") = 0, py::arg("cpus") = std::vector<int>());
  add_host_writer(module);
}

}  // namespace hybrid_ep::bindings
