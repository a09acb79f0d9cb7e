#include "sampling/permutation.h"

#include <algorithm>
#include <vector>

#include "base/blocks.h"
#include "sampling/streams.h"

namespace fedcore {
namespace {

struct Shape {
    std::uint64_t rows, columns;
    int rounds;
};

Shape shape_for(std::uint64_t population) {
    std::uint64_t root = 0;  // the largest whose square is <= population
    for (std::uint64_t bit = std::uint64_t{1} << 31; bit != 0; bit >>= 1)
        if ((root | bit) * (root | bit) <= population) root |= bit;
    // An even number of rows: adding an odd constant to l is then an odd permutation, and both parities come.
    const std::uint64_t least = root * root == population ? root : root + 1;
    const std::uint64_t rows = least + least % 2;
    // Small squares mix slowly: by enumeration a pair of rounds leaves 0.6 of the distance from uniform at 4 x 2.
    return {rows, (population + rows - 1) / rows, population <= 4096 ? 64 : 12};
}

// The function of one round at one place: the word of that index, scaled. The modulus is below 2^32, so that a
// value's probability is even to 2^-32.
std::uint64_t round_value(const Key& key, int round, std::uint64_t half, std::uint64_t modulus) {
    std::uint64_t words[kWordsPerBlock];
    random_words(stream(key, Use::permutation, static_cast<std::uint64_t>(round)), half / kWordsPerBlock, 1, words);
    return scaled(words[half % kWordsPerBlock], modulus);
}

// All rounds' functions, tabulated.
class Tables {
  public:
    Tables(const Key& key, const Shape& shape) : width_(shape.rows + kWordsPerBlock) {
        values_.resize(shape.rounds * width_);
        for (int round = 0; round < shape.rounds; ++round) {
            const std::uint64_t inputs = round % 2 == 0 ? shape.columns : shape.rows;
            const std::uint64_t modulus = round % 2 == 0 ? shape.rows : shape.columns;
            std::uint64_t* row = &values_[round * width_];
            const auto blocks = static_cast<std::int64_t>((inputs + kWordsPerBlock - 1) / kWordsPerBlock);
            random_words(stream(key, Use::permutation, static_cast<std::uint64_t>(round)), 0, blocks, row);
            for (std::uint64_t half = 0; half < inputs; ++half) row[half] = scaled(row[half], modulus);
        }
    }
    std::uint64_t operator()(int round, std::uint64_t half, std::uint64_t) const {
        return values_[round * width_ + half];
    }

  private:
    std::uint64_t width_;  // columns <= rows; room for a last block that is not full
    std::vector<std::uint64_t> values_;
};

template <class Function>
std::uint64_t place(std::uint64_t x, std::uint64_t population, const Shape& shape, const Function& function) {
    std::uint64_t l = x / shape.columns, r = x % shape.columns;
    do {
        for (int round = 0; round < shape.rounds; round += 2) {
            l += function(round, r, shape.rows);
            l -= l >= shape.rows ? shape.rows : 0;
            r += function(round + 1, l, shape.columns);
            r -= r >= shape.columns ? shape.columns : 0;
        }
        x = l * shape.columns + r;
    } while (x >= population);
    return x;
}

}  // namespace

void permutation(std::int64_t population, std::int64_t start, std::int64_t count, const Key& key, std::int64_t* out) {
    const auto n = static_cast<std::uint64_t>(population);
    const Shape shape = shape_for(n);
    const auto fill = [&](const auto& function) {
        for_blocks(count, count * 8 * shape.rounds, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
            for (std::int64_t j = begin; j < end; ++j)
                out[j] = static_cast<std::int64_t>(place(static_cast<std::uint64_t>(start + j), n, shape, function));
        });
    };
    // A word of the table takes a sixteenth of the time of a single word, but the table must not be much larger than
    // the result.
    if (static_cast<std::uint64_t>(count) >= shape.rows) {
        fill(Tables(key, shape));
    } else {
        fill([&](int round, std::uint64_t half, std::uint64_t modulus) {
            return round_value(key, round, half, modulus);
        });
    }
}

}  // namespace fedcore
