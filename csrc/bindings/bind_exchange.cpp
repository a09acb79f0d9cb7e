#include <pybind11/stl.h>

#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_updates.h"
#include "bindings/exchanged_rows.h"
#include "bindings/partials.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/exchange.h"

namespace fedcore::bindings {
namespace {

py::array_t<double> exchange(const py::object& acc, const py::object& out, const py::object& bases,
                             const py::object& ys, const py::object& scales, const py::object& weights,
                             const py::object& old_rows, const py::object& anchors, const py::object& new_rows,
                             const Coefficients& row, const Coefficients& adds, const py::object& keys,
                             const py::object& sums, std::int64_t first, const py::object& partials) {
    Arrays arrays(Devices::any);
    const auto sum = arrays.input<double>(acc, {"acc"});
    const std::vector<ClientUpdate> sent = read_client_updates(arrays, bases, ys, scales, weights, sum.n, false).sent;
    const auto k = static_cast<std::int64_t>(sent.size());
    const ExchangedRows found(arrays, k, sum.n, old_rows, anchors, new_rows, row, adds, keys, sums, first);
    const std::vector<RowExchange>& rows = found.rows;
    const Forms& forms = found.forms;
    const auto result = arrays.output<double>(out, {"out"}, sum.n, sum.number);
    py::array_t<double> norms(k);
    double* norm = norms.mutable_data();
    const Partials shares(arrays, partials, block_count(sum.n), k);
    run_where_arrays_lie(
        arrays,
        [&] {
            fedcore::exchange(sum.data, result.data, sent.data(), rows.data(), forms, k, sum.n, shares.data(), norm);
        },
        [&](cuda::Queue& queue) {
            cuda::exchange(queue, sum.data, result.data, sent.data(), rows.data(), forms, k, sum.n, shares.data(),
                           norm);
        });
    return norms;
}

}  // namespace

void bind_exchange(py::module_& module) {
    module.def("exchange", &exchange, py::arg("acc"), py::arg("out"), py::arg("bases"), py::arg("ys"),
               py::arg("scales"), py::arg("weights"), py::arg("old_rows"), py::arg("anchors"), py::arg("new_rows"),
               py::kw_only(), py::arg("row"), py::arg("adds"), py::arg("keys"), py::arg("sums"), py::arg("first"),
               py::arg("partials"));
}

}  // namespace fedcore::bindings
