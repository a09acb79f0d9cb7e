// The uses of a key's words. Each kind of draw has one use, so that two kinds never share a word, not even under one
// (seed, round, purpose).
#pragma once

#include <cstdint>

#include "base/random.h"

namespace fedcore {

enum class Use : std::uint64_t {  // part of every result: never renumber
    without_replacement = 1,
    weighted_without_replacement = 2,
    with_replacement = 3,
    bernoulli = 4,
    permutation = 5,
};

inline Stream stream(const Key& key, Use use, std::uint64_t part = 0) {
    return {key, {static_cast<std::uint64_t>(use), part, 0}};
}

}  // namespace fedcore
