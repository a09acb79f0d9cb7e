#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {

void mix(Queue& queue, const Mixing& matrix, float* const* models, std::int64_t n) {
    queue.begin();
    const std::int64_t p = matrix.p, entries = matrix.starts[p];
    if (n == 0 || p == 0) return;
    const std::int64_t most = kMostMixed / p, width = most >= 32 ? std::min<std::int64_t>(most / 32 * 32, kTile) : most;
    const Mixing there{copied(queue, matrix.starts, p + 1), copied(queue, matrix.columns, entries),
                       copied(queue, matrix.weights, entries), p};
    const MixCall call{there, copied(queue, models, p), n, static_cast<std::int32_t>(width)};
    const Grid grid{(n + width - 1) / width, 1, static_cast<std::size_t>(p * width) * sizeof(float)};
    queue.launch(Kernel::mix, grid, &call);
}

}  // namespace fedcore::cuda
