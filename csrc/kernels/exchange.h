// exchange: one pass over a cohort that accumulates each client's update relative to its row, and writes the new row.
// MIFA, MimiC and SCAFFOLD share this operation.
#pragma once

#include <cstdint>

#include "kernels/aggregate.h"
#include "kernels/quantise.h"

namespace fedcore {

// A client's row in memory.
struct Row {
    Codec codec;
    void* data;     // float32[n] for f32, else the codes; null for a row that was never written, which reads as zero
    float* scales;  // int8's, else null
};

inline constexpr std::int64_t kSummed = 16384;  // elements of a float32 row under one checksum: a block, 64 KiB

// One client's row before and after.
struct RowExchange {
    Row old_row;                    // r, only read
    const float* anchor;            // q, float32[n], or null if no form has it: MimiC's v[t_i], SCAFFOLD's offset
    Row new_row;                    // of any codec; may be exactly old_row's memory
    DitherKey key;                  // for the rounding of a coded new row
    std::uint64_t* sums = nullptr;  // the checksums of the new row's blocks (store/checksum.h), uint64[block_count(n)]
};

// The new row, and the term that the sum adds. With ~ for the stored value, decoded(encoded(.)):
//     row'   = row.h * h + row.r * r + row.q * q                                  in float32
//     out[j] = acc[j] + sum_i weight_i * (adds.row * row'~_i[j] + adds.r * r_i[j] + adds.h * h_i[j] + adds.q * q_i[j])
// in float64 and in this order; missing r and q are 0. Terms after row.h, and after adds.r, with a coefficient of 0 are
// left out. Codes are rounded stochastically, so that a row's mean over many keys is row'.
struct RowForm {
    float h, r, q;
};
struct SumForm {
    double row, r, h, q;
};
struct Forms {
    RowForm row;
    SumForm adds;
    bool alone = false;  // whether an anchor is allowed without an old row

    // Whether the new row is h, and the sum adds the change and perhaps the anchor. MIFA and MimiC use this form, which
    // has a separate loop.
    bool replaces() const {
        return !alone && row.h == 1 && row.r == 0 && row.q == 0 && adds.row == 1 && adds.r == -1 && adds.h == 0 &&
               (adds.q == 0 || adds.q == 1);
    }
};

// The sum uses exactly the stored values. squared_norms[i] = |h_i|^2 before encoding; also not finite if row'~_i is
// not.
//   Checksums, of the stored bytes while they are in L1, are available if all new rows are float32. Order, aliasing and
//   scratch are as for `accumulate`. Moves (4 + 2 b .. 8 + 2 b) k n + (4
//   + 16) n bytes, b = 4, 2 or 1 + 1/16 the bytes of a row's element: y, r and perhaps the anchor read, the new row
//   written.
void exchange(const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms,
              std::int64_t k, std::int64_t n, double* scratch, double* squared_norms);

}  // namespace fedcore
