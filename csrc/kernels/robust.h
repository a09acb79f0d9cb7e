// robust: the inner products of a cohort's updates, and order statistics of each column, for robust aggregation rules.
//
// Both read h of k updates as `accumulate` does, in tiles of elements. A tile may cross tensors, so updates in separate
// tensors give the bits of flat ones. Callers have checked every pointer, length and overlap; h must be finite.
#pragma once

#include <cstdint>

#include "kernels/aggregate.h"

namespace fedcore {

// k updates of n elements in tensors: client i's tensor s is sent[s * k + i], and begins at element starts[s].
struct Updates {
    const ClientUpdate* sent;
    const std::int64_t* starts;  // tensors + 1 entries; the last is n
    std::int64_t tensors, k;
};

// Elements that a tile of the inner products holds of each row, and between its rows, which would share one set of the
// L1 otherwise.
inline constexpr std::int64_t kGramTile = 256, kGramStride = kGramTile + 8;
inline constexpr int kMostGramRows = 5, kGramLanes = 8;  // rows are multiplied by as many at once, on lanes

// The float64 elements that one thread needs for the inner products of k rows: a tile of the rows, then the lanes of
// each pair of groups of at most kMostGramRows.
inline constexpr std::int64_t gram_scratch(std::int64_t k) {
    const std::int64_t rows = k + kMostGramRows - 1;
    return rows * kGramStride + rows * (rows + kMostGramRows) / 2 * kGramLanes;
}

// gram[i * k + j] = sum over the elements of h_i * h_j, float64[k, k]. Products of float32 are exact in float64. They
// are added on 8 lanes in each block; lanes are folded in a fixed tree; blocks are added in order.
//   shares: output, float64[blocks, k (k + 1) / 2]: each block's share of the upper triangle, row by row.
//   Moves the bytes of all updates once, with k^2 / 2 multiplications an element.
void gram(const Updates& updates, std::int64_t n, double* shares, double* gram);

inline constexpr int kSortedRows = 16;  // that registers sort at once

// A step of sorting the values of each column: `sort` orders rows [low, high), and `merge` does if they rise and then
// fall, or the reverse. `compare` puts the lesser of two rows to `low`, the greater to `high`, where they are needed.
struct SortingStep {
    enum Kind : std::int32_t { sort, merge, compare } kind;
    std::int32_t low, high;
    bool keeps_low, keeps_high;
};

// The mean of some sorted values s_0 <= ... of each column: of those in [first, last), or, if `nearest` > 0, of as many
// nearest the median, where half of each of two equally near ones counts. Sums are in float64, in rising order.
struct Statistic {
    std::int64_t first, last, nearest;
};

// A call's constants for all tiles.
struct ColumnPlan {
    const double* mixing;  // float64[rows, k] or null: rows of the statistic are these combinations of the h_i
    std::int64_t rows;     // k without a mixing
    Statistic of;
    const SortingStep* sorting;
    std::int64_t steps;
    std::int64_t tile, stride;  // elements of a tile in the L2, and between its rows
    std::int64_t run;           // elements of all rows that stay in the L1
};

// out[j] = the statistic of column j of the h_i, or of sum_i mixing[r][i] * h_i[j] (float64, rounded to float32), as
// float32. A zero is +0. Tiles of all rows stay in the L2, and runs in the L1. The bits depend on neither.
//   mixing: float64[rows, k] or null. Moves the bytes of all updates once, and 4 n.
void column_statistic(const Updates& updates, const double* mixing, std::int64_t rows, const Statistic& statistic,
                      std::int64_t n, float* out);

}  // namespace fedcore
