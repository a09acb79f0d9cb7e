#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/bytes.h"
#include "bindings/native_call.h"

namespace fedcore::bindings {
namespace {

constexpr std::int64_t kStretch = 256 << 10;  // bytes that one thread copies on end
constexpr std::int64_t kLarge = 4 << 20;      // bytes from which NumPy, too, asks for huge pages

struct Copy {
    char* to;
    const char* from;
    std::size_t bytes;
};

// Fresh memory costs more than what is copied into it, a fault a page.
void ask_for_huge_pages(char* begin, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(begin), first = (at + page - 1) / page * page;
    const std::uintptr_t last = (at + bytes) / page * page;
    if (bytes >= kLarge) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // fails: small ones
#endif
}

// bytes(heads[i]) + bytes(payloads[i]) for each i, copied by all threads.
py::list joined_bytes(const py::object& heads, const py::object& payloads) {
    const py::tuple listed = items_of(payloads, "payloads");
    const auto k = static_cast<std::int64_t>(listed.size());
    const py::tuple head = items_of(heads, "heads", k);
    std::deque<Bytes> held;
    py::list all;
    std::vector<Copy> copies;
    std::int64_t total = 0;
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
        for (std::int64_t at = 0; at < rest.size(); at += kStretch)
            copies.push_back({to + first.size() + at, static_cast<const char*>(rest.data()) + at,
                              static_cast<std::size_t>(std::min(kStretch, rest.size() - at))});
        total += bytes;
    }
    {
        const NativeCall call;  // nobody else knows the new bytes yet
        for_pieces(static_cast<std::int64_t>(copies.size()), 2 * total, [&](std::int64_t piece) {
            const Copy& copy = copies[piece];
            std::memcpy(copy.to, copy.from, copy.bytes);
        });
    }
    return all;
}

}  // namespace

void bind_joined(py::module_& module) {
    module.def("joined_bytes", &joined_bytes, py::arg("heads"), py::arg("payloads"));
}

}  // namespace fedcore::bindings
