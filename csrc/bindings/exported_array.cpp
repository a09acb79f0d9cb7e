#include "bindings/exported_array.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "bindings/device_array.h"

namespace fedcore::bindings {

void raise(const char* kind, const std::string& message) {
    const py::object type = py::module_::import("fedcore.errors").attr(kind);
    PyErr_SetString(type.ptr(), message.c_str());
    throw py::error_already_set();
}

void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high)
        raise("RangeError", std::string(name) + ": expected an int in " + std::to_string(low) + " .. " +
                                std::to_string(high) + ", got " + std::to_string(value));
}

std::string Name::text() const {
    std::string text = argument;
    for (const std::int64_t i : {index, second})
        if (i >= 0) text += "[" + std::to_string(i) + "]";
    return text + part;
}

namespace {

template <class Strides>
bool c_order(const std::vector<std::int64_t>& shape, const Strides& strides, std::int64_t unit) {
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return true;  // any strides are valid
    for (std::size_t axis = shape.size(); axis-- > 0; unit *= shape[axis])
        if (shape[axis] > 1 && strides[axis] != unit) return false;
    return true;
}

// NumPy's masked arrays: the kernels would ignore the mask, which is another array.
bool is_masked(const py::array& array) {
    if (Py_TYPE(array.ptr()) == py::detail::npy_api::get().PyArray_Type_) return false;
    return py::isinstance(array, py::module_::import("numpy.ma").attr("MaskedArray"));
}

ExportedArray from_numpy(const py::array& array, Name name) {
    if (is_masked(array)) raise("ArrayError", name.text() + ": expected an array without a mask, got a masked one");
    ExportedArray found;
    const py::dtype dtype = array.dtype();
    found.data = address_of(array);
    const bool native = dtype.byteorder() != '>' && dtype.byteorder() != '<';
    const int type = native ? dtype.num() : -1;  // asking NumPy for the name costs as much as a small kernel
    found.dtype = type == py::detail::npy_api::NPY_FLOAT_    ? "float32"
                  : type == py::detail::npy_api::NPY_DOUBLE_ ? "float64"
                  : type == py::detail::npy_api::NPY_USHORT_ ? "uint16"
                  : type == py::detail::npy_api::NPY_BYTE_   ? "int8"
                                                             : std::string(py::str(py::handle(dtype)));
    found.itemsize = dtype.itemsize();
    found.shape.assign(array.shape(), array.shape() + array.ndim());
    found.contiguous = (array.flags() & py::array::c_style) != 0;
    found.writable = array.writeable();
    return found;
}

constexpr int kMostAxes = 64;  // as many as NumPy allows

// The validated shape of another library's tensor.
std::vector<std::int64_t> shape_of(const dlpack::Tensor& tensor, Name name) {
    const bool counted = tensor.ndim >= 0 && tensor.ndim <= kMostAxes && (tensor.ndim == 0 || tensor.shape != nullptr);
    if (!counted)
        raise("ArrayError", name.text() + ": expected a DLPack tensor of 0.." + std::to_string(kMostAxes) +
                                " axes and their sizes, got " + std::to_string(tensor.ndim) + " axes" +
                                (tensor.shape == nullptr ? " without sizes" : ""));
    std::vector<std::int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
    std::int64_t bytes =
        std::max(1, tensor.type_bits * tensor.type_lanes);  // in bits, which is large enough as a bound
    for (const std::int64_t size : shape)
        if (size < 0 || (size != 0 && __builtin_mul_overflow(bytes, size, &bytes)))
            raise("ShapeError", name.text() + ": expected sizes that fit into memory, got " + text("", shape));
    return shape;
}

// The memory in which an array must be, for messages.
const char* memory_due(bool devices) {
    return devices ? "an array in CPU memory or on a CUDA device" : "an array in CPU memory";
}

bool is_cuda(std::int32_t device_type) {
    return device_type == dlpack::kCuda || device_type == dlpack::kManaged;
}

ExportedArray from_tensor(const dlpack::Tensor* tensor, bool writable, Name name, bool devices) {
    ExportedArray found;
    found.writable = writable;
    if (devices && is_cuda(tensor->device_type)) {
        found.device = tensor->device_id;
        if (found.device < 0)
            raise("ArrayError",
                  name.text() + ": expected a CUDA device by its number, got " + std::to_string(found.device));
    } else if (tensor->device_type != dlpack::kCpu && tensor->device_type != dlpack::kPinned)
        raise("ArrayError", name.text() + ": expected " + memory_due(devices) + ", got one on another device");
    const char* code = tensor->type_code == dlpack::kFloat      ? "float"
                       : tensor->type_code == dlpack::kBfloat   ? "bfloat"
                       : tensor->type_code == dlpack::kInt      ? "int"
                       : tensor->type_code == dlpack::kUnsigned ? "uint"
                                                                : "another type of ";
    found.dtype = code + std::to_string(tensor->type_bits);
    found.itemsize = tensor->type_bits * tensor->type_lanes / 8;
    if (tensor->type_lanes != 1) found.dtype += "x" + std::to_string(tensor->type_lanes);
    found.shape = shape_of(*tensor, name);
    found.contiguous = tensor->strides == nullptr || c_order(found.shape, tensor->strides, 1);
    // An array without elements may have no address, but a null pointer would mean a missing array.
    static double nothing;
    const bool empty = std::find(found.shape.begin(), found.shape.end(), 0) != found.shape.end();
    found.data = empty                     ? static_cast<void*>(&nothing)
                 : tensor->data == nullptr ? nullptr
                                           : static_cast<char*>(tensor->data) + tensor->byte_offset;
    return found;
}

ExportedArray from_versioned(const dlpack::ManagedVersioned& managed, bool copied, Name name, bool devices) {
    if (managed.major != 1)
        raise("ArrayError", name.text() + ": expected DLPack 1, got " + std::to_string(managed.major));
    // Writes to a copy would never reach the array.
    return from_tensor(&managed.tensor, !copied && (managed.flags & dlpack::kNotInPlace) == 0, name, devices);
}

ExportedArray from_dlpack(const py::capsule& capsule, Name name, bool devices) {
    const char* kind = capsule.name() == nullptr ? "" : capsule.name();
    if (std::strcmp(kind, "dltensor_versioned") == 0)
        return from_versioned(*capsule.get_pointer<dlpack::ManagedVersioned>(), false, name, devices);
    if (std::strcmp(kind, "dltensor") != 0)
        raise("ArrayError", name.text() + ": expected an unused DLPack capsule, got '" + kind + "'");
    return from_tensor(&capsule.get_pointer<dlpack::Managed>()->tensor, true, name, devices);
}

// A type's export without Python (with Python torch takes 8 us a tensor), or null. Derived types may have their own
// export.
const dlpack::Exchange* exchange_of(PyTypeObject* type) {
    thread_local PyTypeObject* known = nullptr;  // usually that of the last array
    thread_local const dlpack::Exchange* offered = nullptr;
    if (type == known) return offered;
    constexpr const char* kOffer = "__dlpack_c_exchange_api__";
    const py::object members = py::handle(reinterpret_cast<PyObject*>(type)).attr("__dict__");
    if (!members.contains(kOffer)) return nullptr;
    const py::object offer = members[kOffer];
    if (PyCapsule_IsValid(offer.ptr(), "dlpack_exchange_api") == 0) return nullptr;
    const auto* exchange = py::reinterpret_borrow<py::capsule>(offer).get_pointer<const dlpack::Exchange>();
    if (exchange->major != 1 || exchange->managed_of == nullptr) return nullptr;
    Py_INCREF(type);  // never released: its library stays loaded
    known = type, offered = exchange;
    return offered;
}

// The tensor to export by its type's C function: the object itself, or a copy of a torch view whose memory holds the
// negated numbers. None if it requires gradients or has no memory: __dlpack__ then raises the usual error.
py::object direct_source(py::handle object) {
    static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
    static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
    if (py::bool_(py::getattr(object, requires_grad, py::bool_(true)))) return py::none();
    const auto negated = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), is_neg));
    if (!negated) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
        PyErr_Clear();  // another library, which has no such views
        return py::reinterpret_borrow<py::object>(object);
    }
    if (!py::bool_(negated)) return py::reinterpret_borrow<py::object>(object);
    return has_memory(object) ? object.attr("resolve_neg")() : py::none();
}

// The current stream of the tensor's library.
cuda::Stream current_stream(const dlpack::Exchange& exchange, const dlpack::Tensor& tensor) {
    void* stream = nullptr;
    if (exchange.current_stream == nullptr) return nullptr;
    if (exchange.current_stream(tensor.device_type, tensor.device_id, &stream) != 0) throw py::error_already_set();
    return stream;
}

// "ValueError: message" for an exporter's error. Errors that are no Exception, such as Ctrl-C, propagate.
std::string reason(py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    std::string message = py::str(error.type().attr("__name__"));
    try {
        message += ": " + std::string(py::str(error.value()));
    } catch (const py::error_already_set&) {
        // The message cannot be printed; use only the type.
    }
    return message;
}

// The answer of `read`, which asks an exporter, or `otherwise` if it raises an Exception or answers no number.
template <class Answer, class Read>
Answer unless_it_raises(Answer otherwise, const Read& read) {
    try {
        return read();
    } catch (const py::error_already_set& error) {
        if (!error.matches(PyExc_Exception)) throw;
    } catch (const py::builtin_exception&) {
    }
    return otherwise;
}

// Whether an object reports a CUDA device. Called before the export, which needs a stream for such a device, may
// start to wait, and reports errors.
bool says_cuda(py::handle object) {
    const py::object asked = py::getattr(object, "__dlpack_device__", py::none());
    if (asked.is_none()) return false;
    const auto reply = unless_it_raises(py::object(py::none()), [&] { return py::object(asked()); });
    return py::isinstance<py::tuple>(reply) && py::len(reply) == 2 &&
           is_cuda(py::int_(py::reinterpret_borrow<py::tuple>(reply)[0]).cast<std::int32_t>());
}

py::object export_dlpack(py::handle object, Name name, CallersStreams* streams) {
    try {
        py::dict options;
        if (streams != nullptr && says_cuda(object)) options["stream"] = stream_number(streams->tell());
        // Only version 1 can mark an array as read-only, and exporters refuse older versions for such an array.
        try {
            return object.attr("__dlpack__")(**options, py::arg("max_version") = py::make_tuple(1, 0));
        } catch (py::error_already_set& error) {
            if (!error.matches(PyExc_TypeError)) throw;  // an older exporter takes no version
        }
        return object.attr("__dlpack__")(**options);
    } catch (py::error_already_set& error) {
        raise("ArrayError",
              name.text() + ": expected " + memory_due(streams != nullptr) + "; its export failed: " + reason(error));
    }
}

py::buffer_info export_buffer(py::handle object, Name name) {
    try {
        return py::reinterpret_borrow<py::buffer>(object).request();
    } catch (py::error_already_set& error) {
        raise("ArrayError", name.text() + ": expected an array in CPU memory; its export failed: " + reason(error));
    }
}

// A buffer's format as a dtype's name. It may begin with a sign for the byte order; Python's '=' is the processor's.
std::string dtype_of_format(const std::string& format) {
    constexpr const char* kOwnOrder = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "@=<" : "@=>";
    constexpr std::pair<char, const char*> kNames[] = {
        {'f', "float32"}, {'d', "float64"}, {'e', "float16"}, {'H', "uint16"}, {'b', "int8"}};
    const bool marked = format.size() == 2 && std::strchr(kOwnOrder, format[0]) != nullptr;
    for (const auto& [code, name] : kNames)
        if ((format.size() == 1 || marked) && format.back() == code) return name;
    return "'" + format + "'";
}

ExportedArray from_buffer(const py::buffer_info& info) {
    ExportedArray found;
    found.data = info.ptr;
    found.dtype = dtype_of_format(info.format);
    found.itemsize = info.itemsize;
    found.shape.assign(info.shape.begin(), info.shape.end());
    found.contiguous = c_order(found.shape, info.strides, info.itemsize);
    found.writable = !info.readonly;
    return found;
}

py::object call(py::handle object, PyObject* method) {
    PyObject* const result = PyObject_CallMethodNoArgs(object.ptr(), method);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

std::uint64_t number(py::handle object) {
    return object.cast<std::uint64_t>();
}

}  // namespace

bool has_memory(py::handle tensor, const void* first, std::int64_t bytes) {
    static PyObject *const untyped_storage = PyUnicode_InternFromString("untyped_storage"),
                           *const data_ptr = PyUnicode_InternFromString("data_ptr"),
                           *const nbytes = PyUnicode_InternFromString("nbytes");
    return unless_it_raises(false, [&] {
        const py::object storage = call(tensor, untyped_storage);
        const std::uint64_t start = number(call(storage, data_ptr)), size = number(call(storage, nbytes));
        const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(first) - start;
        return start != 0 && offset <= size && static_cast<std::uint64_t>(bytes) <= size - offset;
    });
}

namespace {

bool is_of_torch(py::handle object) {
    static PyObject* const module_name = PyUnicode_InternFromString("__module__");
    const py::object module = py::type::handle_of(object).attr(module_name);
    const auto is = [&](const char* name) {
        return PyUnicode_Check(module.ptr()) && PyUnicode_CompareWithASCIIString(module.ptr(), name) == 0;
    };
    return is("torch") || is("torch.nn.parameter");
}

// A name of torch, or null before it is imported.
py::object of_torch(const char* name) {
    static PyObject* const torch = PyUnicode_InternFromString("torch");
    const auto module = py::reinterpret_steal<py::object>(PyImport_GetModule(torch));
    return module ? py::object(module.attr(name)) : module;
}

// A NumPy array over a tensor's memory, or null. `bits`: as int16. `kept`: the memory lives as long as the array.
py::object numpy_of_torch(py::handle tensor, bool bits, bool kept) {
    static PyObject *const requires_grad = PyUnicode_InternFromString("requires_grad"),
                           *const detach = PyUnicode_InternFromString("detach"),
                           *const numpy = PyUnicode_InternFromString("numpy"),
                           *const view = PyUnicode_InternFromString("view");
    auto plain = py::reinterpret_borrow<py::object>(tensor);
    if (kept || !py::object(tensor.attr(requires_grad)).is(py::bool_(false))) plain = call(tensor, detach);
    if (bits) plain = plain.attr(view)(of_torch("int16"));
    const py::object found = call(plain, numpy);
    if (!py::isinstance<py::array>(found)) return {};
    const auto array = py::reinterpret_borrow<py::array>(found);
    return has_memory(tensor, array.data(), array.nbytes()) ? found : py::object();
}

}  // namespace

void* address_of(py::handle object) {
    auto array = py::reinterpret_borrow<py::array>(object), whole = array;
    while (py::isinstance<py::array>(whole.base())) whole = whole.base();
    const py::object tensor = whole.base();
    const auto* const data = static_cast<const char*>(array.data());
    const std::ptrdiff_t offset = data - static_cast<const char*>(whole.data());
    const auto has = [&](const char* from) { return has_memory(tensor, from, array.nbytes()); };
    const char* const found = unless_it_raises(data, [&] {
        if (!tensor || !is_of_torch(tensor)) return data;
        const char* const now = reinterpret_cast<const char*>(number(tensor.attr("data_ptr")())) + offset;
        return now == data || has(data) || !has(now) ? data : now;
    });
    return const_cast<char*>(found);
}

py::object view_of_torch(py::handle tensor, bool kept) {  // null, for example, for a tensor on a device
    return unless_it_raises(py::object(),
                            [&] { return is_of_torch(tensor) ? numpy_of_torch(tensor, false, kept) : py::object(); });
}

py::object bits_of_torch(py::handle tensor) {  // null, for example, for a tensor whose last axis is strided
    static PyObject* const dtype = PyUnicode_InternFromString("dtype");
    return unless_it_raises(py::object(), [&] {
        const py::object brain = is_of_torch(tensor) ? of_torch("bfloat16") : py::object();
        return brain && py::object(tensor.attr(dtype)).is(brain) ? numpy_of_torch(tensor, true, false) : py::object();
    });
}

bool has_memory(py::handle tensor) {
    static PyObject *const sizes = PyUnicode_InternFromString("shape"),
                           *const stride = PyUnicode_InternFromString("stride"),
                           *const element_size = PyUnicode_InternFromString("element_size"),
                           *const data_ptr = PyUnicode_InternFromString("data_ptr");
    return unless_it_raises(false, [&] {
        const py::tuple shape = py::getattr(tensor, sizes), strides = call(tensor, stride);
        std::uint64_t elements = 1;
        for (std::size_t axis = 0; axis < shape.size(); ++axis) {
            const std::uint64_t size = number(shape[axis]);
            if (size == 0) return true;
            elements += (size - 1) * number(strides[axis]);
        }
        const std::uint64_t bytes = elements * number(call(tensor, element_size));
        const auto* first = reinterpret_cast<const void*>(number(call(tensor, data_ptr)));
        return has_memory(tensor, first, static_cast<std::int64_t>(bytes));
    });
}

std::string text(const std::string& dtype, const std::vector<std::int64_t>& shape) {
    std::string sizes;
    for (const std::int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    return dtype + "[" + sizes + "]";
}

namespace {

ExportedArray from_device_array(const DeviceArray& array) {
    ExportedArray found;
    found.data = array.data();
    found.dtype = array.dtype().name;
    found.itemsize = array.dtype().itemsize;
    found.shape = {array.n()};
    found.writable = array.writeable;
    found.device = array.device();
    found.memory = &array.memory();
    return found;
}

// For libraries without DLPack. The interface has no type for bfloat16.
ExportedArray from_cuda_interface(const py::dict& interface, Name name, CallersStreams& streams) {
    if (interface.contains("mask") && !interface["mask"].is_none())
        raise("ArrayError", name.text() + ": expected an array without a mask, got a masked one");
    ExportedArray found;
    const py::tuple data = interface["data"];
    found.data = reinterpret_cast<void*>(data[0].cast<std::uintptr_t>());
    found.writable = !data[1].cast<bool>();
    const py::dtype dtype = py::dtype::from_args(interface["typestr"]);
    found.dtype = py::str(py::handle(dtype));
    found.itemsize = dtype.itemsize();
    auto sizes = interface["shape"].cast<std::vector<std::int64_t>>();
    dlpack::Tensor described{};
    described.ndim = static_cast<std::int32_t>(sizes.size());
    described.shape = sizes.data();
    described.type_bits = static_cast<std::uint8_t>(std::min<std::int64_t>(8 * found.itemsize, UINT8_MAX));
    described.type_lanes = 1;
    found.shape = shape_of(described, name);
    if (interface.contains("strides") && !interface["strides"].is_none()) {
        const auto strides = interface["strides"].cast<std::vector<std::int64_t>>();
        found.contiguous = strides.size() == found.shape.size() && c_order(found.shape, strides, found.itemsize);
    }
    // An array without elements may have no address, and so no known device.
    const bool empty = std::find(found.shape.begin(), found.shape.end(), 0) != found.shape.end();
    found.device = empty ? 0 : cuda::device_of(found.data);
    // Version 3 names the stream on which the array is made. Older ones are on the legacy default stream.
    const bool has_stream = interface.contains("stream") && !interface["stream"].is_none();
    streams.wait_for(stream_of(has_stream ? interface["stream"].cast<std::intptr_t>() : 1));
    return found;
}

ExportedArray open_cuda_interface(py::handle object, Name name, CallersStreams& streams) {
    const std::string due = name.text() + ": expected " + memory_due(true) + "; its interface is invalid: ";
    try {
        return from_cuda_interface(object.attr("__cuda_array_interface__"), name, streams);
    } catch (const py::builtin_exception& error) {  // a missing field, or one of another type
        raise("ArrayError", due + error.what());
    } catch (const cuda::DeviceFailure& error) {
        raise("ArrayError", due + error.what());
    } catch (py::error_already_set& error) {
        if (error.matches(py::module_::import("fedcore.errors").attr("FedcoreError"))) throw;
        raise("ArrayError", due + reason(error));
    }
}

// Whether a tensor of torch that the kernels may read has its numbers in its storage; true for other libraries.
bool is_in_memory(py::handle tensor, const ExportedArray& found) {
    std::int64_t bytes = found.itemsize;
    for (const std::int64_t extent : found.shape) bytes *= extent;
    if (bytes == 0 || !found.contiguous || has_memory(tensor, found.data, bytes)) return true;
    return !py::hasattr(tensor, "untyped_storage");
}

// The array, whose address may be null.
ExportedArray open_any(py::handle object, Name name, Keep& keep, CallersStreams* streams) {
    const bool devices = streams != nullptr;
    if (py::isinstance<py::array>(object)) {
        keep.objects.push_back(py::reinterpret_borrow<py::object>(object));
        return from_numpy(py::reinterpret_borrow<py::array>(object), name);
    }
    if (const dlpack::Exchange* const exchange = exchange_of(Py_TYPE(object.ptr())); exchange != nullptr) {
        const py::object source = direct_source(object);
        dlpack::ManagedVersioned* managed = nullptr;
        if (!source.is_none() && exchange->managed_of(source.ptr(), &managed) == 0 && managed != nullptr) {
            keep.tensors.emplace_back(managed);
            const ExportedArray found = from_versioned(*managed, !source.is(object), name, devices);
            if (is_in_memory(source, found)) {
                if (found.device != kHost) streams->follow(current_stream(*exchange, managed->tensor));
                return found;
            }
        }
        PyErr_Clear();
    }
    if (devices && py::isinstance<DeviceArray>(object)) {
        keep.objects.push_back(py::reinterpret_borrow<py::object>(object));
        return from_device_array(*object.cast<DeviceArray*>());
    }
    if (py::hasattr(object, "__dlpack__")) {
        // Not consumed: the capsule's destructor releases the tensor.
        const py::object capsule = export_dlpack(object, name, streams);
        if (!py::isinstance<py::capsule>(capsule))
            raise("ArrayError", name.text() + ": expected a DLPack capsule from __dlpack__");
        keep.objects.push_back(capsule);
        // Raises ArrayError for a tensor of torch without memory of its own, whose export may have an invalid address.
        py::module_::import("fedcore.arrays").attr("own_class")(name.text(), object, py::arg("to_write") = true);
        return from_dlpack(py::reinterpret_borrow<py::capsule>(capsule), name, devices);
    }
    if (devices && py::hasattr(object, "__cuda_array_interface__")) {
        keep.objects.push_back(py::reinterpret_borrow<py::object>(object));
        return open_cuda_interface(object, name, *streams);
    }
    if (PyObject_CheckBuffer(object.ptr()) != 0) {
        keep.buffers.push_back(export_buffer(object, name));
        return from_buffer(keep.buffers.back());
    }
    raise("ArrayError", name.text() + ": expected " + memory_due(devices) + ", got " +
                            std::string(py::str(py::type::of(object).attr("__name__"))));
}

}  // namespace

ExportedArray open_array(py::handle object, Name name, Keep& keep, CallersStreams* streams) {
    const ExportedArray found = open_any(object, name, keep, streams);
    const bool empty = std::find(found.shape.begin(), found.shape.end(), 0) != found.shape.end();
    if (found.data == nullptr && !empty)
        raise("ArrayError", name.text() + ": expected " + memory_due(streams != nullptr) + ", got " +
                                text(found.dtype, found.shape) + " of the class " + Py_TYPE(object.ptr())->tp_name +
                                " with a null address; pass a plain array with the numbers");
    return found;
}

}  // namespace fedcore::bindings
