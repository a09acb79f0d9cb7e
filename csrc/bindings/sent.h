// Clients' updates as the kernels take them, from parallel Python lists.
#pragma once

#include <vector>

#include "bindings/arrays.h"
#include "kernels/aggregate.h"

namespace fedcore::bindings {

// bases: list of float32[n] or None; ys: list of float32[n]; scales, weights: float64[k].
inline std::vector<Sent> read_sent(Arrays& arrays, const py::object& bases, const py::object& ys,
                                   const py::object& scales, const py::object& weights, std::int64_t n) {
    const py::sequence listed = sequence(ys, "ys");
    const auto k = static_cast<std::int64_t>(listed.size());
    const py::sequence base = sequence(bases, "bases", k);
    const auto scale = arrays.input<double>(scales, {"scales"}, k);
    const auto weight = arrays.input<double>(weights, {"weights"}, k);
    std::vector<Sent> sent;
    sent.reserve(k);
    for (std::int64_t i = 0; i < k; ++i) {
        const float* y = arrays.input<float>(listed[i], {"ys", i}, n).data;
        const py::object from = base[i];
        sent.push_back({y, from.is_none() ? nullptr : arrays.input<float>(from, {"bases", i}, n).data,
                        static_cast<float>(scale.data[i]), weight.data[i]});
    }
    return sent;
}

}  // namespace fedcore::bindings
