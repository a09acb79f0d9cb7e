#include <pybind11/numpy.h>

#include "bindings/bind.h"
#include "bindings/bytes.h"
#include "bindings/without_gil.h"
#include "store/checksum.h"

namespace fedcore::bindings {
namespace {

py::array_t<std::uint64_t> checksum(const py::object& buffer, std::int64_t block_bytes) {
    check_range("block_bytes", block_bytes, 1);
    const Bytes bytes(buffer, {"buffer"});
    py::array_t<std::uint64_t> out(bytes.size() / block_bytes + (bytes.size() % block_bytes != 0));
    std::uint64_t* sums = out.mutable_data();
    const WithoutGil scope;  // reads the buffer once: milliseconds
    fedcore::checksum(bytes.data(), bytes.size(), block_bytes, sums);
    return out;
}

}  // namespace

void bind_checksum(py::module_& module) {
    module.def("checksum", &checksum, py::arg("buffer"), py::arg("block_bytes"));
}

}  // namespace fedcore::bindings
