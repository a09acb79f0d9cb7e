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

inline constexpr std::int64_t kSummed = 16384;  // elements of a float32 row under one checksum: a block, 64 KiB

// One client's row before and after.
struct RowExchange {
    Row old_row;                    // r, only read
    const float* anchor;            // q, float32[n] or null, as where no form has it: MimiC's v[t_i], SCAFFOLD's offset
    Row new_row;                    // of any codec; may lie where old_row does, element by element
    DitherKey key;                  // of the rounding, where the new row is coded
    std::uint64_t* sums = nullptr;  // the checksums of the new row's blocks (store/checksum.h), uint64[block_count(n)]
};

// What a row becomes, and what the sum sees of it: with ~ for what is stored, that is decoded(encoded(.)),
//     row'   = row.h * h + row.r * r + row.q * q                                  in float32
//     out[j] = acc[j] + sum_i weight_i * (adds.row * row'~_i[j] + adds.r * r_i[j] + adds.h * h_i[j] + adds.q * q_i[j])
// in float64 and in this order, r and q 0 where there is none; behind row.h, and behind adds.r, a term whose
// coefficient is 0 is left out. Codes are rounded stochastically, so that a row's mean over many keys is row'.
struct RowForm {
    float h, r, q;
};
struct SumForm {
    double row, r, h, q;
};
struct Forms {
    RowForm row;
    SumForm adds;
    bool alone = false;  // whether an anchor may come without an old row

    // Whether a row becomes h, and the sum sees by how much it changed, and perhaps the anchor: the form that has a
    // loop of its own, as MIFA and MimiC need it.
    bool replaces() const {
        return !alone && row.h == 1 && row.r == 0 && row.q == 0 && adds.row == 1 && adds.r == -1 && adds.h == 0 &&
               (adds.q == 0 || adds.q == 1);
    }
};

// The sum follows exactly what is stored. squared_norms[i] = |h_i|^2 before encoding; not finite too where row'~_i is
// not.
//   Checksums may be asked for where all new rows are float32. They are those of what is stored, made while it is in
//   L1. The promises of `accumulate` on order, aliasing and scratch hold here too. Moves (4 + 2 b .. 8 + 2 b) k n + (4
//   + 16) n bytes, b = 4, 2 or 1 + 1/16 the bytes of a row's element: y, r and perhaps the anchor read, the new row
//   written.
void exchange(const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms,
              std::int64_t k, std::int64_t n, double* scratch, double* squared_norms);

}  // namespace fedcore
