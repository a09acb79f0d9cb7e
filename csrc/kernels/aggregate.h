// aggregate: sums over clients, and the server's step along them.
//
// Every sum over clients is strictly sequential per element, in the order of the rows, starting from what was there:
// adding rows one by one, a few at a time or all at once gives the same bits. Blocks are independent, so the number
// of threads changes nothing either. Callers have checked every pointer, length and overlap.
#pragma once

#include <cstdint>

namespace fedcore {

// What a sum is kept in while it grows.
enum class Precision { float32, float64 };

// What one client sent, read as the mean gradient of its local steps:
//     h = (base - y) * scale,  or  h = -y * scale  where base is null,
// in float32. For a model, base is the x it started from and scale 1 / (eta K).
struct Sent {
    const float* y;     // float32[n]
    const float* base;  // float32[n] or null
    float scale;
    double weight;  // of this client in the sums
};

// out[j] = sum_i weights[i] * rows[i][j], summed in that precision and rounded once to float32.
//   rows: k x float32[n]; weights: float32[k]; out: float32[n], overlaps no row.
//   Moves 4 (k + 1) n bytes.
void weighted_sum(const float* const* rows, const float* weights, std::int64_t k, std::int64_t n, float* out,
                  Precision precision);

// The weighted sums of k models whose tensors lie apart, as every framework holds them: for each segment s,
//     outs[s][j] = sum_i weights[i] * rows[s * k + i][j].
// `pieces` cuts the segments into blocks, so that many small tensors and one large one are shared out alike.
struct Piece {
    std::int64_t segment, begin, end;
};
//   rows: segments x k x float32[n of the segment]; outs: as many float32 arrays. Moves 4 (k + 1) n bytes in all.
void weighted_sum_segments(const float* const* rows, const float* weights, std::int64_t k, const Piece* pieces,
                           std::int64_t count, float* const* outs, Precision precision);

// out[j] = acc[j] + sum_i weight_i * h_i[j], in Sum (float or double); squared_norms[i] = |h_i|^2, as in norms.h.
//   acc, out: Sum[n], the same array or disjoint. scratch: float64[k * block_count(n)].
//   A squared norm that is not finite tells that the row was not: then `out` is worthless and `acc` still good.
//   Moves (4 k + 4 + 2 sizeof(Sum)) n bytes.
template <class Sum>
void accumulate(const Sum* acc, Sum* out, const Sent* sent, std::int64_t k, std::int64_t n, double* scratch,
                double* squared_norms);

// The linear step that every server algorithm ends its round with (A: the round's sum, T: its running total):
//     v  = float32(from_sum * A + from_total * T)
//     T' = T + keep_sum * A + keep_v * v
//     x' = float32(x - gamma * v)
struct Step {
    double from_sum, from_total, keep_sum, keep_v, gamma;
};

//   sum: Sum[n], float or double; total, total_out: float64[n], both null where the method keeps no total;
//   x, x_out, v: float32[n]. Outputs may be the inputs they replace. scratch: float64[2 * block_count(n)].
//   squares[0] = |v|^2, squares[1] = |x'|^2, not finite if an element of x' is not.
//   Moves (sizeof(Sum) + 12) n bytes, 16 n more with a total.
template <class Sum>
void server_step(const Step& step, const Sum* sum, const double* total, const float* x, float* v, double* total_out,
                 float* x_out, std::int64_t n, double* scratch, double* squares);

}  // namespace fedcore
