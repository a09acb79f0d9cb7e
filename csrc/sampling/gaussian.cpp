#include "sampling/gaussian.h"

#include <numeric>
#include <vector>

#include "base/blocks.h"
#include "base/chacha.h"

namespace fedcore {
namespace {

constexpr int kIntervals = 512, kColumnBits = 9, kKeptBits = 42;
constexpr std::int64_t kColumn = std::int64_t{1} << 53;  // the mass of a column of the alias table

// A stream of 64-bit words for one block of elements.
class Keystream {
  public:
    Keystream(const std::uint32_t* key, std::int64_t block)
        : key_(key), nonce_{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), 0} {}
    std::uint64_t next() {
        if (at_ == kHeld) {
            chacha20(key_, counter_, nonce_, kHeld / kChachaWords, held_);
            counter_ += kHeld / 16;
            at_ = 0;
        }
        const std::uint64_t word = held_[at_] | static_cast<std::uint64_t>(held_[at_ + 1]) << 32;
        at_ += 2;
        return word;
    }

  private:
    static constexpr int kHeld = 4 * kChachaWords;
    const std::uint32_t* key_;
    std::uint32_t nonce_[3], counter_ = 0, held_[kHeld];
    int at_ = kHeld;
};

// exp(-x), x in [0, 1], to within 2^-51, by basic IEEE operations: the same bits on every platform.
double exp_of_minus(double x) {
    double sum = 1.0;
    for (int i = 18; i > 0; --i) sum = 1.0 - sum * x / i;
    return sum;
}

class DiscreteGaussian {
  public:
    explicit DiscreteGaussian(std::int64_t sigma) : scale_(0.5 / static_cast<double>(sigma * sigma)) {
        while (std::int64_t{32} << bits_ <= sigma) ++bits_;
        double weight[kIntervals], total = 0;
        for (int j = 0; j < kIntervals; ++j) {
            const auto start = static_cast<double>(std::int64_t{j} << bits_);
            const double x = start * start * scale_;
            weight[j] = x < 64 ? exp_of_minus(x * 0x1p-10) : 0.0;  // exp(-64) has no mass in units of 2^-62
            for (int i = 0; i < 10; ++i) weight[j] *= weight[j];
            total += weight[j];
        }
        std::int64_t mass[kIntervals];
        for (int j = 0; j < kIntervals; ++j) mass[j] = static_cast<std::int64_t>(weight[j] / total * 0x1p62 + 0.5);
        mass[0] += kIntervals * kColumn - std::accumulate(mass, mass + kIntervals, std::int64_t{0});
        std::vector<int> small, large;  // columns with less, and with at least, their mass
        for (int j = 0; j < kIntervals; ++j) (mass[j] < kColumn ? small : large).push_back(j);
        while (!small.empty()) {
            const int low = small.back(), high = large.back();
            small.pop_back();
            kept_[low] = mass[low];
            other_[low] = high;
            mass[high] -= kColumn - mass[low];
            if (mass[high] < kColumn) {
                large.pop_back();
                small.push_back(high);
            }
        }
        for (const int j : large) {
            kept_[j] = kColumn;
            other_[j] = j;
        }
    }

    std::int64_t draw(Keystream& words) const {
        for (;;) {
            const std::uint64_t first = words.next(), second = words.next();
            const auto column = static_cast<std::int64_t>(first % kIntervals);
            const bool stays = static_cast<std::int64_t>(first >> 11) < kept_[column];
            const std::int64_t start = (stays ? column : other_[column]) << bits_;
            const auto within = static_cast<std::int64_t>(second & ((std::uint64_t{1} << bits_) - 1));
            const bool negative = (first >> kColumnBits & 1) != 0;
            if (negative && start + within == 0) continue;
            const double x = static_cast<double>(within * (2 * start + within)) * scale_;
            const double u = static_cast<double>(second >> (64 - kKeptBits)) * 0x1p-42;
            if (u < 1.0 - x || u < exp_of_minus(x)) return negative ? -(start + within) : start + within;
        }
    }

  private:
    double scale_;
    int bits_ = 0;
    std::int64_t kept_[kIntervals], other_[kIntervals];
};

}  // namespace

void add_discrete_gaussian(const double* sum, std::int64_t n, double grid, std::int64_t sigma, const std::uint32_t* key,
                           double* out) {
    const DiscreteGaussian noise(sigma);
    for_blocks(n, 16 * n * 16, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        Keystream words(key, block);
        for (std::int64_t j = begin; j < end; ++j)
            out[j] = (__builtin_nearbyint(sum[j] / grid) + static_cast<double>(noise.draw(words))) * grid;
    });
}

}  // namespace fedcore
