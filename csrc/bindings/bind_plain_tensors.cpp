#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bind.h"

namespace fedcore::bindings {
namespace {

using py::detail::array_proxy;
using py::detail::npy_api;

using Read = py::typing::Optional<py::typing::List<py::array>>;

// The arrays in the bytes of `.npy` files after known headers; None if a file is of another form.
Read read_npy(const py::object& datas, const py::object& heads, const py::object& shapes) {
    const py::tuple data = items_of(datas, "datas");
    const auto k = static_cast<py::ssize_t>(data.size());
    const py::tuple head = items_of(heads, "heads", k), shape = items_of(shapes, "shapes", k);
    py::list arrays(k);
    for (py::ssize_t i = 0; i < k; ++i) {
        PyObject *const whole = PyTuple_GET_ITEM(data.ptr(), i), *const first = PyTuple_GET_ITEM(head.ptr(), i);
        const auto [extents, elements] = extents_of(PyTuple_GET_ITEM(shape.ptr(), i));
        if (!PyBytes_CheckExact(whole) || !PyBytes_CheckExact(first) || elements <= 0) return py::none();
        const Py_ssize_t length = PyBytes_GET_SIZE(first);
        // Check the length first, so that nothing is read past the end.
        const bool known = PyBytes_GET_SIZE(whole) - length == 4 * elements &&
                           std::memcmp(PyBytes_AS_STRING(whole), PyBytes_AS_STRING(first), length) == 0;
        if (!known) return py::none();
        const py::array view(py::dtype::of<float>(), extents, {}, PyBytes_AS_STRING(whole) + length, py::handle(whole));
        array_proxy(view.ptr())->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
        arrays[i] = view;
    }
    return arrays;
}

// The vectors of `vector_over` for several tensors; None if one is unusual.
Read read_plain_tensors(const py::object& tensors, const py::object& shapes, const py::object& dtypes) {
    const py::tuple listed = items_of(tensors, "tensors");
    const auto k = static_cast<py::ssize_t>(listed.size());
    const py::tuple shape = items_of(shapes, "shapes", k), dtype = items_of(dtypes, "dtypes", k);
    py::list vectors(k);
    for (py::ssize_t i = 0; i < k; ++i) {
        const auto [extents, n] = extents_of(PyTuple_GET_ITEM(shape.ptr(), i));
        const py::object one = n < 0 ? py::object() : vector_over(listed[i], extents, n, dtype[i]);
        if (!one) return py::none();
        vectors[i] = one;
    }
    return vectors;
}

// A view of an array's elements where they are now.
py::array present(const py::array& array) {
    const Extents shape(array.shape(), array.shape() + array.ndim()),
        strides(array.strides(), array.strides() + array.ndim());
    return {array.dtype(), shape, strides, address_of(array), array};
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

std::pair<Extents, std::int64_t> extents_of(const py::handle& shape) {
    std::pair<Extents, std::int64_t> found{{}, 1};
    if (!PyTuple_Check(shape.ptr())) return {{}, -1};
    for (const py::handle extent : py::reinterpret_borrow<py::tuple>(shape)) {
        int overflow = 1;
        const long long size =
            PyLong_CheckExact(extent.ptr()) ? PyLong_AsLongLongAndOverflow(extent.ptr(), &overflow) : -1;
        if (overflow != 0 || size < 0 || __builtin_mul_overflow(found.second, size, &found.second)) return {{}, -1};
        found.first.push_back(size);
    }
    return found.second <= INT64_MAX / 4 ? found : std::pair<Extents, std::int64_t>{{}, -1};
}

py::object vector_over(py::object tensor, const Extents& shape, std::int64_t n, py::handle dtype) {
    if (py::object view = py::isinstance<py::array>(tensor) ? py::object() : view_of_torch(tensor)) tensor = view;
    if (!py::isinstance<py::dtype>(dtype) || !is_plain_array(tensor, shape)) return {};
    const auto* const proxy = array_proxy(tensor.ptr());
    if (proxy->descr != dtype.ptr() && !npy_api::get().PyArray_EquivTypes_(proxy->descr, dtype.ptr())) return {};
    return py::array(py::reinterpret_borrow<py::dtype>(dtype), {n}, {}, proxy->data, tensor);  // as writable
}

void bind_plain_tensors(py::module_& module) {
    module.def("read_npy", &read_npy, py::arg("datas"), py::arg("heads"), py::arg("shapes"));
    module.def("read_plain_tensors", &read_plain_tensors, py::arg("tensors"), py::arg("shapes"), py::arg("dtypes"));
    module.def("are_immutable", &are_immutable, py::arg("arrays"));
    module.def("present", &present, py::arg("array"));
    module.def("has_memory", py::overload_cast<py::handle>(&has_memory), py::arg("tensor"));
}

}  // namespace fedcore::bindings
