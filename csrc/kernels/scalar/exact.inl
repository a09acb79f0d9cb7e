// The grid of exact sums, for one element or for a vector of them. Included by the CPU's levels and by CUDA's kernels,
// as codes.inl is.
//
// A number is rounded to a multiple of 2^-10 by adding 1.5 * 2^42, which has no place for a finer fraction: the sum's
// low bits are then the integer, whatever its sign, and its high ones a constant, which is taken off later, once for
// all terms. The rest is rounded to a multiple of 2^-60 in the same way: both magic numbers minus the first sum is a
// multiple of 2^-10 that a float64 holds, and adding t gives the rest plus the second magic number, rounded once. So no
// level needs a fused operation, and one is allowed if t is an exact product.

constexpr double kHighMagic = 0x1.8p42, kLowMagic = 0x1.8p-8, kBothMagic = kHighMagic + kLowMagic;
constexpr std::uint64_t kHighBias = 0x4298000000000000u, kLowBias = 0x3f78000000000000u;  // their bits
constexpr int kLowBits = 50;
constexpr std::uint64_t kLowMask = (std::uint64_t{1} << kLowBits) - 1;
constexpr std::uint64_t kTop = std::uint64_t{1} << 63;

template <class Word, class Number>
FEDCORE_SCALAR Word words_of(Number value) {
    Word bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
FEDCORE_SCALAR double double_of(std::uint64_t bits) {
    double value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// Adds t, rounded, with the biases; |t| < 2^40. kAdds false takes it off.
template <bool kAdds, class Number, class Word>
FEDCORE_SCALAR void add_rounded(Number t, Word& high, Word& low) {
    const Number coarse = t + kHighMagic;
    const Number fine = t + (kBothMagic - coarse);
    if (kAdds) {
        high = high + words_of<Word>(coarse);
        low = low + words_of<Word>(fine);
    } else {
        high = high - words_of<Word>(coarse);
        low = low - words_of<Word>(fine);
    }
}

// One element of a sum.
struct ExactElement {
    std::uint64_t high, low;
};
template <bool kAdds = true>
FEDCORE_SCALAR void add_rounded(double t, ExactElement& sum) {
    add_rounded<kAdds>(t, sum.high, sum.low);
}

// The client's weight times the coefficients of `adds`, each rounded once.
FEDCORE_SCALAR SumForm weighed(const SumForm& adds, double weight) {
    return {weight * adds.row, weight * adds.r, weight * adds.h, weight * adds.q};
}

// Adds the terms of `seen_of` for one or more elements in float64; `adds` is weighed.
template <Form kForm, class Number, class Sum>
FEDCORE_SCALAR void add_seen_of(const SumForm& adds, Number stored, Number r, Number h, Number q, Sum& sum) {
    add_rounded(adds.row * stored, sum);
    add_rounded(adds.r * r, sum);
    if (kForm != Form::general) return;
    add_rounded(adds.h * h, sum);
    add_rounded(adds.q * q, sum);
}

// Whether a sum can take the weighted elements of a new row, of which `largest` is the largest magnitude.
FEDCORE_SCALAR bool is_held(float largest, const SumForm& adds, double weight) {
    const auto size = [](double value) { return value < 0 ? -value : value; };
    const double most = size(adds.row) > size(adds.r) ? size(adds.row) : size(adds.r);  // the row is r next time
    return static_cast<double>(largest) * (most * size(weight)) < 2 * kLongestExact;    // false for a NaN
}

// What has to be taken off words to which `terms` terms more were added than taken off.
struct Biases {
    std::uint64_t high, low;
};
FEDCORE_SCALAR Biases biases_of(std::int64_t terms) {
    const auto count = static_cast<std::uint64_t>(terms);
    // Beside the biases 2^63, so that low is no negative number and its shift the same on all levels; and what of that
    // comes back with the carry.
    return {count * kHighBias + (kTop >> kLowBits), count * kLowBias - kTop};
}

// The one form of an element: 0 <= low < 2^50. Fewer than 2^12 terms were added.
template <class Word>
FEDCORE_SCALAR void settle(Word& high, Word& low, Biases biases) {
    low = low - biases.low;
    high = high - biases.high + (low >> kLowBits);
    low = low & kLowMask;
}

// float64 of an element. (An integer becomes a float64 by halves: few levels have an instruction for it.)
FEDCORE_SCALAR double value_of(std::uint64_t high, std::uint64_t low) {
    const std::uint64_t shifted = high + kTop;
    const double upper = double_of(shifted >> 32 | 0x4530000000000000u) - (0x1p84 + 0x1p63 + 0x1p52);
    const double of_high = upper + double_of((shifted & 0xffffffffu) | 0x4330000000000000u);
    return of_high * 0x1p-10 + (double_of(low | 0x4330000000000000u) - 0x1p52) * 0x1p-60;
}
