// The inner loops of one ISA level, each over one range [begin, end) of elements. isa_level.cpp fills one table a
// level.
#pragma once

#include <cstdint>

#include "base/blocks.h"
#include "kernels/aggregate.h"
#include "kernels/combine.h"
#include "kernels/direction.h"
#include "kernels/exact.h"
#include "kernels/exchange.h"
#include "kernels/mix.h"
#include "kernels/optimizer.h"
#include "kernels/quantise.h"
#include "kernels/robust.h"

namespace fedcore {

// The order in which a loop reads several clients' rows; the bits do not depend on it.
struct Tiling {
    int rows;          // read together in a pass over the sum: at most kMostRows
    std::int64_t run;  // elements read of them before the next rows: a multiple of kBlock
    bool past_caches;  // whether to store results past the caches, if they replace no input and the level can
};

inline constexpr int kMostRows = 8;
inline constexpr Tiling kInCaches = {8, kBlock, false};

// past_caches: whether to store results past the caches, if they replace no input and the level can.

// The loops for sums in float and in double.
template <class Sum>
struct Sums {
    // squares: float64[k + 1] for each block from `begin` on, its share of |h_i|^2 and of |sum|^2; or null
    void (*weighted_sum)(const RowSum& segment, const double* weights, std::int64_t k, std::int64_t begin,
                         std::int64_t end, double* squares, const Tiling& tiling);
    // squares: float64[k] for each block from `begin` on, its share of |h_i|^2
    void (*accumulate)(const Fold<Sum>& fold, std::int64_t k, std::int64_t begin, std::int64_t end, double* squares,
                       const Tiling& tiling);
    // squares: float64[2], this range's share of |v|^2 and |x'|^2
    void (*server_step)(const Step& step, const StepInputs<Sum>& in, const StepOutputs& out, std::int64_t begin,
                        std::int64_t end, double* squares, bool past_caches);
};

struct Table {
    Sums<float> sums32;
    Sums<double> sums64;
    void (*exchange)(const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows,
                     const Forms& forms, std::int64_t k, std::int64_t begin, std::int64_t end, double* squares,
                     const Tiling& tiling);
    void (*accumulate_exact)(const ExactFold& fold, std::int64_t k, std::int64_t begin, std::int64_t end,
                             double* squares, const Tiling& tiling);
    void (*exchange_exact)(ConstExactSum acc, ExactSum out, const ClientUpdate* sent, const RowExchange* rows,
                           const Forms& forms, std::int64_t k, std::int64_t begin, std::int64_t end, double* squares,
                           const Tiling& tiling);
    bool (*combine_exact)(const ExactTerm* terms, std::int64_t k, std::int64_t begin, std::int64_t end, ExactSum out);
    void (*read_exact32)(ConstExactSum sum, std::int64_t begin, std::int64_t end, float* out);
    void (*read_exact64)(ConstExactSum sum, std::int64_t begin, std::int64_t end, double* out);
    double (*squared_norm)(const float* row, std::int64_t begin, std::int64_t end);
    void (*direction_step)(const LocalStep& step, std::int64_t begin, std::int64_t end, float* y);
    void (*combine32)(const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end, float* out);
    void (*combine64)(const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end, double* out);
    double (*combined_square)(const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end);
    double (*optimizer_step)(const OptimizerStep& step, const OptimizerInputs& in, const OptimizerOutputs& out,
                             std::int64_t begin, std::int64_t end);
    // slots: float32[plan.slots * stride], scratch
    void (*mix)(const Mixing& matrix, const MixPlan& plan, float* const* models, std::int64_t begin, std::int64_t end,
                float* slots, std::int64_t stride);
    // begin is a multiple of kCodeBlock
    void (*quantise)(const float* x, Codec codec, const DitherKey* key, std::int64_t begin, std::int64_t end,
                     void* codes, float* scales);
    void (*dequantise)(const void* codes, const float* scales, Codec codec, std::int64_t begin, std::int64_t end,
                       float* out);
    // scratch: float64[gram_scratch(k)]; shares: float64[k (k + 1) / 2], the block's share of the upper triangle
    void (*gram)(const Updates& updates, std::int64_t begin, std::int64_t end, double* scratch, double* shares);
    void (*column_statistic)(const Updates& updates, const ColumnPlan& plan, std::int64_t begin, std::int64_t end,
                             float* scratch, float* out);
    void (*add_words)(const std::uint64_t* const* terms, std::int64_t k, std::int64_t begin, std::int64_t end,
                      std::uint64_t* out);
};

}  // namespace fedcore
