#include "kernels/aggregate.h"

#include "base/blocks.h"
#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

template <class Sum>
void try_weighted_sum(std::int64_t k, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const auto rows = make.rows<float>(k, n);
    const auto base = make.numbers<float>(n);
    const auto weights = make.numbers<double>(k);
    const auto precision = sizeof(Sum) == 8 ? Precision::float64 : Precision::float32;
    std::vector<const void*> listed;
    for (const auto& row : rows) listed.push_back(row.data());
    std::vector<Piece> pieces;
    for (std::int64_t begin = 0; begin < n; begin += kBlock) pieces.push_back({0, begin, std::min(begin + kBlock, n)});
    const auto count = static_cast<std::int64_t>(pieces.size());
    for (const bool with_base : {false, true})
        for (const bool with_norms : {false, true}) {
            Array<float> out = make.empty<float>(n);
            Array<double> scratch = make.empty<double>(count * (k + 1)), norms = make.empty<double>(k + 1);
            const RowSum sums{listed.data(), with_base ? base.data() : nullptr, out.data(), Dtype::float32,
                              Dtype::float32};
            weighted_sums(&sums, weights.data(), k, pieces.data(), count, precision,
                          with_norms ? scratch.data() : nullptr, with_norms ? norms.data() : nullptr);
            std::vector<double> squares(static_cast<std::size_t>(k) + 1);
            for (std::int64_t j = 0; j < n; ++j) {
                Sum sum = 0;
                for (std::int64_t i = 0; i < k; ++i) {
                    const float h = with_base ? base[j] - rows[i][j] : rows[i][j];
                    sum += static_cast<Sum>(weights[i]) * static_cast<Sum>(h);
                    squares[i] += static_cast<double>(h) * static_cast<double>(h);
                }
                CHECK(out[j] == static_cast<float>(sum));
                squares[k] += static_cast<double>(sum) * static_cast<double>(sum);
            }
            if (with_norms)
                for (std::int64_t i = 0; i <= k; ++i) CHECK(close(norms[i], squares[i]));
        }
}

// `kinds`: whose base is what, row by row: x, the other x, or none.
template <class Sum>
void try_accumulate(const char* kinds, bool in_place, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const auto x = make.numbers<float>(n), other = make.numbers<float>(n);
    std::vector<Array<float>> ys;
    std::vector<ClientUpdate> sent;
    for (const char* kind = kinds; *kind != '\0'; ++kind) {
        ys.push_back(make.numbers<float>(n));
        const float* base = *kind == 'x' ? x.data() : *kind == 'o' ? other.data() : nullptr;
        sent.push_back({ys.back().data(), Dtype::float32, base, 0.5f + static_cast<float>(ys.size()),
                        3.0 - static_cast<double>(ys.size())});
    }
    const auto k = static_cast<std::int64_t>(sent.size());
    Array<Sum> acc = make.numbers<Sum>(n), out = make.empty<Sum>(n);
    std::vector<Piece> pieces;
    for (std::int64_t begin = 0; begin < n; begin += kBlock) pieces.push_back({0, begin, std::min(begin + kBlock, n)});
    const auto count = static_cast<std::int64_t>(pieces.size());
    Array<double> scratch = make.empty<double>(k * count), norms = make.empty<double>(k);
    std::vector<Sum> due(acc.begin(), acc.end());
    std::vector<double> squares(static_cast<std::size_t>(k));
    for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
            const float h = (sent[i].base != nullptr ? sent[i].base[j] - ys[i][j] : -ys[i][j]) * sent[i].scale;
            due[j] += static_cast<Sum>(sent[i].weight) * static_cast<Sum>(h);
            squares[i] += static_cast<double>(h) * static_cast<double>(h);
        }
    Array<Sum>& result = in_place ? acc : out;
    const Fold<Sum> fold{acc.data(), result.data(), sent.data()};
    accumulate(&fold, k, pieces.data(), count, scratch.data(), norms.data());
    CHECK(same(result, due));
    for (std::int64_t i = 0; i < k; ++i) CHECK(close(norms[i], squares[i]));
}

template <class Sum>
void try_server_step(bool with_total, bool in_place, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const Step step{{0.3, 0, -0.7, 0, 0}, {1.5, 0, 1, 0, -2.5}, 0.9};
    const auto sum = make.numbers<Sum>(n);
    Array<double> total = make.numbers<double>(with_total ? n : 0), total_out = make.empty<double>(total.size());
    Array<float> x = make.numbers<float>(n), x_out = make.empty<float>(n), v = make.empty<float>(n);
    Array<double> scratch = make.empty<double>(2 * block_count(n)), squares = make.empty<double>(2);
    const std::vector<double> t(total.begin(), total.end());
    const std::vector<float> from(x.begin(), x.end());
    Array<double>& new_total = in_place ? total : total_out;
    Array<float>& new_x = in_place ? x : x_out;
    const StepInputs<Sum> in{sum.data(), with_total ? total.data() : nullptr, nullptr, nullptr, x.data()};
    const StepOutputs to{v.data(), with_total ? new_total.data() : nullptr, new_x.data()};
    server_step(step, in, to, n, scratch.data(), squares.data());
    double v_square = 0, x_square = 0;
    for (std::int64_t j = 0; j < n; ++j) {
        const auto a = static_cast<double>(sum[j]);
        const auto due = static_cast<float>(with_total ? step.v.A * a + step.v.T * t[j] : step.v.A * a);
        CHECK(v[j] == due);
        if (with_total) CHECK(new_total[j] == (t[j] + step.total.A * a) + step.total.v * static_cast<double>(due));
        CHECK(new_x[j] == static_cast<float>(static_cast<double>(from[j]) - step.gamma * static_cast<double>(due)));
        v_square += static_cast<double>(v[j]) * v[j];
        x_square += static_cast<double>(new_x[j]) * new_x[j];
    }
    CHECK(close(squares[0], v_square));
    CHECK(close(squares[1], x_square));
}

}  // namespace

TEST(weighted_sums_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        for (const std::int64_t k : {0, 1, 3, 4, 5, 9}) {
            try_weighted_sum<float>(k, n, first);
            try_weighted_sum<double>(k, n, first);
        }
    });
}

TEST(segments_of_every_size) {
    constexpr std::int64_t kModels = 5;
    for (const int count : kThreadCounts) {
        set_threads(count);
        Arrays make(1);
        std::vector<std::int64_t> lengths = kSizes;
        lengths.push_back(3 * kShared);
        std::vector<Array<float>> tensors, sums;
        std::vector<const void*> rows;
        std::vector<Piece> pieces;
        for (const std::int64_t n : lengths) {
            for (std::int64_t i = 0; i < kModels; ++i) {
                tensors.push_back(make.numbers<float>(n));
                rows.push_back(tensors.back().data());
            }
            sums.push_back(make.empty<float>(n));
            const auto segment = static_cast<std::int64_t>(sums.size()) - 1;
            for (std::int64_t begin = 0; begin < n; begin += kBlock)
                pieces.push_back({segment, begin, std::min(begin + kBlock, n)});
        }
        const auto weights = make.numbers<double>(kModels);
        std::vector<RowSum> segments;
        for (std::size_t s = 0; s < sums.size(); ++s)
            segments.push_back({rows.data() + s * kModels, nullptr, sums[s].data(), Dtype::float32, Dtype::float32});
        weighted_sums(segments.data(), weights.data(), kModels, pieces.data(), static_cast<std::int64_t>(pieces.size()),
                      Precision::float32, nullptr, nullptr);
        for (std::size_t s = 0; s < lengths.size(); ++s)
            for (std::int64_t j = 0; j < lengths[s]; ++j) {
                float sum = 0;
                for (std::int64_t i = 0; i < kModels; ++i)
                    sum += static_cast<float>(weights[i]) * tensors[s * kModels + i][j];
                CHECK(sums[s][j] == sum);
            }
    }
}

TEST(accumulations_of_every_size_and_place) {
    at_edges_and_past_caches([](std::int64_t n, std::size_t first) {
        for (const char* kinds : {"", "x", "-", "xxxx", "xxxo", "----", "xxxxx-xxxxx"})
            for (const bool in_place : {false, true}) {
                try_accumulate<float>(kinds, in_place, n, first);
                try_accumulate<double>(kinds, in_place, n, first);
            }
    });
}

TEST(server_steps_of_every_size_and_place) {
    at_edges_and_past_caches([](std::int64_t n, std::size_t first) {
        for (const bool with_total : {false, true})
            for (const bool in_place : {false, true}) {
                try_server_step<float>(with_total, in_place, n, first);
                try_server_step<double>(with_total, in_place, n, first);
            }
    });
}
