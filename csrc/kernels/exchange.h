// exchange: one pass over a cohort that accumulates what is new against what each client's row remembers, and
// writes the new row. It is what MIFA, MimiC and SCAFFOLD have in common.
#pragma once

#include <cstdint>

#include "kernels/aggregate.h"

namespace fedcore {

// One client's row before and after.
struct RowSwap {
    const float* old_row;  // r: float32[n], or null for a row that was never written (it reads as zero)
    const float* anchor;   // v: float32[n] added back, or null: MimiC's v[t_i]
    float* new_row;        // float32[n]; may be old_row itself
};

// out[j] = acc[j] + sum_i weight_i * (h_i[j] - r_i[j] + v_i[j]), in float64; new_row_i = h_i; squared_norms
// as in `accumulate`, whose promises on order, aliasing and scratch hold here too.
//   Moves (12 .. 16) k n + (4 + 16) n bytes: y, r and perhaps v read, the new row written.
void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, std::int64_t k, std::int64_t n,
              double* scratch, double* squared_norms);

}  // namespace fedcore
