// The index of registered clients as Python holds it, which one thread uses at a time: one that has the GIL or, where
// Python has none, the lock of an object.
#pragma once

#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>

#include "clients/client_index.h"

namespace fedcore::bindings {

namespace py = pybind11;

struct Registered : ClientIndex {
    using ClientIndex::ClientIndex;
    py::list lock;  // nothing but an object that has one
};

// The scope of whoever uses an index, in which no Python code runs, for nobody else comes in meanwhile; and none is
// opened within another, for the inner one would let others in.
class OneThread {
  public:
    explicit OneThread(const Registered& index) : section_(index.lock) {}

  private:
    py::scoped_critical_section section_;
};

}  // namespace fedcore::bindings
