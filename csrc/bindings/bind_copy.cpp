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

// bytes(heads[i]) + bytes(payloads[i]) for each i, copied by all threads.
py::typing::List<py::bytes> joined_bytes(const py::object& heads, const py::object& payloads) {
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
        PyObject* const made = PyBytes_FromStringAndSize(nullptr, bytes);
        if (made == nullptr) throw py::error_already_set();
        all.append(py::reinterpret_steal<py::object>(made));
        char* const to = PyBytes_AS_STRING(made);
        ask_for_huge_pages(to, bytes);
        std::memcpy(to, first.data(), first.size());
        copies.push_back({to + first.size(), static_cast<const char*>(rest.data()), rest.size()});
    }
    {
        const WithoutGil scope;  // no other code has a reference to the new bytes yet
        copy_all(copies);
    }
    return all;
}

}  // namespace

void bind_copy(py::module_& module) {
    module.def("joined_bytes", &joined_bytes, py::arg("heads"), py::arg("payloads"));
}

}  // namespace fedcore::bindings
