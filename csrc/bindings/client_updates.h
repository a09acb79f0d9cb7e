// Clients' updates in the kernels' form, from parallel Python lists.
#pragma once

#include <vector>

#include "base/float_mode.h"
#include "bindings/arrays.h"
#include "kernels/aggregate.h"

namespace fedcore::bindings {

// As NumPy spells them, in the order of Dtype.
inline const Dtypes& update_dtypes() {
    static const Dtypes kDue{"float32", "float64", "float16", "bfloat16"};
    return kDue;
}

// The updates of k clients, tensor by tensor: client i's tensor s is sent[s * k + i], and begins at starts[s] of the
// sums.
struct ClientTensors {
    std::int64_t k;
    std::vector<std::int64_t> starts;
    std::vector<ClientUpdate> sent;
};

// The arrays of a call except those of its clients.
constexpr std::size_t kOthers = 8;

inline bool is_apart(py::handle y) {
    return PyList_Check(y.ptr()) || PyTuple_Check(y.ptr());
}

// The start of each of y's tensors, and n.
inline std::vector<std::int64_t> read_starts(const py::tuple& tensors, std::int64_t i, std::int64_t n) {
    Arrays arrays(Devices::any);
    std::vector<std::int64_t> starts{0};
    for (std::int64_t s = 0; s < static_cast<std::int64_t>(tensors.size()); ++s)
        starts.push_back(starts.back() +
                         arrays.input(tensors[s], {"ys", i, s}, update_dtypes(), kAnyLength, Axes::any).n);
    if (starts.back() != n)
        raise("ShapeError", Name{"ys", i}.text() + ": expected tensors of " + std::to_string(n) +
                                " elements together, got " + std::to_string(starts.back()));
    return starts;
}

// bases: list of float32[n] or None; ys: list of [n] of any of these dtypes, or with `apart` also of lists of tensors
// of any shapes with n elements together, the same in all lists; scales, weights: float64[k].
inline ClientTensors read_client_updates(Arrays& arrays, const py::object& bases, const py::object& ys,
                                         const py::object& scales, const py::object& weights, std::int64_t n,
                                         bool apart) {
    const py::tuple listed = items_of(ys, "ys");
    const auto k = static_cast<std::int64_t>(listed.size());
    const py::tuple base = items_of(bases, "bases", k);
    const double* const scale = arrays.numbers<double>(scales, {"scales"}, k);
    const double* const weight = arrays.numbers<double>(weights, {"weights"}, k);
    const IeeeMode mode;  // because scales are rounded here, and a flushing caller would lose subnormal ones
    std::int64_t first = apart ? 0 : k;  // the first y that is a list of tensors; all are cut like it
    while (first < k && !is_apart(listed[first])) ++first;
    const py::tuple of_first = first < k ? items_of(listed[first], {"ys", first}) : py::tuple();
    ClientTensors read{k, first < k ? read_starts(of_first, first, n) : std::vector<std::int64_t>{0, n}, {}};
    const auto count = static_cast<std::int64_t>(read.starts.size()) - 1;
    read.sent.resize(count * k);
    arrays.reserve((count + 1) * k + kOthers);
    const py::tuple none;
    const float* x = nullptr;
    for (std::int64_t i = 0; i < k; ++i) {
        const py::handle y = PyTuple_GET_ITEM(listed.ptr(), i), from = PyTuple_GET_ITEM(base.ptr(), i);
        // Clients of one round start from the same model, which is checked once.
        if (i == 0 || from.ptr() != PyTuple_GET_ITEM(base.ptr(), i - 1))
            x = from.is_none() ? nullptr : arrays.input<float>(from, {"bases", i}, n).data;
        const bool in_tensors = apart && is_apart(y);
        const py::tuple tensors = i == first ? of_first : in_tensors ? items_of(y, {"ys", i}, count) : none;
        AnySpan all;
        if (!in_tensors) all = arrays.input(y, {"ys", i}, update_dtypes(), n);
        const std::int64_t size = n > 0 ? all.bytes / n : 0;
        for (std::int64_t s = 0; s < count; ++s) {
            const std::int64_t start = read.starts[s];
            const AnySpan one = in_tensors ? arrays.input(tensors[s], {"ys", i, s}, update_dtypes(),
                                                          read.starts[s + 1] - start, Axes::any)
                                           : AnySpan{static_cast<char*>(all.data) + start * size, 0, all.dtype, 0};
            read.sent[s * k + i] = {one.data, static_cast<Dtype>(one.dtype), x == nullptr ? nullptr : x + start,
                                    static_cast<float>(scale[i]), weight[i]};
        }
    }
    return read;
}

}  // namespace fedcore::bindings
