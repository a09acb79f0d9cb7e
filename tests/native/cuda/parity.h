// What the tests of parity share: problems, and what counts as the same bits.
#pragma once

#include <cmath>
#include <cstring>
#include <random>

#include "base/blocks.h"
#include "check.h"
#include "host_queue.h"
#include "kernels/cuda/kernels.h"
#include "memory.h"

namespace fedcore::test {

// Around nothing, a thread's elements, what shares a scale, a tile, and a piece.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || defined(FEDCORE_EMULATED)
inline const std::vector<std::int64_t> kParitySizes{0, 65, 2047, 4129};
#else
inline const std::vector<std::int64_t> kParitySizes{0, 1, 63, 65, 2047, 2048, 4129, 18500};
#endif

// usual: in [-1, 1), zeros and subnormal numbers among them; huge: float32 does not hold their squares; tiny: their
// squares are lost in it; broken: an infinity or a NaN somewhere.
enum class Numbers { usual, huge, tiny, broken };
inline constexpr Numbers kNumbers[] = {Numbers::usual, Numbers::huge, Numbers::tiny, Numbers::broken};

class Problem {
  public:
    // aligned: every array starts at a multiple of 16 bytes, as a device's allocations do; else anywhere.
    Problem(std::uint32_t seed, bool aligned, Numbers numbers)
        : engine(seed), aligned_(aligned), numbers_(numbers), next_(seed) {}

    template <class T>
    Array<T> empty(std::int64_t n) {
        const Place start{Place::heap, sizeof(T) == 4 ? std::size_t{12} : std::size_t{16}};
        Array<T> array(n, aligned_ ? start : Place::number(next_++));
        if (n > 0) std::memset(static_cast<void*>(array.data()), 0xff, static_cast<std::size_t>(n) * sizeof(T));
        return array;
    }
    template <class T>
    Array<T> values(std::int64_t n) {
        Array<T> array = empty<T>(n);
        for (T& x : array) x = static_cast<T>(value());
        if (numbers_ == Numbers::broken && n > 0 && engine() % 2 == 0)
            array[static_cast<std::int64_t>(engine()) % n] = static_cast<T>(engine() % 2 == 0 ? NAN : INFINITY);
        return array;
    }
    template <class T>
    std::vector<Array<T>> rows(std::int64_t k, std::int64_t n) {
        std::vector<Array<T>> rows;
        for (std::int64_t i = 0; i < k; ++i) rows.push_back(values<T>(n));
        return rows;
    }
    float coefficient() { return static_cast<float>(static_cast<std::int32_t>(engine())) * 0x1p-30f; }

    std::mt19937 engine;

  private:
    float value() {
        const auto word = static_cast<std::int32_t>(engine());
        const float usual = static_cast<float>(word) * 0x1p-31f;
        if (word % 64 == 0) return word % 128 == 0 ? 0.0f : 0x1p-149f * static_cast<float>(word % 4096);
        if (numbers_ == Numbers::huge) return usual * 0x1p90f;
        return numbers_ == Numbers::tiny ? usual * 0x1p-70f : usual;
    }

    bool aligned_;
    Numbers numbers_;
    std::size_t next_;
};

template <class T>
bool is_nan(T value) {
    return !(value == value);
}

// Bit by bit; where one is no number, so is the other.
template <class T>
bool same_bits(const T* a, const T* b, std::int64_t n) {
    if (n == 0 || std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(T)) == 0) return true;
    for (std::int64_t j = 0; j < n; ++j)
        if (std::memcmp(a + j, b + j, sizeof(T)) != 0 && !(is_nan(a[j]) && is_nan(b[j]))) return false;
    return true;
}
template <class T>
bool same_bits(const Array<T>& a, const Array<T>& b) {
    return same_bits(a.data(), b.data(), a.size());
}

// Norms have the same bits, or neither is finite.
inline bool same_norms(const std::vector<double>& a, const std::vector<double>& b) {
    for (std::size_t i = 0; i < a.size(); ++i)
        if (std::isfinite(a[i]) != std::isfinite(b[i]) || (std::isfinite(a[i]) && !same_bits(&a[i], &b[i], 1)))
            return false;
    return true;
}
inline bool are_finite(const std::vector<double>& norms) {
    for (const double norm : norms)
        if (!std::isfinite(norm)) return false;
    return true;
}

template <class T>
Array<T> copy_of(Problem& make, const Array<T>& from) {
    Array<T> to = make.empty<T>(from.size());
    if (from.size() > 0) std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.size()) * sizeof(T));
    return to;
}

// A sum over clients: floats, or for std::int64_t the words of an exact sum.
template <class Sum>
struct SumOf {
    Array<Sum> values;
    SumOf(Problem& make, std::int64_t n, bool filled) : values(filled ? make.values<Sum>(n) : make.empty<Sum>(n)) {}
    Sum* data() { return values.data(); }
    bool same(const SumOf& other) const { return same_bits(values, other.values); }
};
template <>
struct SumOf<std::int64_t> {
    Array<std::int64_t> high, low;
    SumOf(Problem& make, std::int64_t n, bool filled)
        : high(make.empty<std::int64_t>(n)), low(make.empty<std::int64_t>(n)) {
        for (std::int64_t j = 0; j < n && filled; ++j) {
            high[j] = static_cast<std::int32_t>(make.engine()) * (std::int64_t{1} << make.engine() % 20);
            low[j] = static_cast<std::int64_t>(make.engine()) << 18 | make.engine() >> 14;  // below 2^50
        }
    }
    ExactSum data() { return {high.data(), low.data()}; }
    ConstExactSum read() { return {high.data(), low.data()}; }
    bool same(const SumOf& other) const { return same_bits(high, other.high) && same_bits(low, other.low); }
};
template <class Sum>
const Sum* read(SumOf<Sum>& sum) {
    return sum.data();
}
inline ConstExactSum read(SumOf<std::int64_t>& sum) {
    return sum.read();
}

// Numbers in any dtype, as bytes.
inline std::int64_t size_of(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

struct Typed {
    Array<double> wide;
    Array<float> narrow;
    Array<std::uint16_t> half;
    Dtype dtype;

    Typed(Problem& make, Dtype of, std::int64_t n)
        : wide(make.values<double>(of == Dtype::float64 ? n : 0)),
          narrow(make.values<float>(of == Dtype::float64 ? 0 : n)),
          half(make.empty<std::uint16_t>(size_of(of) == 2 ? n : 0)),
          dtype(of) {
        const Codec codec = of == Dtype::float16 ? Codec::f16 : Codec::bf16;
        if (size_of(of) == 2) quantise(narrow.data(), codec, nullptr, n, half.data(), nullptr);
    }
    void* data() {
        return dtype == Dtype::float64   ? static_cast<void*>(wide.data())
               : dtype == Dtype::float32 ? static_cast<void*>(narrow.data())
                                         : static_cast<void*>(half.data());
    }
};

// body(n, seed, aligned, numbers): every size and kind of number, at any address and at a device's.
template <class Body>
void at_every_shape(const Body& body) {
    std::uint32_t seed = 1;
    for (const std::int64_t n : kParitySizes)
        for (const Numbers numbers : kNumbers)
            for (const bool aligned : {false, true}) body(n, seed++, aligned, numbers);
}

}  // namespace fedcore::test
