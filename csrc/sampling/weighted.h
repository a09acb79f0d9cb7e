// Draws by weights, with and without replacement.
//
// The weights stand under a tree of sums, 32 children a node. A draw walks down from the root, choosing one of 32
// a level with a word of its own; without replacement the weight that was drawn then becomes zero, and the sums
// above it are added up anew. So each draw is made from the weights that are left: the law of successive draws
// itself, to float64 rounding, without rejected draws however uneven the weights. Sums are never subtracted from,
// so that the light weights keep their ratios after the heavy ones have gone.
#pragma once

#include <cstdint>
#include <vector>

#include "base/random.h"

namespace fedcore {

class WeightTree {
  public:
    // weights: float64[n], n >= 1, read-only; they must outlive the tree. Reads them once, on the pool. If they change
    // later, draws follow no law, but are indices in [0, n) still.
    WeightTree(const double* weights, std::int64_t n);

    // Whether all weights are >= 0 and their sum is finite; if not, ask for nothing else.
    bool valid() const { return valid_; }
    double total() const { return levels_.back().front(); }
    // Words that one draw takes: the least d >= 1 with 32^d >= n.
    std::int64_t depth() const { return static_cast<std::int64_t>(levels_.size()); }

    // Index i with probability weights[i] / total(), which must be > 0.
    std::int64_t draw(Words& words) const;
    // Makes weight i zero.
    void remove(std::int64_t i);

  private:
    const double* leaf(std::int64_t node, double* copy) const;

    const double* weights_;
    std::int64_t n_;
    bool valid_;
    std::vector<std::uint32_t> removed_;       // a bit a weight, a word a leaf; empty until something is removed
    std::vector<std::vector<double>> levels_;  // sums of 32 weights, of 32 of these, ...; the last is the root
};

// out: int64[k], different indices in the order in which they were drawn: draw j takes i with probability
// weights[i] / (sum of the weights not drawn before). A larger k only appends to a smaller one's draws. Consumes
// the tree. Returns how many were drawn: fewer than k if fewer weights are > 0.
//   O(k log n) time after the tree's one pass over the weights.
std::int64_t weighted_without_replacement(WeightTree& tree, std::int64_t k, const Key& key, std::int64_t* out);

// out: int64[k], each index drawn anew from all weights. tree.total() > 0 if k > 0. Runs on the pool.
void with_replacement(const WeightTree& tree, std::int64_t k, const Key& key, std::int64_t* out);

}  // namespace fedcore
