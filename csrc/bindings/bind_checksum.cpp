#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/native_call.h"
#include "store/checksum.h"

namespace fedcore::bindings {
namespace {

// The bytes of whatever exports the buffer protocol, held until it goes out of scope, which must be with the GIL held.
class Bytes {
  public:
    Bytes(py::handle object, const char* name) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
        const py::error_already_set error;
        const std::string due = std::string(name) + ": expected contiguous bytes, ";
        if (PyObject_CheckBuffer(object.ptr()) != 0)
            raise("ArrayError", due + "whose export says: " + std::string(py::str(error.value())));
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

py::array_t<std::uint64_t> checksum(const py::object& buffer, std::int64_t block_bytes) {
    const Bytes bytes(buffer, "buffer");
    py::array_t<std::uint64_t> out(bytes.size() / block_bytes + (bytes.size() % block_bytes != 0));
    std::uint64_t* sums = out.mutable_data();
    const NativeCall call;  // reads the buffer once: milliseconds
    fedcore::checksum(bytes.data(), bytes.size(), block_bytes, sums);
    return out;
}

}  // namespace

void bind_checksum(py::module_& module) {
    module.def("checksum", &checksum, py::arg("buffer"), py::arg("block_bytes"));
}

}  // namespace fedcore::bindings
