#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <utility>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/device_array.h"
#include "bindings/without_gil.h"
#include "cuda/call.h"
#include "cuda/copy_stream.h"

namespace fedcore::bindings {

std::optional<cuda::Stream>& chosen_stream() {
    thread_local std::optional<cuda::Stream> stream;
    return stream;
}

namespace {

// Copies beside the kernels, and the arrays that they read or write: kept until the copy is done, or until later work
// is ordered after it.
struct Copies {
    cuda::CopyStream stream;
    std::vector<std::shared_ptr<cuda::Memory>> uploaded;
    std::vector<py::object> pinned;  // the device reads these directly
    struct Download {
        std::shared_ptr<cuda::Memory> from;
        py::object to;
    };
    std::vector<Download> downloads;

    Copies(int device, std::int64_t buffer_bytes)
        : stream(cuda::Device::get(device), static_cast<std::size_t>(buffer_bytes)) {}
    ~Copies() { let_go(downloads); }

    void let_go(std::vector<Download>& done) const {
        for (const Download& download : done) download.from->no_longer_used_by(stream.stream());
        done.clear();
    }
};

// An array's memory on the host, which the device reads and writes directly during this object's lifetime.
struct PinnedArray {
    py::object array;
    cuda::PinnedRegion region;
};

std::unique_ptr<PinnedArray> pin(const py::object& array, int device) {
    Arrays arrays;
    const AnySpan memory = arrays.output(array, {"array"}, Dtypes{"uint8"}, kAnyLength);
    return std::unique_ptr<PinnedArray>(
        new PinnedArray{array, {cuda::Device::get(device), memory.data, static_cast<std::size_t>(memory.bytes)}});
}

std::unique_ptr<Copies> make_copies(int device, std::int64_t buffer_bytes) {
    check_range("buffer_bytes", buffer_bytes, 1);
    return std::make_unique<Copies>(device, buffer_bytes);
}

void require_device(const Copies& copies, const DeviceArray& array, const char* name) {
    if (array.device() != copies.stream.device.ordinal)
        raise("ArrayError", std::string(name) +
                                ": expected an array on cuda:" + std::to_string(copies.stream.device.ordinal) +
                                ", got one on cuda:" + std::to_string(array.device()));
}

void begin_upload(Copies& copies, const py::object& source, const DeviceArray& to, bool pinned) {
    require_device(copies, to, "to");
    if (!to.writeable) raise("ArrayError", "to: must be writable, got a read-only array");
    Arrays arrays;
    const AnySpan here = arrays.input(source, {"source"}, Dtypes{to.dtype().name}, to.n(), Axes::any);
    const std::vector<cuda::Stream> users = to.memory().users;
    if (pinned) copies.pinned.push_back(source);
    {
        const WithoutGil scope;  // milliseconds for a large row
        copies.stream.upload(static_cast<const char*>(here.data), pinned, to.memory(), to.offset(),
                             static_cast<std::size_t>(to.bytes()), users);
    }
    copies.uploaded.push_back(to.held());
}

void begin_download(Copies& copies, const DeviceArray& source, const py::object& out, bool pinned) {
    require_device(copies, source, "source");
    Arrays arrays;
    const AnySpan here = arrays.output(out, {"out"}, Dtypes{source.dtype().name}, source.n(), kNothing, Axes::any);
    const std::vector<cuda::Stream> users = source.memory().users;
    copies.downloads.push_back({source.held(), out});
    source.memory().used_by(copies.stream.stream());
    const WithoutGil scope;  // milliseconds for a large row
    copies.stream.download(source.memory(), source.offset(), static_cast<char*>(here.data), pinned,
                           static_cast<std::size_t>(source.bytes()), users);
}

// Kernel calls, and other uses of the memory, run after the uploads.
void join_copies(Copies& copies) {
    const auto uploaded = std::exchange(copies.uploaded, {});
    const WithoutGil scope;
    copies.stream.join();
}

void wait_for_copies(Copies& copies) {
    auto downloads = std::exchange(copies.downloads, {});
    const auto pinned = std::exchange(copies.pinned, {});
    {
        const WithoutGil scope;
        copies.stream.wait();
    }
    copies.let_go(downloads);
}

// Later calls run after the work that these arrays' libraries have queued so far, on their current streams.
void await_arrays(const py::object& arrays) {
    Keep keep;
    for (const py::handle array : items_of(arrays, "arrays")) {
        CallersStreams streams;
        const ExportedArray found = open_array(array, {"arrays"}, keep, &streams);
        if (found.device == kHost) continue;
        std::vector<cuda::Stream> theirs = streams.others();
        if (found.memory != nullptr)
            theirs.insert(theirs.end(), found.memory->users.begin(), found.memory->users.end());
        if (theirs.empty()) continue;
        const WithoutGil scope;
        cuda::Call(cuda::Device::get(found.device), streams.mine(), theirs);
    }
}

py::typing::Optional<py::str> cuda_reason() {
    try {
        const WithoutGil scope;
        cuda::Device::get(0);
        return py::none();
    } catch (const cuda::DeviceFailure& failure) {
        return py::str(failure.what());
    }
}

py::typing::List<py::typing::Tuple<py::str, int, std::int64_t>> cuda_devices() {
    int count = 0;
    cuda::check(cuda::driver().cuDeviceGetCount(&count), "counting GPUs");
    py::list listed;
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        const cuda::Device& device = cuda::Device::get(ordinal);
        listed.append(py::make_tuple(device.name, device.capability, device.memory));
    }
    return listed;
}

py::typing::Optional<py::int_> choose_stream(const std::optional<std::intptr_t>& number) {
    std::optional<cuda::Stream>& chosen = chosen_stream();
    const py::object before = chosen.has_value() ? py::object(py::int_(stream_number(*chosen))) : py::none();
    if (number.has_value())
        chosen = stream_of(*number);
    else
        chosen.reset();
    return before;
}

void translate_failure(std::exception_ptr raised) {
    const auto set = [](const char* kind, const char* message) {
        const py::object type = py::module_::import("fedcore.errors").attr(kind);
        PyErr_SetString(type.ptr(), message);
    };
    try {
        if (raised) std::rethrow_exception(raised);
    } catch (const cuda::OutOfDeviceMemory& failure) {
        set("DeviceMemoryError", failure.what());
    } catch (const cuda::DeviceFailure& failure) {
        set("DeviceError", failure.what());
    }
}

}  // namespace

void bind_devices(py::module_& module) {
    py::register_local_exception_translator(&translate_failure);
    py::class_<DeviceArray>(module, "DeviceArray")
        .def(py::init<std::int64_t, const py::object&, int>(), py::arg("n"), py::arg("dtype"), py::arg("device") = 0)
        .def_property_readonly("dtype", [](const DeviceArray& array) { return py::dtype(array.dtype().name); })
        .def_property_readonly("size", &DeviceArray::n)
        .def_property_readonly("nbytes", &DeviceArray::bytes)
        .def_property_readonly("ndim", [](const DeviceArray&) { return 1; })
        .def_property_readonly("shape", [](const DeviceArray& array) { return py::make_tuple(array.n()); })
        .def_property_readonly("device", &DeviceArray::device)
        .def_property_readonly("holders", &DeviceArray::holders)
        .def_property_readonly("address",
                               [](const DeviceArray& array) { return reinterpret_cast<std::uintptr_t>(array.data()); })
        .def_property(
            "writeable", [](const DeviceArray& array) { return array.writeable; },
            [](DeviceArray& array, bool writeable) {
                if (writeable && !array.writeable)
                    raise("ArrayError", "writeable: expected False, because the array is read-only");
                array.writeable = writeable;
            })
        .def("__len__", &DeviceArray::n)
        .def("__getitem__", &DeviceArray::part, py::arg("part"))
        .def(
            "__getitem__",
            [](const DeviceArray&, const py::object& part) -> DeviceArray {
                raise("ArrayError", "part: expected a slice, as in x[2:5], got " + std::string(py::str(part)) +
                                        "; to_host() copies the array to where its elements can be read");
            },
            py::arg("part"))
        .def("view", &DeviceArray::view, py::arg("dtype"))
        .def("fill_with_zeros", &DeviceArray::fill_with_zeros)
        .def("copy_from", &DeviceArray::copy_from, py::arg("source"))
        .def("copy_to", &DeviceArray::copy_to, py::arg("out"))
        .def("to_host", &DeviceArray::to_host)
        .def("__array__",
             [](const DeviceArray&, const py::Args<py::object>&, const py::KWArgs<py::object>&) -> py::array {
                 raise("ArrayError", "expected an array in CPU memory, got one on a CUDA device; to_host() copies it");
             })
        .def("__dlpack_device__",
             [](const DeviceArray& array) { return py::make_tuple(dlpack::kCuda, array.device()); })
        .def("__dlpack__", &DeviceArray::to_dlpack, py::kw_only(), py::arg("stream") = py::none(),
             py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
        .def("__repr__", [](const DeviceArray& array) {
            return text(array.dtype().name, {array.n()}) + " on cuda:" + std::to_string(array.device());
        });
    py::class_<Copies>(module, "CopyStream")
        .def(py::init(&make_copies), py::arg("device") = 0, py::arg("buffer_bytes") = std::int64_t{64} << 20)
        .def("upload", &begin_upload, py::arg("source"), py::arg("to"), py::arg("pinned") = false)
        .def("download", &begin_download, py::arg("source"), py::arg("out"), py::arg("pinned") = false)
        .def("join", &join_copies)
        .def("wait", &wait_for_copies);
    py::class_<PinnedArray>(module, "PinnedArray").def(py::init(&pin), py::arg("array"), py::arg("device") = 0);
    module.def("await_arrays", &await_arrays, py::arg("arrays"));
    module.def("cuda_reason", &cuda_reason);
    module.def("cuda_devices", &cuda_devices);
    module.def("choose_stream", &choose_stream, py::arg("stream"));
}

}  // namespace fedcore::bindings
