#include <pybind11/stl.h>

#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_updates.h"
#include "bindings/exchanged_rows.h"
#include "bindings/partials.h"
#include "bindings/totals.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/exchange.h"

namespace fedcore::bindings {
namespace {

py::array_t<double> exchange(const py::object& acc, const py::object& bases, const py::object& ys,
                             const py::object& scales, const py::object& weights, const py::object& old_rows,
                             const py::object& anchors, const py::object& new_rows, const py::object& out,
                             const Coefficients& row, const Coefficients& adds, const py::object& keys,
                             const py::object& sums, std::int64_t first, const py::object& partials) {
    Arrays arrays(Devices::any);
    const auto add_to = [&](auto total) {
        const std::int64_t n = total.n;
        const std::vector<ClientUpdate> sent = read_client_updates(arrays, bases, ys, scales, weights, n, false).sent;
        const auto k = static_cast<std::int64_t>(sent.size());
        const ExchangedRows found(arrays, k, n, old_rows, anchors, new_rows, row, adds, keys, sums, first);
        const RowExchange* const rows = found.rows.data();
        total.write(arrays, out);
        const auto fold = total.fold(0, sent.data());
        py::array_t<double> norms(k);
        double* norm = norms.mutable_data();
        const Partials shares(arrays, partials, block_count(n), k);
        run_where_arrays_lie(
            arrays,
            [&] { fedcore::exchange(fold.acc, fold.out, fold.sent, rows, found.forms, k, n, shares.data(), norm); },
            [&](cuda::Queue& queue) {
                cuda::exchange(queue, fold.acc, fold.out, fold.sent, rows, found.forms, k, n, shares.data(), norm);
            });
        return norms;
    };
    return is_exact(out) ? add_to(Totals<std::int64_t>(arrays, acc)) : add_to(Totals<double>(arrays, acc));
}

}  // namespace

void bind_exchange(py::module_& module) {
    module.def("exchange", &exchange, py::arg("acc"), py::arg("bases"), py::arg("ys"), py::arg("scales"),
               py::arg("weights"), py::arg("old_rows"), py::arg("anchors"), py::arg("new_rows"), py::kw_only(),
               py::arg("out"), py::arg("row") = Coefficients{1, 0, 0, 0}, py::arg("adds") = Coefficients{0, -1, 1, 1},
               py::arg("keys") = py::none(), py::arg("sums") = py::none(), py::arg("first") = 0,
               py::arg("partials") = py::none());
}

}  // namespace fedcore::bindings
