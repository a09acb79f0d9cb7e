// Uniform draws without replacement.
#pragma once

#include <cstdint>

#include "base/random.h"

namespace fedcore {

// out: int64[k], k different numbers of [0, population) in the order of the draws; every sequence of k has exactly the
// same probability. 0 <= k <= population. A larger k only appends to a smaller one's draws.
//   Durstenfeld's shuffle, stopped after k exchanges: entries that were never moved are not stored.
//   O(k) time and memory (at most 64 bytes a draw), whatever the population. Allocates.
void without_replacement(std::int64_t population, std::int64_t k, const Key& key, std::int64_t* out);

}  // namespace fedcore
