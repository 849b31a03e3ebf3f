// Threads that return from C++ while the interpreter is finalised.
//
// Before version 3.14, Python ends such a thread by pthread_exit, which unwinds its stack. A C++ frame that may not
// throw, like the end of a gil_scoped_release, calls std::terminate then, and the whole process would abort. The thread
// sleeps instead, as it does in Python 3.14; the process ends without it.
#include <pthread.h>
#include <unistd.h>

#include <exception>

#include "bindings/bindings.h"

namespace hybrid_ep::bindings {
namespace {

pthread_t exiting_thread;
std::terminate_handler earlier_handler;

[[noreturn]] void sleep_unless_error() {
  bool is_unwound = !std::current_exception() && !pthread_equal(pthread_self(), exiting_thread);
  while (is_unwound) pause();
  earlier_handler();
  __builtin_abort();
}

void park_threads() {
  exiting_thread = pthread_self();
  earlier_handler = std::set_terminate(sleep_unless_error);
}

}  // namespace

void add_process_exit(pybind11::module_& module) { module.def("park_threads", park_threads); }

}  // namespace hybrid_ep::bindings
