#include "kernels/robust.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {
namespace {

// Elements of all rows together that stay in the L1 and the L2, and of one row.
constexpr std::int64_t kRunFloats = (32 << 10) / 4, kTileFloats = (256 << 10) / 4;
constexpr std::int64_t kShortestRun = 64, kLongestRun = 256, kLongestTile = 512;
constexpr std::int64_t kTilePadding = 16;  // else all rows would share one set of the L1

std::int64_t power_of_two(std::int64_t most, std::int64_t longest) {
    std::int64_t length = kShortestRun;
    while (2 * length <= std::min(most, longest)) length *= 2;
    return length;
}

std::int64_t bytes_of(const Updates& updates, std::int64_t n) {
    return 4 * (updates.k + 1) * n;
}

// Calls work(scratch, block, begin, end) for all blocks, in groups. Each worker has its own scratch and claims blocks.
template <class Number, class Work>
void for_blocks_with_scratch(std::int64_t n, std::int64_t bytes, std::int64_t size, const Work& work) {
    const std::int64_t workers = bytes < kSerialBytes ? 1 : std::min<std::int64_t>(threads(), block_count(n));
    const std::int64_t stride = size + 64;  // workers share no cache line
    const std::unique_ptr<Number[]> scratch(new Number[workers * stride + 64]);
    Number* aligned = scratch.get();
    while (reinterpret_cast<std::uintptr_t>(aligned) % 64 != 0) ++aligned;
    for_groups(block_count(n), bytes, [&](std::int64_t first, std::int64_t count) {
        std::atomic<std::int64_t> next{first};
        parallel_for(workers, [&](std::int64_t worker) {
            for (std::int64_t block; (block = next.fetch_add(1, std::memory_order_relaxed)) < first + count;)
                work(aligned + worker * stride, block, block * kBlock, std::min((block + 1) * kBlock, n));
        });
    });
}

// Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2, Algorithm M) for `rows` values, without the
// comparators on which the sorted values in [first, last) do not depend.
std::vector<Comparator> sorting_network(std::int64_t rows, std::int64_t first, std::int64_t last) {
    std::vector<Comparator> all;
    std::int64_t top = 1;
    while (2 * top < rows) top *= 2;
    for (std::int64_t p = rows > 1 ? top : 0; p > 0; p /= 2) {
        std::int64_t q = top, r = 0, d = p;
        for (;;) {
            for (std::int64_t i = 0; i + d < rows; ++i)
                if ((i & p) == r)
                    all.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(i + d), false, false});
            if (q == p) break;
            d = q - p;
            q /= 2;
            r = p;
        }
    }
    std::vector<bool> needed(rows);
    for (std::int64_t i = first; i < last; ++i) needed[i] = true;
    std::vector<Comparator> kept;
    for (auto c = all.rbegin(); c != all.rend(); ++c) {
        c->keeps_low = needed[c->low];
        c->keeps_high = needed[c->high];
        if (!c->keeps_low && !c->keeps_high) continue;
        needed[c->low] = needed[c->high] = true;
        kept.push_back(*c);
    }
    std::reverse(kept.begin(), kept.end());
    return kept;
}

}  // namespace

void gram(const Updates& updates, std::int64_t n, double* shares, double* gram) {
    const std::int64_t k = updates.k, pairs = k * (k + 1) / 2;
    std::vector<double> sums(pairs);
    for_blocks_with_scratch<double>(n, bytes_of(updates, n), gram_scratch(k),
                                    [&](double* tile, std::int64_t block, std::int64_t begin, std::int64_t end) {
                                        table().gram(updates, begin, end, tile, shares + block * pairs);
                                    });
    add_partials(shares, block_count(n), pairs, sums.data());
    const double* sum = sums.data();
    for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t j = i; j < k; ++j) gram[i * k + j] = gram[j * k + i] = *sum++;
}

void column_statistic(const Updates& updates, const double* mixing, std::int64_t rows, const Statistic& statistic,
                      std::int64_t n, float* out) {
    const bool nearest = statistic.nearest > 0;
    const std::vector<Comparator> network =
        sorting_network(rows, nearest ? 0 : statistic.first, nearest ? rows : statistic.last);
    const std::int64_t held = rows + 1 + (mixing == nullptr ? 0 : updates.k);
    const std::int64_t tile = power_of_two(kTileFloats / held, kLongestTile);
    const std::int64_t run = power_of_two(kRunFloats / rows, std::min(kLongestRun, tile));
    const ColumnPlan plan{
        mixing, rows, statistic, network.data(), static_cast<std::int64_t>(network.size()), tile, tile + kTilePadding,
        run};
    for_blocks_with_scratch<float>(n, bytes_of(updates, n), held * plan.stride,
                                   [&](float* scratch, std::int64_t, std::int64_t begin, std::int64_t end) {
                                       table().column_statistic(updates, plan, begin, end, scratch, out);
                                   });
}

}  // namespace fedcore
