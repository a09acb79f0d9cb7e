#include <pybind11/numpy.h>

#include <type_traits>
#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_updates.h"
#include "bindings/partials.h"
#include "bindings/totals.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/aggregate.h"
#include "kernels/cuda/kernels.h"

namespace fedcore::bindings {
namespace {

const Dtypes kRowDtypes{"float32", "float64", "float16", "bfloat16"};  // in the order of Dtype
const Dtypes kOneDtype[] = {{"float32"}, {"float64"}, {"float16"}, {"bfloat16"}};
const Dtypes kOutDtypes[] = {{"float32"}, {"float32", "float64"}, {"float32", "float16"}, {"float32", "bfloat16"}};

// The rows of one sum, all of the first one's dtype and length.
struct Rows {
    Axes axes;
    Dtype dtype = Dtype::float32;
    std::int64_t n = kAnyLength;

    const void* read(Arrays& arrays, py::handle row, Name name) {
        const bool first = n == kAnyLength;
        const Dtypes& due = first ? kRowDtypes : kOneDtype[static_cast<int>(dtype)];
        const AnySpan found = arrays.input(row, name, due, n, axes);
        if (first) dtype = static_cast<Dtype>(found.dtype);
        n = found.n;
        return found.data;
    }

    const float* read_base(Arrays& arrays, const py::object& base, Name name) {
        if (base.is_none()) return nullptr;
        const auto found = arrays.input<float>(base, name, n, axes);
        n = found.n;
        return found.data;
    }
};

std::vector<double> read_weights(Arrays& arrays, const py::object& weights, std::int64_t k, bool float64) {
    const IeeeMode ieee;  // a flushing thread would lose subnormal weights
    if (!float64) {
        const float* values = arrays.numbers<float>(weights, {"weights"}, k);
        return {values, values + k};
    }
    const AnySpan found = arrays.numbers(weights, {"weights"}, kOutDtypes[static_cast<int>(Dtype::float64)], k);
    if (found.dtype == 0) return {static_cast<const float*>(found.data), static_cast<const float*>(found.data) + k};
    return {static_cast<const double*>(found.data), static_cast<const double*>(found.data) + k};
}

// The blocks of a sum's n elements.
void cut(std::int64_t sum, std::int64_t n, std::vector<Piece>& pieces) {
    for (std::int64_t begin = 0; begin < n; begin += kBlock)
        pieces.push_back({sum, begin, std::min(begin + kBlock, n)});
}

using Norms = py::typing::Optional<py::array_t<double>>;  // float64[k + 1], or None if they are not wanted

// Sums whose inputs have been read; outputs are read last, and compared with all inputs.
struct Job {
    std::vector<RowSum> sums;
    std::vector<Piece> pieces;
    std::vector<std::int64_t> sizes;

    void add(Arrays& arrays, const Rows& rows, const void* const* pointers, std::int64_t k, const float* base,
             py::handle out, Name name) {
        RowSum sum{pointers, base, nullptr, rows.dtype, Dtype::float32};
        const Dtypes& due = k == 0 ? kRowDtypes : kOutDtypes[static_cast<int>(rows.dtype)];
        const AnySpan to = arrays.output(out, name, due, rows.n, kNothing, rows.axes);
        if (to.dtype != 0) sum.out_dtype = k == 0 ? static_cast<Dtype>(to.dtype) : rows.dtype;
        sum.out = to.data;
        cut(static_cast<std::int64_t>(sums.size()), to.n, pieces);
        sizes.push_back(to.n);
        sums.push_back(sum);
    }

    Norms run(Arrays& arrays, const std::vector<double>& weights, bool float64, bool norms) const {
        const auto k = static_cast<std::int64_t>(weights.size()), count = static_cast<std::int64_t>(pieces.size());
        const auto tensors = static_cast<std::int64_t>(sums.size());
        const Precision precision = float64 ? Precision::float64 : Precision::float32;
        std::vector<double> squares(norms ? k + 1 : 0), scratch(norms && !arrays.on_device() ? count * (k + 1) : 0);
        double* const square = norms ? squares.data() : nullptr;
        run_where_arrays_lie(
            arrays,
            [&] {
                weighted_sums(sums.data(), weights.data(), k, pieces.data(), count, precision, scratch.data(), square);
            },
            [&](cuda::Queue& queue) {
                cuda::weighted_sums(queue, sums.data(), sizes.data(), tensors, weights.data(), k, precision, square);
            });
        if (!norms) return py::none();
        return py::array_t<double>(k + 1, squares.data());
    }
};

Norms weighted_sum(const py::object& rows, const py::object& weights, const py::object& out, const py::object& base,
                   bool float64, bool norms) {
    const py::tuple listed = items_of(rows, "rows");
    const auto k = static_cast<std::int64_t>(listed.size());
    Arrays arrays(Devices::any);
    Rows read{Axes::one};
    std::vector<const void*> pointers;
    for (std::int64_t i = 0; i < k; ++i) pointers.push_back(read.read(arrays, listed[i], {"rows", i}));
    const std::vector<double> weight = read_weights(arrays, weights, k, float64);
    const float* x = read.read_base(arrays, base, {"base"});
    Job sums;
    sums.add(arrays, read, pointers.data(), k, x, out, {"out"});
    return sums.run(arrays, weight, float64, norms);
}

Norms weighted_sum_segments(const py::object& models, const py::object& weights, const py::object& outs,
                            const py::object& base, bool float64, bool norms) {
    const py::tuple listed = items_of(models, "models");
    const auto k = static_cast<std::int64_t>(listed.size());
    const py::tuple out = items_of(outs, "outs");
    const auto segments = static_cast<std::int64_t>(out.size());
    Arrays arrays(Devices::any);
    arrays.reserve((k + 2) * segments + 1);
    const std::vector<double> weight = read_weights(arrays, weights, k, float64);
    std::vector<Rows> read(segments, {Axes::any});
    std::vector<const void*> pointers(segments * k);
    for (std::int64_t i = 0; i < k; ++i) {
        const py::tuple model = items_of(listed[i], {"models", i}, segments);
        for (std::int64_t s = 0; s < segments; ++s)
            pointers[s * k + i] = read[s].read(arrays, model[s], {"models", i, s});
    }
    std::vector<const float*> bases(segments, nullptr);
    if (!base.is_none()) {
        const py::tuple x = items_of(base, "base", segments);
        for (std::int64_t s = 0; s < segments; ++s) bases[s] = read[s].read_base(arrays, x[s], {"base", s});
    }
    Job sums;
    for (std::int64_t s = 0; s < segments; ++s)
        sums.add(arrays, read[s], pointers.data() + s * k, k, bases[s], out[s], {"outs", s});
    return sums.run(arrays, weight, float64, norms);
}

// For a missing term: an array of any length that overlaps nothing.
template <class T>
Span<const T> optional(Arrays& arrays, const py::object& array, Name name, std::int64_t n) {
    return array.is_none() ? Span<const T>{nullptr, n, kNothing} : arrays.input<T>(array, name, n);
}

// Adds to the sum `out`, from `acc` or from zeros.
template <class Number, class Accumulate>
py::array_t<double> add_to(const py::object& acc, const py::object& out, const Accumulate& accumulate) {
    Arrays arrays(Devices::any);
    using Total = Totals<Number>;
    return accumulate(arrays, acc.is_none() ? Total(Total::length_of(out)) : Total(arrays, acc));
}

py::array_t<double> accumulate(const py::object& acc, const py::object& bases, const py::object& ys,
                               const py::object& scales, const py::object& weights, const py::object& out,
                               const py::object& partials) {
    const auto run = [&](Arrays& arrays, auto total) {
        const ClientTensors read = read_client_updates(arrays, bases, ys, scales, weights, total.n, true);
        total.write(arrays, out);
        const std::int64_t k = read.k;
        std::vector<decltype(total.fold(0, nullptr))> folds;
        std::vector<Piece> pieces;
        std::vector<std::int64_t> sizes;
        for (std::size_t s = 0; s + 1 < read.starts.size(); ++s) {
            const auto tensor = static_cast<std::int64_t>(s);
            folds.push_back(total.fold(read.starts[s], read.sent.data() + tensor * k));
            sizes.push_back(read.starts[s + 1] - read.starts[s]);
            cut(tensor, sizes.back(), pieces);
        }
        const auto count = static_cast<std::int64_t>(pieces.size());
        py::array_t<double> norms(k);
        double* norm = norms.mutable_data();
        const Partials shares(arrays, partials, count, k);
        run_where_arrays_lie(
            arrays, [&] { fedcore::accumulate(folds.data(), k, pieces.data(), count, shares.data(), norm); },
            [&](cuda::Queue& queue) {
                const auto tensors = static_cast<std::int64_t>(sizes.size());
                cuda::accumulate(queue, folds.data(), sizes.data(), tensors, k, shares.data(), norm);
            });
        return norms;
    };
    if (is_exact(out)) return add_to<std::int64_t>(acc, out, run);
    // The sum's dtype chooses the precision; other dtypes are rejected as not float64.
    return is_float32(acc.is_none() ? out : acc, acc.is_none() ? "out" : "acc") ? add_to<float>(acc, out, run)
                                                                                : add_to<double>(acc, out, run);
}

// The coefficients, in the order of fedcore.kernels.Linear: A, B, T, g, v.
Linear read_linear(const py::object& form, const char* name) {
    const py::tuple listed = items_of(form, {name}, 5);
    double numbers[5];
    for (std::size_t i = 0; i < 5; ++i) {
        numbers[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(listed.ptr(), i));
        if (numbers[i] == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
    return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
}

py::typing::Tuple<double, double> server_step(const py::object& sum, const py::object& total, const py::object& x,
                                              const py::object& v_of, const py::object& total_of, double gamma,
                                              const py::object& momentum, const py::object& control,
                                              const py::object& v, const py::object& total_out, const py::object& x_out,
                                              const py::object& partials) {
    const Step step{read_linear(v_of, "v_of"), read_linear(total_of, "total_of"), gamma};
    Arrays arrays(Devices::any);
    const auto take = [&](const auto& a) {
        using Sum = std::remove_const_t<std::remove_pointer_t<decltype(a.data)>>;
        const auto x_in = arrays.input<float>(x, {"x"}, a.n);
        const auto t = optional<double>(arrays, total, {"total"}, a.n);
        const auto g = optional<float>(arrays, momentum, {"momentum"}, a.n);
        const auto b = optional<double>(arrays, control, {"control"}, a.n);
        if (total.is_none() != total_out.is_none())
            raise("ArrayError", "total_out: expected an array exactly where total is one");
        StepOutputs to{};
        if (!total.is_none()) to.total = arrays.output<double>(total_out, {"total_out"}, a.n, t.number).data;
        to.v = arrays.output<float>(v, {"v"}, a.n, g.number).data;
        to.x = arrays.output<float>(x_out, {"x_out"}, a.n, x_in.number).data;
        const StepInputs<Sum> from{a.data, t.data, g.data, b.data, x_in.data};
        const Partials shares(arrays, partials, block_count(a.n), 2);
        double squares[2];
        run_where_arrays_lie(
            arrays, [&] { fedcore::server_step<Sum>(step, from, to, a.n, shares.data(), squares); },
            [&](cuda::Queue& queue) { cuda::server_step<Sum>(queue, step, from, to, a.n, shares.data(), squares); });
        return py::make_tuple(squares[0], squares[1]);
    };
    return is_float32(sum, "sum") ? take(arrays.input<float>(sum, {"sum"})) : take(arrays.input<double>(sum, {"sum"}));
}

}  // namespace

void bind_aggregate(py::module_& module) {
    module.def("weighted_sum", &weighted_sum, py::arg("rows"), py::arg("weights"), py::arg("out"), py::kw_only(),
               py::arg("base"), py::arg("float64"), py::arg("norms"));
    module.def("weighted_sum_segments", &weighted_sum_segments, py::arg("models"), py::arg("weights"), py::arg("outs"),
               py::kw_only(), py::arg("base"), py::arg("float64"), py::arg("norms"));
    module.def("accumulate", &accumulate, py::arg("acc"), py::arg("bases"), py::arg("ys"), py::arg("scales"),
               py::arg("weights"), py::kw_only(), py::arg("out"), py::arg("partials") = py::none());
    module.def("server_step", &server_step, py::arg("sum"), py::arg("total"), py::arg("x"), py::kw_only(),
               py::arg("v_of"), py::arg("total_of") = py::make_tuple(0.0, 0.0, 1.0, 0.0, 0.0), py::arg("gamma"),
               py::arg("momentum") = py::none(), py::arg("control") = py::none(), py::arg("v"), py::arg("total_out"),
               py::arg("x_out"), py::arg("partials") = py::none());
}

}  // namespace fedcore::bindings
