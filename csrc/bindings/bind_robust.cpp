#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_updates.h"
#include "bindings/partials.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/robust.h"

namespace fedcore::bindings {
namespace {

struct Cohort {
    ClientTensors read;
    std::int64_t n;
};

// The first update sets n. Lists are read once, since they may change.
Cohort read_updates(Arrays& arrays, const py::object& bases, const py::object& ys, const py::object& scales) {
    const py::tuple listed = items_of(ys, "ys");
    if (listed.empty()) raise("ShapeError", "ys: must not be empty");
    Arrays first(Devices::any);
    py::tuple each = listed;
    std::int64_t n = 0;
    if (is_apart(listed[0])) {
        const py::tuple tensors = items_of(listed[0], {"ys", 0});
        for (std::int64_t s = 0; s < static_cast<std::int64_t>(tensors.size()); ++s)
            n += first.input(tensors[s], {"ys", 0, s}, update_dtypes(), kAnyLength, Axes::any).n;
        each = py::tuple(listed.size());
        each[0] = tensors;
        for (std::size_t i = 1; i < listed.size(); ++i) each[i] = listed[i];
    } else {
        n = first.input(listed[0], {"ys", 0}, update_dtypes()).n;
    }
    py::array_t<double> weights(static_cast<py::ssize_t>(listed.size()));
    std::fill_n(weights.mutable_data(), weights.size(), 1.0);
    return {read_client_updates(arrays, bases, each, scales, weights, n, true), n};
}

Updates updates_of(const ClientTensors& read) {
    return {read.sent.data(), read.starts.data(), static_cast<std::int64_t>(read.starts.size()) - 1, read.k};
}

py::array_t<double> gram_matrix(const py::object& bases, const py::object& ys, const py::object& scales,
                                const py::object& partials) {
    Arrays arrays(Devices::any);
    const auto [read, n] = read_updates(arrays, bases, ys, scales);
    const Partials shares(arrays, partials, block_count(n), read.k * (read.k + 1) / 2);
    py::array_t<double> products({read.k, read.k});
    double* const product = products.mutable_data();
    const Updates updates = updates_of(read);
    run_where_arrays_lie(
        arrays, [&, n = n] { fedcore::gram(updates, n, shares.data(), product); },
        [&, n = n](cuda::Queue& queue) { cuda::gram(queue, updates, n, shares.data(), product); });
    return products;
}

void column_statistic(const py::object& bases, const py::object& ys, const py::object& scales, const py::object& out,
                      const py::object& mixing, std::int64_t rows, std::int64_t first, std::int64_t last,
                      std::int64_t nearest) {
    Arrays arrays(Devices::any);
    const auto [read, n] = read_updates(arrays, bases, ys, scales);
    const double* matrix = nullptr;
    if (mixing.is_none())
        rows = read.k;
    else
        matrix = static_cast<const double*>(
            arrays.numbers(mixing, {"mixing"}, Dtypes{"float64"}, rows * read.k, Axes::any).data);
    check_range("last", last, 1, rows);
    check_range("first", first, 0, last - 1);
    check_range("nearest", nearest, 0, rows);
    float* const to = arrays.output<float>(out, {"out"}, n).data;
    const Updates updates = updates_of(read);
    const Statistic statistic{first, last, nearest};
    run_where_arrays_lie(
        arrays, [&, n = n] { fedcore::column_statistic(updates, matrix, rows, statistic, n, to); },
        [&, n = n](cuda::Queue& queue) { cuda::column_statistic(queue, updates, matrix, rows, statistic, n, to); });
}

}  // namespace

void bind_robust(py::module_& module) {
    module.def("gram_matrix", &gram_matrix, py::arg("bases"), py::arg("ys"), py::arg("scales"), py::kw_only(),
               py::arg("partials") = py::none());
    module.def("column_statistic", &column_statistic, py::arg("bases"), py::arg("ys"), py::arg("scales"),
               py::arg("out"), py::kw_only(), py::arg("mixing"), py::arg("rows"), py::arg("first"), py::arg("last"),
               py::arg("nearest"));
}

}  // namespace fedcore::bindings
