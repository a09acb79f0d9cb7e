#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/partials.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/norms.h"

namespace fedcore::bindings {
namespace {

py::array_t<double> squared_norms(const py::object& rows, const py::object& partials) {
    const py::tuple listed = items_of(rows, "rows");
    const auto k = static_cast<std::int64_t>(listed.size());
    Arrays arrays(Devices::any);
    std::int64_t n = kAnyLength;
    std::vector<const float*> pointers;
    for (std::int64_t i = 0; i < k; ++i) {
        const auto row = arrays.input<float>(listed[i], {"rows", i}, n);
        n = row.n;
        pointers.push_back(row.data);
    }
    py::array_t<double> norms(k);
    double* norm = norms.mutable_data();
    if (k == 0) return norms;
    const Partials shares(arrays, partials, block_count(n), k);
    run_where_arrays_lie(
        arrays, [&] { fedcore::squared_norms(pointers.data(), k, n, shares.data(), norm); },
        [&](cuda::Queue& queue) { cuda::squared_norms(queue, pointers.data(), k, n, shares.data(), norm); });
    return norms;
}

}  // namespace

void bind_norms(py::module_& module) {
    module.def("squared_norms", &squared_norms, py::arg("rows"), py::kw_only(), py::arg("partials") = py::none());
}

}  // namespace fedcore::bindings
