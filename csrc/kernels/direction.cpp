#include "kernels/direction.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"

namespace fedcore {

void direction_step(const LocalStep& step, float* y, std::int64_t n) {
    const Table& loops = table();
    const std::int64_t reads = 2 + (step.grad_prev != nullptr) + (step.offset != nullptr) + (step.x != nullptr);
    for_blocks(n, 4 * (reads + 1) * n,
               [&](std::int64_t, std::int64_t begin, std::int64_t end) { loops.direction_step(step, begin, end, y); });
}

}  // namespace fedcore
