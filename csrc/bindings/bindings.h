// Each concept of `_C` has one file here that adds its functions to the module; sizes.cpp and transport.cpp are in
// `_cuda` as well.
#pragma once

#include <pybind11/pybind11.h>

namespace hybrid_ep::bindings {

void add_layout(pybind11::module_& module);
void add_process_exit(pybind11::module_& module);
void add_sizes(pybind11::module_& module);
void add_topology(pybind11::module_& module);
void add_transport(pybind11::module_& module);

}  // namespace hybrid_ep::bindings
