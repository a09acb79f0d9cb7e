#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <vector>

#include "base/blocks.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/client_updates.h"
#include "bindings/exchanged_rows.h"
#include "bindings/partials.h"
#include "bindings/where_arrays_lie.h"
#include "bindings/without_gil.h"
#include "kernels/cuda/kernels.h"
#include "kernels/exact.h"

namespace fedcore::bindings {
namespace {

const Dtypes kWord{"int64"};

// The words of a fedcore.kernels.ExactSum, a named tuple: their numbers among the call's arrays, and their length.
struct FoundSum {
    ConstExactSum words{};
    std::int64_t n = kAnyLength;
    std::size_t high = kNothing, low = kNothing;
};

py::tuple words_of(const py::object& sum, Name name) {
    if (!py::isinstance<py::tuple>(sum) || py::len(sum) != 2)
        raise("ArrayError", name.text() + ": must be an ExactSum of two int64[n]");
    return sum;
}

Name word(Name name, const char* which) {
    return {name.argument, name.index, name.second, which};
}

FoundSum read_sum(Arrays& arrays, const py::object& sum, Name name, std::int64_t n) {
    const py::tuple words = words_of(sum, name);
    const auto high = arrays.input<std::int64_t>(words[0], word(name, ".high"), n);
    const auto low = arrays.input<std::int64_t>(words[1], word(name, ".low"), high.n);
    return {{high.data, low.data}, high.n, high.number, low.number};
}

// Each word may be the memory that it replaces.
ExactSum writable_sum(Arrays& arrays, const py::object& sum, Name name, std::int64_t n, std::size_t high,
                      std::size_t low) {
    const py::tuple words = words_of(sum, name);
    std::int64_t* const to_high = arrays.output<std::int64_t>(words[0], word(name, ".high"), n, high).data;
    return {to_high, arrays.output<std::int64_t>(words[1], word(name, ".low"), n, low).data};
}

// A loop reads both words of an element before it writes them, but it may begin with a copy of one word, so out must be
// both words of acc or neither.
void require_alike(ConstExactSum from, ExactSum to) {
    if ((from.high == to.high) != (from.low == to.low))
        raise("ArrayError", "out: must be both words of acc, or neither");
}

py::array_t<double> accumulate_exact(const py::object& acc, const py::object& out, const py::object& bases,
                                     const py::object& ys, const py::object& scales, const py::object& weights,
                                     const py::object& partials) {
    Arrays arrays(Devices::any);
    FoundSum sum;
    if (acc.is_none())
        sum.n = length(words_of(out, {"out"})[0], {"out", -1, -1, ".high"});
    else
        sum = read_sum(arrays, acc, {"acc"}, kAnyLength);
    const ClientTensors read = read_client_updates(arrays, bases, ys, scales, weights, sum.n, true);
    const ExactSum result = writable_sum(arrays, out, {"out"}, sum.n, sum.high, sum.low);
    require_alike(sum.words, result);
    const std::int64_t k = read.k;
    std::vector<ExactFold> folds;
    std::vector<Piece> pieces;
    std::vector<std::int64_t> sizes;
    for (std::size_t s = 0; s + 1 < read.starts.size(); ++s) {
        const std::int64_t start = read.starts[s], n = read.starts[s + 1] - start;
        const ConstExactSum from =
            acc.is_none() ? sum.words : ConstExactSum{sum.words.high + start, sum.words.low + start};
        folds.push_back(
            {from, {result.high + start, result.low + start}, read.sent.data() + static_cast<std::int64_t>(s) * k});
        for (std::int64_t begin = 0; begin < n; begin += kBlock)
            pieces.push_back({static_cast<std::int64_t>(s), begin, std::min(begin + kBlock, n)});
        sizes.push_back(n);
    }
    const auto count = static_cast<std::int64_t>(pieces.size());
    py::array_t<double> norms(k);
    double* norm = norms.mutable_data();
    const Partials shares(arrays, partials, count, k);
    run_where_arrays_lie(
        arrays, [&] { fedcore::accumulate_exact(folds.data(), k, pieces.data(), count, shares.data(), norm); },
        [&](cuda::Queue& queue) {
            const auto tensors = static_cast<std::int64_t>(sizes.size());
            cuda::accumulate_exact(queue, folds.data(), sizes.data(), tensors, k, shares.data(), norm);
        });
    return norms;
}

py::array_t<double> exchange_exact(const py::object& acc, const py::object& out, const py::object& bases,
                                   const py::object& ys, const py::object& scales, const py::object& weights,
                                   const py::object& old_rows, const py::object& anchors, const py::object& new_rows,
                                   const Coefficients& row, const Coefficients& adds, const py::object& keys,
                                   const py::object& sums, std::int64_t first, const py::object& partials) {
    Arrays arrays(Devices::any);
    const auto sum = read_sum(arrays, acc, {"acc"}, kAnyLength);
    const std::vector<ClientUpdate> sent = read_client_updates(arrays, bases, ys, scales, weights, sum.n, false).sent;
    const auto k = static_cast<std::int64_t>(sent.size());
    const ExchangedRows found(arrays, k, sum.n, old_rows, anchors, new_rows, row, adds, keys, sums, first);
    const ExactSum result = writable_sum(arrays, out, {"out"}, sum.n, sum.high, sum.low);
    require_alike(sum.words, result);
    py::array_t<double> norms(k);
    double* norm = norms.mutable_data();
    const Partials shares(arrays, partials, block_count(sum.n), k);
    run_where_arrays_lie(
        arrays,
        [&] {
            fedcore::exchange_exact(sum.words, result, sent.data(), found.rows.data(), found.forms, k, sum.n,
                                    shares.data(), norm);
        },
        [&](cuda::Queue& queue) {
            cuda::exchange_exact(queue, sum.words, result, sent.data(), found.rows.data(), found.forms, k, sum.n,
                                 shares.data(), norm);
        });
    return norms;
}

bool combine_exact(const py::object& terms, const py::object& coefficients, const py::object& out) {
    Arrays arrays(Devices::any);
    const py::tuple listed = items_of(terms, "terms");
    const auto k = static_cast<std::int64_t>(listed.size());
    if (k == 0) raise("ShapeError", "terms: expected at least one, got none");
    const AnySpan coefficient = arrays.numbers(coefficients, {"coefficients"}, kWord, k);
    std::vector<ExactTerm> read;
    std::int64_t n = kAnyLength;
    FoundSum first;
    for (std::int64_t i = 0; i < k; ++i) {
        const py::object term = listed[i];
        const std::int64_t times = static_cast<const std::int64_t*>(coefficient.data)[i];
        if (times < -(std::int64_t{1} << 31) || times > std::int64_t{1} << 31)
            raise("RangeError", "coefficients: expected integers of at most 2^31, got " + std::to_string(times));
        if (py::isinstance<py::tuple>(term)) {
            const auto sum = read_sum(arrays, term, {"terms", i}, n);
            read.push_back({sum.words, nullptr, times});
            n = sum.n;
            if (i == 0) first = sum;
        } else {
            const auto vector = arrays.input<float>(term, {"terms", i}, n);
            read.push_back({{}, vector.data, times});
            n = vector.n;
        }
    }
    const ExactSum result = writable_sum(arrays, out, {"out"}, n, first.high, first.low);
    bool held = true;
    run_where_arrays_lie(
        arrays, [&] { held = fedcore::combine_exact(read.data(), k, result, n); },
        [&](cuda::Queue& queue) { held = cuda::combine_exact(queue, read.data(), k, result, n); });
    return held;
}

template <class Out>
void read_to(Arrays& arrays, const FoundSum& from, Out* out) {
    run_where_arrays_lie(
        arrays, [&] { fedcore::read_exact(from.words, out, from.n); },
        [&](cuda::Queue& queue) { cuda::read_exact(queue, from.words, out, from.n); });
}

void read_exact(const py::object& sum, const py::object& out) {
    Arrays arrays(Devices::any);
    const auto from = read_sum(arrays, sum, {"sum"}, kAnyLength);
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
    module.def("accumulate_exact", &accumulate_exact, py::arg("acc"), py::arg("out"), py::arg("bases"), py::arg("ys"),
               py::arg("scales"), py::arg("weights"), py::arg("partials"));
    module.def("exchange_exact", &exchange_exact, py::arg("acc"), py::arg("out"), py::arg("bases"), py::arg("ys"),
               py::arg("scales"), py::arg("weights"), py::arg("old_rows"), py::arg("anchors"), py::arg("new_rows"),
               py::kw_only(), py::arg("row"), py::arg("adds"), py::arg("keys"), py::arg("sums"), py::arg("first"),
               py::arg("partials"));
    module.def("combine_exact", &combine_exact, py::arg("terms"), py::arg("coefficients"), py::arg("out"));
    module.def("read_exact", &read_exact, py::arg("sum"), py::arg("out"));
    module.def("add_words", &add_words, py::arg("sum"), py::arg("terms"));
}

}  // namespace fedcore::bindings
