// `hybrid_ep._C`: the part of the extension that needs nothing but a C++ compiler.
#include "bindings/bindings.h"
#include "build_info.h"
#include "calls/judge.h"

PYBIND11_MODULE(_C, module) {
  module.attr("version") = HYBRID_EP_VERSION;
  module.attr("compiler") = __VERSION__;
  module.attr("built") = HYBRID_EP_BUILT;
  module.attr("left_out") = HYBRID_EP_LEFT_OUT;
  hybrid_ep::calls::add_judge(module);
  hybrid_ep::bindings::add_layout(module);
  hybrid_ep::bindings::add_process_exit(module);
  hybrid_ep::bindings::add_sizes(module);
  hybrid_ep::bindings::add_topology(module);
  hybrid_ep::bindings::add_transport(module);
}
