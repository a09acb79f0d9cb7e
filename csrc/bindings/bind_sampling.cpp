#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>

#include "base/chacha.h"
#include "base/random.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/bytes.h"
#include "bindings/without_gil.h"
#include "sampling/bernoulli.h"
#include "sampling/gaussian.h"
#include "sampling/permutation.h"
#include "sampling/uniform.h"
#include "sampling/weighted.h"

namespace fedcore::bindings {
namespace {

// fedcore/sampling.py checks ranges before it calls these functions. Errors that only a pass over an array can find are
// returned as None, or as too few draws, and fedcore/sampling.py reports them.
using Drawn = py::array_t<std::int64_t>;

// Some 64-bit words, as a list or tuple of ints.
template <std::size_t kCount>
std::array<std::uint64_t, kCount> read_words(const py::object& words, const char* name) {
    const py::tuple items = items_of(words, {name}, kCount);
    std::array<std::uint64_t, kCount> read;
    for (std::size_t i = 0; i < kCount; ++i) {
        PyObject* const item = PyTuple_GET_ITEM(items.ptr(), i);
        if (!PyLong_Check(item))
            raise("RangeError", Name{name, static_cast<std::int64_t>(i)}.text() + ": expected an int");
        read[i] = PyLong_AsUnsignedLongLong(item);
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
    return read;
}

Key key_of(const py::object& key) {
    const auto words = read_words<4>(key, "key");
    return {words[0], words[1], words[2], words[3]};
}

// Memory for the results; a size beyond the address space is out of memory.
template <class T>
py::array_t<T> room_for(const char* name, std::int64_t count) {
    check_range(name, count, 0);
    if (count > PTRDIFF_MAX / static_cast<std::int64_t>(sizeof(T))) throw std::bad_alloc();
    return py::array_t<T>(count);
}

py::array_t<std::uint64_t> words(const py::object& key, const py::object& use, std::uint64_t first,
                                 std::int64_t blocks) {
    check_range("blocks", blocks, 0, INT64_MAX / kWordsPerBlock);
    const auto uses = read_words<3>(use, "use");
    const Stream stream{key_of(key), {uses[0], uses[1], uses[2]}};
    auto out = room_for<std::uint64_t>("blocks", blocks * kWordsPerBlock);
    random_words(stream, first, blocks, out.mutable_data());
    return out;
}

Drawn uniform(std::int64_t population, std::int64_t k, const py::object& key) {
    check_range("population", population, 1);
    check_range("k", k, 0, population);
    const Key words = key_of(key);
    Drawn out = room_for<std::int64_t>("k", k);
    std::int64_t* drawn = out.mutable_data();
    {
        const WithoutGil scope;  // some nanoseconds a draw
        fedcore::without_replacement(population, k, words, drawn);
    }
    return out;
}

using Draws = py::typing::Optional<Drawn>;  // None if a weight or a probability is invalid

// draw(tree, out) fills out and returns the number of draws, at most `longest`.
template <class Draw>
Draws weighted(const Span<const double>& weights, std::int64_t longest, const Draw& draw) {
    Drawn out = room_for<std::int64_t>("k", longest);
    std::int64_t* next = out.mutable_data();
    std::int64_t drawn = 0;
    bool valid = true;
    if (weights.n != 0) {
        const WithoutGil scope;  // reads every weight once: up to milliseconds
        WeightTree tree(weights.data, weights.n);
        valid = tree.valid();
        if (valid) drawn = draw(tree, next);
    }
    if (!valid) return py::none();
    if (drawn < longest) out.resize({drawn});
    return out;
}

Draws weighted_without(const py::object& weights, std::int64_t k, const py::object& key) {
    const Key words = key_of(key);
    Arrays arrays;
    const auto w = arrays.input<double>(weights, {"weights"});
    const std::int64_t longest = std::min(k, w.n);
    return weighted(w, longest, [&](WeightTree& tree, std::int64_t* out) {
        return fedcore::weighted_without_replacement(tree, longest, words, out);
    });
}

Draws weighted_with(const py::object& weights, std::int64_t k, const py::object& key) {
    const Key words = key_of(key);
    Arrays arrays;
    const auto w = arrays.input<double>(weights, {"weights"});
    return weighted(w, k, [&](const WeightTree& tree, std::int64_t* out) {
        if (!(tree.total() > 0)) return std::int64_t{0};
        fedcore::with_replacement(tree, k, words, out);
        return k;
    });
}

Draws bernoulli_set(std::int64_t population, const py::object& p, const py::object& key) {
    check_range("population", population, 0);
    const Key words = key_of(key);
    Arrays arrays;
    const bool each = !PyFloat_Check(p.ptr());
    const double one = each ? 0 : PyFloat_AS_DOUBLE(p.ptr());
    const double* chances = each ? arrays.input<double>(p, {"p"}, population).data : &one;
    BitSet set(population);
    bool valid;
    {
        const WithoutGil scope;  // some nanoseconds a client
        valid = bernoulli(chances, each, words, set);
    }
    if (!valid) return py::none();
    Drawn out(set.size());
    set.list(out.mutable_data());
    return out;
}

Drawn permuted(std::int64_t population, std::int64_t start, std::int64_t count, const py::object& key) {
    check_range("population", population, 1);
    check_range("start", start, 0, population);
    check_range("count", count, 0, population - start);
    const Key words = key_of(key);
    Drawn out = room_for<std::int64_t>("count", count);
    std::int64_t* places = out.mutable_data();
    {
        const WithoutGil scope;  // some nanoseconds a place
        fedcore::permutation(population, start, count, words, places);
    }
    return out;
}

// Little-endian words from exactly as many bytes.
template <std::size_t kCount>
std::array<std::uint32_t, kCount> little_endian_words(const py::object& object, const char* name) {
    const Bytes bytes(object, {name});
    check_range(name, bytes.size(), 4 * kCount, 4 * kCount);
    const auto* byte = static_cast<const unsigned char*>(bytes.data());
    std::array<std::uint32_t, kCount> words;
    for (std::size_t i = 0; i < kCount; ++i, byte += 4)
        words[i] = byte[0] | byte[1] << 8 | byte[2] << 16 | static_cast<std::uint32_t>(byte[3]) << 24;
    return words;
}

py::array_t<std::uint32_t> chacha20_words(const py::object& key, std::uint32_t counter, const py::object& nonce,
                                          std::int64_t groups) {
    const auto keys = little_endian_words<8>(key, "key");
    const auto nonces = little_endian_words<3>(nonce, "nonce");
    check_range("groups", groups, 0, INT64_MAX / (4 * kChachaWords));
    auto out = room_for<std::uint32_t>("groups", groups * kChachaWords);
    chacha20(keys.data(), counter, nonces.data(), groups, out.mutable_data());
    return out;
}

void add_noise(const py::object& sum, double grid, std::int64_t sigma, const py::object& key, const py::object& out) {
    const auto words = little_endian_words<8>(key, "key");
    check_range("sigma", sigma, 1, kMostSigma);
    int exponent;
    if (!(grid > 0) || std::frexp(grid, &exponent) != 0.5) raise("RangeError", "grid: must be a power of two");
    Arrays arrays;
    const auto from = arrays.input<double>(sum, {"sum"});
    const auto to = arrays.output<double>(out, {"out"}, from.n, from.number);
    const WithoutGil scope;  // some nanoseconds an element
    add_discrete_gaussian(from.data, from.n, grid, sigma, words.data(), to.data);
}

}  // namespace

void bind_sampling(py::module_& module) {
    // Only for the known-answer tests.
    module.def("random_words", &words, py::arg("key"), py::arg("use"), py::arg("first"), py::arg("blocks"));
    module.def("chacha20", &chacha20_words, py::arg("key"), py::arg("counter"), py::arg("nonce"), py::arg("groups"));
    module.def("add_discrete_gaussian", &add_noise, py::arg("sum"), py::arg("grid"), py::arg("sigma"), py::arg("key"),
               py::kw_only(), py::arg("out"));
    module.def("without_replacement", &uniform, py::arg("population"), py::arg("k"), py::arg("key"));
    module.def("weighted_without_replacement", &weighted_without, py::arg("weights"), py::arg("k"), py::arg("key"));
    module.def("with_replacement", &weighted_with, py::arg("weights"), py::arg("k"), py::arg("key"));
    module.def("bernoulli", &bernoulli_set, py::arg("population"), py::arg("p"), py::arg("key"));
    module.def("permutation", &permuted, py::arg("population"), py::arg("start"), py::arg("count"), py::arg("key"));
}

}  // namespace fedcore::bindings
