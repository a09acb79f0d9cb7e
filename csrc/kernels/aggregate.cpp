#include "kernels/aggregate.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {

void weighted_sum(const float* const* rows, const float* weights, std::int64_t k, std::int64_t n, float* out) {
    const Table& loops = table();
    for_blocks(n, 4 * (k + 1) * n, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        loops.weighted_sum(rows, weights, k, begin, end, out);
    });
}

void accumulate(const double* acc, double* out, const Sent* sent, std::int64_t k, std::int64_t n, double* scratch,
                double* squared_norms) {
    const Table& loops = table();
    for_blocks(n, (4 * k + 20) * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        loops.accumulate(acc, out, sent, k, begin, end, scratch + block * k);
    });
    add_partials(scratch, block_count(n), k, squared_norms);
}

void server_step(const Step& step, const double* sum, const double* total, const float* x, float* v, double* total_out,
                 float* x_out, std::int64_t n, double* scratch, double* squares) {
    const Table& loops = table();
    for_blocks(n, 36 * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        loops.server_step(step, sum, total, x, v, total_out, x_out, begin, end, scratch + block * 2);
    });
    add_partials(scratch, block_count(n), 2, squares);
}

}  // namespace fedcore
