#include "kernels/robust.h"

#include <algorithm>

#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

// k updates of n elements in two tensors, and h of each. Every other one is a difference.
struct Cohort {
    std::int64_t k, n, starts[3];
    Array<float> base;
    std::vector<Array<float>> ys;
    std::vector<ClientUpdate> sent;
    std::vector<std::vector<float>> h;

    Cohort(std::int64_t clients, std::int64_t length, Arrays make)
        : k(clients),
          n(length),
          starts{0, length / 3, length},
          base(make.numbers<float>(length)),
          ys(make.rows<float>(clients, length)) {
        for (std::int64_t s = 0; s < 2; ++s)
            for (std::int64_t i = 0; i < k; ++i)
                sent.push_back({ys[i].data() + starts[s], Dtype::float32,
                                i % 2 == 0 ? base.data() + starts[s] : nullptr, scale_of(i), 1.0});
        for (std::int64_t i = 0; i < k; ++i) {
            h.emplace_back();
            for (std::int64_t j = 0; j < n; ++j)
                h[i].push_back(((i % 2 == 0 ? base[j] - ys[i][j] : -ys[i][j])) * scale_of(i));
        }
    }
    static float scale_of(std::int64_t i) { return 0.5f + 0.3f * static_cast<float>(i % 7); }
    Updates updates() const { return {sent.data(), starts, 2, k}; }
};

double product(const std::vector<float>& a, const std::vector<float>& b) {
    double total = 0;
    for (std::size_t begin = 0; begin < a.size(); begin += kBlock) {
        double lanes[8] = {};
        for (std::size_t j = begin; j < std::min<std::size_t>(begin + kBlock, a.size()); ++j)
            lanes[j % 8] += static_cast<double>(a[j]) * static_cast<double>(b[j]);
        for (int width = 4; width > 0; width /= 2)
            for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
        total += lanes[0];
    }
    return total;
}

void try_gram(const Cohort& cohort) {
    const std::int64_t k = cohort.k;
    std::vector<double> shares(block_count(cohort.n) * k * (k + 1) / 2), products(k * k);
    gram(cohort.updates(), cohort.n, shares.data(), products.data());
    for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t j = 0; j < k; ++j)
            CHECK(products[i * k + j] == product(cohort.h[std::min(i, j)], cohort.h[std::max(i, j)]));
}

void try_statistic(const Cohort& cohort, const Statistic& of, Arrays& make) {
    Array<float> out = make.empty<float>(cohort.n);
    column_statistic(cohort.updates(), nullptr, cohort.k, of, cohort.n, out.data());
    for (std::int64_t j = 0; j < cohort.n; ++j) {
        std::vector<double> column;
        for (const std::vector<float>& h : cohort.h) column.push_back(h[j]);
        std::sort(column.begin(), column.end());
        std::int64_t low = of.first, high = of.first, count = of.last - of.first;
        if (of.nearest > 0) {  // the lower and the higher of two equally near choices
            const double twice = column[(cohort.k - 1) / 2] + column[cohort.k / 2];
            low = high = 0, count = of.nearest;
            while (low + count < cohort.k && column[low] + column[low + count] < twice) ++low;
            while (high + count < cohort.k && column[high] + column[high + count] <= twice) ++high;
        }
        double sum = 0;
        for (std::int64_t i = low; i < high + count; ++i)
            sum += 0.5 * column[i] * ((i < low + count ? 1 : 0) + (i >= high ? 1 : 0));
        CHECK(out[j] == static_cast<float>(sum / static_cast<double>(count)));
    }
}

}  // namespace

TEST(inner_products_and_statistics_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        const auto k = static_cast<std::int64_t>(1 + first * 5 % (n < 600 ? 71 : 8));
        const Cohort cohort(k, n, Arrays(first));
        Arrays make(first + k);
        try_gram(cohort);
        try_statistic(cohort, {(k - 1) / 2, k / 2 + 1, 0}, make);
        if (n >= 20000) return;
        try_statistic(cohort, {k / 4, k - k / 4, 0}, make);
        try_statistic(cohort, {0, k, (k + 1) / 2}, make);
    });
}
