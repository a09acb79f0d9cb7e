#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bind.h"

namespace fedcore::bindings {
namespace {

using py::detail::array_descriptor_proxy;
using py::detail::array_proxy;
using py::detail::npy_api;

using Read = py::typing::Optional<py::typing::List<py::array>>;

bool is_array(PyObject* object) {
    return Py_TYPE(object) == npy_api::get().PyArray_Type_;
}

// A NumPy float32 array, aligned and in C order, of no derived class, which may be masked.
bool is_plain(PyObject* object) {
    if (!is_array(object)) return false;
    const auto* array = array_proxy(object);
    const auto* dtype = array_descriptor_proxy(array->descr);
    constexpr int kFlags = py::array::c_style | npy_api::NPY_ARRAY_ALIGNED_;
    return dtype->type_num == npy_api::NPY_FLOAT_ && dtype->byteorder == '=' && (array->flags & kFlags) == kFlags;
}

// The number of elements of a shape, a tuple of plain ints; -1 for another object, or for more elements than memory can
// hold.
std::int64_t elements_of(const py::handle& shape) {
    if (!PyTuple_Check(shape.ptr())) return -1;
    std::int64_t elements = 1;
    for (Py_ssize_t axis = 0; axis < PyTuple_GET_SIZE(shape.ptr()); ++axis) {
        PyObject* const extent = PyTuple_GET_ITEM(shape.ptr(), axis);
        int overflow = 1;
        const long long size = PyLong_CheckExact(extent) ? PyLong_AsLongLongAndOverflow(extent, &overflow) : -1;
        if (overflow != 0 || size < 0 || __builtin_mul_overflow(elements, size, &elements)) return -1;
    }
    return elements <= INT64_MAX / 4 ? elements : -1;
}

bool has_shape(PyObject* array, const py::handle& shape) {
    const auto* proxy = array_proxy(array);
    if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != proxy->nd) return false;
    for (int axis = 0; axis < proxy->nd; ++axis) {
        PyObject* const extent = PyTuple_GET_ITEM(shape.ptr(), axis);
        if (!PyLong_CheckExact(extent) || PyLong_AsSsize_t(extent) != proxy->dimensions[axis]) {
            PyErr_Clear();  // the int is too large
            return false;
        }
    }
    return true;
}

// The arrays in the bytes of `.npy` files after known headers; None if a file is of another form.
Read read_npy(const py::object& datas, const py::object& heads, const py::object& shapes) {
    const py::tuple data = items_of(datas, "datas");
    const auto k = static_cast<py::ssize_t>(data.size());
    const py::tuple head = items_of(heads, "heads", k), shape = items_of(shapes, "shapes", k);
    py::list arrays(k);
    for (py::ssize_t i = 0; i < k; ++i) {
        PyObject *const whole = PyTuple_GET_ITEM(data.ptr(), i), *const first = PyTuple_GET_ITEM(head.ptr(), i);
        const py::handle extents = PyTuple_GET_ITEM(shape.ptr(), i);
        const std::int64_t elements = elements_of(extents);
        if (!PyBytes_CheckExact(whole) || !PyBytes_CheckExact(first) || elements <= 0) return py::none();
        const Py_ssize_t length = PyBytes_GET_SIZE(first);
        // Check the length first, so that nothing is read past the end.
        const bool known = PyBytes_GET_SIZE(whole) - length == 4 * elements &&
                           std::memcmp(PyBytes_AS_STRING(whole), PyBytes_AS_STRING(first), length) == 0;
        if (!known) return py::none();
        std::vector<py::ssize_t> sizes;
        for (const py::handle extent : py::reinterpret_borrow<py::tuple>(extents))
            sizes.push_back(PyLong_AsSsize_t(extent.ptr()));
        const py::array view(py::dtype::of<float>(), sizes, {}, PyBytes_AS_STRING(whole) + length, py::handle(whole));
        array_proxy(view.ptr())->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
        arrays[i] = view;
    }
    return arrays;
}

// Float32 vectors over tensors, if each is an array of NumPy's own class, or a tensor of torch's in CPU memory, of that
// shape and in C order; else None.
Read read_plain_tensors(const py::object& tensors, const py::object& shapes) {
    const py::tuple listed = items_of(tensors, "tensors");
    const auto k = static_cast<py::ssize_t>(listed.size());
    const py::tuple shape = items_of(shapes, "shapes", k);
    py::list vectors(k);
    for (py::ssize_t i = 0; i < k; ++i) {
        py::object array = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(listed.ptr(), i));
        if (!is_array(array.ptr()) && !(array = view_of_torch(array))) return py::none();
        PyObject* const tensor = array.ptr();
        if (!is_plain(tensor) || !has_shape(tensor, PyTuple_GET_ITEM(shape.ptr(), i))) return py::none();
        const auto* proxy = array_proxy(tensor);
        py::ssize_t n = 1;
        for (int axis = 0; axis < proxy->nd; ++axis) n *= proxy->dimensions[axis];
        if (proxy->nd == 1)
            vectors[i] = py::handle(tensor);
        else  // as writable as the tensor
            vectors[i] = py::array(py::dtype::of<float>(), {n}, {}, proxy->data, py::handle(tensor));
    }
    return vectors;
}

bool are_immutable(const py::object& arrays) {
    const py::tuple listed = items_of(arrays, "arrays");
    return std::all_of(listed.begin(), listed.end(), [](py::handle array) { return is_immutable(array); });
}

}  // namespace

bool is_immutable(py::handle array) {
    auto base = py::reinterpret_borrow<py::object>(array);
    for (;;) {
        if (py::isinstance<py::array>(base)) {
            PyObject* const next = array_proxy(base.ptr())->base;
            if (next == nullptr) return false;
            base = py::reinterpret_borrow<py::object>(next);
        } else if (PyMemoryView_Check(base.ptr())) {
            base = base.attr("obj");
        } else {
            return PyBytes_Check(base.ptr());
        }
    }
}

void bind_plain_tensors(py::module_& module) {
    module.def("read_npy", &read_npy, py::arg("datas"), py::arg("heads"), py::arg("shapes"));
    module.def("read_plain_tensors", &read_plain_tensors, py::arg("tensors"), py::arg("shapes"));
    module.def("are_immutable", &are_immutable, py::arg("arrays"));
    module.def("has_memory", py::overload_cast<py::handle>(&has_memory), py::arg("tensor"));
}

}  // namespace fedcore::bindings
