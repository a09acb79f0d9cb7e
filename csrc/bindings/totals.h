// Sums over clients, from Python: float32[n], float64[n], or a fedcore.kernels.ExactSum.
#pragma once

#include "bindings/arrays.h"
#include "kernels/exact.h"

namespace fedcore::bindings {

// Whether a sum is an ExactSum, a named tuple.
inline bool is_exact(const py::object& sum) {
    return py::isinstance<py::tuple>(sum);
}

inline py::tuple words_of(const py::object& sum, Name name) {
    if (!is_exact(sum) || py::len(sum) != 2) raise("ArrayError", name.text() + ": must be an ExactSum of two int64[n]");
    return sum;
}

inline Name word(Name name, const char* which) {
    return {name.argument, name.index, name.second, which};
}

// `acc` and `out` of a call that adds to a sum. acc is read before the call's other inputs, and out after them. Each
// may be exactly the memory that it replaces.
template <class Number>
class Totals {
  public:
    // A sum of zeros, if the length is that of `out`.
    explicit Totals(std::int64_t count) : n(count) {}
    Totals(Arrays& arrays, const py::object& acc, Name name = {"acc"}, std::int64_t due = kAnyLength) {
        const auto found = arrays.input<Number>(acc, name, due);
        n = found.n;
        from_ = found.data;
        number_ = found.number;
    }
    static std::int64_t length_of(const py::object& out) { return length(out, {"out"}); }

    void write(Arrays& arrays, const py::object& out) { to_ = arrays.output<Number>(out, {"out"}, n, number_).data; }
    // From element `start` on.
    Fold<Number> fold(std::int64_t start, const ClientUpdate* sent) const {
        return {from_ == nullptr ? nullptr : from_ + start, to_ + start, sent};
    }

    std::int64_t n;

  private:
    const Number* from_ = nullptr;
    Number* to_ = nullptr;
    std::size_t number_ = kNothing;
};

template <>
class Totals<std::int64_t> {
  public:
    explicit Totals(std::int64_t count) : n(count) {}
    Totals(Arrays& arrays, const py::object& acc, Name name = {"acc"}, std::int64_t due = kAnyLength) {
        const py::tuple words = words_of(acc, name);
        const auto high = arrays.input<std::int64_t>(words[0], word(name, ".high"), due);
        const auto low = arrays.input<std::int64_t>(words[1], word(name, ".low"), high.n);
        n = high.n;
        from_ = {high.data, low.data};
        high_ = high.number;
        low_ = low.number;
    }
    static std::int64_t length_of(const py::object& out) {
        return length(words_of(out, {"out"})[0], word({"out"}, ".high"));
    }

    ExactSum write(Arrays& arrays, const py::object& out) {
        const py::tuple words = words_of(out, {"out"});
        to_.high = arrays.output<std::int64_t>(words[0], word({"out"}, ".high"), n, high_).data;
        to_.low = arrays.output<std::int64_t>(words[1], word({"out"}, ".low"), n, low_).data;
        // A loop reads both words of an element before it writes them, but it may begin with a copy of one word.
        if ((from_.high == to_.high) != (from_.low == to_.low))
            raise("ArrayError", "out: must be both words of acc, or neither");
        return to_;
    }
    ConstExactSum words() const { return from_; }
    Fold<std::int64_t> fold(std::int64_t start, const ClientUpdate* sent) const {
        const bool zeros = from_.high == nullptr;
        return {zeros ? from_ : ConstExactSum{from_.high + start, from_.low + start},
                {to_.high + start, to_.low + start},
                sent};
    }

    std::int64_t n = kAnyLength;

  private:
    ConstExactSum from_{};
    ExactSum to_{};
    std::size_t high_ = kNothing, low_ = kNothing;
};

}  // namespace fedcore::bindings
