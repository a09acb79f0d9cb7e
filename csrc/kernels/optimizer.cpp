#include "kernels/optimizer.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {

double optimizer_step(const OptimizerStep& step, const OptimizerInputs& in, const OptimizerOutputs& out, std::int64_t n,
                      double* scratch) {
    const Table& loops = table();
    const std::int64_t moved = step.second == Second::none ? 20 : 28;
    for_blocks(n, moved * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        scratch[block] = loops.optimizer_step(step, in, out, begin, end);
    });
    double square = 0;
    add_partials(scratch, block_count(n), 1, &square);
    return square;
}

}  // namespace fedcore
