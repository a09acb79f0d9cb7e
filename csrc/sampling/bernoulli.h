// Random sets with independent members, each with its own probability.
#pragma once

#include <cstdint>
#include <vector>

#include "base/random.h"

namespace fedcore {

// A set of [0, n) as bits, and the position of each block's (base/blocks.h) elements in an ascending list.
class BitSet {
  public:
    explicit BitSet(std::int64_t n);
    std::int64_t size() const { return first_.back(); }
    void list(std::int64_t* out) const;  // int64[size()], ascending

  private:
    friend bool bernoulli(const double* p, bool each, const Key& key, BitSet& set);
    std::int64_t n_;
    std::vector<std::uint64_t> bits_;
    std::vector<std::int64_t> first_;  // the position of each block's first element, and the size
};

// i is in the set exactly if unit(word i) < p_i, so with probability p_i rounded up to a multiple of 2^-53; a
// larger p only adds elements. p: float64[n] if `each`, else one number for all. Returns whether every p_i is in
// [0, 1]; if not, the set is invalid. Runs on the pool.
bool bernoulli(const double* p, bool each, const Key& key, BitSet& set);

}  // namespace fedcore
