#include <pybind11/numpy.h>

#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/sent.h"
#include "kernels/aggregate.h"

namespace fedcore::bindings {
namespace {

void weighted_sum(const py::object& rows, const py::object& weights, const py::object& out) {
    const py::sequence listed = sequence(rows, "rows");
    const auto k = static_cast<std::int64_t>(listed.size());
    Arrays arrays;
    std::int64_t n = kAnyLength;
    std::vector<const float*> pointers;
    for (std::int64_t i = 0; i < k; ++i) {
        const auto row = arrays.input<float>(listed[i], {"rows", i}, n);
        n = row.n;
        pointers.push_back(row.data);
    }
    const auto weight = arrays.input<float>(weights, {"weights"}, k);
    const auto sum = arrays.output<float>(out, {"out"}, n);
    const py::gil_scoped_release release;  // reads every row once: milliseconds
    fedcore::weighted_sum(pointers.data(), weight.data, k, sum.n, sum.data);
}

py::array_t<double> accumulate(const py::object& acc, const py::object& out, const py::object& bases,
                               const py::object& ys, const py::object& scales, const py::object& weights) {
    Arrays arrays;
    const auto sum = arrays.input<double>(acc, {"acc"});
    const std::vector<Sent> sent = read_sent(arrays, bases, ys, scales, weights, sum.n);
    const auto result = arrays.output<double>(out, {"out"}, sum.n, sum.data);
    const auto k = static_cast<std::int64_t>(sent.size());
    py::array_t<double> norms(k);
    double* norm = norms.mutable_data();
    std::vector<double> scratch(k * block_count(sum.n));
    {
        const py::gil_scoped_release release;  // reads every update once: milliseconds
        fedcore::accumulate(sum.data, result.data, sent.data(), k, sum.n, scratch.data(), norm);
    }
    return norms;
}

py::tuple server_step(const py::object& sum, const py::object& total, const py::object& x, const py::object& v,
                      const py::object& total_out, const py::object& x_out, double from_sum, double from_total,
                      double keep_sum, double keep_v, double gamma) {
    Arrays arrays;
    const auto a = arrays.input<double>(sum, {"sum"});
    const auto x_in = arrays.input<float>(x, {"x"}, a.n);
    const double* t = total.is_none() ? nullptr : arrays.input<double>(total, {"total"}, a.n).data;
    if (total.is_none() != total_out.is_none())
        raise("ArrayError", "total_out: expected an array exactly where total is one");
    double* t_out = t == nullptr ? nullptr : arrays.output<double>(total_out, {"total_out"}, a.n, t).data;
    const auto step_v = arrays.output<float>(v, {"v"}, a.n);
    const auto x_next = arrays.output<float>(x_out, {"x_out"}, a.n, x_in.data);
    std::vector<double> scratch(2 * block_count(a.n));
    double squares[2];
    {
        const py::gil_scoped_release release;  // several passes over the model's length: milliseconds
        fedcore::server_step({from_sum, from_total, keep_sum, keep_v, gamma}, a.data, t, x_in.data, step_v.data, t_out,
                             x_next.data, a.n, scratch.data(), squares);
    }
    return py::make_tuple(squares[0], squares[1]);
}

}  // namespace

void bind_aggregate(py::module_& module) {
    module.def("weighted_sum", &weighted_sum, py::arg("rows"), py::arg("weights"), py::arg("out"));
    module.def("accumulate", &accumulate, py::arg("acc"), py::arg("out"), py::arg("bases"), py::arg("ys"),
               py::arg("scales"), py::arg("weights"));
    module.def("server_step", &server_step, py::arg("sum"), py::arg("total"), py::arg("x"), py::arg("v"),
               py::arg("total_out"), py::arg("x_out"), py::kw_only(), py::arg("from_sum"), py::arg("from_total"),
               py::arg("keep_sum"), py::arg("keep_v"), py::arg("gamma"));
}

}  // namespace fedcore::bindings
