#include "kernels/combine.h"

#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

template <class Out>
void try_combine(std::int64_t k, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const auto narrow = make.rows<float>(k, n);
    const auto wide = make.rows<double>(k, n);
    std::vector<Term> terms;
    for (std::int64_t i = 0; i < k; ++i) {
        const bool is_wide = i % 2 == 0;
        const void* values = is_wide ? static_cast<const void*>(wide[i].data()) : narrow[i].data();
        terms.push_back({values, is_wide, 0.5 - static_cast<double>(i)});
    }
    Array<Out> out = make.empty<Out>(n);
    combine(terms.data(), k, out.data(), n);
    double square = 0;
    for (std::int64_t j = 0; j < n; ++j) {
        double sum = terms[0].coefficient * wide[0][j];
        for (std::int64_t i = 1; i < k; ++i)
            sum += terms[i].coefficient * (terms[i].wide ? wide[i][j] : static_cast<double>(narrow[i][j]));
        CHECK(out[j] == static_cast<Out>(sum));
        square += sum * sum;
    }
    std::vector<double> scratch(block_count(n));
    CHECK(close(combined_square(terms.data(), k, n, scratch.data()), square));
}

}  // namespace

TEST(combinations_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        for (const std::int64_t k : {1, 2, 5}) {
            try_combine<float>(k, n, first);
            try_combine<double>(k, n, first);
        }
    });
}

TEST(a_combination_over_its_first_term) {
    at_edges([](std::int64_t n, std::size_t first) {
        Arrays make(first);
        Array<double> total = make.numbers<double>(n);
        const auto part = make.numbers<float>(n);
        const std::vector<double> before(total.begin(), total.end());
        const Term terms[] = {{total.data(), true, 1.0}, {part.data(), false, -1.0}};
        combine(terms, 2, total.data(), n);
        for (std::int64_t j = 0; j < n; ++j) CHECK(total[j] == before[j] - static_cast<double>(part[j]));
    });
}
