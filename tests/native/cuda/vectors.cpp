// Optimisers, directions, combinations, norms, codes and mixes on the emulated device: the CPU's bits.
#include "kernels/combine.h"
#include "kernels/direction.h"
#include "kernels/mix.h"
#include "kernels/norms.h"
#include "kernels/optimizer.h"
#include "kernels/quantise.h"
#include "kernels/robust.h"
#include "parity.h"

using namespace fedcore;
using namespace fedcore::test;

TEST(cuda_optimizer_step) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const Second second : {Second::none, Second::decay, Second::yogi}) {
            Problem make(seed, aligned, numbers);
            const auto v = make.values<float>(n);
            std::vector<Array<float>> of[2] = {make.rows<float>(3, n), {}};
            for (float& s : of[0][1]) s = std::fabs(s) * 4;  // a second moment is a mean of squares
            for (const Array<float>& one : of[0]) of[1].push_back(copy_of(make, one));
            const OptimizerStep step{second, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f, 0.5f};
            const bool has_second = second != Second::none;
            std::vector<double> scratch(block_count(n) + 1), shares(scratch.size()), norms(2);
            const bool wanted = seed % 4 < 2;
            HostQueue queue;
            for (int side = 0; side < 2; ++side) {
                float* const s = has_second ? of[side][1].data() : nullptr;
                const OptimizerInputs in{v.data(), of[side][0].data(), s, of[side][2].data()};
                const OptimizerOutputs out{of[side][0].data(), s, of[side][2].data()};
                norms[side] = side == 0
                                  ? optimizer_step(step, in, out, n, scratch.data())
                                  : cuda::optimizer_step(queue, step, in, out, n, wanted ? shares.data() : nullptr);
            }
            CHECK(same_norms({norms[0]}, {norms[1]}));
            CHECK(!wanted || same_norms(scratch, shares));
            for (int i = 0; i < 3; ++i) CHECK(same_bits(of[0][i], of[1][i]));
        }
    });
}

TEST(cuda_direction_step) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (int parts = 0; parts < 16; ++parts) {
            Problem make(seed, aligned, numbers);
            const auto grad = make.values<float>(n), prev = make.values<float>(n), offset = make.values<float>(n);
            const auto x = make.values<float>(n);
            auto y = make.values<float>(n), found = copy_of(make, y);
            const LocalStep step{grad.data(),
                                 parts & 1 ? prev.data() : nullptr,
                                 parts & 2 ? offset.data() : nullptr,
                                 parts & 4 ? x.data() : nullptr,
                                 0.9f,
                                 -0.4f,
                                 0.3f,
                                 parts & 8 ? 0.01f : 0.0f,
                                 0.125f};
            HostQueue queue;
            direction_step(step, y.data(), n);
            cuda::direction_step(queue, step, found.data(), n);
            CHECK(same_bits(y, found));
        }
    });
}

template <class Out>
void try_combine(std::int64_t k, std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
    Problem make(seed, aligned, numbers);
    std::vector<Typed> vectors;
    std::vector<Term> terms;
    for (std::int64_t i = 0; i < k; ++i)
        vectors.emplace_back(make, (seed + i) % 2 == 0 ? Dtype::float64 : Dtype::float32, n);
    for (Typed& vector : vectors)
        terms.push_back({vector.data(), vector.dtype == Dtype::float64, static_cast<double>(make.coefficient())});
    auto due = make.empty<Out>(n), found = make.empty<Out>(n);
    std::vector<double> scratch(block_count(n) + 1), shares(scratch.size());
    HostQueue queue;
    combine(terms.data(), k, due.data(), n);
    cuda::combine(queue, terms.data(), k, found.data(), n);
    CHECK(same_bits(due, found));
    CHECK(same_norms({combined_square(terms.data(), k, n, scratch.data())},
                     {cuda::combined_square(queue, terms.data(), k, n, nullptr)}));
    CHECK(same_norms({combined_square(terms.data(), k, n, scratch.data())},
                     {cuda::combined_square(queue, terms.data(), k, n, shares.data())}));
    CHECK(same_norms(scratch, shares));
}

TEST(cuda_combine) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const std::int64_t k : {1, 2, 5}) {
            try_combine<float>(k, n, seed, aligned, numbers);
            try_combine<double>(k, n, seed, aligned, numbers);
        }
    });
}

// Sums and vectors in turn, with coefficients of both sizes; a result replaces the first sum.
void try_combine_exact(std::int64_t k, std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
    Problem make(seed, aligned, numbers);
    std::vector<SumOf<std::int64_t>> sums;
    std::vector<Array<float>> vectors;
    std::vector<ExactTerm> terms;
    for (std::int64_t i = 0; i < k; ++i) sums.emplace_back(make, n, true);
    for (std::int64_t i = 0; i < k; ++i) vectors.push_back(make.values<float>(n));
    for (std::int64_t i = 0; i < k; ++i) {
        const auto times = static_cast<std::int64_t>(static_cast<std::int32_t>(make.engine()));
        const std::int64_t coefficient = seed % 3 == 0 ? times >> 24 : times;
        if ((seed + i) % 2 == 0)
            terms.push_back({sums[i].read(), nullptr, coefficient});
        else
            terms.push_back({{}, vectors[i].data(), coefficient});
    }
    SumOf<std::int64_t> due(make, n, false);
    auto& found = sums[0];
    HostQueue queue;
    const bool held = combine_exact(terms.data(), k, due.data(), n);
    CHECK(held == cuda::combine_exact(queue, terms.data(), k, found.data(), n));
    if (held) CHECK(due.same(found));
    auto wide = make.empty<double>(n), found_wide = make.empty<double>(n);
    auto narrow = make.empty<float>(n), found_narrow = make.empty<float>(n);
    read_exact(found.read(), wide.data(), n);
    read_exact(found.read(), narrow.data(), n);
    cuda::read_exact(queue, found.read(), found_wide.data(), n);
    cuda::read_exact(queue, found.read(), found_narrow.data(), n);
    CHECK(same_bits(wide, found_wide));
    CHECK(same_bits(narrow, found_narrow));
}

TEST(cuda_combine_exact) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const std::int64_t k : {1, 2, 5}) try_combine_exact(k, n, seed + k, aligned, numbers);
    });
    try_combine_exact(70, 300, 3, true, Numbers::usual);  // more terms than are described at once
}

// Two terms whose sum reaches 2^62 are out of range where they share a chunk of 512 elements.
TEST(cuda_combine_exact_range) {
    for (const bool aligned : {false, true})
        for (const std::int64_t second : {11, 511, 512, 2047}) {
            Problem make(7, aligned, Numbers::usual);
            SumOf<std::int64_t> a(make, 2048, true), b(make, 2048, true), out(make, 2048, false);
            a.high[10] = b.high[second] = std::int64_t{1} << 61;
            const ExactTerm terms[] = {{a.read(), nullptr, 1}, {b.read(), nullptr, -1}};
            HostQueue queue;
            CHECK(combine_exact(terms, 2, out.data(), 2048) == (second >= 512));
            CHECK(cuda::combine_exact(queue, terms, 2, out.data(), 2048) == (second >= 512));
        }
}

TEST(cuda_squared_norms) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const std::int64_t k : {0, 1, 4, 6}) {
            Problem make(seed, aligned, numbers);
            const auto rows = make.rows<float>(k, n);
            std::vector<const float*> listed;
            for (const auto& row : rows) listed.push_back(row.data());
            std::vector<double> scratch(k * block_count(n) + 1), shares(scratch.size()), due(k), found(k);
            const bool wanted = seed % 4 < 2;
            HostQueue queue;
            squared_norms(listed.data(), k, n, scratch.data(), due.data());
            cuda::squared_norms(queue, listed.data(), k, n, wanted ? shares.data() : nullptr, found.data());
            CHECK(same_norms(due, found));
            CHECK(!wanted || same_norms(scratch, shares));
        }
    });
}

// Updates in two tensors, of several dtypes and bases. They must be finite.
void try_robust(std::int64_t k, std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
    Problem make(seed, aligned, numbers);
    const std::int64_t starts[] = {0, n / 3, n};
    const Dtype dtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float64, Dtype::float16};
    const auto base = make.values<float>(n);
    std::vector<Typed> ys;
    std::vector<ClientUpdate> sent;
    for (std::int64_t e = 0; e < 2 * k; ++e)
        ys.emplace_back(make, dtypes[(seed + e) % (numbers == Numbers::huge ? 3 : 4)],
                        starts[e / k + 1] - starts[e / k]);
    for (std::int64_t e = 0; e < 2 * k; ++e)
        sent.push_back({ys[e].data(), ys[e].dtype, e % k % 3 == 0 ? nullptr : base.data() + starts[e / k],
                        0.5f + static_cast<float>(e % k), 1.0});
    const Updates updates{sent.data(), starts, 2, k};
    std::vector<double> due(k * k), found(k * k), scratch(block_count(n) * k * (k + 1) / 2 + 1), shares(scratch.size());
    const bool wanted = seed % 4 < 2;
    HostQueue queue;
    gram(updates, n, scratch.data(), due.data());
    cuda::gram(queue, updates, n, wanted ? shares.data() : nullptr, found.data());
    CHECK(same_norms(due, found));
    CHECK(!wanted || same_norms(scratch, shares));
    if (n > kBlock) return;  // a column knows no blocks
    std::vector<double> mixing(k * k);
    for (double& weight : mixing) weight = static_cast<double>(make.coefficient());
    for (const Statistic of : {Statistic{k / 4, k - k / 4, 0}, {(k - 1) / 2, k / 2 + 1, 0}, {0, k, (k + 1) / 2}})
        for (double* const mixed : {static_cast<double*>(nullptr), mixing.data()}) {
            auto out = make.empty<float>(n), there = make.empty<float>(n);
            column_statistic(updates, mixed, k, of, n, out.data());
            cuda::column_statistic(queue, updates, mixed, k, of, n, there.data());
            CHECK(same_bits(out, there));
        }
}

TEST(cuda_inner_products_and_statistics) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const std::int64_t k : {1, 12, 20, 40, 70})
            if (numbers != Numbers::broken && n * k < 30000) try_robust(k, n, seed, aligned, numbers);
    });
    try_robust(40, kBlock + 100, 1, true, Numbers::usual);
}

TEST(cuda_quantise) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const Codec codec : {Codec::bf16, Codec::f16, Codec::int8})
            for (const bool dithered : {false, true}) {
                Problem make(seed, aligned, numbers);
                auto x = make.values<float>(n), back = make.empty<float>(n), found_back = make.empty<float>(n);
                if (n > 40) x[40] = 70000.0f;  // above what float16 holds
                const std::int64_t bytes = (codec == Codec::int8 ? 1 : 2) * n;
                const std::int64_t scales = codec == Codec::int8 ? (n + kCodeBlock - 1) / kCodeBlock : 0;
                auto codes = make.empty<std::uint8_t>(bytes), found = make.empty<std::uint8_t>(bytes);
                auto scale = make.empty<float>(scales), found_scale = make.empty<float>(scales);
                const DitherKey key{seed, 7, seed % 3 * ((std::int64_t{1} << 32) - kBlock)};
                HostQueue queue;
                quantise(x.data(), codec, dithered ? &key : nullptr, n, codes.data(), scale.data());
                cuda::quantise(queue, x.data(), codec, dithered ? &key : nullptr, n, found.data(), found_scale.data());
                CHECK(same_bits(codes, found));
                CHECK(same_bits(scale, found_scale));
                dequantise(codes.data(), scale.data(), codec, n, back.data());
                cuda::dequantise(queue, codes.data(), scale.data(), codec, n, found_back.data());
                CHECK(same_bits(back, found_back));
            }
    });
}

TEST(cuda_mix) {
    std::uint32_t seed = 1;
    for (const std::int64_t n : {0, 1, 33, 700, 2049})
        for (const std::int64_t p : {1, 3, 9, 40}) {
            Problem make(seed++, p == 3, Numbers::usual);
            auto models = make.rows<float>(p, n);
            std::vector<Array<float>> copies;
            std::vector<float*> due, found;
            for (auto& model : models) copies.push_back(copy_of(make, model));
            for (auto& model : models) due.push_back(model.data());
            for (auto& model : copies) found.push_back(model.data());
            std::vector<std::int64_t> starts{0}, columns;
            std::vector<float> weights;
            for (std::int64_t i = 0; i < p; ++i) {  // rows of 0, 1, 2, ... entries, a column perhaps twice
                for (std::int64_t e = 0; e < i % 12; ++e) {
                    columns.push_back((4 * p - 1 - 3 * e + i) % p);
                    weights.push_back(make.coefficient());
                }
                starts.push_back(static_cast<std::int64_t>(columns.size()));
            }
            const Mixing matrix{starts.data(), columns.data(), weights.data(), p};
            std::vector<std::int64_t> memory(static_cast<std::size_t>(mix_memory(matrix)));
            const MixPlan plan = plan_mix(matrix, n, memory.data());
            std::vector<float> scratch(static_cast<std::size_t>(plan.scratch));
            HostQueue queue;
            mix(matrix, plan, due.data(), n, scratch.data());
            cuda::mix(queue, matrix, found.data(), n);
            for (std::int64_t i = 0; i < p; ++i) CHECK(same_bits(models[i], copies[i]));
        }
}
