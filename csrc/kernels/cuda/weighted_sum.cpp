#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {
namespace {

// A kernel of kernels.def's family `sums`; a launch is for the tensors of one dtype that have a base, or have none.
Kernel kernel_of(Precision precision, int dtype, bool base, bool norms) {
    const Kernel first = precision == Precision::float64 ? Kernel::sums_f32_in_f64 : Kernel::sums_f32_in_f32;
    return behind(first, dtype * 4 + base * 2 + norms);
}

}  // namespace

void weighted_sums(Queue& queue, const RowSum* sums, const std::int64_t* n, std::int64_t count, const double* weights,
                   std::int64_t k, Precision precision, double* squared_norms) {
    queue.begin();
    const bool norms = squared_norms != nullptr;
    const Pieces pieces = pieces_of(queue, n, count);
    const Table<SumSegment> tensors = table<SumSegment>(queue, count);
    bool wanted[4][2] = {};
    for (std::int64_t s = 0; s < count; ++s) {
        const RowSum& sum = sums[s];
        bool vector = are_aligned({sum.base, sum.out});
        for (std::int64_t i = 0; i < k; ++i) vector = vector && is_aligned(sum.rows[i]);
        const void* const* const rows = copied(queue, sum.rows, k);
        tensors.host[s] = {{rows, sum.base, sum.out, sum.rows_dtype, sum.out_dtype}, n[s], vector};
        wanted[static_cast<int>(sum.rows_dtype)][sum.base != nullptr] = true;
    }
    const SumsCall call{tensors.device, copied(queue, weights, k),
                        norms ? squares_for(queue, k + 1, pieces.tiles()) : nullptr, pieces.segments,
                        static_cast<std::int32_t>(k)};
    for (int dtype = 0; pieces.count > 0 && dtype < 4; ++dtype)
        for (const bool base : {false, true})
            if (wanted[dtype][base]) queue.launch(kernel_of(precision, dtype, base, norms), {pieces.tiles()}, &call);
    if (norms) read_totals(queue, call.squares, k + 1, pieces.count, kPieceTiles, nullptr, squared_norms);
}

}  // namespace fedcore::cuda
