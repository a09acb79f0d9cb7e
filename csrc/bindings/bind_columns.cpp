#include <cmath>
#include <limits>

#include "base/float_mode.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"

namespace fedcore::bindings {
namespace {

// A cohort's columns are short, and NumPy's checks of its arguments take longer than the arithmetic.
Span<const double> read_column(Arrays& arrays, py::handle column, const char* name, std::int64_t k = kAnyLength) {
    return arrays.input<double>(column, {name}, k);
}

// The minimum and maximum of a column; NaN if it has one, and inf and -inf if it is empty.
py::typing::Tuple<double, double> column_range(const py::object& column) {
    Arrays arrays;
    const IeeeMode mode;
    const auto read = read_column(arrays, column, "column");
    double least = std::numeric_limits<double>::infinity(), most = -least;
    for (std::int64_t i = 0; i < read.n; ++i) {
        const double value = read.data[i];
        if (std::isnan(value)) return py::make_tuple(value, value);
        least = value < least ? value : least;
        most = value > most ? value : most;
    }
    return py::make_tuple(least, most);
}

// total + sum_i column[i] times[i], in order; a missing `times` counts as 1.
double column_sum(double total, const py::object& column, const py::object& times) {
    Arrays arrays;
    const IeeeMode mode;
    const auto read = read_column(arrays, column, "column");
    const double* by = times.is_none() ? nullptr : read_column(arrays, times, "times", read.n).data;
    for (std::int64_t i = 0; i < read.n; ++i) total += by == nullptr ? read.data[i] : read.data[i] * by[i];
    return total;
}

}  // namespace

void bind_columns(py::module_& module) {
    module.def("column_range", &column_range, py::arg("column"));
    module.def("column_sum", &column_sum, py::arg("total"), py::arg("column"), py::arg("times"));
}

}  // namespace fedcore::bindings
