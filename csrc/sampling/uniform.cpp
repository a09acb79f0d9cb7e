#include "sampling/uniform.h"

#include <numeric>
#include <utility>
#include <vector>

#include "sampling/streams.h"

namespace fedcore {
namespace {

// The identity on [0, population) with single overwritten entries: an open-addressed hash table, never more than half
// full.
class Sparse {
  public:
    explicit Sparse(std::int64_t entries) {
        while ((std::int64_t{1} << (64 - shift_)) < 2 * entries) --shift_;
        slots_.resize(std::size_t{1} << (64 - shift_));
    }

    // The entry at `index`; overwrites it by `value`.
    std::int64_t exchange(std::int64_t index, std::int64_t value) {
        Slot& slot = find(index);
        if (slot.index_plus_1 == 0) slot = {index + 1, index};
        return std::exchange(slot.value, value);
    }

    std::int64_t read(std::int64_t index) {
        const Slot& slot = find(index);
        return slot.index_plus_1 == 0 ? index : slot.value;
    }

  private:
    struct Slot {
        std::int64_t index_plus_1 = 0;  // 0 is an empty slot
        std::int64_t value = 0;
    };

    Slot& find(std::int64_t index) {
        // Fibonacci hashing: the upper bits of a multiple of 2^64 / golden ratio.
        std::size_t at = (static_cast<std::uint64_t>(index) * 0x9E3779B97F4A7C15u) >> shift_;
        while (slots_[at].index_plus_1 != 0 && slots_[at].index_plus_1 != index + 1)
            at = (at + 1) & (slots_.size() - 1);
        return slots_[at];
    }

    int shift_ = 60;
    std::vector<Slot> slots_;
};

}  // namespace

void without_replacement(std::int64_t population, std::int64_t k, const Key& key, std::int64_t* out) {
    Words words(stream(key, Use::without_replacement));
    const auto drawn = [&](std::int64_t j) {
        return j + static_cast<std::int64_t>(below(words, static_cast<std::uint64_t>(population - j)));
    };
    // Draw j takes the entry at a uniform place of [j, population) and writes the entry at j there. The entry at j is
    // not read again.
    if (population / 4 <= k) {  // an array needs as little memory as the table, and no hashing
        std::vector<std::int64_t> entries(population);
        std::iota(entries.begin(), entries.end(), std::int64_t{0});
        for (std::int64_t j = 0; j < k; ++j) out[j] = std::exchange(entries[drawn(j)], entries[j]);
    } else {
        Sparse entries(k);
        for (std::int64_t j = 0; j < k; ++j) out[j] = entries.exchange(drawn(j), entries.read(j));
    }
}

}  // namespace fedcore
