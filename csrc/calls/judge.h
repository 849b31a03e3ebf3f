// The one judge of tensor arguments: hybrid_ep.core.checks hands these functions out. A call that passes costs well
// under a microsecond, so that every call can afford them.
#pragma once

#include <pybind11/pybind11.h>

namespace hybrid_ep::calls {

void add_judge(pybind11::module_& module);

}  // namespace hybrid_ep::calls
