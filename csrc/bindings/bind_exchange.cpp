#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/native_call.h"
#include "bindings/sent.h"
#include "kernels/exchange.h"

namespace fedcore::bindings {
namespace {

Span<const float> optional_row(Arrays& arrays, const py::object& row, Name name, std::int64_t n) {
    return row.is_none() ? Span<const float>{nullptr, n, kNothing} : arrays.input<float>(row, name, n);
}

py::array_t<double> exchange(const py::object& acc, const py::object& out, const py::object& bases,
                             const py::object& ys, const py::object& scales, const py::object& weights,
                             const py::object& old_rows, const py::object& anchors, const py::object& new_rows) {
    Arrays arrays;
    const auto sum = arrays.input<double>(acc, {"acc"});
    const std::vector<Sent> sent = read_sent(arrays, bases, ys, scales, weights, sum.n);
    const auto k = static_cast<std::int64_t>(sent.size());
    const py::sequence old_row = sequence(old_rows, "old_rows", k);
    const py::sequence anchor = sequence(anchors, "anchors", k);
    const py::sequence new_row = sequence(new_rows, "new_rows", k);
    std::vector<RowSwap> rows(k);
    std::vector<std::size_t> replaced(k);
    for (std::int64_t i = 0; i < k; ++i) {
        const auto old = optional_row(arrays, old_row[i], {"old_rows", i}, sum.n);
        rows[i].old_row = old.data;
        replaced[i] = old.number;
        rows[i].anchor = optional_row(arrays, anchor[i], {"anchors", i}, sum.n).data;
        if (rows[i].anchor != nullptr && rows[i].old_row == nullptr)
            raise("ArrayError", Name{"anchors", i}.text() + ": expected None where old_rows is None");
    }
    for (std::int64_t i = 0; i < k; ++i)
        rows[i].new_row = arrays.output<float>(new_row[i], {"new_rows", i}, sum.n, replaced[i]).data;
    const auto result = arrays.output<double>(out, {"out"}, sum.n, sum.number);
    py::array_t<double> norms(k);
    double* norm = norms.mutable_data();
    std::vector<double> scratch(k * block_count(sum.n));
    {
        const NativeCall call;  // reads and writes every row once: milliseconds
        fedcore::exchange(sum.data, result.data, sent.data(), rows.data(), k, sum.n, scratch.data(), norm);
    }
    return norms;
}

}  // namespace

void bind_exchange(py::module_& module) {
    module.def("exchange", &exchange, py::arg("acc"), py::arg("out"), py::arg("bases"), py::arg("ys"),
               py::arg("scales"), py::arg("weights"), py::arg("old_rows"), py::arg("anchors"), py::arg("new_rows"));
}

}  // namespace fedcore::bindings
