#include "kernels/exchange.h"

#include "base/blocks.h"
#include "check.h"
#include "problem.h"
#include "store/checksum.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

void try_exchange(std::int64_t k, bool in_place, bool summed, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const auto x = make.numbers<float>(n);
    const auto ys = make.rows<float>(k, n), anchors = make.rows<float>(k, n);
    auto old_rows = make.rows<float>(k, n), new_rows = make.rows<float>(k, n);
    Array<double> acc = make.numbers<double>(n), out = make.empty<double>(n);
    Array<double> scratch = make.empty<double>(k * block_count(n)), norms = make.empty<double>(k);
    Array<std::uint64_t> sums = make.empty<std::uint64_t>(k * block_count(n)), due_sums(block_count(n), Place{});
    std::vector<ClientUpdate> sent;
    std::vector<RowExchange> rows;
    std::vector<double> due(acc.begin(), acc.end());
    std::vector<std::vector<float>> due_rows(static_cast<std::size_t>(k));
    for (std::int64_t i = 0; i < k; ++i) {  // every combination: a base or none; no row, a row, a row and its anchor
        sent.push_back({ys[i].data(), Dtype::float32, i % 2 == 0 ? x.data() : nullptr, 0.5f + static_cast<float>(i),
                        2.0 - static_cast<double>(i)});
        const bool has_old = i % 3 != 0, has_anchor = i % 3 == 2;
        rows.push_back({{Codec::f32, has_old ? old_rows[i].data() : nullptr, nullptr},
                        has_anchor ? anchors[i].data() : nullptr,
                        {Codec::f32, in_place && has_old ? old_rows[i].data() : new_rows[i].data(), nullptr},
                        {},
                        summed ? sums.data() + i * block_count(n) : nullptr});
        for (std::int64_t j = 0; j < n; ++j) {
            const float h = (i % 2 == 0 ? x[j] - ys[i][j] : -ys[i][j]) * sent[i].scale;
            double change = static_cast<double>(h);
            if (has_old) change -= static_cast<double>(old_rows[i][j]);
            if (has_anchor) change += static_cast<double>(anchors[i][j]);
            due[j] += sent[i].weight * change;
            due_rows[i].push_back(h);
        }
    }
    Array<double>& result = in_place ? acc : out;
    exchange(acc.data(), result.data(), sent.data(), rows.data(), Forms{{1, 0, 0}, {1, -1, 0, 1}}, k, n, scratch.data(),
             norms.data());
    CHECK(same(result, due));
    for (std::int64_t i = 0; i < k; ++i) {
        double square = 0;
        for (std::int64_t j = 0; j < n; ++j) {
            CHECK(static_cast<const float*>(rows[i].new_row.data)[j] == due_rows[i][j]);
            square += static_cast<double>(due_rows[i][j]) * static_cast<double>(due_rows[i][j]);
        }
        CHECK(close(norms[i], square));
        if (!summed) continue;
        checksum(rows[i].new_row.data, 4 * n, 4 * kSummed, due_sums.data());
        for (std::int64_t b = 0; b < block_count(n); ++b) CHECK(rows[i].sums[b] == due_sums[b]);
    }
}

}  // namespace

TEST(exchanges_of_every_size_and_place) {
    at_edges_and_past_caches([](std::int64_t n, std::size_t first) {
        for (const std::int64_t k : {0, 1, 2, 7})
            for (const bool in_place : {false, true})
                for (const bool summed : {false, true}) try_exchange(k, in_place, summed, n, first);
    });
}
