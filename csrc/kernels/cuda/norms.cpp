#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {

void squared_norms(Queue& queue, const float* const* rows, std::int64_t k, std::int64_t n, double* partials,
                   double* squared_norms) {
    queue.begin();
    const std::int64_t pieces = block_count(n), tiles = pieces * kPieceTiles;
    bool vector = true;
    for (std::int64_t i = 0; i < k; ++i) vector = vector && is_aligned(rows[i]);
    const NormsCall call{copied(queue, rows, k), squares_for(queue, k, tiles), n, static_cast<std::int32_t>(k), vector};
    if (tiles > 0 && k > 0) queue.launch(Kernel::squared_norms, {tiles, (k + kTogether - 1) / kTogether}, &call);
    read_totals(queue, call.squares, k, pieces, kPieceTiles, partials, squared_norms);
}

}  // namespace fedcore::cuda
