// combine: linear combinations of a few vectors, and their norms.
//
// Elementwise, or summed over the fixed blocks, so the number of threads does not matter. Callers have checked every
// pointer, length and overlap.
#pragma once

#include <cstdint>

namespace fedcore {

// One vector of a linear combination: float32[n], or float64[n] (for example a running total) if `wide`.
struct Term {
    const void* values;
    bool wide;
    double coefficient;
};

// out[j] = Out((coefficient_0 * v_0[j] + coefficient_1 * v_1[j]) + ...), in float64, from left to right, rounded once.
// Out: float or double.
//   terms: k >= 1; out: Out[n], exactly the array of a term or disjoint. Moves (4 .. 8) k n + sizeof(Out) n bytes.
template <class Out>
void combine(const Term* terms, std::int64_t k, Out* out, std::int64_t n);

// The squared norm of the same combination in float64, without writing it: squares on 16 fixed lanes in each block,
// folded in a fixed tree; blocks in order.
//   scratch: float64[block_count(n)]. Moves (4 .. 8) k n bytes.
double combined_square(const Term* terms, std::int64_t k, std::int64_t n, double* scratch);

}  // namespace fedcore
