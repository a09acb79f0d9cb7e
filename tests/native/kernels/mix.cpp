#include "kernels/mix.h"

#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

// The rows of a p x p matrix; columns may come in any order, and twice.
struct Matrix {
    std::vector<std::int64_t> starts{0}, columns;
    std::vector<float> weights;

    void add(std::int64_t column) {
        columns.push_back(column);
        weights.push_back(0.25f + 0.5f * static_cast<float>(weights.size() % 7));
    }
    void end_row() { starts.push_back(static_cast<std::int64_t>(columns.size())); }
};

Matrix ring(std::int64_t p) {
    Matrix matrix;
    for (std::int64_t i = 0; i < p; ++i, matrix.end_row())
        for (const std::int64_t step : {p - 1, std::int64_t{0}, std::int64_t{1}}) matrix.add((i + step) % p);
    return matrix;
}

Matrix complete(std::int64_t p) {
    Matrix matrix;
    for (std::int64_t i = 0; i < p; ++i, matrix.end_row())
        for (std::int64_t c = 0; c < p; ++c) matrix.add(c);
    return matrix;
}

// Rows of 0, 1, 2, ... entries, from the last column on.
Matrix ragged(std::int64_t p) {
    Matrix matrix;
    for (std::int64_t i = 0; i < p; ++i, matrix.end_row())
        for (std::int64_t e = 0; e < i; ++e) matrix.add((4 * p - 1 - 3 * e) % p);
    return matrix;
}

void try_mix(const Matrix& matrix, std::int64_t n, std::size_t first) {
    const auto p = static_cast<std::int64_t>(matrix.starts.size()) - 1;
    Arrays make(first);
    auto models = make.rows<float>(p, n);
    std::vector<std::vector<float>> from;
    std::vector<float*> pointers;
    for (Array<float>& model : models) {
        from.emplace_back(model.begin(), model.end());
        pointers.push_back(model.data());
    }
    const Mixing mixing{matrix.starts.data(), matrix.columns.data(), matrix.weights.data(), p};
    Array<std::int64_t> memory = make.empty<std::int64_t>(mix_memory(mixing));
    const MixPlan plan = plan_mix(mixing, n, memory.data());
    Array<float> scratch = make.empty<float>(plan.scratch);
    mix(mixing, plan, pointers.data(), n, scratch.data());
    for (std::int64_t i = 0; i < p; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (std::int64_t e = matrix.starts[i]; e < matrix.starts[i + 1]; ++e) {
                const float product = matrix.weights[e] * from[matrix.columns[e]][j];
                sum = e == matrix.starts[i] ? product : sum + product;
            }
            CHECK(models[i][j] == sum);
        }
}

}  // namespace

TEST(mixes_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        for (const std::int64_t p : {0, 1, 2, 7}) {
            try_mix(ring(p), n, first);
            try_mix(complete(p), n, first);
            try_mix(ragged(p), n, first);
        }
    });
}

TEST(mixes_of_many_models) {
    try_mix(ring(300), 2100, 0);
    try_mix(complete(100), 1000, 1);
}
