#include "kernels/exchange.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"
#include "kernels/tuner.h"

namespace fedcore {

static_assert(kSummed == kBlock, "a block has a checksum of its own");

void exchange(const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms,
              std::int64_t k, std::int64_t n, double* scratch, double* squared_norms) {
    const Table& loops = table();
    const std::int64_t bytes = (12 * k + 20) * n;
    static Tuner tuner(kExchangeTilings);
    for_stretches(
        block_count(n), bytes, tuner, [](std::int64_t) { return true; },
        [&](std::int64_t first, std::int64_t last, const Tiling& tiling) {
            loops.exchange(acc, out, sent, rows, forms, k, first * kBlock, std::min(last * kBlock, n),
                           scratch + first * k, tiling);
        });
    add_partials(scratch, block_count(n), k, squared_norms);
}

}  // namespace fedcore
