#include "kernels/norms.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {

void squared_norms(const float* const* rows, std::int64_t k, std::int64_t n, double* scratch, double* squared_norms) {
    const Table& loops = table();
    for_blocks(n, 4 * k * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < k; ++i) scratch[block * k + i] = loops.squared_norm(rows[i], begin, end);
    });
    add_partials(scratch, block_count(n), k, squared_norms);
}

}  // namespace fedcore
