#include <cstring>
#include <deque>
#include <vector>

#include "base/copy.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/bytes.h"
#include "bindings/without_gil.h"

namespace fedcore::bindings {
namespace {

// The memory of bytes that nobody else has, which is as good as freed and allocated again; else null. The list gives
// its i-th entry up. (By its own pointer: an object that nobody has is no object that anybody could look at.)
py::object reused(const py::list& spare, std::int64_t i, std::int64_t bytes) {
    if (i >= static_cast<std::int64_t>(spare.size())) return {};
    auto item = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(spare.ptr(), i));
    if (PyList_SetItem(spare.ptr(), i, py::none().release().ptr()) != 0) throw py::error_already_set();
    const bool fits = PyBytes_CheckExact(item.ptr()) && PyBytes_GET_SIZE(item.ptr()) == bytes && bytes > 1;
    if (!fits || Py_REFCNT(item.ptr()) != 1) return {};
#if defined(__GNUC__)
#    pragma GCC diagnostic push
#    pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif
    reinterpret_cast<PyBytesObject*>(item.ptr())->ob_shash = -1;  // it was that of other bytes
#if defined(__GNUC__)
#    pragma GCC diagnostic pop
#endif
    return item;
}

py::object fresh(std::int64_t bytes) {
    PyObject* const made = PyBytes_FromStringAndSize(nullptr, bytes);
    if (made == nullptr) throw py::error_already_set();
    ask_for_huge_pages(PyBytes_AS_STRING(made), bytes);
    return py::reinterpret_steal<py::object>(made);
}

// bytes(heads[i]) + bytes(payloads[i]) for each i, copied by all threads; in the memory of spare[i] where that is of
// as many bytes and nobody else's.
py::list joined_bytes(const py::object& heads, const py::object& payloads, const py::list& spare) {
    const py::tuple listed = items_of(payloads, "payloads");
    const auto k = static_cast<std::int64_t>(listed.size());
    const py::tuple head = items_of(heads, "heads", k);
    std::deque<Bytes> held;
    py::list all;
    std::vector<Copy> copies;
    for (std::int64_t i = 0; i < k; ++i) {
        const Bytes& first = held.emplace_back(head[i], Name{"heads", i});
        const Bytes& rest = held.emplace_back(listed[i], Name{"payloads", i});
        const std::int64_t bytes = first.size() + rest.size();
        py::object made = reused(spare, i, bytes);
        if (!made) made = fresh(bytes);
        char* const to = PyBytes_AS_STRING(made.ptr());
        all.append(std::move(made));
        std::memcpy(to, first.data(), first.size());
        copies.push_back({to + first.size(), static_cast<const char*>(rest.data()), rest.size()});
    }
    {
        const WithoutGil scope;  // nobody else knows the new bytes yet
        copy_all(copies);
    }
    return all;
}

}  // namespace

void bind_copy(py::module_& module) {
    module.def("joined_bytes", &joined_bytes, py::arg("heads"), py::arg("payloads"), py::arg("spare"));
}

}  // namespace fedcore::bindings
