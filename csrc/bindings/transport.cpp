// The proxy and the transports, in `_C` and in `_cuda`. The types are local to the module: each has its own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "common/check.h"
#include "transport/fabric_link.h"
#include "transport/faulty_link.h"
#include "transport/host_writer.h"
#include "transport/link_measure.h"
#include "transport/loopback_link.h"
#include "transport/mapped_link.h"
#include "transport/paced_link.h"
#include "transport/proxy.h"
#include "transport/tcp_link.h"
#include "transport/verbs_link.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

using Shape = std::tuple<uint32_t, uint32_t, uint32_t>;

LinkLayout link_layout(int num_domains, int domain_idx, const std::vector<Shape>& rings, int num_near) {
  std::vector<RingShape> shapes;
  for (const auto& [slot_bytes, num_slots, slots_per_credit] : rings) {
    shapes.push_back({slot_bytes, num_slots, slots_per_credit});
  }
  return make_link_layout(num_domains, domain_idx, num_near, shapes.data(), static_cast<int>(shapes.size()));
}

// The proxy of any transport, with the faults that tests ask for.
std::unique_ptr<Proxy> make_proxy(std::unique_ptr<Link> link, int num_fifos, int device, std::vector<int> cpus,
                                  const Faults& faults) {
  if (faults.max_delay_us > 0 || faults.lost_fraction > 0) link = make_faulty_link(std::move(link), faults);
  return std::make_unique<Proxy>(std::move(link), ProxyOptions{num_fifos, device, std::move(cpus)});
}

// gbytes_per_s: the rate of a simulated NIC; 0: as fast as memory.
std::unique_ptr<Proxy> loopback_proxy(const LinkLayout& layout, const std::vector<uintptr_t>& windows,
                                      double gbytes_per_s, int num_fifos, int device, std::vector<int> cpus,
                                      const Faults& faults) {
  if (!windows.empty()) {
    return make_proxy(make_mapped_link(layout, windows, gbytes_per_s), num_fifos, device, std::move(cpus), faults);
  }
  auto link = make_loopback_link(layout);
  if (gbytes_per_s != 0) link = make_paced_link(std::move(link), gbytes_per_s);
  return make_proxy(std::move(link), num_fifos, device, std::move(cpus), faults);
}

std::unique_ptr<Proxy> nvshmem_proxy(const LinkLayout& layout, const std::vector<uintptr_t>& windows,
                                     const std::vector<int>& pes, int device, std::vector<int> cpus) {
  return make_proxy(make_nvshmem_link(layout, windows, pes), 1, device, std::move(cpus), {});
}

std::unique_ptr<Proxy> tcp_proxy(const LinkLayout& layout, const std::string& host, int num_connections,
                                 double timeout_s, int num_fifos, int device, std::vector<int> cpus,
                                 const Faults& faults) {
  return make_proxy(make_tcp_link(layout, {host, num_connections, timeout_s}), num_fifos, device, std::move(cpus),
                    faults);
}

std::unique_ptr<Proxy> verbs_proxy(const LinkLayout& layout, std::vector<std::string> devices, int port, int gid_index,
                                   int pkey_index, int service_level, int traffic_class, int mtu_bytes,
                                   int num_queue_pairs, bool relaxed_ordering, bool unordered, double timeout_s,
                                   uintptr_t memory, bool window_only, int num_fifos, int device, std::vector<int> cpus,
                                   const Faults& faults) {
  const VerbsOptions options{std::move(devices), port,      gid_index,       pkey_index,       service_level,
                             traffic_class,      mtu_bytes, num_queue_pairs, relaxed_ordering, unordered,
                             timeout_s,          memory,    window_only};
  return make_proxy(make_verbs_link(layout, options), num_fifos, device, std::move(cpus), faults);
}

std::unique_ptr<Proxy> fabric_proxy(const LinkLayout& layout, const std::string& provider,
                                    std::vector<std::string> devices, const std::string& host, bool has_remote_data,
                                    double timeout_s, uintptr_t memory, int num_fifos, int device,
                                    std::vector<int> cpus, const Faults& faults) {
  const FabricOptions options{provider, std::move(devices), host, has_remote_data, timeout_s, memory, device};
  return make_proxy(make_fabric_link(layout, options), num_fifos, device, std::move(cpus), faults);
}

// Addresses are bytes, because they need not be text.
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

bool drain(const Proxy& self, double timeout_s) {
  const py::gil_scoped_release release;
  return self.drain(timeout_s);
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
  require(layout.joins(peer), "peer", peer, "another domain that the link joins");
  require(slot >= 0 && static_cast<uint32_t>(slot) < layout.rings[ring].num_slots, "slot", slot, "a slot of the ring");
}

py::tuple run_chunks_of(HostWriter& self, Proxy& proxy, int ring, int num_out, int num_in, uint32_t num_bytes,
                        uint32_t epoch, bool verifies, double timeout_s) {
  require_slot(self.view().layout, ring, self.view().layout.domain_idx == 0 ? 1 : 0, 0);
  require(num_bytes <= self.view().layout.rings[ring].slot_bytes && num_bytes % 16 == 0, "num_bytes", num_bytes,
          "multiples of 16 up to slot_bytes");
  ChunkFigures figures{};
  {
    const py::gil_scoped_release release;
    figures = run_chunks(self, proxy.link().failure(), {ring, num_out, num_in, num_bytes, epoch, verifies, timeout_s});
  }
  return py::make_tuple(figures.seconds, figures.num_sent, figures.num_received, figures.num_wrong);
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
      .def("run_chunks", &run_chunks_of, py::arg("proxy"), py::kw_only(), py::arg("ring"), py::arg("num_out"),
           py::arg("num_in"), py::arg("num_bytes"), py::arg("epoch"), py::arg("verifies"), py::arg("timeout_s"))
      .def("median_post_ns", &median_post_ns, py::call_guard<py::gil_scoped_release>(), py::arg("peer"), py::arg("num"))
      .def_property_readonly("num_pushed", &HostWriter::num_pushed)
      .def_property_readonly("num_done", &HostWriter::num_done);
}

}  // namespace

void add_transport(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const LinkError& error) {
      // hybrid_ep/transport knows the rank of the peer, and raises TransportError.
      PyErr_SetObject(PyExc_ConnectionError, py::make_tuple(error.peer, error.what()).ptr());
    }
  });
  py::class_<LinkLayout>(module, "LinkLayout", py::module_local())
      .def(py::init(&link_layout), py::kw_only(), py::arg("num_domains"), py::arg("domain_idx"), py::arg("rings"),
           py::arg("num_near") = 1)
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
      .def_property_readonly("is_mapped", [](const Proxy& self) { return self.view().is_mapped; })
      .def_property_readonly("describe", [](Proxy& self) { return self.link().describe(); })
      .def("keep_other_peers", &Proxy::keep_other_peers)
      .def_property_readonly("failure", &failure)
      .def_property_readonly("counts", &counts)
      .def("drain", &drain, py::arg("timeout_s"))
      .def("close", &close, py::arg("timeout_s"));
  py::class_<Faults>(module, "Faults", py::module_local())
      .def(py::init<uint64_t, int, double>(), py::kw_only(), py::arg("seed") = 0, py::arg("max_delay_us") = 0,
           py::arg("lost_fraction") = 0.0);
  module.def("loopback_proxy", &loopback_proxy, py::kw_only(), py::arg("layout"),
             py::arg("windows") = std::vector<uintptr_t>(), py::arg("gbytes_per_s") = 0.0, py::arg("num_fifos") = 8,
             py::arg("device") = 0, py::arg("cpus") = std::vector<int>(), py::arg("faults") = Faults());
  module.def("nvshmem_proxy", &nvshmem_proxy, py::kw_only(), py::arg("layout"), py::arg("windows"), py::arg("pes"),
             py::arg("device") = 0, py::arg("cpus") = std::vector<int>());
  module.def("tcp_proxy", &tcp_proxy, py::kw_only(), py::arg("layout"), py::arg("host"), py::arg("num_connections") = 4,
             py::arg("timeout_s") = 100.0, py::arg("num_fifos") = 8, py::arg("device") = 0,
             py::arg("cpus") = std::vector<int>(), py::arg("faults") = Faults());
  module.def("verbs_proxy", &verbs_proxy, py::kw_only(), py::arg("layout"), py::arg("devices"), py::arg("port") = 1,
             py::arg("gid_index") = -1, py::arg("pkey_index") = -1, py::arg("service_level") = 0,
             py::arg("traffic_class") = 0, py::arg("mtu_bytes") = 0, py::arg("num_queue_pairs") = 2,
             py::arg("relaxed_ordering") = true, py::arg("unordered") = false, py::arg("timeout_s") = 100.0,
             py::arg("memory") = 0, py::arg("window_only") = false, py::arg("num_fifos") = 8, py::arg("device") = 0,
             py::arg("cpus") = std::vector<int>(), py::arg("faults") = Faults());
  module.def("fabric_proxy", &fabric_proxy, py::kw_only(), py::arg("layout"), py::arg("provider"),
             py::arg("devices") = std::vector<std::string>(), py::arg("host") = "", py::arg("has_remote_data") = true,
             py::arg("timeout_s") = 100.0, py::arg("memory") = 0, py::arg("num_fifos") = 8, py::arg("device") = 0,
             py::arg("cpus") = std::vector<int>(), py::arg("faults") = Faults());
  module.attr("has_fabric") = kHasFabric;
  module.def("fabric_devices", &fabric_devices, py::arg("provider"), py::call_guard<py::gil_scoped_release>());
  module.attr("has_verbs") = kHasVerbs;
  module.def("active_verbs_devices", &active_verbs_devices, py::arg("port") = 1);
  // Two numbers: a retry comes after 4.096 µs × 2^first; the second is the number of retries.
  module.def(
      "verbs_retries",
      [](double timeout_s) {
        const VerbsRetries retries = retries_of(timeout_s);
        return py::make_tuple(retries.timeout, retries.retries);
      },
      py::arg("timeout_s"));
  add_host_writer(module);
}

}  // namespace hybrid_ep::bindings
