// The index of registered clients as a Python object, for one thread at a time: the one with the GIL or, in a Python
// without a GIL, with an object's lock.
#pragma once

#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>

#include "clients/client_index.h"

namespace fedcore::bindings {

namespace py = pybind11;

struct Registered : ClientIndex {
    using ClientIndex::ClientIndex;
    py::list lock;  // used only for its lock
};

// The scope in which code uses an index. No Python code may run in it, so that no other thread enters. Scopes must not
// be nested, because the end of the inner one would admit other threads.
class OneThread {
  public:
    explicit OneThread(const Registered& index) : section_(index.lock) {}

  private:
    py::scoped_critical_section section_;
};

}  // namespace fedcore::bindings
