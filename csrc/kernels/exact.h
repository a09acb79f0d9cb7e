// exact: sums over clients that do not depend on the order. Each term is rounded separately to a fixed grid, and
// integers are added, so the result is the same in any order and for any division into partial sums.
//
// A sum holds two words an element, high and low, for high * 2^-10 + low * 2^-60, in one form: 0 <= low < 2^50. So
// equal sums are equal bytes. A term t is rounded to the nearest multiple of 2^-10, and the rest to the nearest
// multiple of 2^-60. Callers keep terms below 2^40 and sums below 2^52; the error is 2^-61 a term.
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

inline constexpr double kLongestExact = 0x1p39;  // a squared norm is infinite if |weight h| is at least this

// One tensor of k clients' updates, and its range of the sums.
template <>
struct Fold<std::int64_t> {
    ConstExactSum acc;  // null words for zeros
    ExactSum out;       // the same words or disjoint
    const ClientUpdate* sent;
};
using ExactFold = Fold<std::int64_t>;

// A client's squared norm; infinite if |weight h| >= kLongestExact.
double held(double square, double weight);
// The largest coefficient of h in an exchange, by which the weight is multiplied.
double largest_coefficient(const Forms& forms);

// out[j] = acc[j] + sum_i rounded(weight_i * h_i[j]), `weight * h` in float64; otherwise as `accumulate`.
//   A squared norm is also infinite if |weight_i h_i| >= kLongestExact.
//   Moves (4 k + 4 + 32) n bytes.
void accumulate(const ExactFold* folds, std::int64_t k, const Piece* pieces, std::int64_t count, double* scratch,
                double* squared_norms);

// As `exchange`, but each term of `adds` is rounded separately, with its coefficient times the client's weight:
//     out[j] = acc[j] + sum_i sum over the terms of rounded((weight_i * coefficient) * term_i[j])
// Subtracting a row (a coefficient of -1) removes exactly what it once added. The weighted elements of old rows and
// anchors are below 2^40, since earlier calls accepted them.
//   A squared norm is also infinite if |weight_i h_i| >= kLongestExact, or if a weighted element of row' is 2^40 or
//   more. Moves 16 n bytes more than `exchange`.
void exchange(ConstExactSum acc, ExactSum out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms,
              std::int64_t k, std::int64_t n, double* scratch, double* squared_norms);

// A term of a combination: a sum, or a vector that is rounded to the grid; `values` is null for a sum.
struct ExactTerm {
    ConstExactSum sum;
    const float* values;
    std::int64_t coefficient;  // |coefficient| <= 2^31
};

// out[j] = sum_i coefficient_i * term_i[j], as integers. Returns whether every intermediate sum has |high| < 2^62 and
// every value is below 2^40; otherwise `out` is invalid.
//   out may be any of the sums. k >= 1.
//   Moves 16 n bytes a sum, 4 n a vector, and 16 n.
bool combine_exact(const ExactTerm* terms, std::int64_t k, ExactSum out, std::int64_t n);

// out[j] = float64(high) * 2^-10 + low * 2^-60, rounded once if |high| < 2^53, and to float32 once more.
//   Moves 24 n or 20 n bytes.
template <class Out>
void read_exact(ConstExactSum sum, Out* out, std::int64_t n);

// out[j] += sum_i terms[i][j], modulo 2^64. Moves (8 k + 16) n bytes.
void add_words(const std::uint64_t* const* terms, std::int64_t k, std::uint64_t* out, std::int64_t n);

}  // namespace fedcore
