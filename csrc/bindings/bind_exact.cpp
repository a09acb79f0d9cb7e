#include <pybind11/numpy.h>

#include <vector>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/totals.h"
#include "bindings/where_arrays_lie.h"
#include "bindings/without_gil.h"
#include "kernels/cuda/kernels.h"
#include "kernels/exact.h"

namespace fedcore::bindings {
namespace {

const Dtypes kWord{"int64"};

bool combine_exact(const py::object& terms, const py::object& coefficients, const py::object& out) {
    Arrays arrays(Devices::any);
    const py::tuple listed = items_of(terms, "terms");
    const auto k = static_cast<std::int64_t>(listed.size());
    if (k == 0) raise("ShapeError", "terms: expected at least one, got none");
    const AnySpan coefficient = arrays.numbers(coefficients, {"coefficients"}, kWord, k);
    std::vector<ExactTerm> read;
    std::int64_t n = kAnyLength;
    Totals<std::int64_t> sum(n);
    for (std::int64_t i = 0; i < k; ++i) {
        const py::object term = listed[i];
        const std::int64_t times = static_cast<const std::int64_t*>(coefficient.data)[i];
        if (times < -(std::int64_t{1} << 31) || times > std::int64_t{1} << 31)
            raise("RangeError", "coefficients: expected integers of at most 2^31, got " + std::to_string(times));
        if (is_exact(term)) {
            const Totals<std::int64_t> found(arrays, term, {"terms", i}, n);
            read.push_back({found.words(), nullptr, times});
            n = found.n;
            if (i == 0) sum = found;
        } else {
            const auto vector = arrays.input<float>(term, {"terms", i}, n);
            read.push_back({{}, vector.data, times});
            n = vector.n;
        }
    }
    sum.n = n;
    const ExactSum result = sum.write(arrays, out);
    bool held = true;
    run_where_arrays_lie(
        arrays, [&] { held = fedcore::combine_exact(read.data(), k, result, n); },
        [&](cuda::Queue& queue) { held = cuda::combine_exact(queue, read.data(), k, result, n); });
    return held;
}

template <class Out>
void read_to(Arrays& arrays, const Totals<std::int64_t>& from, Out* out) {
    run_where_arrays_lie(
        arrays, [&] { fedcore::read_exact(from.words(), out, from.n); },
        [&](cuda::Queue& queue) { cuda::read_exact(queue, from.words(), out, from.n); });
}

void read_exact(const py::object& sum, const py::object& out) {
    Arrays arrays(Devices::any);
    const Totals<std::int64_t> from(arrays, sum, {"sum"});
    const AnySpan to = arrays.output(out, {"out"}, Dtypes{"float32", "float64"}, from.n);
    if (to.dtype == 1)
        read_to(arrays, from, static_cast<double*>(to.data));
    else
        read_to(arrays, from, static_cast<float*>(to.data));
}

void add_words(const py::object& sum, const py::object& terms) {
    const py::tuple listed = items_of(terms, "terms");
    Arrays arrays;
    std::vector<const std::uint64_t*> pointers;
    std::int64_t n = kAnyLength;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(listed.size()); ++i) {
        const auto term = arrays.input<std::int64_t>(listed[i], {"terms", i}, n);
        n = term.n;
        pointers.push_back(reinterpret_cast<const std::uint64_t*>(term.data));
    }
    const auto out = arrays.output<std::int64_t>(sum, {"sum"}, n);
    const WithoutGil scope;
    fedcore::add_words(pointers.data(), static_cast<std::int64_t>(pointers.size()),
                       reinterpret_cast<std::uint64_t*>(out.data), out.n);
}

}  // namespace

void bind_exact(py::module_& module) {
    module.def("combine_exact", &combine_exact, py::arg("terms"), py::arg("coefficients"), py::arg("out"));
    module.def("read_exact", &read_exact, py::arg("sum"), py::arg("out"));
    module.def("add_words", &add_words, py::arg("sum"), py::arg("terms"));
}

}  // namespace fedcore::bindings
