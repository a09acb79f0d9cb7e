// aggregate: sums over clients, and the server's step along them.
//
// Every sum over clients is strictly sequential per element, in the order of the rows, and continues the sum so far.
// So adding rows one by one, a few at a time or all at once gives the same bits. Blocks are independent, so the number
// of threads does not matter either. Callers have checked every pointer, length and overlap.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace fedcore {

// The precision of a sum during the additions.
enum class Precision { float32, float64 };

// A client's update, read as the mean gradient of its local steps:
//     h = (base - y) * scale,  or  h = -y * scale  if base is null,
// in float32, to which y is rounded first. For a model, base is the client's first x and scale 1 / (eta K).
struct ClientUpdate {
    const void* y;  // dtype[n]
    Dtype dtype;
    const float* base;  // float32[n] or null
    float scale;
    double weight;  // of this client in the sums
};

// A weighted sum of k rows of one dtype, or of their differences from a base:
//     out[j] = sum_i weights[i] * h_i[j],  h_i[j] = rows[i][j]  or  base[j] - rows[i][j] if base is not null.
// Elements are read, and h formed, in float32, or in float64 if rows and sum are. Products and sums are in the sum's
// precision; out is rounded from it once, to the nearest, ties to even, a NaN to a NaN.
struct RowSum {
    const void* const* rows;  // k arrays of n elements
    const float* base;        // float32[n] or null
    void* out;                // n elements; overlaps none of the others
    Dtype rows_dtype, out_dtype;
};

// A model of separate tensors, as in all frameworks, is one sum a tensor. Pieces divide the sums into blocks
// [begin, end), so that threads share many small tensors as well as one large one.
struct Piece {
    std::int64_t sum, begin, end;
};

// Whether a piece begins where the one before it in an array ends.
inline bool follows(const Piece* piece) {
    return piece[-1].sum == piece->sum && piece[-1].end == piece->begin;
}

// Computes all sums and, in the same pass, if squared_norms is not null, the norms of whole models over all their
// segments, as in norms.h, of float32(h). squared_norms[i] = |h_i|^2 for i < k, and squared_norms[k] = |sum|^2, before
// the rounding to `out`. A norm is not finite if the row is not, or if float64 cannot hold the square.
//   weights: float64[k]; squared_norms: float64[k + 1] or null; scratch: float64[count * (k + 1)], or null likewise.
//   Moves the bytes of all rows and bases once, and those of out.
void weighted_sums(const RowSum* sums, const double* weights, std::int64_t k, const Piece* pieces, std::int64_t count,
                   Precision precision, double* scratch, double* squared_norms);

// One tensor of k clients' updates, and its range of the sums.
template <class Sum>
struct Fold {
    const Sum* acc;  // null for zeros
    Sum* out;        // the same array or disjoint
    const ClientUpdate* sent;
};

// out[j] = acc[j] + sum_i weight_i * h_i[j], in Sum (float or double), for every tensor; squared_norms[i] = |h_i|^2
// over all tensors, as in norms.h. `Piece::sum` is the number of a tensor.
//   scratch: float64[k * count], one line for each piece.
//   A squared norm is not finite if the row is not; then `out` is invalid, and `acc` is unchanged.
//   Moves (4 k + 4 + 2 sizeof(Sum)) n bytes.
template <class Sum>
void accumulate(const Fold<Sum>* folds, std::int64_t k, const Piece* pieces, std::int64_t count, double* scratch,
                double* squared_norms);

// The coefficients of a linear form over A, the round's sum, B, a second sum, T, the running total, g, the direction of
// the round before, and v, the direction of this round.
struct Linear {
    double A, B, T, g, v;
};

// The linear step at the end of every round:
//     v  = float32(v.A * A + v.T * T + v.g * g + v.B * B)
//     T' = total.T * T + total.A * A + total.B * B + total.g * g + total.v * v
//     x' = float32(x - gamma * v)
// elementwise in float64, each line from left to right, without the terms whose arrays are null.
struct Step {
    Linear v, total;
    double gamma;
};

template <class Sum>
struct StepInputs {
    const Sum* sum;         // A: Sum[n], float or double
    const double* total;    // T: float64[n], or null without a total
    const float* momentum;  // g: float32[n] or null
    const double* control;  // B: float64[n] or null
    const float* x;         // float32[n]
};

// Each may be the input that it replaces: v momentum, total total, x x.
struct StepOutputs {
    float* v;
    double* total;  // null without a total
    float* x;
};

//   scratch: float64[2 * block_count(n)]. squares[0] = |v|^2, squares[1] = |x'|^2, not finite if an element of x' is
//   not. Moves (sizeof(Sum) + 12) n bytes, 16 n more with a total, 4 n with g, 8 n with B.
template <class Sum>
void server_step(const Step& step, const StepInputs<Sum>& in, const StepOutputs& out, std::int64_t n, double* scratch,
                 double* squares);

}  // namespace fedcore
