#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "base/random.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/native_call.h"
#include "sampling/bernoulli.h"
#include "sampling/permutation.h"
#include "sampling/uniform.h"
#include "sampling/weighted.h"

namespace fedcore::bindings {
namespace {

// The faces in fedcore/sampling check ranges; what only a pass over an array can tell comes back as None, or as
// fewer draws than were asked for, and the face says what was wrong.
using Words4 = std::array<std::uint64_t, 4>;
using Drawn = py::array_t<std::int64_t>;

Key key_of(const Words4& key) {
    return {key[0], key[1], key[2], key[3]};
}

py::array_t<std::uint64_t> words(const Words4& key, const std::array<std::uint64_t, 3>& use, std::uint64_t first,
                                 std::int64_t blocks) {
    py::array_t<std::uint64_t> out(blocks * kWordsPerBlock);
    random_words({key_of(key), {use[0], use[1], use[2]}}, first, blocks, out.mutable_data());
    return out;
}

Drawn uniform(std::int64_t population, std::int64_t k, const Words4& key) {
    Drawn out(k);
    std::int64_t* drawn = out.mutable_data();
    {
        const NativeCall call;  // some nanoseconds a draw
        fedcore::without_replacement(population, k, key_of(key), drawn);
    }
    return out;
}

// draw(tree, out) fills out and returns how many it drew; `longest` is the most that it may draw.
template <class Draw>
py::object weighted(const Span<const double>& weights, std::int64_t longest, const Draw& draw) {
    Drawn out(longest);
    std::int64_t* next = out.mutable_data();
    std::int64_t drawn = 0;
    bool valid = true;
    if (weights.n != 0) {
        const NativeCall call;  // reads every weight once: up to milliseconds
        WeightTree tree(weights.data, weights.n);
        valid = tree.valid();
        if (valid) drawn = draw(tree, next);
    }
    if (!valid) return py::none();
    if (drawn < longest) out.resize({drawn});
    return out;
}

py::object weighted_without(const py::object& weights, std::int64_t k, const Words4& key) {
    Arrays arrays;
    const auto w = arrays.input<double>(weights, {"weights"});
    const std::int64_t longest = std::min(k, w.n);
    return weighted(w, longest, [&](WeightTree& tree, std::int64_t* out) {
        return fedcore::weighted_without_replacement(tree, longest, key_of(key), out);
    });
}

py::object weighted_with(const py::object& weights, std::int64_t k, const Words4& key) {
    Arrays arrays;
    const auto w = arrays.input<double>(weights, {"weights"});
    return weighted(w, k, [&](const WeightTree& tree, std::int64_t* out) {
        if (!(tree.total() > 0)) return std::int64_t{0};
        fedcore::with_replacement(tree, k, key_of(key), out);
        return k;
    });
}

py::object bernoulli_set(std::int64_t population, const py::object& p, const Words4& key) {
    Arrays arrays;
    const bool each = !PyFloat_Check(p.ptr());
    const double one = each ? 0 : PyFloat_AS_DOUBLE(p.ptr());
    const double* chances = each ? arrays.input<double>(p, {"p"}, population).data : &one;
    BitSet set(population);
    bool valid;
    {
        const NativeCall call;  // some nanoseconds a client
        valid = bernoulli(chances, each, key_of(key), set);
    }
    if (!valid) return py::none();
    Drawn out(set.size());
    set.list(out.mutable_data());
    return out;
}

Drawn permuted(std::int64_t population, std::int64_t start, std::int64_t count, const Words4& key) {
    Drawn out(count);
    std::int64_t* places = out.mutable_data();
    {
        const NativeCall call;  // some nanoseconds a place
        fedcore::permutation(population, start, count, key_of(key), places);
    }
    return out;
}

}  // namespace

void bind_sampling(py::module_& module) {
    // For the known-answer tests: nothing else needs single words in Python.
    module.def("random_words", &words, py::arg("key"), py::arg("use"), py::arg("first"), py::arg("blocks"));
    module.def("without_replacement", &uniform, py::arg("population"), py::arg("k"), py::arg("key"));
    module.def("weighted_without_replacement", &weighted_without, py::arg("weights"), py::arg("k"), py::arg("key"));
    module.def("with_replacement", &weighted_with, py::arg("weights"), py::arg("k"), py::arg("key"));
    module.def("bernoulli", &bernoulli_set, py::arg("population"), py::arg("p"), py::arg("key"));
    module.def("permutation", &permuted, py::arg("population"), py::arg("start"), py::arg("count"), py::arg("key"));
}

}  // namespace fedcore::bindings
