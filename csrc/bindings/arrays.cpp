#include "bindings/arrays.h"

#include <cstring>

#include "bindings/dlpack_abi.h"

namespace fedcore::bindings {

void raise(const char* kind, const std::string& message) {
    const py::object type = py::module_::import("fedcore.errors").attr(kind);
    PyErr_SetString(type.ptr(), message.c_str());
    throw py::error_already_set();
}

std::string Name::text() const {
    std::string text = argument;
    for (const std::int64_t i : {index, second})
        if (i >= 0) text += "[" + std::to_string(i) + "]";
    return text;
}

namespace {

// An array as its exporter describes it.
struct Found {
    void* data = nullptr;
    std::string dtype;
    std::vector<std::int64_t> shape;
    bool contiguous = true;
    bool writable = true;
};

std::string text(const std::string& dtype, const std::vector<std::int64_t>& shape) {
    std::string sizes;
    for (const std::int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    return dtype + "[" + sizes + "]";
}

template <class Strides>
bool c_order(const std::vector<std::int64_t>& shape, const Strides& strides, std::int64_t unit) {
    for (std::size_t axis = shape.size(); axis-- > 0; unit *= shape[axis])
        if (shape[axis] > 1 && strides[axis] != unit) return false;
    return true;
}

Found from_numpy(const py::array& array) {
    Found found;
    const py::dtype dtype = array.dtype();
    found.data = const_cast<void*>(array.data());
    found.dtype = dtype.num() == py::detail::npy_api::NPY_FLOAT_    ? "float32"
                  : dtype.num() == py::detail::npy_api::NPY_DOUBLE_ ? "float64"
                                                                    : py::str(py::handle(dtype));
    if (dtype.byteorder() == '>' || dtype.byteorder() == '<') found.dtype = py::str(py::handle(dtype));  // swapped
    found.shape.assign(array.shape(), array.shape() + array.ndim());
    found.contiguous = (array.flags() & py::array::c_style) != 0;
    found.writable = array.writeable();
    return found;
}

// The common case, without a string or an allocation: the data of a NumPy vector that is just what is due, or null.
void* plain_vector(py::handle object, bool writable, bool float64, std::int64_t* n) {
    const auto* array = py::detail::array_proxy(object.ptr());
    const auto* dtype = py::detail::array_descriptor_proxy(array->descr);
    const int due = float64 ? py::detail::npy_api::NPY_DOUBLE_ : py::detail::npy_api::NPY_FLOAT_;
    const int flags = py::array::c_style | (writable ? py::detail::npy_api::NPY_ARRAY_WRITEABLE_ : 0);
    if (dtype->type_num != due || dtype->byteorder != '=' || (array->flags & flags) != flags || array->nd != 1 ||
        (*n != kAnyLength && array->dimensions[0] != *n))
        return nullptr;
    *n = array->dimensions[0];
    return array->data;
}

Found from_dlpack(const py::capsule& capsule, Name name) {
    const dlpack::Tensor* tensor;
    Found found;
    const char* kind = capsule.name() == nullptr ? "" : capsule.name();
    if (std::strcmp(kind, "dltensor_versioned") == 0) {
        const auto* managed = capsule.get_pointer<dlpack::ManagedVersioned>();
        if (managed->major != 1)
            raise("ArrayError", name.text() + ": expected DLPack 1, got " + std::to_string(managed->major));
        // What is written to a copy never reaches the array.
        found.writable = (managed->flags & (dlpack::kReadOnly | dlpack::kCopied)) == 0;
        tensor = &managed->tensor;
    } else if (std::strcmp(kind, "dltensor") == 0) {
        tensor = &capsule.get_pointer<dlpack::Managed>()->tensor;
    } else {
        raise("ArrayError", name.text() + ": expected a DLPack capsule that nobody used, got '" + kind + "'");
    }
    if (tensor->device_type != dlpack::kCpu)
        raise("ArrayError", name.text() + ": expected an array in CPU memory, got one on another device");
    const char* code = tensor->type_code == dlpack::kFloat      ? "float"
                       : tensor->type_code == dlpack::kBfloat   ? "bfloat"
                       : tensor->type_code == dlpack::kInt      ? "int"
                       : tensor->type_code == dlpack::kUnsigned ? "uint"
                                                                : "another type of ";
    found.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
    found.dtype = code + std::to_string(tensor->type_bits);
    if (tensor->type_lanes != 1) found.dtype += "x" + std::to_string(tensor->type_lanes);
    found.shape.assign(tensor->shape, tensor->shape + tensor->ndim);
    found.contiguous = tensor->strides == nullptr || c_order(found.shape, tensor->strides, 1);
    return found;
}

py::object export_dlpack(py::handle object, Name name, bool writable) {
    try {
        if (writable) {  // only 1.x tells whether the exporter allows writing
            try {
                return object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
            } catch (py::error_already_set& error) {
                if (!error.matches(PyExc_TypeError)) throw;
            }
        }
        return object.attr("__dlpack__")();
    } catch (py::error_already_set& error) {
        raise("ArrayError", name.text() + ": expected an array in CPU memory, whose export says: " + error.what());
    }
}

Found from_buffer(const py::buffer_info& info) {
    Found found;
    found.data = info.ptr;
    found.dtype = info.format == "f" ? "float32" : info.format == "d" ? "float64" : "'" + info.format + "'";
    found.shape.assign(info.shape.begin(), info.shape.end());
    found.contiguous = c_order(found.shape, info.strides, info.itemsize);
    found.writable = !info.readonly;
    return found;
}

}  // namespace

void* Arrays::open(py::handle object, Name name, bool writable, bool float64, Axes axes, std::int64_t* n) {
    Found found;
    if (py::isinstance<py::array>(object)) {
        kept_.push_back(py::reinterpret_borrow<py::object>(object));
        if (void* data = plain_vector(object, writable, float64, n)) return data;
        found = from_numpy(py::reinterpret_borrow<py::array>(object));
    } else if (py::hasattr(object, "__dlpack__")) {
        kept_.push_back(export_dlpack(object, name, writable));  // unconsumed: its destructor gives the tensor back
        if (!py::isinstance<py::capsule>(kept_.back()))
            raise("ArrayError", name.text() + ": expected a DLPack capsule from __dlpack__");
        found = from_dlpack(py::reinterpret_borrow<py::capsule>(kept_.back()), name);
    } else if (PyObject_CheckBuffer(object.ptr()) != 0) {
        buffers_.push_back(py::reinterpret_borrow<py::buffer>(object).request());
        found = from_buffer(buffers_.back());
    } else {
        raise("ArrayError", name.text() + ": expected an array in CPU memory, got " +
                                std::string(py::str(py::type::of(object).attr("__name__"))));
    }
    std::int64_t size = 1;
    for (const std::int64_t extent : found.shape) size *= extent;
    const char* dtype = float64 ? "float64" : "float32";
    const auto refuse = [&](const char* kind, const std::string& what) {
        const std::string length = *n == kAnyLength ? "n" : std::to_string(*n);
        const std::string due = axes == Axes::one ? "[" + length + "]" : " of " + length + " elements";
        raise(kind, name.text() + ": expected " + dtype + due + what);
    };
    if (found.dtype != dtype) refuse("DtypeError", ", got " + text(found.dtype, found.shape));
    if ((axes == Axes::one && found.shape.size() != 1) || (*n != kAnyLength && size != *n))
        refuse("ShapeError", ", got " + text(found.dtype, found.shape));
    if (!found.contiguous) refuse("ShapeError", ", got " + text(found.dtype, found.shape) + " that is not contiguous");
    if (writable && !found.writable) refuse("ArrayError", " to write to, got a read-only array");
    *n = size;
    return found.data;
}

template <class T>
Span<const T> Arrays::input(py::handle object, Name name, std::int64_t n, Axes axes) {
    const auto* data = static_cast<const T*>(open(object, name, false, sizeof(T) == 8, axes, &n));
    regions_.push_back({reinterpret_cast<const char*>(data), reinterpret_cast<const char*>(data + n), name});
    return {data, n, regions_.size() - 1};
}

template <class T>
Span<T> Arrays::output(py::handle object, Name name, std::int64_t n, std::size_t replaces, Axes axes) {
    auto* data = static_cast<T*>(open(object, name, true, sizeof(T) == 8, axes, &n));
    const auto* begin = reinterpret_cast<const char*>(data);
    const auto* end = reinterpret_cast<const char*>(data + n);
    for (std::size_t i = 0; i < regions_.size(); ++i) {
        const Region& region = regions_[i];
        const bool replaced = i == replaces && region.begin == begin && region.end == end;
        if (!replaced && begin < region.end && region.begin < end)
            raise("ArrayError", name.text() + ": must not overlap " + region.name.text());
    }
    regions_.push_back({begin, end, name});
    return {data, n, regions_.size() - 1};
}

template Span<const float> Arrays::input<float>(py::handle, Name, std::int64_t, Axes);
template Span<const double> Arrays::input<double>(py::handle, Name, std::int64_t, Axes);
template Span<float> Arrays::output<float>(py::handle, Name, std::int64_t, std::size_t, Axes);
template Span<double> Arrays::output<double>(py::handle, Name, std::int64_t, std::size_t, Axes);

bool is_float32(py::handle object) {
    return py::isinstance<py::array>(object) &&
           py::reinterpret_borrow<py::array>(object).dtype().num() == py::detail::npy_api::NPY_FLOAT_;
}

py::sequence sequence(py::handle object, const char* name, std::int64_t k) {
    if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr()))
        raise("ArrayError", std::string(name) + ": expected a list or tuple, got " +
                                std::string(py::str(py::type::of(object).attr("__name__"))));
    const auto items = py::reinterpret_borrow<py::sequence>(object);
    if (k != kAnyLength && static_cast<std::int64_t>(items.size()) != k)
        raise("ShapeError",
              std::string(name) + ": expected " + std::to_string(k) + " entries, got " + std::to_string(items.size()));
    return items;
}

}  // namespace fedcore::bindings
