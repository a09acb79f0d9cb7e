#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/blocks.h"
#include "base/chacha.h"
#include "check.h"
#include "memory.h"
#include "sampling/bernoulli.h"
#include "sampling/gaussian.h"
#include "sampling/permutation.h"
#include "sampling/uniform.h"
#include "sampling/weighted.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

using Drawn = Array<std::int64_t>;
constexpr std::int64_t kLongest = INT64_MAX;
constexpr Key kKey{1, 2, 3, 4};
const std::vector<std::int64_t> kCounts{1, 2, 3, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 16383, 16384, 16385, 40'000};

bool all_different(const Drawn& drawn, std::int64_t population) {
    std::vector<std::int64_t> sorted(drawn.data(), drawn.data() + drawn.size());
    std::sort(sorted.begin(), sorted.end());
    const bool inside = sorted.empty() || (sorted.front() >= 0 && sorted.back() < population);
    return inside && std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

// draw() on one thread and on several gives the same.
template <class Draw>
void on_every_thread_count(const Draw& draw) {
    set_threads(1);
    const Drawn due = draw();
    for (const int count : {2, 3, 7}) {
        set_threads(count);
        const Drawn drawn = draw();
        CHECK(std::equal(due.data(), due.data() + due.size(), drawn.data(), drawn.data() + drawn.size()));
    }
}

Array<double> uneven_weights(std::int64_t n) {
    Array<double> weights(n, Place{Place::before_guard, 0});
    for (std::int64_t i = 0; i < n; ++i) weights[i] = i % 5 == 3 ? 0.0 : static_cast<double>(1 + i % 7);
    return weights;
}

std::int64_t positive(const Array<double>& weights) {
    return std::count_if(weights.data(), weights.data() + weights.size(), [](double w) { return w > 0; });
}

}  // namespace

TEST(words_of_every_count) {
    for (const std::int64_t blocks : {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33}) {
        const Stream stream{kKey, {5, 6, 7}};
        Array<std::uint64_t> words(blocks * kWordsPerBlock, Place{Place::before_guard, 0});
        random_words(stream, UINT64_MAX - 3, blocks, words.data());  // the counter passes 2^64
        for (std::int64_t b = 0; b < blocks; ++b) {
            std::uint64_t one[kWordsPerBlock];
            random_words(stream, UINT64_MAX - 3 + static_cast<std::uint64_t>(b), 1, one);
            CHECK(std::equal(one, one + kWordsPerBlock, &words[b * kWordsPerBlock]));
        }
    }
}

TEST(uniform_draws_at_the_edges) {
    for (const std::int64_t population :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{1000}, std::int64_t{1} << 40, kLongest})
        for (const std::int64_t k : {std::int64_t{0}, std::int64_t{1}, std::int64_t{249}, std::int64_t{250},
                                     std::int64_t{251}, std::int64_t{1000}}) {
            if (k > population) continue;
            Drawn out(k, Place{Place::before_guard, 0});
            without_replacement(population, k, kKey, out.data());
            CHECK(all_different(out, population));
        }
}

TEST(weighted_draws_at_the_edges) {
    for (const std::int64_t n : kCounts) {
        const Array<double> weights = uneven_weights(n);
        for (const std::int64_t k : {std::int64_t{0}, std::int64_t{1}, n}) {
            WeightTree tree(weights.data(), n);
            CHECK(tree.valid());
            Drawn out(k, Place{Place::before_guard, 0});
            const std::int64_t drawn = weighted_without_replacement(tree, k, kKey, out.data());
            CHECK(drawn == std::min(k, positive(weights)));
            Drawn taken(drawn, Place{Place::heap, 0});
            std::copy_n(out.data(), drawn, taken.data());
            CHECK(all_different(taken, n));
            for (const std::int64_t i : taken) CHECK(weights[i] > 0);
        }
    }
}

TEST(weights_that_are_none) {
    for (const double bad : {-1.0, -0x1p-1074, __builtin_nan(""), __builtin_inf()})
        for (const std::int64_t n : kCounts)
            for (const std::int64_t where : {std::int64_t{0}, n / 2, n - 1}) {
                Array<double> weights = uneven_weights(n);
                weights[where] = bad;
                CHECK(!WeightTree(weights.data(), n).valid());
            }
    const std::vector<double> zeros(1000);
    WeightTree tree(zeros.data(), 1000);
    CHECK(tree.valid() && !(tree.total() > 0));
    CHECK(weighted_without_replacement(tree, 10, kKey, nullptr) == 0);
}

TEST(draws_with_replacement_at_the_edges) {
    for (const std::int64_t n : kCounts) {
        const Array<double> weights = uneven_weights(n);
        const WeightTree tree(weights.data(), n);
        for (const std::int64_t k : {0, 1, 3000}) {
            Drawn out(k, Place{Place::before_guard, 0});
            with_replacement(tree, k, kKey, out.data());
            for (const std::int64_t i : out) CHECK(i >= 0 && i < n && weights[i] > 0);
        }
    }
    const Array<double> weights = uneven_weights(1'000'000);
    on_every_thread_count([&] {
        const WeightTree tree(weights.data(), weights.size());
        Drawn out(50'000, Place{Place::before_guard, 0});
        with_replacement(tree, out.size(), kKey, out.data());
        return out;
    });
}

TEST(weights_that_change_under_the_tree) {
    // A caller's mistake, from another thread: draws mean nothing then, but are no other memory's.
    for (const std::int64_t n : kCounts)
        for (const double later : {0.0, -1.0, __builtin_nan("")}) {
            Array<double> weights = uneven_weights(n);
            WeightTree tree(weights.data(), n);
            std::fill(weights.begin(), weights.end(), later);
            Drawn out(1000, Place{Place::before_guard, 0});
            with_replacement(tree, out.size(), kKey, out.data());
            for (const std::int64_t i : out) CHECK(i >= 0 && i < n);
            const std::int64_t drawn = weighted_without_replacement(tree, out.size(), kKey, out.data());
            for (std::int64_t j = 0; j < drawn; ++j) CHECK(out[j] >= 0 && out[j] < n);
        }
}

TEST(sets_at_the_edges) {
    for (const std::int64_t n : kCounts)
        for (const double chance : {0.0, 0.5, 1.0})
            for (const bool each : {false, true}) {
                Array<double> chances(each ? n : 1, Place{Place::before_guard, 0});
                std::fill(chances.begin(), chances.end(), chance);
                BitSet set(n);
                CHECK(bernoulli(chances.data(), each, kKey, set));
                Drawn out(set.size(), Place{Place::before_guard, 0});
                set.list(out.data());
                CHECK(all_different(out, n) && std::is_sorted(out.begin(), out.end()));
                if (chance != 0.5) CHECK(out.size() == (chance == 0 ? 0 : n));
                chances[chances.size() - 1] = 1.5;
                CHECK(!bernoulli(chances.data(), each, kKey, set));
            }
    BitSet nobody(0);
    const double half = 0.5;
    CHECK(bernoulli(&half, false, kKey, nobody) && nobody.size() == 0);
    on_every_thread_count([&] {
        BitSet set(1'000'001);
        CHECK(bernoulli(&half, false, kKey, set));
        Drawn out(set.size(), Place{Place::before_guard, 0});
        set.list(out.data());
        return out;
    });
}

TEST(permutations_at_the_edges) {
    for (std::int64_t population = 1; population <= 70; ++population) {
        Drawn out(population, Place{Place::before_guard, 0});
        permutation(population, 0, population, kKey, out.data());
        CHECK(all_different(out, population));
    }
    for (const std::int64_t population :
         {std::int64_t{4095}, std::int64_t{4096}, std::int64_t{4097}, std::int64_t{1} << 40, kLongest})
        for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1000}})
            for (const std::int64_t start : {std::int64_t{0}, population - count}) {
                Drawn out(count, Place{Place::before_guard, 0});
                permutation(population, start, count, kKey, out.data());
                CHECK(all_different(out, population));
            }
    on_every_thread_count([&] {
        Drawn out(100'000, Place{Place::before_guard, 0});
        permutation(out.size(), 0, out.size(), kKey, out.data());
        CHECK(all_different(out, out.size()));
        return out;
    });
}

TEST(chacha20_of_every_count) {
    const std::uint32_t key[8] = {1, 2, 3, 4, 5, 6, 7, 8}, nonce[3] = {9, 10, 11};
    for (const std::int64_t groups : {0, 1, 2, 3, 17}) {
        Array<std::uint32_t> words(kChachaWords * groups, Place{Place::before_guard, 0});
        chacha20(key, UINT32_MAX - 3, nonce, groups, words.data());  // the counter passes 2^32
        for (std::int64_t g = 0; g < groups; ++g) {
            std::uint32_t due[kChachaWords];
            chacha20(key, UINT32_MAX - 3 + static_cast<std::uint32_t>(16 * g), nonce, 1, due);
            CHECK(std::equal(due, due + kChachaWords, words.data() + kChachaWords * g));
        }
    }
}

TEST(noise_of_every_count) {
    const std::uint32_t key[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (const std::int64_t n : kCounts)
        for (const std::int64_t sigma : {std::int64_t{1}, std::int64_t{100}, kMostSigma})
            on_every_thread_count([&] {
                Array<double> sums(n, Place{Place::before_guard, 0});
                std::fill(sums.data(), sums.data() + n, 0.0);
                add_discrete_gaussian(sums.data(), n, 0.5, sigma, key, sums.data());
                Drawn drawn(n, Place{Place::before_guard, 0});
                for (std::int64_t i = 0; i < n; ++i) drawn[i] = static_cast<std::int64_t>(2 * sums[i]);
                return drawn;
            });
}
