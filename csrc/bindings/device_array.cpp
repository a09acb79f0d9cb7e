#include "bindings/device_array.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <utility>

#include "bindings/arrays.h"
#include "bindings/without_gil.h"
#include "cuda/call.h"

namespace fedcore::bindings {
namespace {

constexpr DeviceDtype kDeviceDtypes[] = {{"float32", 4, dlpack::kFloat},   {"float64", 8, dlpack::kFloat},
                                         {"float16", 2, dlpack::kFloat},   {"uint8", 1, dlpack::kUnsigned},
                                         {"uint16", 2, dlpack::kUnsigned}, {"uint64", 8, dlpack::kUnsigned},
                                         {"int8", 1, dlpack::kInt},        {"int64", 8, dlpack::kInt}};

const DeviceDtype* device_dtype(const py::object& dtype) {
    const std::string name = py::str(py::handle(py::dtype::from_args(dtype)));
    for (const DeviceDtype& known : kDeviceDtypes)
        if (name == known.name) return &known;
    raise("DtypeError",
          "dtype: expected one of a device's arrays (float32, float64, float16, uint8, uint16, "
          "uint64, int8, int64), got " +
              name);
}

std::shared_ptr<cuda::Memory> memory_of(std::int64_t n, const DeviceDtype& dtype, int device) {
    check_range("n", n, 0, INT64_MAX / 8);
    const WithoutGil scope;  // the first use of a device loads its kernels, which takes a second
    return std::make_shared<cuda::Memory>(cuda::Device::get(device), static_cast<std::size_t>(n * dtype.itemsize));
}

// A tensor that another library holds, and its memory.
struct Exported {
    explicit Exported(std::shared_ptr<cuda::Memory> of) : memory(std::move(of)) { ++memory->shown; }
    ~Exported() { --memory->shown; }
    Exported(const Exported&) = delete;
    Exported& operator=(const Exported&) = delete;

    dlpack::ManagedVersioned versioned{};
    dlpack::Managed managed{};
    std::shared_ptr<cuda::Memory> memory;
    std::int64_t shape[1], strides[1] = {1};
};

// The capsule's destructor. A used capsule has another name; its consumer releases the tensor.
void end_capsule(PyObject* capsule) {
    for (const char* name : {"dltensor", "dltensor_versioned"})
        if (PyCapsule_IsValid(capsule, name) != 0) delete static_cast<Exported*>(PyCapsule_GetContext(capsule));
}

}  // namespace

DeviceArray::DeviceArray(std::int64_t n, const py::object& dtype, int device) : n_(n), dtype_(device_dtype(dtype)) {
    memory_ = memory_of(n, *dtype_, device);
}

void DeviceArray::require_writeable(const char* what) const {
    if (!writeable) raise("ArrayError", std::string(what) + ": must be writable, got a read-only array");
}

DeviceArray DeviceArray::part(const py::slice& which) const {
    py::ssize_t start = 0, stop = 0, step = 0, count = 0;
    if (!which.compute(n_, &start, &stop, &step, &count)) throw py::error_already_set();
    if (step != 1) raise("ArrayError", "a part of a device's array: expected step 1, got " + std::to_string(step));
    DeviceArray part = *this;
    part.offset_ += static_cast<std::size_t>(start * dtype_->itemsize);
    part.n_ = count;
    return part;
}

DeviceArray DeviceArray::view(const py::object& dtype) const {
    DeviceArray seen = *this;
    seen.dtype_ = device_dtype(dtype);
    const auto itemsize = static_cast<std::size_t>(seen.dtype_->itemsize);
    if (bytes() % seen.dtype_->itemsize != 0 || offset_ % itemsize != 0)
        raise("DtypeError",
              "dtype: its items must fill " + std::to_string(bytes()) + " bytes, got " + seen.dtype_->name);
    seen.n_ = bytes() / seen.dtype_->itemsize;
    return seen;
}

// Runs body(call) as one call on the device, which waits for the streams of the memory's other users.
template <class Body>
void DeviceArray::run(const CallersStreams& streams, const Body& body) const {
    std::vector<cuda::Stream> others = streams.others(), gone;
    others.insert(others.end(), memory_->users.begin(), memory_->users.end());
    {
        const WithoutGil scope;  // milliseconds for a large model
        cuda::Call call(memory_->device, streams.mine(), others);
        gone = call.gone();
        body(call.stream());
    }
    for (const cuda::Stream stream : gone) memory_->no_longer_used_by(stream);
    memory_->forget_users();
}

void DeviceArray::fill_with_zeros() {
    require_writeable("fill_with_zeros");
    if (bytes() == 0) return;
    const auto count = static_cast<std::size_t>(bytes());
    run(CallersStreams(), [&](cuda::Stream stream) {
        cuda::check(cuda::driver().cuMemsetD8Async(address(), 0, count, stream), "writing zeros on the GPU");
    });
}

void DeviceArray::copy_from(const py::object& source) {
    require_writeable("copy_from");
    Arrays arrays(Devices::any);
    const AnySpan from = arrays.input(source, {"source"}, Dtypes{dtype_->name}, n_, Axes::any);
    if (bytes() == 0) return;
    const bool here = !arrays.on_device();
    if (!here && arrays.device() != device())
        raise("ArrayError", "source: expected an array on cuda:" + std::to_string(device()) +
                                ", got one on cuda:" + std::to_string(arrays.device()));
    const auto count = static_cast<std::size_t>(bytes());
    run(arrays.streams(), [&](cuda::Stream stream) {
        const cuda::Driver& cuda = cuda::driver();
        if (!here) {
            const auto there = reinterpret_cast<cuda::Address>(from.data);
            cuda::check(cuda.cuMemcpyDtoDAsync(address(), there, count, stream), "copying on the GPU");
            return;
        }
        cuda::check(cuda.cuMemcpyHtoDAsync(address(), from.data, count, stream), "copying to the GPU");
        cuda::check(cuda.cuStreamSynchronize(stream), "copying to the GPU");  // the source may be pinned memory
    });
}

void DeviceArray::copy_to(const py::object& out) const {
    Arrays arrays;
    const AnySpan to = arrays.output(out, {"out"}, Dtypes{dtype_->name}, n_, kNothing, Axes::any);
    if (bytes() == 0) return;
    const auto count = static_cast<std::size_t>(bytes());
    run(CallersStreams(), [&](cuda::Stream stream) {
        cuda::check(cuda::driver().cuMemcpyDtoHAsync(to.data, address(), count, stream), "copying from the GPU");
        cuda::check(cuda::driver().cuStreamSynchronize(stream), "copying from the GPU");
    });
}

py::array DeviceArray::to_host() const {
    const py::array out(py::dtype(dtype_->name), n_);
    copy_to(out);
    return out;
}

py::capsule DeviceArray::to_dlpack(const std::optional<std::intptr_t>& stream, const py::object& max_version,
                                   const py::object& dl_device, const py::object& copy) const {
    constexpr std::intptr_t kNoWaiting = -1;
    if (stream.value_or(1) < kNoWaiting || stream.value_or(1) == 0)
        raise("RangeError", "stream: expected None, -1 or the number of a stream, got " + std::to_string(*stream));
    if (!copy.is_none() && copy.cast<bool>())
        raise("ArrayError", "copy: must be None or False, since an export makes no copy, got True");
    if (!dl_device.is_none() && !dl_device.equal(py::make_tuple(dlpack::kCuda, device())))
        raise("ArrayError", "dl_device: expected None or (2, " + std::to_string(device()) + "), got " +
                                std::string(py::str(dl_device)) + "; to_host() copies it");
    const bool versioned = !max_version.is_none() && max_version.cast<py::tuple>()[0].cast<int>() >= 1;
    if (!versioned && !writeable) {
        PyErr_SetString(PyExc_BufferError,
                        "a read-only array of a device: expected a library of DLPack 1, which can "
                        "record that it is read-only");
        throw py::error_already_set();
    }
    if (stream.value_or(1) != kNoWaiting) {
        const cuda::Stream theirs = stream_of(stream.value_or(1));
        memory_->used_by(theirs);
        const WithoutGil scope;
        const std::lock_guard<std::mutex> turn(memory_->device.turn);
        const cuda::Current current(memory_->device);
        memory_->device.precede(theirs);
    }
    auto exported = std::make_unique<Exported>(memory_);
    exported->shape[0] = n_;
    const dlpack::Tensor tensor{n_ == 0 ? nullptr : data(),
                                dlpack::kCuda,
                                device(),
                                1,
                                dtype_->code,
                                static_cast<std::uint8_t>(8 * dtype_->itemsize),
                                1,
                                exported->shape,
                                exported->strides,
                                0};
    void* shown = nullptr;
    if (versioned) {
        exported->versioned = {1,
                               0,
                               exported.get(),
                               [](dlpack::ManagedVersioned* used) { delete static_cast<Exported*>(used->context); },
                               writeable ? 0 : dlpack::kReadOnly,
                               tensor};
        shown = &exported->versioned;
    } else {
        exported->managed = {tensor, exported.get(),
                             [](dlpack::Managed* used) { delete static_cast<Exported*>(used->context); }};
        shown = &exported->managed;
    }
    PyObject* const capsule = PyCapsule_New(shown, versioned ? "dltensor_versioned" : "dltensor", &end_capsule);
    if (capsule == nullptr || PyCapsule_SetContext(capsule, exported.get()) != 0) throw py::error_already_set();
    exported.release();
    return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace fedcore::bindings
