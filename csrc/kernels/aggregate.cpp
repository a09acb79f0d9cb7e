#include "kernels/aggregate.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {

void weighted_sum(const float* const* rows, const float* weights, std::int64_t k, std::int64_t n, float* out,
                  Precision precision) {
    const auto loop = precision == Precision::float64 ? table().sums64.weighted_sum : table().sums32.weighted_sum;
    for_blocks(n, 4 * (k + 1) * n,
               [&](std::int64_t, std::int64_t begin, std::int64_t end) { loop(rows, weights, k, begin, end, out); });
}

void weighted_sum_segments(const float* const* rows, const float* weights, std::int64_t k, const Piece* pieces,
                           std::int64_t count, float* const* outs, Precision precision) {
    const auto loop = precision == Precision::float64 ? table().sums64.weighted_sum : table().sums32.weighted_sum;
    std::int64_t n = 0;
    for (std::int64_t p = 0; p < count; ++p) n += pieces[p].end - pieces[p].begin;
    for_pieces(count, 4 * (k + 1) * n, [&](std::int64_t p) {
        const Piece& piece = pieces[p];
        loop(rows + piece.segment * k, weights, k, piece.begin, piece.end, outs[piece.segment]);
    });
}

namespace {

const Sums<float>& sums(const float*) {
    return table().sums32;
}
const Sums<double>& sums(const double*) {
    return table().sums64;
}

}  // namespace

template <class Sum>
void accumulate(const Sum* acc, Sum* out, const Sent* sent, std::int64_t k, std::int64_t n, double* scratch,
                double* squared_norms) {
    const auto loop = sums(acc).accumulate;
    for_blocks(n, (4 * k + 20) * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        loop(acc, out, sent, k, begin, end, scratch + block * k);
    });
    add_partials(scratch, block_count(n), k, squared_norms);
}

template <class Sum>
void server_step(const Step& step, const Sum* sum, const double* total, const float* x, float* v, double* total_out,
                 float* x_out, std::int64_t n, double* scratch, double* squares) {
    const auto loop = sums(sum).server_step;
    for_blocks(n, 36 * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        loop(step, sum, total, x, v, total_out, x_out, begin, end, scratch + block * 2);
    });
    add_partials(scratch, block_count(n), 2, squares);
}

#define FEDCORE_INSTANTIATE(Sum)                                                                             \
    template void accumulate(const Sum*, Sum*, const Sent*, std::int64_t, std::int64_t, double*, double*);   \
    template void server_step(const Step&, const Sum*, const double*, const float*, float*, double*, float*, \
                              std::int64_t, double*, double*);
FEDCORE_INSTANTIATE(float)
FEDCORE_INSTANTIATE(double)
#undef FEDCORE_INSTANTIATE

}  // namespace fedcore
