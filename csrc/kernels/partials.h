// Blocks' shares of a sum, added in block order after all blocks are done, so that the threads do not matter.
#pragma once

#include <cstdint>

namespace fedcore {

// sums[i] = sum over blocks of partials[block * k + i]
inline void add_partials(const double* partials, std::int64_t blocks, std::int64_t k, double* sums) {
    for (std::int64_t i = 0; i < k; ++i) sums[i] = 0;
    for (std::int64_t block = 0; block < blocks; ++block)
        for (std::int64_t i = 0; i < k; ++i) sums[i] += partials[block * k + i];
}

}  // namespace fedcore
