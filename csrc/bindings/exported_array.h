// A caller's array, as its exporter describes it: NumPy, DLPack, the buffer protocol or the CUDA array interface.
// Rejects descriptions that no array can have; arrays.h checks whether the array fits the call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/callers_device.h"
#include "bindings/dlpack_abi.h"
#include "cuda/device.h"

namespace fedcore::bindings {

namespace py = pybind11;

// Raises fedcore.errors.<kind>(message).
[[noreturn]] void raise(const char* kind, const std::string& message);

// Raises RangeError unless low <= value <= high.
void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high = INT64_MAX);

// An argument's name in an error: `weights`, `rows[3]`, `models[3][1]`, or `rows[3].codes`.
struct Name {
    Name(const char* called, std::int64_t i = -1, std::int64_t j = -1, const char* of = "")
        : argument(called), index(i), second(j), part(of) {}
    std::string text() const;

    const char* argument;
    std::int64_t index, second;
    const char* part;
};

struct ExportedArray {
    void* data = nullptr;
    std::string dtype;  // as NumPy spells it, or another name for types that NumPy lacks
    std::int64_t itemsize = 0;
    std::vector<std::int64_t> shape;
    bool contiguous = true;
    bool writable = true;
    int device = kHost;
    cuda::Memory* memory = nullptr;  // if it is one of this package's on a device
};

struct GiveBack {
    void operator()(dlpack::ManagedVersioned* managed) const {
        if (managed->deleter != nullptr) managed->deleter(managed);
    }
};

// Owners of the arrays' memory.
struct Keep {
    std::vector<py::object> objects;
    std::vector<py::buffer_info> buffers;
    std::vector<std::unique_ptr<dlpack::ManagedVersioned, GiveBack>> tensors;
};

// Raises ArrayError or ShapeError if object is no array in CPU memory. With streams, it may also be on a device, and
// the call's stream may use it from now on.
ExportedArray open_array(py::handle object, Name name, Keep& keep, CallersStreams* streams);

// Whether all numbers of a tensor of torch are in its storage, which may be freed, shrunk or absent.
bool has_memory(py::handle tensor);
// The same for a contiguous tensor with these bytes.
bool has_memory(py::handle tensor, const void* first, std::int64_t bytes);

// The present address of a NumPy array's elements. share_memory_() of torch moves those of a tensor to other memory.
void* address_of(py::handle object);

// NumPy's view of a tensor of torch's own class in CPU memory; null for another object, or if NumPy lacks the dtype.
py::object view_of_torch(py::handle tensor, bool kept = true);

// The bits of a torch tensor of bfloat16 in host memory, as a NumPy array of int16; null for any other object.
py::object bits_of_torch(py::handle tensor);

// `float32[3, 4]`
std::string text(const std::string& dtype, const std::vector<std::int64_t>& shape);

}  // namespace fedcore::bindings
