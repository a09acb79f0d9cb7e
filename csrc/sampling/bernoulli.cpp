#include "sampling/bernoulli.h"

#include <algorithm>

#include "base/blocks.h"
#include "sampling/streams.h"

namespace fedcore {
namespace {

constexpr std::int64_t kBits = 64;
constexpr std::int64_t kTile = 512;  // words at a time: 4 KiB, which stay in L1
static_assert(kBlock % kTile == 0 && kTile % kBits == 0 && kBits % kWordsPerBlock == 0, "tiles are whole words");

}  // namespace

BitSet::BitSet(std::int64_t n) : n_(n), bits_(n / kBits + (n % kBits != 0)), first_(block_count(n) + 1) {}

void BitSet::list(std::int64_t* out) const {
    for_blocks(n_, 8 * size(), [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        std::int64_t* next = out + first_[block];
        for (std::int64_t i = begin; i < end; i += kBits)
            for (std::uint64_t left = bits_[i / kBits]; left != 0; left &= left - 1)
                *next++ = i + __builtin_ctzll(left);
    });
}

bool bernoulli(const double* p, bool each, const Key& key, BitSet& set) {
    const Stream words = stream(key, Use::bernoulli);
    std::vector<char> valid(block_count(set.n_));
    for_blocks(set.n_, 8 * set.n_, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        std::uint64_t word[kTile];
        std::int64_t count = 0;
        bool in_range = true;
        for (std::int64_t tile = begin; tile < end; tile += kTile) {
            const std::int64_t tile_end = std::min(tile + kTile, end);
            const std::int64_t blocks = (tile_end - tile + kWordsPerBlock - 1) / kWordsPerBlock;
            random_words(words, static_cast<std::uint64_t>(tile / kWordsPerBlock), blocks, word);
            for (std::int64_t i = tile; i < tile_end; i += kBits) {
                std::uint64_t bits = 0;
                for (std::int64_t j = i; j < std::min(i + kBits, tile_end); ++j) {
                    const double chance = each ? p[j] : *p;
                    in_range &= chance >= 0 && chance <= 1;
                    bits |= static_cast<std::uint64_t>(unit(word[j - tile]) < chance) << (j - i);
                }
                set.bits_[i / kBits] = bits;
                count += __builtin_popcountll(bits);
            }
        }
        set.first_[block + 1] = count;
        valid[block] = in_range;
    });
    for (std::size_t block = 1; block < set.first_.size(); ++block) set.first_[block] += set.first_[block - 1];
    return std::all_of(valid.begin(), valid.end(), [](char v) { return v != 0; });
}

}  // namespace fedcore
