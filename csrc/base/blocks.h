// The fixed partition of elements into blocks, the pieces of work. It depends only on n, never on the number of
// threads, so that a sum over a block, and a sum over blocks, has the same bits on any machine.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/pool.h"
#include "base/residency.h"

namespace fedcore {

inline constexpr std::int64_t kBlock = 16384;  // elements; 64 KiB of float32: several rows' blocks fit in L2

// Below this many bytes one thread does all the work: waking a second one costs the caller at least 20 us, in which it
// can read about this much itself. One thread's time over two threads', the best of 150 in turn, two cores of a virtual
// Zen 4 (bench/kernels/bench_serial.py; the kernels are weighted_sum, accumulate, exchange and direction):
//     MiB                              1           2           4           8
//     call upon call, in the caches    0.9 - 2.0   1.0 - 1.7   1.3 - 1.8   1.0 - 1.9
//     after a pause, from memory       0.6 - 1.0   0.8 - 1.1   0.9 - 1.4   1.2 - 1.5
inline constexpr std::int64_t kSerialBytes = 2 << 20;

inline std::int64_t block_count(std::int64_t n) {
    return n / kBlock + (n % kBlock != 0);  // a sum might pass 2^63
}

// Calls body(first, count) for all pieces of [0, pieces) at once. With a limit of resident memory, groups of pieces
// follow each other, each with a quarter of the limit as traffic.
template <class Body>
void for_groups(std::int64_t pieces, std::int64_t bytes, const Body& body) {
    const std::int64_t limit = resident_limit.load(std::memory_order_relaxed);
    const std::int64_t each = pieces == 0 ? 0 : bytes / pieces + 1;
    const std::int64_t together =
        limit == 0 ? pieces : std::max<std::int64_t>(1, limit / 4 / std::max<std::int64_t>(1, each));
    for (std::int64_t first = 0; first < pieces; first += together) {
        const std::int64_t count = std::min(together, pieces - first);
        if (limit != 0) count_traffic(count * each, limit);
        body(first, count);
    }
}

// Calls body(piece) for every piece of [0, pieces), on the pool if `bytes` of traffic are enough, in groups.
template <class Body>
void for_pieces(std::int64_t pieces, std::int64_t bytes, const Body& body) {
    for_groups(pieces, bytes, [&](std::int64_t first, std::int64_t count) {
        if (count < 2 || bytes < kSerialBytes) {
            for (std::int64_t piece = first; piece < first + count; ++piece) body(piece);
        } else {
            parallel_for(count, [&](std::int64_t piece) { body(first + piece); });
        }
    });
}

// Calls body(block, begin, end) for every block of [0, n), likewise.
template <class Body>
void for_blocks(std::int64_t n, std::int64_t bytes, const Body& body) {
    for_pieces(block_count(n), bytes, [&](std::int64_t block) {
        const std::int64_t begin = block * kBlock;
        body(block, begin, std::min(begin + kBlock, n));
    });
}

}  // namespace fedcore
