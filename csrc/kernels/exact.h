// exact: sums over clients that do not depend on an order. Each term is rounded by itself to a fixed grid, and integers
// are added: whatever comes first, and however terms are shared out over partial sums, the integers are the same.
//
// A sum holds two words an element, high and low, for high * 2^-10 + low * 2^-60, and is kept in one form: 0 <= low <
// 2^50. So equal sums are equal bytes. A term t holds what it is to the nearest multiple of 2^-10, and what that leaves
// to the nearest of 2^-60: terms up to 2^40 and sums up to 2^52, which callers see to, with an error of 2^-61 a term.
#pragma once

#include <cstdint>

#include "kernels/aggregate.h"
#include "kernels/exchange.h"

namespace fedcore {

template <class Word>
struct ExactWords {
    Word* high;
    Word* low;
};
using ExactSum = ExactWords<std::int64_t>;
using ConstExactSum = ExactWords<const std::int64_t>;

inline constexpr double kLongestExact = 0x1p39;  // |weight h| from which on a squared norm is said to be infinite

// One tensor of what k clients sent, and its stretch of the sums.
struct ExactFold {
    ConstExactSum acc;  // null words for zeros
    ExactSum out;       // the same words or disjoint
    const ClientUpdate* sent;
};

// out[j] = acc[j] + sum_i rounded(weight_i * h_i[j]), `weight * h` in float64; for the rest as `accumulate`.
//   A squared norm is infinite too where |weight_i h_i| >= kLongestExact.
//   Moves (4 k + 4 + 32) n bytes.
void accumulate_exact(const ExactFold* folds, std::int64_t k, const Piece* pieces, std::int64_t count, double* scratch,
                      double* squared_norms);

// As `exchange`, each term of `adds` rounded by itself, with its coefficient times the client's weight:
//     out[j] = acc[j] + sum_i sum over the terms of rounded((weight_i * coefficient) * term_i[j])
// A row taken off (a coefficient of -1) takes off exactly what it once added. Rows before, and anchors, are such as
// were once taken in: their weighted elements are below 2^40.
//   A squared norm is infinite too where |weight_i h_i| >= kLongestExact, or a weighted element of row' is 2^40 or
//   more. Moves 16 n bytes more than `exchange`.
void exchange_exact(ConstExactSum acc, ExactSum out, const ClientUpdate* sent, const RowExchange* rows,
                    const Forms& forms, std::int64_t k, std::int64_t n, double* scratch, double* squared_norms);

// A term of a combination: a sum, or a vector that is rounded to the grid; `values` null where it is a sum.
struct ExactTerm {
    ConstExactSum sum;
    const float* values;
    std::int64_t coefficient;  // |coefficient| <= 2^31
};

// out[j] = sum_i coefficient_i * term_i[j], as integers. Returns whether every sum on the way has |high| < 2^62 and
// every value is below 2^40; else `out` is worthless.
//   out may be any of the sums. k >= 1.
//   Moves 16 n bytes a sum, 4 n a vector, and 16 n.
bool combine_exact(const ExactTerm* terms, std::int64_t k, ExactSum out, std::int64_t n);

// out[j] = float64(high) * 2^-10 + low * 2^-60, rounded once where |high| < 2^53, and from there to float32 once more.
//   Moves 24 n or 20 n bytes.
template <class Out>
void read_exact(ConstExactSum sum, Out* out, std::int64_t n);

}  // namespace fedcore
