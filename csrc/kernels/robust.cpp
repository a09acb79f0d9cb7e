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

// The steps that sort `rows` values, without those on which the sorted values in [first, last) do not depend: groups of
// kSortedRows, then a bitonic merge of each two neighbors, whose first comparators mirror the second one. As values
// beyond the last row would be infinite, their comparators change nothing and are left out.
std::vector<SortingStep> sorting_steps(std::int64_t rows, std::int64_t first, std::int64_t last) {
    std::vector<SortingStep> all;
    const auto add = [&](SortingStep::Kind kind, std::int64_t low, std::int64_t high) {
        all.push_back({kind, static_cast<std::int32_t>(low), static_cast<std::int32_t>(high), true, true});
    };
    for (std::int64_t i = 0; i < rows; i += kSortedRows) add(SortingStep::sort, i, std::min(i + kSortedRows, rows));
    for (std::int64_t size = 2 * kSortedRows; size / 2 < rows; size *= 2)
        for (std::int64_t start = 0; start + size / 2 < rows; start += size) {
            for (std::int64_t i = 0; i < size / 2; ++i)
                if (start + size - 1 - i < rows) add(SortingStep::compare, start + i, start + size - 1 - i);
            for (std::int64_t d = size / 4; d > 0; d /= 2)
                for (std::int64_t i = start; i < start + size && i < rows; ++i) {
                    const bool whole = i / kSortedRows * kSortedRows + kSortedRows <= rows;
                    if (2 * d > kSortedRows || !whole) {
                        if ((i & d) == 0 && i + d < rows) add(SortingStep::compare, i, i + d);
                    } else if (2 * d == kSortedRows && i % kSortedRows == 0) {
                        add(SortingStep::merge, i, i + kSortedRows);
                    }
                }
        }
    std::vector<bool> needed(rows);
    std::fill(needed.begin() + first, needed.begin() + last, true);
    std::vector<SortingStep> kept;
    for (auto step = all.rbegin(); step != all.rend(); ++step) {
        if (step->kind == SortingStep::compare) {
            step->keeps_low = needed[step->low];
            step->keeps_high = needed[step->high];
            if (!step->keeps_low && !step->keeps_high) continue;
            needed[step->low] = needed[step->high] = true;
        } else {
            const auto from = needed.begin() + step->low, to = needed.begin() + step->high;
            if (std::find(from, to, true) == to) continue;
            std::fill(from, to, true);
        }
        kept.push_back(*step);
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
    const std::vector<SortingStep> sorting =
        sorting_steps(rows, nearest ? 0 : statistic.first, nearest ? rows : statistic.last);
    const std::int64_t held = rows + 1 + (mixing == nullptr ? 0 : updates.k);
    const std::int64_t tile = power_of_two(kTileFloats / held, kLongestTile);
    const std::int64_t run = power_of_two(kRunFloats / rows, std::min(kLongestRun, tile));
    const ColumnPlan plan{
        mixing, rows, statistic, sorting.data(), static_cast<std::int64_t>(sorting.size()), tile, tile + kTilePadding,
        run};
    for_blocks_with_scratch<float>(n, bytes_of(updates, n), held * plan.stride,
                                   [&](float* scratch, std::int64_t, std::int64_t begin, std::int64_t end) {
                                       table().column_statistic(updates, plan, begin, end, scratch, out);
                                   });
}

}  // namespace fedcore
