#include "kernels/exact.h"

#include <cmath>

#include "base/blocks.h"
#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

constexpr std::int64_t kLow = std::int64_t{1} << 50;

// A sum by one integer an element, in units of 2^-60.
using Whole = std::vector<__int128>;

__int128 rounded(double t) {
    const double coarse = std::nearbyint(t * 0x1p10);
    const double fine = std::nearbyint((t - coarse * 0x1p-10) * 0x1p60);
    return static_cast<__int128>(coarse) * kLow + static_cast<std::int64_t>(fine);
}

struct TwoSums {
    Array<std::int64_t> high, low;
    TwoSums(Arrays& make, std::int64_t n) : high(make.empty<std::int64_t>(n)), low(make.empty<std::int64_t>(n)) {}
    ExactSum words() { return {high.data(), low.data()}; }
    ConstExactSum read() const { return {high.data(), low.data()}; }
};

// Whether the words are those of the integers, in their one form.
bool are(const TwoSums& sums, const Whole& due) {
    for (std::size_t j = 0; j < due.size(); ++j) {
        const auto at = static_cast<std::int64_t>(j);
        if (sums.low[at] < 0 || sums.low[at] >= kLow) return false;
        if (static_cast<__int128>(sums.high[at]) * kLow + sums.low[at] != due[j]) return false;
    }
    return true;
}

// Low words without a pattern; the product goes round, as unsigned numbers may.
std::int64_t some_low(std::int64_t j) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(j) * 0x9e3779b97f4a7c) & (kLow - 1);
}

std::vector<Piece> cut(std::int64_t n) {
    std::vector<Piece> pieces;
    for (std::int64_t begin = 0; begin < n; begin += kBlock) pieces.push_back({0, begin, std::min(begin + kBlock, n)});
    return pieces;
}

void try_accumulate(const char* kinds, bool in_place, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const auto x = make.numbers<float>(n);
    std::vector<Array<float>> ys;
    std::vector<ClientUpdate> sent;
    for (const char* kind = kinds; *kind != '\0'; ++kind) {
        ys.push_back(make.numbers<float>(n));
        sent.push_back({ys.back().data(), Dtype::float32, *kind == 'x' ? x.data() : nullptr,
                        0.5f + static_cast<float>(ys.size()), 3.25 - static_cast<double>(ys.size())});
    }
    const auto k = static_cast<std::int64_t>(sent.size());
    TwoSums acc(make, n), other(make, n);
    Whole due(static_cast<std::size_t>(n));
    for (std::int64_t j = 0; j < n; ++j) {
        acc.high[j] = j % 2 == 0 ? j : -j;
        acc.low[j] = some_low(j);
        __int128 sum = static_cast<__int128>(acc.high[j]) * kLow + acc.low[j];
        for (std::int64_t i = 0; i < k; ++i) {
            const float h = (sent[i].base != nullptr ? x[j] - ys[i][j] : -ys[i][j]) * sent[i].scale;
            sum += rounded(sent[i].weight * static_cast<double>(h));
        }
        due[static_cast<std::size_t>(j)] = sum;
    }
    TwoSums& out = in_place ? acc : other;
    const std::vector<Piece> pieces = cut(n);
    const auto count = static_cast<std::int64_t>(pieces.size());
    Array<double> scratch = make.empty<double>(count * k), norms = make.empty<double>(k);
    const ExactFold fold{acc.read(), out.words(), sent.data()};
    accumulate(&fold, k, pieces.data(), count, scratch.data(), norms.data());
    CHECK(are(out, due));
}

}  // namespace

TEST(exact_folds_of_every_size_and_place) {
    at_edges_and_past_caches([](std::int64_t n, std::size_t first) {
        for (const char* kinds : {"", "x", "d", "xxxxx", "xxddxxxxxxxxx"})
            for (const bool in_place : {false, true}) try_accumulate(kinds, in_place, n, first);
    });
}

TEST(exact_exchanges_of_every_size_and_place) {
    at_edges_and_past_caches([](std::int64_t n, std::size_t first) {
        Arrays make(first);
        const auto x = make.numbers<float>(n), anchor = make.numbers<float>(n);
        const auto ys = make.rows<float>(5, n), old = make.rows<float>(5, n);
        auto made = make.rows<float>(5, n);
        for (const bool replaces : {true, false}) {
            const Forms forms = replaces ? Forms{{1, 0, 0}, {1, -1, 0, 1}, false}
                                         : Forms{{0.5f, 0.25f, -2}, {0.75, -0.5, 0.25, 1.5}, false};
            std::vector<ClientUpdate> sent;
            std::vector<RowExchange> rows;
            for (std::size_t i = 0; i < 5; ++i) {
                sent.push_back({ys[i].data(), Dtype::float32, x.data(), 1.5f, 2.0 - static_cast<double>(i)});
                RowExchange row{};
                row.old_row = {Codec::f32, i == 0 ? nullptr : const_cast<float*>(old[i].data()), nullptr};
                row.anchor = i > 2 ? anchor.data() : nullptr;
                row.new_row = {Codec::f32, made[i].data(), nullptr};
                rows.push_back(row);
            }
            TwoSums acc(make, n), out(make, n);
            Whole due(static_cast<std::size_t>(n));
            for (std::int64_t j = 0; j < n; ++j) {
                acc.high[j] = acc.low[j] = 0;
                for (std::size_t i = 0; i < 5; ++i) {
                    const float h = (x[j] - ys[i][j]) * 1.5f, r = i == 0 ? 0 : old[i][j], q = i > 2 ? anchor[j] : 0;
                    float row = forms.row.h * h;
                    if (!replaces) row = row + forms.row.r * r + forms.row.q * q;
                    const double w = sent[i].weight;
                    __int128& sum = due[static_cast<std::size_t>(j)];
                    sum += rounded(w * forms.adds.row * static_cast<double>(row));
                    sum += rounded(w * forms.adds.r * static_cast<double>(r));
                    sum += rounded(w * forms.adds.h * static_cast<double>(h));
                    sum += rounded(w * forms.adds.q * static_cast<double>(q));
                }
            }
            Array<double> scratch = make.empty<double>(block_count(n) * 5), norms = make.empty<double>(5);
            exchange(acc.read(), out.words(), sent.data(), rows.data(), forms, 5, n, scratch.data(), norms.data());
            CHECK(are(out, due));
        }
    });
}

TEST(exact_combinations_and_readings) {
    at_edges([](std::int64_t n, std::size_t first) {
        Arrays make(first);
        TwoSums a(make, n), b(make, n), out(make, n);
        const auto v = make.numbers<float>(n);
        for (std::int64_t j = 0; j < n; ++j) {
            a.high[j] = j * j - n;
            b.high[j] = -j;
            a.low[j] = b.low[j] = some_low(j);
        }
        for (const std::int64_t times : {std::int64_t{3}, std::int64_t{5000}}) {
            const ExactTerm terms[] = {
                {a.read(), nullptr, -1}, {b.read(), nullptr, times}, {{nullptr, nullptr}, v.data(), -times}};
            Whole due;
            for (std::int64_t j = 0; j < n; ++j)
                due.push_back(-(static_cast<__int128>(a.high[j]) * kLow + a.low[j]) +
                              times * (static_cast<__int128>(b.high[j]) * kLow + b.low[j]) -
                              times * rounded(static_cast<double>(v[j])));
            CHECK(combine_exact(terms, 3, out.words(), n) == (times < 4096 || n == 0));
            CHECK(are(out, due));
        }
        Array<double> values = make.empty<double>(n);
        read_exact(out.read(), values.data(), n);
        for (std::int64_t j = 0; j < n; ++j)
            CHECK(values[j] == static_cast<double>(out.high[j]) * 0x1p-10 + static_cast<double>(out.low[j]) * 0x1p-60);
    });
}
