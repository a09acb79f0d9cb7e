// A caller's bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings/exported_array.h"

namespace fedcore::bindings {

// The bytes of an object with the buffer protocol, held during this object's lifetime; its destructor needs the GIL.
class Bytes {
  public:
    Bytes(py::handle object, Name name) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
        const py::error_already_set error;
        const std::string due = name.text() + ": expected contiguous bytes, ";
        if (PyObject_CheckBuffer(object.ptr()) != 0)
            raise("ArrayError", due + "but its export failed: " + std::string(py::str(error.value())));
        raise("ArrayError", due + "got " + std::string(py::str(py::type::of(object).attr("__name__"))));
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }

    const void* data() const { return view_.buf; }
    std::int64_t size() const { return view_.len; }

  private:
    Py_buffer view_;
};

}  // namespace fedcore::bindings
