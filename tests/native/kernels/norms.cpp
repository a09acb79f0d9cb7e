#include "kernels/norms.h"

#include <cmath>

#include "base/blocks.h"
#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

double norm_of(const Array<float>& row) {
    const float* data = row.data();
    std::vector<double> scratch(static_cast<std::size_t>(block_count(row.size())));
    double square;
    squared_norms(&data, 1, row.size(), scratch.data(), &square);
    return square;
}

}  // namespace

TEST(norms_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        for (const std::int64_t k : {0, 1, 5}) {
            Arrays make(first);
            const auto rows = make.rows<float>(k, n);
            Array<double> scratch = make.empty<double>(k * block_count(n)), norms = make.empty<double>(k);
            squared_norms(pointers(rows).data(), k, n, scratch.data(), norms.data());
            for (std::int64_t i = 0; i < k; ++i) {
                double square = 0;
                for (std::int64_t j = 0; j < n; ++j) square += static_cast<double>(rows[i][j]) * rows[i][j];
                CHECK(close(norms[i], square));
            }
        }
    });
}

TEST(a_norm_is_finite_exactly_if_its_row_is) {
    for (const std::int64_t n : kSizes)
        for (const std::int64_t where : {std::int64_t{0}, n / 2, n - 1}) {
            if (where < 0 || where >= n) continue;
            Arrays make(static_cast<std::size_t>(where));
            Array<float> row = make.numbers<float>(n);
            for (const float bad : {INFINITY, -INFINITY, NAN}) {
                row[where] = bad;
                CHECK(!std::isfinite(norm_of(row)));
            }
            row[where] = 3e38f;
            CHECK(std::isfinite(norm_of(row)));
        }
}
