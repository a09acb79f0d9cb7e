#include "kernels/exchange.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {

void exchange(const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms,
              std::int64_t k, std::int64_t n, double* scratch, double* squared_norms) {
    const Table& loops = table();
    for_blocks(n, (12 * k + 20) * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        loops.exchange(acc, out, sent, rows, forms, k, begin, end, scratch + block * k);
    });
    add_partials(scratch, block_count(n), k, squared_norms);
}

}  // namespace fedcore
