#include <memory>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/where_arrays_lie.h"
#include "kernels/cuda/kernels.h"
#include "kernels/mix.h"

namespace fedcore::bindings {
namespace {

// Rejects compressed rows that would lead the kernel out of its arrays.
Mixing read_matrix(Arrays& arrays, const py::object& starts, const py::object& columns, const py::object& weights,
                   std::int64_t p) {
    const AnySpan weight = arrays.numbers(weights, {"weights"}, Dtypes{"float32"}, kAnyLength);
    const std::int64_t entries = weight.n;
    const auto* start =
        static_cast<const std::int64_t*>(arrays.numbers(starts, Name{"starts"}, Dtypes{"int64"}, p + 1).data);
    const auto* column =
        static_cast<const std::int64_t*>(arrays.numbers(columns, Name{"columns"}, Dtypes{"int64"}, entries).data);
    bool rising = start[0] == 0 && start[p] == entries;
    for (std::int64_t i = 0; i < p; ++i) rising = rising && start[i] <= start[i + 1];
    if (!rising) raise("RangeError", "starts: expected to rise from 0 to the " + std::to_string(entries) + " entries");
    for (std::int64_t e = 0; e < entries; ++e)
        if (column[e] < 0 || column[e] >= p)
            raise("RangeError", Name{"columns", e}.text() + ": expected 0.." + std::to_string(p - 1) + ", got " +
                                    std::to_string(column[e]));
    return {start, column, static_cast<const float*>(weight.data), p};
}

void mix_on_host(const Mixing& matrix, float* const* models, std::int64_t n) {
    std::vector<std::int64_t> memory(mix_memory(matrix));
    const MixPlan plan = plan_mix(matrix, n, memory.data());
    const std::unique_ptr<float[]> scratch(new float[plan.scratch]);  // not a vector, which would be zeroed
    fedcore::mix(matrix, plan, models, n, scratch.get());
}

void mix(const py::object& models, const py::object& starts, const py::object& columns, const py::object& weights) {
    const py::tuple listed = items_of(models, "models");
    const auto p = static_cast<std::int64_t>(listed.size());
    Arrays arrays(Devices::any);
    const Mixing matrix = read_matrix(arrays, starts, columns, weights, p);
    std::int64_t n = p == 0 ? 0 : kAnyLength;
    std::vector<float*> pointers;
    for (std::int64_t i = 0; i < p; ++i) {
        const auto model = arrays.output<float>(listed[i], {"models", i}, n);
        n = model.n;
        pointers.push_back(model.data);
    }
    if (arrays.on_device()) check_range("p", p, 0, cuda::kMostMixed);
    run_where_arrays_lie(
        arrays, [&] { mix_on_host(matrix, pointers.data(), n); },
        [&](cuda::Queue& queue) { cuda::mix(queue, matrix, pointers.data(), n); });
}

}  // namespace

void bind_mix(py::module_& module) {
    module.def("mix", &mix, py::arg("models"), py::arg("starts"), py::arg("columns"), py::arg("weights"));
}

}  // namespace fedcore::bindings
