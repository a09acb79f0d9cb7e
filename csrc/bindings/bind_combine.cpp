#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/without_gil.h"
#include "kernels/combine.h"

namespace fedcore::bindings {
namespace {

// The terms of a call, all of one length.
struct Terms {
    std::vector<Term> vectors;
    std::int64_t n = kAnyLength;
    std::vector<AnySpan> read;

    Terms(Arrays& arrays, const py::object& terms, const py::object& coefficients) {
        const py::tuple listed = items_of(terms, "terms");
        const auto k = static_cast<std::int64_t>(listed.size());
        if (k == 0) raise("ShapeError", "terms: expected at least one vector, got none");
        const auto coefficient = arrays.input<double>(coefficients, {"coefficients"}, k);
        for (std::int64_t i = 0; i < k; ++i) {
            read.push_back(arrays.input(listed[i], {"terms", i}, Dtypes{"float32", "float64"}, n));
            n = read.back().n;
            vectors.push_back({read.back().data, read.back().dtype == 1, coefficient.data[i]});
        }
    }
    std::int64_t k() const { return static_cast<std::int64_t>(vectors.size()); }
};

void combine(const py::object& terms, const py::object& coefficients, const py::object& out) {
    Arrays arrays;
    const Terms from(arrays, terms, coefficients);
    const AnySpan to = arrays.output(out, {"out"}, Dtypes{"float32", "float64"}, from.n, from.read[0].number);
    const WithoutGil scope;  // reads every vector once: milliseconds
    if (to.dtype == 1)
        fedcore::combine(from.vectors.data(), from.k(), static_cast<double*>(to.data), from.n);
    else
        fedcore::combine(from.vectors.data(), from.k(), static_cast<float*>(to.data), from.n);
}

double combined_square(const py::object& terms, const py::object& coefficients) {
    Arrays arrays;
    const Terms from(arrays, terms, coefficients);
    std::vector<double> scratch(block_count(from.n));
    const WithoutGil scope;  // reads every vector once: milliseconds
    return fedcore::combined_square(from.vectors.data(), from.k(), from.n, scratch.data());
}

}  // namespace

void bind_combine(py::module_& module) {
    module.def("combine", &combine, py::arg("terms"), py::arg("coefficients"), py::arg("out"));
    module.def("combined_square", &combined_square, py::arg("terms"), py::arg("coefficients"));
}

}  // namespace fedcore::bindings
