#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/partials.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/combine.h"
#include "kernels/cuda/kernels.h"

namespace fedcore::bindings {
namespace {

// The terms of a call, all of the same length.
struct Terms {
    std::vector<Term> vectors;
    std::int64_t n = kAnyLength;
    std::vector<AnySpan> read;

    Terms(Arrays& arrays, const py::object& terms, const py::object& coefficients) {
        const py::tuple listed = items_of(terms, "terms");
        const auto k = static_cast<std::int64_t>(listed.size());
        if (k == 0) raise("ShapeError", "terms: expected at least one vector, got none");
        const double* const coefficient = arrays.numbers<double>(coefficients, {"coefficients"}, k);
        for (std::int64_t i = 0; i < k; ++i) {
            read.push_back(arrays.input(listed[i], {"terms", i}, Dtypes{"float32", "float64"}, n));
            n = read.back().n;
            vectors.push_back({read.back().data, read.back().dtype == 1, coefficient[i]});
        }
    }
    std::int64_t k() const { return static_cast<std::int64_t>(vectors.size()); }
};

template <class Out>
void combine_to(Arrays& arrays, const Terms& from, Out* out) {
    run_where_arrays_lie(
        arrays, [&] { fedcore::combine(from.vectors.data(), from.k(), out, from.n); },
        [&](cuda::Queue& queue) { cuda::combine(queue, from.vectors.data(), from.k(), out, from.n); });
}

void combine(const py::object& terms, const py::object& coefficients, const py::object& out) {
    Arrays arrays(Devices::any);
    const Terms from(arrays, terms, coefficients);
    const AnySpan to = arrays.output(out, {"out"}, Dtypes{"float32", "float64"}, from.n, from.read[0].number);
    if (to.dtype == 1)
        combine_to(arrays, from, static_cast<double*>(to.data));
    else
        combine_to(arrays, from, static_cast<float*>(to.data));
}

double combined_square(const py::object& terms, const py::object& coefficients, const py::object& partials) {
    Arrays arrays(Devices::any);
    const Terms from(arrays, terms, coefficients);
    const Partials shares(arrays, partials, block_count(from.n), 1);
    double square = 0;
    run_where_arrays_lie(
        arrays, [&] { square = fedcore::combined_square(from.vectors.data(), from.k(), from.n, shares.data()); },
        [&](cuda::Queue& queue) {
            square = cuda::combined_square(queue, from.vectors.data(), from.k(), from.n, shares.data());
        });
    return square;
}

}  // namespace

void bind_combine(py::module_& module) {
    module.def("combine", &combine, py::arg("terms"), py::arg("coefficients"), py::arg("out"));
    module.def("combined_square", &combined_square, py::arg("terms"), py::arg("coefficients"), py::arg("partials"));
}

}  // namespace fedcore::bindings
