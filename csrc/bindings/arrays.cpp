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
    return index < 0 ? argument : std::string(argument) + "[" + std::to_string(index) + "]";
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
    if (std::strcmp(capsule.name(), "dltensor_versioned") == 0) {
        const auto* managed = capsule.get_pointer<dlpack::ManagedVersioned>();
        found.writable = (managed->flags & dlpack::kReadOnly) == 0;
        tensor = &managed->tensor;
    } else {
        tensor = &capsule.get_pointer<dlpack::Managed>()->tensor;
    }
    if (tensor->device_type != dlpack::kCpu)
        raise("ArrayError", name.text() + ": expected an array in CPU memory, got one on another device");
    const char* kind = tensor->type_code == dlpack::kFloat      ? "float"
                       : tensor->type_code == dlpack::kBfloat   ? "bfloat"
                       : tensor->type_code == dlpack::kInt      ? "int"
                       : tensor->type_code == dlpack::kUnsigned ? "uint"
                                                                : "another type of ";
    found.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
    found.dtype = kind + std::to_string(tensor->type_bits * tensor->type_lanes);
    found.itemsize = tensor->type_bits * tensor->type_lanes / 8;
    found.shape.assign(tensor->shape, tensor->shape + tensor->ndim);
    found.contiguous = tensor->strides == nullptr || c_order(found.shape, tensor->strides, 1);
    return found;
}

py::capsule export_dlpack(py::handle object, bool writable) {
    if (writable) {  // only 1.x tells whether the exporter allows writing
        try {
            return object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
        } catch (py::error_already_set& error) {
            if (!error.matches(PyExc_TypeError)) throw;
        }
    }
    return object.attr("__dlpack__")();
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
const Dtypes& plain() {
    static const Dtypes due{sizeof(T) == 4 ? "float32" : "float64"};
    return due;
}

}  // namespace

AnySpan Arrays::open(py::handle object, Name name, bool writable, const Dtypes& due, std::int64_t n) {
    Found found;
    if (py::isinstance<py::array>(object)) {
        kept_.push_back(py::reinterpret_borrow<py::object>(object));
        found = from_numpy(py::reinterpret_borrow<py::array>(object));
    } else if (py::hasattr(object, "__dlpack__")) {
        const py::capsule capsule = export_dlpack(object, writable);
        kept_.push_back(capsule);  // unconsumed: its own destructor gives the tensor back
        found = from_dlpack(capsule, name);
    } else if (PyObject_CheckBuffer(object.ptr()) != 0) {
        buffers_.push_back(py::reinterpret_borrow<py::buffer>(object).request());
        found = from_buffer(buffers_.back());
    } else {
        raise("ArrayError", name.text() + ": expected an array in CPU memory, got " +
                                std::string(py::str(py::type::of(object).attr("__name__"))));
    }
    std::size_t which = 0;
    while (which < due.size() && found.dtype != due[which]) ++which;
    const bool fits = found.shape.size() == 1 && (n == kAnyLength || found.shape[0] == n);
    if (which < due.size() && fits && found.contiguous && (found.writable || !writable))
        return {found.data, found.shape[0], which, found.shape[0] * found.itemsize};
    // The message is built only now: a call on a small model would spend its time on it.
    std::string dtypes;
    for (const char* dtype : due) dtypes += (dtypes.empty() ? "" : " or ") + std::string(dtype);
    const std::string expected =
        name.text() + ": expected " + dtypes + "[" + (n == kAnyLength ? "n" : std::to_string(n)) + "]";
    const std::string got = expected + ", got " + text(found.dtype, found.shape);
    if (which == due.size()) raise("DtypeError", got);
    if (!fits) raise("ShapeError", got);
    if (!found.contiguous) raise("ShapeError", got + " that is not contiguous");
    raise("ArrayError", expected + " to write to, got a read-only array");
}

AnySpan Arrays::input(py::handle object, Name name, const Dtypes& due, std::int64_t n) {
    const AnySpan found = open(object, name, false, due, n);
    const auto* begin = static_cast<const char*>(found.data);
    regions_.push_back({begin, begin + found.bytes, name});
    return found;
}

AnySpan Arrays::output(py::handle object, Name name, const Dtypes& due, std::int64_t n, const void* replaces) {
    const AnySpan found = open(object, name, true, due, n);
    const auto* begin = static_cast<const char*>(found.data);
    const auto* end = begin + found.bytes;
    for (const Region& region : regions_) {
        const bool replaced = begin == replaces && region.begin == begin && region.end == end;
        if (!replaced && begin < region.end && region.begin < end)
            raise("ArrayError", name.text() + ": must not overlap " + region.name.text());
    }
    regions_.push_back({begin, end, name});
    return found;
}

template <class T>
Span<const T> Arrays::input(py::handle object, Name name, std::int64_t n) {
    const AnySpan found = input(object, name, plain<T>(), n);
    return {static_cast<const T*>(found.data), found.n};
}

template <class T>
Span<T> Arrays::output(py::handle object, Name name, std::int64_t n, const void* replaces) {
    const AnySpan found = output(object, name, plain<T>(), n, replaces);
    return {static_cast<T*>(found.data), found.n};
}

template Span<const float> Arrays::input<float>(py::handle, Name, std::int64_t);
template Span<const double> Arrays::input<double>(py::handle, Name, std::int64_t);
template Span<float> Arrays::output<float>(py::handle, Name, std::int64_t, const void*);
template Span<double> Arrays::output<double>(py::handle, Name, std::int64_t, const void*);

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
