#include <pybind11/numpy.h>

#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/native_call.h"
#include "bindings/sent.h"
#include "kernels/aggregate.h"

namespace fedcore::bindings {
namespace {

void weighted_sum(const py::object& rows, const py::object& weights, const py::object& out, bool float64) {
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
    const NativeCall call;  // reads every row once: milliseconds
    fedcore::weighted_sum(pointers.data(), weight.data, k, sum.n, sum.data,
                          float64 ? Precision::float64 : Precision::float32);
}

void weighted_sum_segments(const py::object& models, const py::object& weights, const py::object& outs, bool float64) {
    const py::sequence listed = sequence(models, "models");
    const auto k = static_cast<std::int64_t>(listed.size());
    const py::sequence out = sequence(outs, "outs");
    const auto segments = static_cast<std::int64_t>(out.size());
    Arrays arrays;
    const auto weight = arrays.input<float>(weights, {"weights"}, k);
    std::vector<const float*> rows(segments * k);
    std::vector<std::int64_t> lengths(segments, kAnyLength);
    for (std::int64_t i = 0; i < k; ++i) {
        const py::sequence model = sequence(listed[i], "models[i]", segments);
        for (std::int64_t s = 0; s < segments; ++s) {
            const auto row = arrays.input<float>(model[s], {"models", i, s}, lengths[s], Axes::any);
            lengths[s] = row.n;
            rows[s * k + i] = row.data;
        }
    }
    std::vector<float*> sums(segments);
    std::vector<Piece> pieces;
    for (std::int64_t s = 0; s < segments; ++s) {
        const auto sum = arrays.output<float>(out[s], {"outs", s}, lengths[s], kNothing, Axes::any);
        sums[s] = sum.data;
        for (std::int64_t begin = 0; begin < sum.n; begin += kBlock)
            pieces.push_back({s, begin, std::min(begin + kBlock, sum.n)});
    }
    const NativeCall call;  // reads every model once: milliseconds
    fedcore::weighted_sum_segments(rows.data(), weight.data, k, pieces.data(), static_cast<std::int64_t>(pieces.size()),
                                   sums.data(), float64 ? Precision::float64 : Precision::float32);
}

template <class Sum>
py::array_t<double> accumulate(const py::object& acc, const py::object& out, const py::object& bases,
                               const py::object& ys, const py::object& scales, const py::object& weights) {
    Arrays arrays;
    const auto sum = arrays.input<Sum>(acc, {"acc"});
    const std::vector<Sent> sent = read_sent(arrays, bases, ys, scales, weights, sum.n);
    const auto result = arrays.output<Sum>(out, {"out"}, sum.n, sum.number);
    const auto k = static_cast<std::int64_t>(sent.size());
    py::array_t<double> norms(k);
    double* norm = norms.mutable_data();
    std::vector<double> scratch(k * block_count(sum.n));
    {
        const NativeCall call;  // reads every update once: milliseconds
        fedcore::accumulate(sum.data, result.data, sent.data(), k, sum.n, scratch.data(), norm);
    }
    return norms;
}

template <class Sum>
py::tuple server_step(const py::object& sum, const py::object& total, const py::object& x, const py::object& v,
                      const py::object& total_out, const py::object& x_out, double from_sum, double from_total,
                      double keep_sum, double keep_v, double gamma) {
    Arrays arrays;
    const auto a = arrays.input<Sum>(sum, {"sum"});
    const auto x_in = arrays.input<float>(x, {"x"}, a.n);
    const auto t =
        total.is_none() ? Span<const double>{nullptr, a.n, kNothing} : arrays.input<double>(total, {"total"}, a.n);
    if (total.is_none() != total_out.is_none())
        raise("ArrayError", "total_out: expected an array exactly where total is one");
    double* t_out = total.is_none() ? nullptr : arrays.output<double>(total_out, {"total_out"}, a.n, t.number).data;
    const auto step_v = arrays.output<float>(v, {"v"}, a.n);
    const auto x_next = arrays.output<float>(x_out, {"x_out"}, a.n, x_in.number);
    std::vector<double> scratch(2 * block_count(a.n));
    double squares[2];
    {
        const NativeCall call;  // several passes over the model's length: milliseconds
        fedcore::server_step({from_sum, from_total, keep_sum, keep_v, gamma}, a.data, t.data, x_in.data, step_v.data,
                             t_out, x_next.data, a.n, scratch.data(), squares);
    }
    return py::make_tuple(squares[0], squares[1]);
}

}  // namespace

void bind_aggregate(py::module_& module) {
    module.def("weighted_sum", &weighted_sum, py::arg("rows"), py::arg("weights"), py::arg("out"), py::kw_only(),
               py::arg("float64"));
    module.def("weighted_sum_segments", &weighted_sum_segments, py::arg("models"), py::arg("weights"), py::arg("outs"),
               py::kw_only(), py::arg("float64"));
    // The dtype of the sum chooses; what is neither is refused as no float64.
    module.def(
        "accumulate",
        [](const py::object& acc, const py::object& out, const py::object& bases, const py::object& ys,
           const py::object& scales, const py::object& weights) {
            return (is_float32(acc) ? accumulate<float> : accumulate<double>)(acc, out, bases, ys, scales, weights);
        },
        py::arg("acc"), py::arg("out"), py::arg("bases"), py::arg("ys"), py::arg("scales"), py::arg("weights"));
    module.def(
        "server_step",
        [](const py::object& sum, const py::object& total, const py::object& x, const py::object& v,
           const py::object& total_out, const py::object& x_out, double from_sum, double from_total, double keep_sum,
           double keep_v, double gamma) {
            return (is_float32(sum) ? server_step<float> : server_step<double>)(sum, total, x, v, total_out, x_out,
                                                                                from_sum, from_total, keep_sum, keep_v,
                                                                                gamma);
        },
        py::arg("sum"), py::arg("total"), py::arg("x"), py::arg("v"), py::arg("total_out"), py::arg("x_out"),
        py::kw_only(), py::arg("from_sum"), py::arg("from_total"), py::arg("keep_sum"), py::arg("keep_v"),
        py::arg("gamma"));
}

}  // namespace fedcore::bindings
