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
    std::int64_t itemsize = 0;
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
    const bool native = dtype.byteorder() != '>' && dtype.byteorder() != '<';
    switch (native ? dtype.num() : -1) {  // asking NumPy for the name costs as much as a small kernel
        case py::detail::npy_api::NPY_FLOAT_:
            found.dtype = "float32";
            break;
        case py::detail::npy_api::NPY_DOUBLE_:
            found.dtype = "float64";
            break;
        case py::detail::npy_api::NPY_USHORT_:
            found.dtype = "uint16";
            break;
        case py::detail::npy_api::NPY_BYTE_:
            found.dtype = "int8";
            break;
        default:
            found.dtype = py::str(py::handle(dtype));
    }
    found.itemsize = dtype.itemsize();
    found.shape.assign(array.shape(), array.shape() + array.ndim());
    found.contiguous = (array.flags() & py::array::c_style) != 0;
    found.writable = array.writeable();
    return found;
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
    found.itemsize = tensor->type_bits * tensor->type_lanes / 8;
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
    found.dtype = info.format == "f"   ? "float32"
                  : info.format == "d" ? "float64"
                  : info.format == "H" ? "uint16"
                  : info.format == "b" ? "int8"
                                       : "'" + info.format + "'";
    found.itemsize = info.itemsize;
    found.shape.assign(info.shape.begin(), info.shape.end());
    found.contiguous = c_order(found.shape, info.strides, info.itemsize);
    found.writable = !info.readonly;
    return found;
}

template <class T>
const Dtypes& dtype_of() {
    static const Dtypes due{sizeof(T) == 4 ? "float32" : "float64"};
    return due;
}

// The common case, without a string or an allocation: a NumPy vector of T that is just what is due; else null.
template <class T>
T* plain_vector(py::handle object, bool writable, std::int64_t* n) {
    if (!py::isinstance<py::array>(object)) return nullptr;
    const auto* array = py::detail::array_proxy(object.ptr());
    const auto* dtype = py::detail::array_descriptor_proxy(array->descr);
    const int due = sizeof(T) == 4 ? py::detail::npy_api::NPY_FLOAT_ : py::detail::npy_api::NPY_DOUBLE_;
    const int flags = py::array::c_style | (writable ? py::detail::npy_api::NPY_ARRAY_WRITEABLE_ : 0);
    if (dtype->type_num != due || dtype->byteorder != '=' || (array->flags & flags) != flags || array->nd != 1 ||
        (*n != kAnyLength && array->dimensions[0] != *n))
        return nullptr;
    *n = array->dimensions[0];
    return reinterpret_cast<T*>(array->data);
}

}  // namespace

AnySpan Arrays::open(py::handle object, Name name, bool writable, const Dtypes& due, Axes axes, std::int64_t n) {
    Found found;
    if (py::isinstance<py::array>(object)) {
        kept_.push_back(py::reinterpret_borrow<py::object>(object));
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
    std::size_t which = 0;
    while (which < due.size() && found.dtype != due[which]) ++which;
    const bool fits = (axes == Axes::any || found.shape.size() == 1) && (n == kAnyLength || size == n);
    if (which < due.size() && fits && found.contiguous && (found.writable || !writable))
        return {found.data, size, which, size * found.itemsize};
    // The message is built only now: a call on a small model would spend its time on it.
    std::string expected = name.text() + ": expected ";
    for (const char* dtype : due) expected += (dtype == due[0] ? "" : " or ") + std::string(dtype);
    const std::string length = n == kAnyLength ? "n" : std::to_string(n);
    expected += axes == Axes::one ? "[" + length + "]" : " of " + length + " elements";
    const std::string got = expected + ", got " + text(found.dtype, found.shape);
    if (which == due.size()) raise("DtypeError", got);
    if (!fits) raise("ShapeError", got);
    if (!found.contiguous) raise("ShapeError", got + " that is not contiguous");
    raise("ArrayError", expected + " to write to, got a read-only array");
}

std::size_t Arrays::add_input(const void* data, std::int64_t bytes, Name name) {
    const auto* begin = static_cast<const char*>(data);
    regions_.push_back({begin, begin + bytes, name});
    return regions_.size() - 1;
}

std::size_t Arrays::add_output(const void* data, std::int64_t bytes, Name name, std::size_t replaces) {
    const auto* begin = static_cast<const char*>(data);
    const auto* end = begin + bytes;
    for (std::size_t i = 0; i < regions_.size(); ++i) {
        const Region& region = regions_[i];
        const bool replaced = i == replaces && region.begin == begin && region.end == end;
        if (!replaced && begin < region.end && region.begin < end)
            raise("ArrayError", name.text() + ": must not overlap " + region.name.text());
    }
    return add_input(data, bytes, name);
}

AnySpan Arrays::input(py::handle object, Name name, const Dtypes& due, std::int64_t n) {
    const AnySpan found = open(object, name, false, due, Axes::one, n);
    add_input(found.data, found.bytes, name);
    return found;
}

AnySpan Arrays::output(py::handle object, Name name, const Dtypes& due, std::int64_t n) {
    const AnySpan found = open(object, name, true, due, Axes::one, n);
    add_output(found.data, found.bytes, name, kNothing);
    return found;
}

template <class T>
Span<const T> Arrays::input(py::handle object, Name name, std::int64_t n, Axes axes) {
    const T* data = plain_vector<T>(object, false, &n);
    if (data != nullptr) {
        kept_.push_back(py::reinterpret_borrow<py::object>(object));
    } else {
        const AnySpan found = open(object, name, false, dtype_of<T>(), axes, n);
        data = static_cast<const T*>(found.data);
        n = found.n;
    }
    return {data, n, add_input(data, n * static_cast<std::int64_t>(sizeof(T)), name)};
}

template <class T>
Span<T> Arrays::output(py::handle object, Name name, std::int64_t n, std::size_t replaces, Axes axes) {
    T* data = plain_vector<T>(object, true, &n);
    if (data != nullptr) {
        kept_.push_back(py::reinterpret_borrow<py::object>(object));
    } else {
        const AnySpan found = open(object, name, true, dtype_of<T>(), axes, n);
        data = static_cast<T*>(found.data);
        n = found.n;
    }
    return {data, n, add_output(data, n * static_cast<std::int64_t>(sizeof(T)), name, replaces)};
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
