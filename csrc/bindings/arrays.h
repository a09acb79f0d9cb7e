// Callers' arrays, checked once: NumPy, DLPack (torch, JAX, CuPy), the buffer protocol, and the CUDA array interface.
// Nothing is copied. After these checks the kernels rely on every pointer and length.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/callers_device.h"
#include "bindings/exported_array.h"

namespace fedcore::bindings {

constexpr std::int64_t kAnyLength = -1;
constexpr std::size_t kNothing = static_cast<std::size_t>(-1);

template <class T>
struct Span {
    T* data;
    std::int64_t n;
    std::size_t number;  // of the array in its call
};

// An array of one of several dtypes; `dtype` is the index of the array's dtype.
struct AnySpan {
    void* data;
    std::int64_t n;
    std::size_t dtype;
    std::int64_t bytes;
    std::size_t number = kNothing;
};

// dtypes as NumPy spells them, "bfloat16" (of torch, or ml_dtypes) besides.
using Dtypes = std::vector<const char*>;

// Whether an array must have one axis, or may have any axes, and is read as the vector of its elements in C order.
enum class Axes { one, any };

// Whether the vectors of a call are in host memory, or may be in one device's memory, all of them on the same device.
enum class Devices { none, any };

// The arrays of one call, held during this object's lifetime; its destructor needs the GIL. Read all inputs before the
// outputs, so that each output can be compared with every input.
class Arrays {
  public:
    explicit Arrays(Devices devices = Devices::none) : devices_(devices) {}

    // The device of the vectors so far: kHost, or an ordinal.
    int device() const { return device_ == kNowhere ? kHost : device_; }
    bool on_device() const { return device() != kHost; }
    const CallersStreams& streams() const { return streams_; }
    // The call has waited for its arrays' other users.
    void forget_users(const std::vector<cuda::Stream>& gone);

    // Reserves memory for the number of arrays, because growing vectors would cost a small call more than the arrays.
    void reserve(std::size_t count);

    // Arrays that the call itself reads, such as weights or keys, always in host memory.
    template <class T>
    const T* numbers(py::handle object, Name name, std::int64_t n);
    AnySpan numbers(py::handle object, Name name, const Dtypes& due, std::int64_t n, Axes axes = Axes::one);
    // Numbers that the call writes, likewise; of any shape.
    double* written_numbers(py::handle object, Name name, std::int64_t n);

    // T is float, double or std::int64_t, the required dtype. n: the required length.
    template <class T>
    Span<const T> input(py::handle object, Name name, std::int64_t n = kAnyLength, Axes axes = Axes::one);

    // May be exactly the input of number `replaces`, and overlaps nothing else that this call reads or writes.
    template <class T>
    Span<T> output(py::handle object, Name name, std::int64_t n, std::size_t replaces = kNothing,
                   Axes axes = Axes::one);

    // The same for arrays of one of several dtypes.
    AnySpan input(py::handle object, Name name, const Dtypes& due, std::int64_t n = kAnyLength, Axes axes = Axes::one);
    AnySpan output(py::handle object, Name name, const Dtypes& due, std::int64_t n, std::size_t replaces = kNothing,
                   Axes axes = Axes::one);

  private:
    struct Region {
        const char* begin;
        const char* end;
        Name name;
    };
    static constexpr int kNowhere = -2;
    AnySpan open(py::handle object, Name name, bool writable, const Dtypes& due, Axes axes, std::int64_t n,
                 Devices devices);
    void lie_on(int device, Name name);
    std::size_t add_input(const void* data, std::int64_t bytes, Name name);
    std::size_t add_output(const void* data, std::int64_t bytes, Name name, std::size_t replaces);

    Devices devices_;
    int device_ = kNowhere;
    Name first_{""};  // of the first array that determined the device
    CallersStreams streams_;
    std::vector<cuda::Memory*> shown_;
    Keep keep_;
    std::vector<Region> regions_;
};

// Whether an object is an array of NumPy's own class, of this shape, aligned, in C order and in native byte order. An
// array of a derived class may be masked.
bool is_plain_array(py::handle object, const std::vector<py::ssize_t>& shape);

// The extents of a shape and the number of its elements; -1 for an object that is no tuple of plain ints, or for more
// elements than memory can hold.
using Extents = std::vector<py::ssize_t>;
std::pair<Extents, std::int64_t> extents_of(const py::handle& shape);

// A vector over a tensor of n elements, an array of NumPy's own class or a tensor of torch's in CPU memory, of this
// shape and dtype and in C order; null for any other object.
py::object vector_over(py::object tensor, const Extents& shape, std::int64_t n, py::handle dtype);

// Whether an array's chain of bases ends in a bytes object, so that its memory is immutable.
bool is_immutable(py::handle array);

// The length of an array of one axis, on any device.
std::int64_t length(py::handle object, Name name);

// Whether an object is an array of float32, on any device, for functions that take sums of two dtypes.
bool is_float32(py::handle object, Name name);

// The current items of a caller's list or tuple of exactly k objects (any length if k is kAnyLength). Every binding
// reads each of its lists once, with this function: the list may change whenever Python code runs, for example in an
// export.
py::tuple items_of(py::handle object, Name name, std::int64_t k = kAnyLength);

}  // namespace fedcore::bindings
