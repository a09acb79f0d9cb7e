#include "kernels/mix.h"

#include <algorithm>
#include <atomic>

#include "base/blocks.h"
#include "kernels/dispatch.h"

namespace fedcore {
namespace {

// A tile is so long that the slots fit in a core's L1, or in its L2 if that tile would be too short for efficient
// loops. It is a power of two, so that blocks are whole tiles, and pages end at tiles' ends.
constexpr std::int64_t kInL1 = (24 << 10) / 4, kInL2 = (128 << 10) / 4;
constexpr std::int64_t kShortest = 64, kUseful = 512, kLongest = 1024;

std::int64_t tile_length(std::int64_t slots) {
    const std::int64_t short_one = kInL1 / (slots + 2);
    const std::int64_t most = short_one >= kUseful ? short_one : kInL2 / slots;
    std::int64_t length = kShortest;
    while (2 * length <= std::min(most, kLongest)) length *= 2;
    return length;
}

// Assigns each kept model the first free slot; returns the number of slots.
void assign_slots(const Mixing& m, std::int64_t* work, MixPlan& plan) {
    std::int64_t* last_row = work;  // the last row that needs model c, or -1
    std::int64_t* unused = work + m.p;
    std::fill(last_row, last_row + m.p, -1);
    for (std::int64_t i = 0; i < m.p; ++i)
        for (std::int64_t e = m.starts[i]; e < m.starts[i + 1]; ++e) last_row[m.columns[e]] = i;
    std::int64_t free = 0;
    plan.slots = 0;
    for (std::int64_t i = 0; i < m.p; ++i) {
        plan.keeps[i] = last_row[i] < i ? -1 : free != 0 ? unused[--free] : plan.slots++;
        for (std::int64_t e = m.starts[i]; e < m.starts[i + 1]; ++e)
            plan.sources[e] = m.columns[e] <= i ? plan.keeps[m.columns[e]] : -1;
        for (std::int64_t e = m.starts[i]; e < m.starts[i + 1]; ++e) {
            const std::int64_t c = m.columns[e];
            if (c > i || last_row[c] != i) continue;
            unused[free++] = plan.keeps[c];
            last_row[c] = -1;  // once, though a row may list a column twice
        }
    }
}

// The models in the order of their first use. Each row fetches one model, so fetching runs ahead by the number of
// models that are needed early, and a few rows more for the latency of memory. Further ahead the models would leave the
// caches again.
void order_fetches(const Mixing& m, std::int64_t* wanted, MixPlan& plan) {
    constexpr std::int64_t kRows = 4;
    std::fill(wanted, wanted + m.p, 0);
    std::int64_t count = 0, early = 0;
    const auto want = [&](std::int64_t model) {
        if (wanted[model] == 0) plan.order[count++] = model;
        wanted[model] = 1;
    };
    for (std::int64_t i = 0; i < m.p; ++i) {
        want(i);
        for (std::int64_t e = m.starts[i]; e < m.starts[i + 1]; ++e) want(m.columns[e]);
        early = std::max(early, count - i);
    }
    plan.ahead = std::min(early + kRows, m.p);
}

constexpr std::int64_t kLine = 16;  // elements of a cache line

// Slots start at different offsets of a page, because otherwise slots and models would share one set of the L1.
std::int64_t slot_stride(std::int64_t tile) {
    return tile + 5 * kLine;
}

}  // namespace

std::int64_t mix_memory(const Mixing& matrix) {
    return 4 * matrix.p + matrix.starts[matrix.p];
}

MixPlan plan_mix(const Mixing& matrix, std::int64_t n, std::int64_t* memory) {
    const std::int64_t p = matrix.p;
    MixPlan plan;
    plan.order = memory;
    plan.keeps = memory + p;
    plan.sources = memory + 4 * p;
    assign_slots(matrix, memory + 2 * p, plan);
    order_fetches(matrix, memory + 2 * p, plan);
    plan.tile = tile_length(plan.slots);
    plan.workers = 8 * p * n < kSerialBytes ? 1 : std::min<std::int64_t>(threads(), block_count(n));
    plan.scratch = plan.workers * plan.slots * slot_stride(plan.tile) + kLine;
    return plan;
}

void mix(const Mixing& matrix, const MixPlan& plan, float* const* models, std::int64_t n, float* scratch) {
    const Table& loops = table();
    while (reinterpret_cast<std::uintptr_t>(scratch) % (4 * kLine) != 0) ++scratch;
    // One piece of work for each worker, so that each has its own slots. The workers claim blocks; a single worker
    // would finish them all.
    std::atomic<std::int64_t> next{0};
    parallel_for(plan.workers, [&](std::int64_t worker) {
        const std::int64_t stride = slot_stride(plan.tile);
        for (std::int64_t begin; (begin = next.fetch_add(kBlock, std::memory_order_relaxed)) < n;)
            loops.mix(matrix, plan, models, begin, std::min(begin + kBlock, n), scratch + worker * plan.slots * stride,
                      stride);
    });
}

}  // namespace fedcore
