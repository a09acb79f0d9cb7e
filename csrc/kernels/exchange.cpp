#include "kernels/exchange.h"

#include "base/blocks.h"
#include "base/cached.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {

static_assert(kSummed == kBlock, "a block has a checksum of its own");

void exchange(const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms,
              std::int64_t k, std::int64_t n, double* scratch, double* squared_norms) {
    const Table& loops = table();
    const std::int64_t bytes = (12 * k + 20) * n;
    const bool past_caches = bytes > cached_bytes();
    for_blocks(n, bytes, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        loops.exchange(acc, out, sent, rows, forms, k, begin, end, scratch + block * k, past_caches);
    });
    add_partials(scratch, block_count(n), k, squared_norms);
}

}  // namespace fedcore
