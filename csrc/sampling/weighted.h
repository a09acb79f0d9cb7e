// Draws by weights, with and without replacement.
//
// The weights are the leaves of a tree of sums, 32 children a node. A draw walks down from the root, and chooses one of
// 32 children a level with one random word. Without replacement the drawn weight then becomes zero, and the sums above
// it are added up again. So each draw is made from the remaining weights: the law of successive draws, to float64
// rounding, without rejected draws for any weights. Sums are never subtracted from, so the light weights keep their
// ratios after the heavy ones are drawn.
#pragma once

#include <cstdint>
#include <vector>

#include "base/random.h"

namespace fedcore {

class WeightTree {
  public:
    // weights: float64[n], n >= 1, read-only; they must outlive the tree. Reads them once, on the pool. If they change
    // later, draws follow no law, but stay indices in [0, n).
    WeightTree(const double* weights, std::int64_t n);

    // Whether all weights are >= 0 and their sum is finite; if not, call nothing else.
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
    std::vector<std::uint32_t> removed_;       // a bit a weight, a word a leaf; empty until the first removal
    std::vector<std::vector<double>> levels_;  // sums of 32 weights, of 32 of these, ...; the last is the root
};

// out: int64[k], different indices in the order in which they were drawn: draw j takes i with probability
// weights[i] / (sum of the weights not drawn before). A larger k only appends to a smaller one's draws. Consumes
// the tree. Returns the number of draws: fewer than k if fewer weights are > 0.
//   O(k log n) time after the tree's one pass over the weights.
std::int64_t weighted_without_replacement(WeightTree& tree, std::int64_t k, const Key& key, std::int64_t* out);

// out: int64[k], each index drawn from all weights. tree.total() > 0 if k > 0. Runs on the pool.
void with_replacement(const WeightTree& tree, std::int64_t k, const Key& key, std::int64_t* out);

}  // namespace fedcore
