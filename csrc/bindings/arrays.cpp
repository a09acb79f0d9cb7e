#include "bindings/arrays.h"

#include <pybind11/critical_section.h>

#include <cstring>
#include <type_traits>

namespace fedcore::bindings {

namespace {

template <class T>
const Dtypes& dtype_of() {
    static const Dtypes due{std::is_integral_v<T> ? "int64" : sizeof(T) == 4 ? "float32" : "float64"};
    return due;
}

// The common case, without a string or an allocation: a NumPy array of T that fits exactly; else null.
template <class T>
T* plain_vector(py::handle object, bool writable, std::int64_t* n, Axes axes = Axes::one) {
    if (Py_TYPE(object.ptr()) != py::detail::npy_api::get().PyArray_Type_) return nullptr;
    const auto* array = py::detail::array_proxy(object.ptr());
    const auto* dtype = py::detail::array_descriptor_proxy(array->descr);
    const int due = std::is_integral_v<T> ? py::detail::npy_api::NPY_INT64_
                    : sizeof(T) == 4      ? py::detail::npy_api::NPY_FLOAT_
                                          : py::detail::npy_api::NPY_DOUBLE_;
    const int flags = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_ |
                      (writable ? py::detail::npy_api::NPY_ARRAY_WRITEABLE_ : 0);
    if (dtype->type_num != due || dtype->byteorder != '=' || (array->flags & flags) != flags ||
        (array->nd != 1 && axes == Axes::one))
        return nullptr;
    std::int64_t size = 1;
    for (int axis = 0; axis < array->nd; ++axis) size *= array->dimensions[axis];
    if (*n != kAnyLength && size != *n) return nullptr;
    *n = size;
    return static_cast<T*>(address_of(object));
}

}  // namespace

void Arrays::lie_on(int device, Name name) {
    if (device_ == kNowhere) {
        device_ = device, first_ = name;
    } else if (device_ != device) {
        const auto place = [](int of) { return of == kHost ? "in CPU memory" : "on cuda:" + std::to_string(of); };
        raise("ArrayError", name.text() + ": expected an array " + place(device_) + ", as " + first_.text() +
                                " is, got one " + place(device));
    }
}

AnySpan Arrays::open(py::handle object, Name name, bool writable, const Dtypes& due, Axes axes, std::int64_t n,
                     Devices devices) {
    const ExportedArray found = open_array(object, name, keep_, devices == Devices::any ? &streams_ : nullptr);
    std::int64_t size = 1;
    for (const std::int64_t extent : found.shape) size *= extent;
    std::size_t which = 0;
    while (which < due.size() && found.dtype != due[which]) ++which;
    const bool fits = (axes == Axes::any || found.shape.size() == 1) && (n == kAnyLength || size == n);
    // The compiler assumes aligned floats.
    const auto address = reinterpret_cast<std::uintptr_t>(found.data);
    const bool aligned = size == 0 || found.itemsize == 0 || address % found.itemsize == 0;
    if (which < due.size() && fits && found.contiguous && aligned && (found.writable || !writable)) {
        if (devices == Devices::any) lie_on(found.device, name);
        if (found.memory != nullptr && !found.memory->users.empty()) {
            for (const cuda::Stream user : found.memory->users) streams_.wait_for(user);
            shown_.push_back(found.memory);
        }
        return {found.data, size, which, size * found.itemsize};
    }
    // Build the message only for an error, because it would dominate the time of a call on a small model.
    std::string expected = name.text() + ": expected ";
    for (const char* dtype : due) expected += (dtype == due[0] ? "" : " or ") + std::string(dtype);
    const std::string length = n == kAnyLength ? "n" : std::to_string(n);
    expected += axes == Axes::one ? "[" + length + "]" : " of " + length + " elements";
    const std::string got = expected + ", got " + text(found.dtype, found.shape);
    if (which == due.size()) raise("DtypeError", got);
    if (!fits) raise("ShapeError", got);
    if (!found.contiguous) raise("ShapeError", got + " that is not contiguous");
    if (!aligned) raise("ArrayError", got + " whose address is no multiple of " + std::to_string(found.itemsize));
    raise("ArrayError", expected + " that is writable, got a read-only array");
}

void Arrays::forget_users(const std::vector<cuda::Stream>& gone) {
    for (cuda::Memory* memory : shown_) {
        for (const cuda::Stream stream : gone) memory->no_longer_used_by(stream);
        memory->forget_users();
    }
}

void Arrays::reserve(std::size_t count) {
    keep_.objects.reserve(count);
    regions_.reserve(count);
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
        if (!replaced && bytes != 0 && begin < region.end && region.begin < end)
            raise("ArrayError", name.text() + ": must not overlap " + region.name.text());
    }
    return add_input(data, bytes, name);
}

AnySpan Arrays::input(py::handle object, Name name, const Dtypes& due, std::int64_t n, Axes axes) {
    std::int64_t length = n;
    const float* plain =
        std::strcmp(due[0], "float32") == 0 ? plain_vector<float>(object, false, &length, axes) : nullptr;
    AnySpan found;
    if (plain != nullptr) {
        keep_.objects.push_back(py::reinterpret_borrow<py::object>(object));
        lie_on(kHost, name);
        found = {const_cast<float*>(plain), length, 0, length * static_cast<std::int64_t>(sizeof(float))};
    } else {
        found = open(object, name, false, due, axes, n, devices_);
    }
    found.number = add_input(found.data, found.bytes, name);
    return found;
}

AnySpan Arrays::output(py::handle object, Name name, const Dtypes& due, std::int64_t n, std::size_t replaces,
                       Axes axes) {
    AnySpan found = open(object, name, true, due, axes, n, devices_);
    found.number = add_output(found.data, found.bytes, name, replaces);
    return found;
}

template <class T>
Span<const T> Arrays::input(py::handle object, Name name, std::int64_t n, Axes axes) {
    const T* data = plain_vector<T>(object, false, &n, axes);
    if (data != nullptr) {
        keep_.objects.push_back(py::reinterpret_borrow<py::object>(object));
        lie_on(kHost, name);
    } else {
        const AnySpan found = open(object, name, false, dtype_of<T>(), axes, n, devices_);
        data = static_cast<const T*>(found.data);
        n = found.n;
    }
    return {data, n, add_input(data, n * static_cast<std::int64_t>(sizeof(T)), name)};
}

template <class T>
Span<T> Arrays::output(py::handle object, Name name, std::int64_t n, std::size_t replaces, Axes axes) {
    T* data = plain_vector<T>(object, true, &n, axes);
    if (data != nullptr) {
        keep_.objects.push_back(py::reinterpret_borrow<py::object>(object));
        lie_on(kHost, name);
    } else {
        const AnySpan found = open(object, name, true, dtype_of<T>(), axes, n, devices_);
        data = static_cast<T*>(found.data);
        n = found.n;
    }
    return {data, n, add_output(data, n * static_cast<std::int64_t>(sizeof(T)), name, replaces)};
}

template <class T>
const T* Arrays::numbers(py::handle object, Name name, std::int64_t n) {
    const T* const plain = plain_vector<T>(object, false, &n);
    if (plain == nullptr) return static_cast<const T*>(numbers(object, name, dtype_of<T>(), n).data);
    keep_.objects.push_back(py::reinterpret_borrow<py::object>(object));
    add_input(plain, n * static_cast<std::int64_t>(sizeof(T)), name);
    return plain;
}

AnySpan Arrays::numbers(py::handle object, Name name, const Dtypes& due, std::int64_t n, Axes axes) {
    AnySpan found = open(object, name, false, due, axes, n, Devices::none);
    found.number = add_input(found.data, found.bytes, name);
    return found;
}

double* Arrays::written_numbers(py::handle object, Name name, std::int64_t n) {
    double* data = plain_vector<double>(object, true, &n, Axes::any);
    if (data != nullptr)
        keep_.objects.push_back(py::reinterpret_borrow<py::object>(object));
    else
        data = static_cast<double*>(open(object, name, true, dtype_of<double>(), Axes::any, n, Devices::none).data);
    add_output(data, n * static_cast<std::int64_t>(sizeof(double)), name, kNothing);
    return data;
}

template const float* Arrays::numbers<float>(py::handle, Name, std::int64_t);
template const double* Arrays::numbers<double>(py::handle, Name, std::int64_t);
template Span<const float> Arrays::input<float>(py::handle, Name, std::int64_t, Axes);
template Span<const double> Arrays::input<double>(py::handle, Name, std::int64_t, Axes);
template Span<const std::int64_t> Arrays::input<std::int64_t>(py::handle, Name, std::int64_t, Axes);
template Span<float> Arrays::output<float>(py::handle, Name, std::int64_t, std::size_t, Axes);
template Span<double> Arrays::output<double>(py::handle, Name, std::int64_t, std::size_t, Axes);
template Span<std::int64_t> Arrays::output<std::int64_t>(py::handle, Name, std::int64_t, std::size_t, Axes);

bool is_plain_array(py::handle object, const std::vector<py::ssize_t>& shape) {
    using py::detail::npy_api;
    if (!object || Py_TYPE(object.ptr()) != npy_api::get().PyArray_Type_) return false;
    const auto* const array = py::detail::array_proxy(object.ptr());
    constexpr int kFlags = py::array::c_style | npy_api::NPY_ARRAY_ALIGNED_;
    const char order = py::detail::array_descriptor_proxy(array->descr)->byteorder;
    return (order == '=' || order == '|') && (array->flags & kFlags) == kFlags &&
           std::equal(array->dimensions, array->dimensions + array->nd, shape.begin(), shape.end());
}

std::int64_t length(py::handle object, Name name) {
    Keep keep;
    CallersStreams streams;
    const ExportedArray found = open_array(object, name, keep, &streams);
    return found.shape.size() == 1 ? found.shape[0] : 0;  // the call's own check reports other arrays
}

bool is_float32(py::handle object, Name name) {
    std::int64_t n = kAnyLength;
    if (plain_vector<float>(object, false, &n) != nullptr) return true;
    if (plain_vector<double>(object, false, &n) != nullptr) return false;
    Keep keep;
    CallersStreams streams;
    return open_array(object, name, keep, &streams).dtype == dtype_of<float>()[0];
}

namespace {

// Making a tuple may collect garbage, and finalisers may run Python code. So the length is compared afterwards, with
// only references taken in between. Without a GIL, the list's lock excludes other threads.
py::tuple items_of_list(PyObject* list) {
    const py::scoped_critical_section scope(list);
    for (;;) {
        const Py_ssize_t size = PyList_GET_SIZE(list);
        auto items = py::reinterpret_steal<py::tuple>(PyTuple_New(size));
        if (!items) throw py::error_already_set();
        if (PyList_GET_SIZE(list) != size) continue;
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject* const item = PyList_GET_ITEM(list, i);
            Py_INCREF(item);
            PyTuple_SET_ITEM(items.ptr(), i, item);
        }
        return items;
    }
}

}  // namespace

py::tuple items_of(py::handle object, Name name, std::int64_t k) {
    const bool is_list = PyList_Check(object.ptr());
    if (!is_list && !PyTuple_Check(object.ptr()))
        raise("ArrayError", name.text() + ": expected a list or tuple, got " +
                                std::string(py::str(py::type::of(object).attr("__name__"))));
    const py::tuple items = is_list ? items_of_list(object.ptr()) : py::reinterpret_borrow<py::tuple>(object);
    if (k != kAnyLength && static_cast<std::int64_t>(items.size()) != k)
        raise("ShapeError",
              name.text() + ": expected " + std::to_string(k) + " entries, got " + std::to_string(items.size()));
    return items;
}

}  // namespace fedcore::bindings
