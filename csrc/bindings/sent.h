// Clients' updates as the kernels take them, from parallel Python lists.
#pragma once

#include <vector>

#include "base/float_mode.h"
#include "bindings/arrays.h"
#include "kernels/aggregate.h"

namespace fedcore::bindings {

// As NumPy spells them, in the order of Dtype.
inline const Dtypes& sent_dtypes() {
    static const Dtypes kDue{"float32", "float64", "float16", "bfloat16"};
    return kDue;
}

// bases: list of float32[n] or None; ys: list of [n] of any of these; scales, weights: float64[k].
inline std::vector<Sent> read_sent(Arrays& arrays, const py::object& bases, const py::object& ys,
                                   const py::object& scales, const py::object& weights, std::int64_t n) {
    const py::sequence listed = sequence(ys, "ys");
    const auto k = static_cast<std::int64_t>(listed.size());
    const py::sequence base = sequence(bases, "bases", k);
    const auto scale = arrays.input<double>(scales, {"scales"}, k);
    const auto weight = arrays.input<double>(weights, {"weights"}, k);
    const IeeeMode mode;  // scales are rounded here, and a flushing caller would lose the subnormal ones
    std::vector<Sent> sent;
    sent.reserve(k);
    for (std::int64_t i = 0; i < k; ++i) {
        const AnySpan y = arrays.input(listed[i], {"ys", i}, sent_dtypes(), n);
        const py::object from = base[i];
        sent.push_back({y.data, static_cast<Dtype>(y.dtype),
                        from.is_none() ? nullptr : arrays.input<float>(from, {"bases", i}, n).data,
                        static_cast<float>(scale.data[i]), weight.data[i]});
    }
    return sent;
}

}  // namespace fedcore::bindings
