// norms: squared Euclidean norms of rows, which also show whether every element is finite.
#pragma once

#include <cstdint>

namespace fedcore {

// squared_norms[i] = sum_j rows[i][j]^2: on 16 fixed lanes of float32 in each tile of 2,048 elements, folded in a fixed
// tree; tiles, and then blocks, in order in float64. A tile whose sum is inaccurate in float32 is summed again in
// float64, so that the result is finite exactly if the row is. Relative error below 1e-5, mostly near 1e-7.
//   rows: k x float32[n]; scratch: float64[k * block_count(n)]. Moves 4 k n bytes.
void squared_norms(const float* const* rows, std::int64_t k, std::int64_t n, double* scratch, double* squared_norms);

}  // namespace fedcore
