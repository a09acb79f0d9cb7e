// exchange: one pass over a cohort that accumulates what is new against what each client's row remembers, and
// writes the new row. It is what MIFA, MimiC and SCAFFOLD have in common.
#pragma once

#include <cstdint>

#include "kernels/aggregate.h"
#include "kernels/quantise.h"

namespace fedcore {

// A client's row as it lies in memory.
struct Row {
    Codec codec;
    void* data;     // float32[n] for f32, else the codes; null for a row that was never written: it reads as zero
    float* scales;  // int8's, else null
};

// One client's row before and after.
struct RowSwap {
    Row old_row;          // r, only read
    const float* anchor;  // float32[n] or null: MimiC's v[t_i], or the control form's q
    Row new_row;          // of any codec; may lie where old_row does, element by element
    DitherKey key;        // of the rounding, where the new row is coded
};

// What a row becomes, and what the sum sees of it: with ~ for what is stored, that is decoded(encoded(.)),
//     gradient:  row' = h,            out[j] = acc[j] + sum_i weight_i * (row'~_i[j] - r_i[j] + v_i[j])
//     control:   row' = (h + r) + q,  out[j] = acc[j] + sum_i weight_i * (row'~_i[j] - r_i[j])
// Codes are rounded stochastically, so that a row's mean over many keys is row'.
enum class Form { gradient, control };

// In float64, h and row' in float32, r and what the anchor holds 0 where there is none; old_row first, then anchor. The
// sum follows exactly what is stored. squared_norms[i] = |h_i|^2 before encoding; not finite too where row'~_i is not.
//   The promises of `accumulate` on order, aliasing and scratch hold here too.
//   Moves (4 + 2 b .. 8 + 2 b) k n + (4 + 16) n bytes, b = 4, 2 or 1 + 1/16 the bytes of a row's element: y, r and
//   perhaps the anchor read, the new row written.
void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, Form form, std::int64_t k,
              std::int64_t n, double* scratch, double* squared_norms);

}  // namespace fedcore
