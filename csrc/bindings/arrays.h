// Callers' arrays, checked once: NumPy, whatever exports DLPack (torch, JAX, CuPy), the buffer protocol, and the CUDA
// array interface. Nothing is copied; behind these checks the kernels trust every pointer and length.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
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

// An array of one of several dtypes; `dtype` is the index of the one that came.
struct AnySpan {
    void* data;
    std::int64_t n;
    std::size_t dtype;
    std::int64_t bytes;
    std::size_t number = kNothing;
};

// dtypes as NumPy spells them, "bfloat16" (of torch, or ml_dtypes) besides.
using Dtypes = std::vector<const char*>;

// Whether an array must have one axis, or may have any, and is read as the vector of its elements in C order.
enum class Axes { one, any };

// Whether the vectors of a call lie in the host's memory, or may lie in a device's, all of them in one's.
enum class Devices { none, any };

// The arrays of one call. It keeps them alive until it goes out of scope, which must be with the GIL held;
// ask for all inputs before the outputs, so that an output can be held against every input.
class Arrays {
  public:
    explicit Arrays(Devices devices = Devices::none) : devices_(devices) {}

    // Where the vectors lie that were asked for so far: kHost, or the ordinal of a device.
    int device() const { return device_ == kNowhere ? kHost : device_; }
    bool on_device() const { return device() != kHost; }
    const CallersStreams& streams() const { return streams_; }
    // A call has waited for those to whom its arrays were shown.
    void forget_users(const std::vector<cuda::Stream>& gone);

    // So many arrays will come: a vector that grows costs a small call more than they do.
    void reserve(std::size_t count);

    // What the call itself reads, and which lies in the host's memory wherever vectors lie: a weight or key a client.
    template <class T>
    const T* numbers(py::handle object, Name name, std::int64_t n);
    AnySpan numbers(py::handle object, Name name, const Dtypes& due, std::int64_t n, Axes axes = Axes::one);
    // Numbers that the call writes, likewise; of any shape.
    double* written_numbers(py::handle object, Name name, std::int64_t n);

    // T is float, double or std::int64_t: the dtype that is due. n: the length that is due.
    template <class T>
    Span<const T> input(py::handle object, Name name, std::int64_t n = kAnyLength, Axes axes = Axes::one);

    // May be exactly the input of number `replaces`, and overlaps nothing else that this call reads or writes.
    template <class T>
    Span<T> output(py::handle object, Name name, std::int64_t n, std::size_t replaces = kNothing,
                   Axes axes = Axes::one);

    // The same where any of several dtypes will do.
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
    Name first_{""};  // of the array that lay somewhere first
    CallersStreams streams_;
    std::vector<cuda::Memory*> shown_;
    Keep keep_;
    std::vector<Region> regions_;
};

// Whether it is a NumPy vector of n float32 that needs no further look.
bool is_plain_vector(py::handle object, std::int64_t n);

// The length of an array of one axis, wherever it lies.
std::int64_t length(py::handle object, Name name);

// Whether it is an array of float32, wherever it lies, for functions that take sums of two dtypes.
bool is_float32(py::handle object, Name name);

// What a caller's list or tuple of exactly k objects (any length if k is kAnyLength) holds now. Every binding takes
// each of its lists by this, once: a list itself may have another length after any line that runs Python, as an export
// does.
py::tuple items_of(py::handle object, Name name, std::int64_t k = kAnyLength);

}  // namespace fedcore::bindings
