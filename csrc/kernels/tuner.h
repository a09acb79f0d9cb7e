// The order in which a fold reads its rows. No order is the fastest on every processor, so folds of more than the
// caches hold try several on the blocks of real calls, measure them, and keep the fastest. The bits do not depend on
// it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "base/blocks.h"
#include "base/cached.h"
#include "kernels/partials.h"
#include "kernels/table.h"

namespace fedcore {

inline constexpr std::int64_t kMostBlocks = 4;  // in one stretch: the longest run of a tiling

inline constexpr int kMostTilings = 5;

// Tilings to choose from.
struct Tilings {
    int count;
    Tiling of[kMostTilings];
};
extern const Tilings kFoldTilings, kExchangeTilings;  // for one stream a row, and for three

// Finds the fastest tiling during the first calls.
class Tuner {
  public:
    explicit Tuner(const Tilings& ways = kFoldTilings) : ways_(&ways) {}

    // Calls fold(tiling) for some blocks in memory, kMostBlocks of them if they are `whole`.
    template <class Fold>
    void run(bool whole, const Fold& fold) {
        const int known = fastest_.load(std::memory_order_relaxed);
        if (known >= 0 || !whole) return fold(ways_->of[known < 0 ? 0 : known]);
        const int way = turn_.fetch_add(1, std::memory_order_relaxed) % ways_->count;
        const auto began = std::chrono::steady_clock::now();
        fold(ways_->of[way]);
        record(way, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }

  private:
    static constexpr int kTrials = 15;

    void record(int way, double seconds);

    const Tilings* const ways_;
    std::atomic<int> fastest_{-1};
    std::atomic<unsigned> turn_{0};
    std::mutex mutex_;  // guards the rest
    int trials_[kMostTilings] = {};
    double seconds_[kMostTilings][kTrials];
};

// The tiling of FEDCORE_TILING, "ROWSxRUN", or null if calls choose by measurement. Throws std::runtime_error for an
// invalid value.
const Tiling* forced_tiling();
void force_tiling(const Tiling& tiling);  // for tests; no rows force none

// Calls fold(first, last, tiling) for pieces [first, last) of `count`, which move `bytes`. In the caches a call gets
// one piece. From memory, or with a forced tiling, it gets several pieces p that each follow(p) the one before, if
// there are enough for all threads.
template <class Follows, class Fold>
void for_stretches(std::int64_t count, std::int64_t bytes, Tuner& tuner, const Follows& follows, const Fold& fold) {
    const Tiling* const forced = forced_tiling();
    if (forced == nullptr && bytes <= cached_bytes())
        return for_pieces(count, bytes, [&](std::int64_t p) { fold(p, p + 1, kInCaches); });
    const std::int64_t together = std::clamp<std::int64_t>(count / (8 * threads()), 1, kMostBlocks);
    for_pieces((count + together - 1) / together, bytes, [&](std::int64_t group) {
        const std::int64_t end = std::min(count, (group + 1) * together);
        for (std::int64_t first = group * together, last; first < end; first = last) {
            for (last = first + 1; last < end && follows(last); ++last) continue;
            const auto run = [&](const Tiling& tiling) { fold(first, last, tiling); };
            forced != nullptr ? run(*forced) : tuner.run(last - first == kMostBlocks, run);
        }
    });
}

// Adds k updates to the sums of these pieces by loop(fold, k, begin, end, scratch, tiling), which moves 4 k + `sum`
// bytes for an element. The arguments are those of `accumulate`.
template <class Loop, class Folds>
void accumulate_pieces(Loop loop, const Folds* folds, std::int64_t k, const Piece* pieces, std::int64_t count,
                       std::int64_t sum, double* scratch, double* squared_norms) {
    std::int64_t n = 0;
    for (std::int64_t p = 0; p < count; ++p) n += pieces[p].end - pieces[p].begin;
    static Tuner tuners[2];
    for_stretches(
        count, (4 * k + sum) * n, tuners[k > kMostRows], [&](std::int64_t p) { return follows(pieces + p); },
        [&](std::int64_t first, std::int64_t last, const Tiling& tiling) {
            loop(folds[pieces[first].sum], k, pieces[first].begin, pieces[last - 1].end, scratch + first * k, tiling);
        });
    add_partials(scratch, count, k, squared_norms);
}

}  // namespace fedcore
