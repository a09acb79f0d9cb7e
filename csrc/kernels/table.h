// The inner loops of one ISA level, each over one range [begin, end) of elements. level.cpp fills one table a level.
#pragma once

#include <cstdint>

#include "kernels/aggregate.h"
#include "kernels/exchange.h"

namespace fedcore {

// What exists for sums in float and in double.
template <class Sum>
struct Sums {
    void (*weighted_sum)(const float* const* rows, const float* weights, std::int64_t k, std::int64_t begin,
                         std::int64_t end, float* out);
    // squares: float64[k], this range's share of |h_i|^2
    void (*accumulate)(const Sum* acc, Sum* out, const Sent* sent, std::int64_t k, std::int64_t begin, std::int64_t end,
                       double* squares);
    // squares: float64[2], this range's share of |v|^2 and |x'|^2
    void (*server_step)(const Step& step, const Sum* sum, const double* total, const float* x, float* v,
                        double* total_out, float* x_out, std::int64_t begin, std::int64_t end, double* squares);
};

struct Table {
    Sums<float> sums32;
    Sums<double> sums64;
    void (*exchange)(const double* acc, double* out, const Sent* sent, const RowSwap* rows, std::int64_t k,
                     std::int64_t begin, std::int64_t end, double* squares);
    double (*squared_norm)(const float* row, std::int64_t begin, std::int64_t end);
};

}  // namespace fedcore
