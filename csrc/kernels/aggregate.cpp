#include "kernels/aggregate.h"

#include "kernels/dispatch.h"
#include "kernels/partials.h"
#include "kernels/tuner.h"

namespace fedcore {

namespace {

std::int64_t size_of(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

const Sums<float>& sums(const float*) {
    return table().sums32;
}
const Sums<double>& sums(const double*) {
    return table().sums64;
}

}  // namespace

void weighted_sums(const RowSum* sums, const double* weights, std::int64_t k, const Piece* pieces, std::int64_t count,
                   Precision precision, double* scratch, double* squared_norms) {
    const auto loop = precision == Precision::float64 ? table().sums64.weighted_sum : table().sums32.weighted_sum;
    std::int64_t bytes = 0;
    for (std::int64_t p = 0; p < count; ++p) {
        const RowSum& sum = sums[pieces[p].sum];
        bytes += (pieces[p].end - pieces[p].begin) * (k * size_of(sum.rows_dtype) + size_of(sum.out_dtype));
    }
    const Dtype rows_dtype = count > 0 ? sums[pieces[0].sum].rows_dtype : Dtype::float32;
    static Tuner tuners[2][4][2];
    Tuner& tuner = tuners[precision == Precision::float64][static_cast<int>(rows_dtype)][k > kMostRows];
    for_stretches(
        count, bytes, tuner, [&](std::int64_t p) { return follows(pieces + p); },
        [&](std::int64_t first, std::int64_t last, const Tiling& tiling) {
            loop(sums[pieces[first].sum], weights, k, pieces[first].begin, pieces[last - 1].end,
                 squared_norms == nullptr ? nullptr : scratch + first * (k + 1), tiling);
        });
    if (squared_norms != nullptr) add_partials(scratch, count, k + 1, squared_norms);
}

template <class Sum>
void accumulate(const Fold<Sum>* folds, std::int64_t k, const Piece* pieces, std::int64_t count, double* scratch,
                double* squared_norms) {
    const auto loop = sums(static_cast<const Sum*>(nullptr)).accumulate;
    accumulate_pieces(loop, folds, k, pieces, count, 20, scratch, squared_norms);
}

template <class Sum>
void server_step(const Step& step, const StepInputs<Sum>& in, const StepOutputs& out, std::int64_t n, double* scratch,
                 double* squares) {
    const auto loop = sums(in.sum).server_step;
    const bool past_caches = 36 * n > cached_bytes();
    for_blocks(n, 36 * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        loop(step, in, out, begin, end, scratch + block * 2, past_caches);
    });
    add_partials(scratch, block_count(n), 2, squares);
}

#define FEDCORE_INSTANTIATE(Sum)                                                                            \
    template void accumulate(const Fold<Sum>*, std::int64_t, const Piece*, std::int64_t, double*, double*); \
    template void server_step(const Step&, const StepInputs<Sum>&, const StepOutputs&, std::int64_t, double*, double*);
FEDCORE_INSTANTIATE(float)
FEDCORE_INSTANTIATE(double)
#undef FEDCORE_INSTANTIATE

}  // namespace fedcore
