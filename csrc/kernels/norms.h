// norms: squared Euclidean norms of rows, and with them whether every element is finite.
#pragma once

#include <cstdint>

namespace fedcore {

// squared_norms[i] = sum_j rows[i][j]^2 in float64, on 16 fixed lanes a tile, folded in a fixed tree; tiles
// and then blocks follow in order. A float32's square cannot overflow a float64, so the result is finite
// exactly if the row is.
//   rows: k x float32[n]; scratch: float64[k * block_count(n)]. Moves 4 k n bytes.
void squared_norms(const float* const* rows, std::int64_t k, std::int64_t n, double* scratch, double* squared_norms);

}  // namespace fedcore
