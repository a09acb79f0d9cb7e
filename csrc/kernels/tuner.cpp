#include "kernels/tuner.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fedcore {
namespace {

constexpr std::int64_t kLong = kMostBlocks * kBlock;

// The tiling of FEDCORE_TILING; no rows if it is not set.
Tiling wanted() {
    const char* text = std::getenv("FEDCORE_TILING");
    if (text == nullptr || *text == '\0') return {0, 0, false};
    int rows = 0, end = 0;
    long long run = 0;
    if (std::sscanf(text, "%dx%lld%n", &rows, &run, &end) != 2 || text[end] != '\0' || rows < 1 || rows > kMostRows ||
        run < kBlock || run > kLong || run % kBlock != 0)
        throw std::runtime_error(
            "FEDCORE_TILING: expected ROWSxELEMENTS, 1..8 rows and a multiple of 16384 elements up to 65536, such as "
            "4x65536, got " +
            std::string(text));
    return {rows, run, true};
}

Tiling& forced() {
    static Tiling tiling = wanted();
    return tiling;
}

}  // namespace

// With many rows at once the sum stays in registers for longer. Few rows and long runs are few streams, which suit
// processors with small first-level caches or short queues.
const Tilings kFoldTilings = {
    5, {{8, kBlock, true}, {8, kLong, true}, {6, kLong, true}, {4, kLong, true}, {2, kLong, true}}};
const Tilings kExchangeTilings = {4, {{4, kBlock, true}, {4, kLong, true}, {2, kBlock, true}, {2, kLong, true}}};

const Tiling* forced_tiling() {
    const Tiling& tiling = forced();
    return tiling.rows > 0 ? &tiling : nullptr;
}

void force_tiling(const Tiling& tiling) {
    forced() = tiling;
}

void Tuner::record(int way, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (trials_[way] < kTrials) seconds_[way][trials_[way]++] = seconds;
    const int count = ways_->count;
    if (std::any_of(trials_, trials_ + count, [](int trials) { return trials < kTrials; })) return;
    double medians[kMostTilings];
    for (int i = 0; i < count; ++i) {
        std::nth_element(seconds_[i], seconds_[i] + kTrials / 2, seconds_[i] + kTrials);
        medians[i] = seconds_[i][kTrials / 2];
    }
    medians[0] *= 0.97;  // so that noise does not choose another
    fastest_.store(static_cast<int>(std::min_element(medians, medians + count) - medians), std::memory_order_relaxed);
}

}  // namespace fedcore
