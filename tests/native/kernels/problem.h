// The sizes, places and numbers for the tests of every family.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include "base/blocks.h"
#include "base/cached.h"
#include "base/pool.h"
#include "kernels/tuner.h"
#include "memory.h"

namespace fedcore::test {

// A search for races is slow, and so is the emulation of another processor.
#if defined(__SANITIZE_THREAD__) || defined(FEDCORE_EMULATED)
inline const std::vector<std::int64_t> kSizes{0, 1, 17, 2063};
inline const std::vector<int> kThreadCounts{3};
#else
// Around zero, every level's vector, 16 lanes, the distance of two prefetches, a tile, and a block.
inline const std::vector<std::int64_t> kSizes{0,   1,    2,    3,    4,    5,    7,     8,     9,     15,   16,  17,
                                              31,  32,   33,   47,   63,   64,   65,    79,    127,   128,  129, 511,
                                              513, 2047, 2048, 2049, 2063, 4097, 16383, 16384, 16385, 32785};
inline const std::vector<int> kThreadCounts{1, 2, 7};
#endif
inline constexpr std::int64_t kShared = kSerialBytes / 8 + 1;  // two rows of this length are shared by several threads

// Arrays of one call, each in the next place and with different numbers.
class Arrays {
  public:
    explicit Arrays(std::size_t first) : next_(first), engine_(static_cast<std::uint32_t>(first)) {}

    template <class T>
    Array<T> empty(std::int64_t n) {
        return Array<T>(n, Place::number(next_++));
    }
    // In [-1, 1), zeros and subnormal numbers among them.
    template <class T>
    Array<T> numbers(std::int64_t n) {
        Array<T> array = empty<T>(n);
        for (T& x : array) {
            const auto word = static_cast<std::int32_t>(engine_());
            x = static_cast<T>(word) * static_cast<T>(0x1p-31);
            if (word % 64 == 0)
                x = word % 128 == 0 ? T{0} : std::numeric_limits<T>::denorm_min() * static_cast<T>(word);
        }
        return array;
    }
    template <class T>
    std::vector<Array<T>> rows(std::int64_t k, std::int64_t n) {
        std::vector<Array<T>> rows;
        for (std::int64_t i = 0; i < k; ++i) rows.push_back(numbers<T>(n));
        return rows;
    }

  private:
    std::size_t next_;
    std::mt19937 engine_;
};

template <class T>
std::vector<const T*> pointers(const std::vector<Array<T>>& rows) {
    std::vector<const T*> found;
    for (const Array<T>& row : rows) found.push_back(row.data());
    return found;
}

// Whether a and b hold the same numbers.
template <class A, class B>
bool same(const A& a, const B& b) {
    for (std::int64_t j = 0; j < a.size(); ++j)
        if (!(a[j] == b[j])) return false;
    return true;
}

inline bool close(double a, double b) {
    const double difference = a < b ? b - a : a - b;
    return difference <= 1e-5 * b + 1e-40;
}

// body(n, first): every size, up to a tile with the first array in each kind of place; then on several thread counts.
template <class Body>
void at_edges(const Body& body) {
    std::size_t first = 0;
    for (const std::int64_t n : kSizes)
        for (const std::size_t end = first + (n < 5000 ? 3 : 1); first < end; ++first) body(n, first);
    const int before = threads();
    for (const int count : kThreadCounts) {
        set_threads(count);
        body(kShared, first++);
    }
    set_threads(before);
}

// The same for kernels whose large calls walk through the rows and store results in other ways. Every size up to a tile
// is tried as a small call and as a large call in three ways. Larger sizes alternate between two halves of these four.
template <class Body>
void at_edges_and_past_caches(const Body& body) {
    const std::int64_t before = cached_bytes();
    at_edges([&](std::int64_t n, std::size_t first) {
        const bool small = n < 5000, even = first % 2 == 0;
        const auto try_large = [&](const Tiling& tiling) {
            set_cached_bytes(0);
            force_tiling(tiling);
            body(n, first);
        };
        if (small || even) {
            set_cached_bytes(std::numeric_limits<std::int64_t>::max());
            body(n, first);
            try_large({3, 4 * kBlock, true});
        }
        if (small || !even) {
            try_large({8, kBlock, true});
            try_large({2, kBlock, false});
        }
    });
    force_tiling({0, 0, false});
    set_cached_bytes(before);
}

}  // namespace fedcore::test
