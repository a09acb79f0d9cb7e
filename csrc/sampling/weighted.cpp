#include "sampling/weighted.h"

#include <algorithm>
#include <limits>

#include "base/blocks.h"
#include "sampling/streams.h"

namespace fedcore {
namespace {

constexpr std::int64_t kFan = 32;  // children a node; a leaf's removed weights are one 32-bit word
static_assert(kBlock % kFan == 0, "a block of weights is a whole number of leaves");

// sums[i] = the sum of s[32 i .. 32 i + 31], on 8 lanes folded in a fixed tree. Returns whether no number is
// negative; a NaN may pass here, but makes its sum NaN. One loop for both: the weights come from memory once.
bool sum_by_32(const double* s, std::int64_t nodes, double* sums) {
    double least[8] = {};
    for (std::int64_t node = 0; node < nodes; ++node, s += kFan) {
        double lane[8];
        for (int j = 0; j < 8; ++j) {
            const double a = s[j], b = s[8 + j], c = s[16 + j], d = s[24 + j];
            lane[j] = ((a + b) + c) + d;
            const double ab = a < b ? a : b, cd = c < d ? c : d, low = ab < cd ? ab : cd;
            least[j] = least[j] < low ? least[j] : low;
        }
        const double l0 = lane[0] + lane[4], l1 = lane[1] + lane[5], l2 = lane[2] + lane[6], l3 = lane[3] + lane[7];
        sums[node] = (l0 + l2) + (l1 + l3);
    }
    return std::all_of(least, least + 8, [](double low) { return !(low < 0); });
}

// Child j with probability s[j] / total, where total is the sum of the 32 to within rounding, and > 0.
int choose(const double* s, double total, std::uint64_t word) {
    const double x = unit(word) * total;
    double sum = 0;
    for (int j = 0; j < kFan; ++j) {
        sum += s[j];
        if (x < sum) return j;
    }
    // The running sum fell short of the total by rounding; the last child with a weight gets the gap. No child has a
    // weight only if the caller's weights have changed since they were summed.
    int last = kFan - 1;
    while (last > 0 && !(s[last] > 0)) --last;
    return last;
}

std::int64_t nodes_above(std::int64_t count) {
    return (count + kFan - 1) / kFan;
}

}  // namespace

WeightTree::WeightTree(const double* weights, std::int64_t n) : weights_(weights), n_(n) {
    // Every level but the root is padded by zeros to whole nodes.
    std::int64_t count = nodes_above(n);
    levels_.emplace_back(count == 1 ? 1 : nodes_above(count) * kFan);
    std::vector<char> block_valid(block_count(n));
    for_blocks(n, 8 * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        const std::int64_t node = begin / kFan, whole = (end - begin) / kFan;
        bool valid = sum_by_32(weights + begin, whole, &levels_[0][node]);
        if (begin + whole * kFan < end) {
            double copy[kFan];
            valid &= sum_by_32(leaf(node + whole, copy), 1, &levels_[0][node + whole]);
        }
        block_valid[block] = valid;
    });
    while (count > 1) {
        count = nodes_above(count);
        const std::vector<double>& below = levels_.back();
        std::vector<double> sums(count == 1 ? 1 : nodes_above(count) * kFan);
        sum_by_32(below.data(), count, sums.data());
        levels_.push_back(std::move(sums));
    }
    const bool finite = total() <= std::numeric_limits<double>::max();  // false for a NaN
    valid_ = finite && std::all_of(block_valid.begin(), block_valid.end(), [](char v) { return v != 0; });
}

// The current 32 weights of a leaf: in place, or in `copy` if some are missing or removed.
const double* WeightTree::leaf(std::int64_t node, double* copy) const {
    const std::int64_t begin = node * kFan;
    const std::uint32_t removed = removed_.empty() ? 0 : removed_[node];
    if (removed == 0 && begin + kFan <= n_) return weights_ + begin;
    for (std::int64_t j = 0; j < kFan; ++j)
        copy[j] = begin + j >= n_ || (removed >> j & 1) != 0 ? 0.0 : weights_[begin + j];
    return copy;
}

std::int64_t WeightTree::draw(Words& words) const {
    std::int64_t node = 0;
    for (std::int64_t level = depth() - 1; level > 0; --level)
        node = node * kFan + choose(&levels_[level - 1][node * kFan], levels_[level][node], words.next());
    double copy[kFan];
    return node * kFan + choose(leaf(node, copy), levels_[0][node], words.next());
}

void WeightTree::remove(std::int64_t i) {
    if (removed_.empty()) removed_.resize(nodes_above(n_));
    std::int64_t node = i / kFan;
    removed_[node] |= std::uint32_t{1} << (i % kFan);
    double copy[kFan];
    sum_by_32(leaf(node, copy), 1, &levels_[0][node]);
    for (std::int64_t level = 1; level < depth(); ++level) {
        node /= kFan;
        sum_by_32(&levels_[level - 1][node * kFan], 1, &levels_[level][node]);
    }
}

std::int64_t weighted_without_replacement(WeightTree& tree, std::int64_t k, const Key& key, std::int64_t* out) {
    Words words(stream(key, Use::weighted_without_replacement));
    std::int64_t drawn = 0;
    for (; drawn < k && tree.total() > 0; ++drawn) {
        out[drawn] = tree.draw(words);
        tree.remove(out[drawn]);
    }
    return drawn;
}

void with_replacement(const WeightTree& tree, std::int64_t k, const Key& key, std::int64_t* out) {
    const std::int64_t bytes = k * tree.depth() * kFan * 8;  // a draw reads a node a level
    for_blocks(k, bytes, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        Words words(stream(key, Use::with_replacement), static_cast<std::uint64_t>(begin * tree.depth()));
        for (std::int64_t j = begin; j < end; ++j) out[j] = tree.draw(words);
    });
}

}  // namespace fedcore
