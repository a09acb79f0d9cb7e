// The fixed block partition: which elements are one piece of work. It depends on n alone, never on the number
// of threads, so that a sum over a block, and a sum over blocks, has the same bits on any machine.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/pool.h"

namespace fedcore {

inline constexpr std::int64_t kBlock = 16384;  // elements; 64 KiB of float32: several rows' blocks fit in L2

// Below this many bytes one thread is faster than waking a second one: a sleeping worker takes 20-50 us to
// claim its first block, in which one core reads about this much.
inline constexpr std::int64_t kSerialBytes = 1 << 20;

inline std::int64_t block_count(std::int64_t n) {
    return (n + kBlock - 1) / kBlock;
}

// Calls body(block, begin, end) for every block of [0, n), on the pool where `bytes` of traffic are worth it.
template <class Body>
void for_blocks(std::int64_t n, std::int64_t bytes, const Body& body) {
    const auto task = [&](std::int64_t block) {
        const std::int64_t begin = block * kBlock;
        body(block, begin, std::min(begin + kBlock, n));
    };
    const std::int64_t blocks = block_count(n);
    if (blocks < 2 || bytes < kSerialBytes) {
        for (std::int64_t block = 0; block < blocks; ++block) task(block);
    } else {
        parallel_for(blocks, task);
    }
}

}  // namespace fedcore
