// Client ids from Python.
#pragma once

#include <pybind11/pybind11.h>

#include "clients/client_index.h"

namespace fedcore::bindings {

namespace py = pybind11;

// A client's id from Python: exactly an int in 0 .. 2^64 - 1 or a str of Unicode characters. The Python code converts
// other ids, and rejects invalid ones, such as a str with lone surrogates, which no file could hold.
class ReadId {
  public:
    explicit ReadId(py::handle object) {
        if (PyLong_CheckExact(object.ptr())) {
            id_.number = PyLong_AsUnsignedLongLong(object.ptr());
            valid_ = id_.number != static_cast<std::uint64_t>(-1) || PyErr_Occurred() == nullptr;
            if (!valid_) PyErr_Clear();
        } else if (PyUnicode_CheckExact(object.ptr())) {
            Py_ssize_t size = 0;
            const char* bytes = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
            valid_ = bytes != nullptr;
            if (!valid_) {
                if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw py::error_already_set();
                PyErr_Clear();
                return;
            }
            id_.is_text = true;
            id_.text = {bytes, static_cast<std::size_t>(size)};
        }
    }
    explicit operator bool() const { return valid_; }
    const ClientId& operator*() const { return id_; }

  private:
    ClientId id_{false, 0, {}};
    bool valid_ = false;
};

// kNone if no registered client has the id.
inline std::int64_t number_of(const ClientIndex& index, py::handle object) {
    const ReadId id(object);
    return id ? index.number(*id) : kNone;
}

}  // namespace fedcore::bindings
