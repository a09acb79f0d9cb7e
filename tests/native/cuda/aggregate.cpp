// Weighted sums, folds and steps on the emulated device: the CPU's bits.
#include "kernels/aggregate.h"

#include "parity.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16};

std::vector<Piece> pieces_of(const std::vector<std::int64_t>& sizes) {
    std::vector<Piece> pieces;
    for (std::size_t s = 0; s < sizes.size(); ++s)
        for (std::int64_t begin = 0; begin < sizes[s]; begin += kBlock)
            pieces.push_back({static_cast<std::int64_t>(s), begin, std::min(begin + kBlock, sizes[s])});
    return pieces;
}

// Tensors of several sizes, dtypes and bases at once, of which some are empty.
// ways: 1 for sums in float64 and norms alone, 4 for all.
void try_sums(const std::vector<std::int64_t>& sizes, std::int64_t k, std::uint32_t seed, bool aligned, Numbers numbers,
              int ways = 4) {
    Problem make(seed, aligned, numbers);
    const auto count = static_cast<std::int64_t>(sizes.size());
    const auto pieces = pieces_of(sizes);
    const auto parts = static_cast<std::int64_t>(pieces.size());
    std::vector<Typed> rows;
    std::vector<Array<float>> bases;
    std::vector<Typed> outs[2];
    std::vector<double> weights;
    for (std::int64_t i = 0; i < k; ++i) weights.push_back(static_cast<double>(make.coefficient()));
    for (std::int64_t s = 0; s < count; ++s) {
        for (std::int64_t i = 0; i < k; ++i) rows.emplace_back(make, kDtypes[(seed + s) % 4], sizes[s]);
        bases.push_back(make.values<float>(sizes[s]));
        for (auto& out : outs) out.emplace_back(make, kDtypes[(seed / 4 + s) % 4], sizes[s]);
    }
    for (int way = 0; way < ways; ++way) {
        const Precision precision = way % 2 == 0 ? Precision::float64 : Precision::float32;
        const bool norms = way < 2;
        std::vector<RowSum> sums[2];
        std::vector<std::vector<const void*>> listed;
        for (std::int64_t s = 0; s < count; ++s) {
            listed.emplace_back();
            for (std::int64_t i = 0; i < k; ++i) listed.back().push_back(rows[s * k + i].data());
        }
        for (int side = 0; side < 2; ++side)
            for (std::int64_t s = 0; s < count; ++s)
                sums[side].push_back({listed[s].data(), (seed + s) % 3 != 0 ? bases[s].data() : nullptr,
                                      outs[side][s].data(), kDtypes[(seed + s) % 4], outs[side][s].dtype});
        std::vector<double> scratch(parts * (k + 1)), due(k + 1), found(k + 1);
        weighted_sums(sums[0].data(), weights.data(), k, pieces.data(), parts, precision,
                      norms ? scratch.data() : nullptr, norms ? due.data() : nullptr);
        HostQueue queue;
        cuda::weighted_sums(queue, sums[1].data(), sizes.data(), count, weights.data(), k, precision,
                            norms ? found.data() : nullptr);
        CHECK(same_norms(due, found));
        for (std::int64_t s = 0; s < count; ++s) {
            CHECK(same_bits(outs[0][s].wide, outs[1][s].wide));
            if (outs[0][s].dtype == Dtype::float32) CHECK(same_bits(outs[0][s].narrow, outs[1][s].narrow));
            if (numbers != Numbers::broken) CHECK(same_bits(outs[0][s].half, outs[1][s].half));
        }
    }
}

template <class Sum>
void accumulate_on_both(const std::vector<Fold<Sum>>* folds, const std::vector<std::int64_t>& sizes, std::int64_t k,
                        std::vector<double>& scratch, double* due, double* shares, double* found) {
    const auto pieces = pieces_of(sizes);
    const auto parts = static_cast<std::int64_t>(pieces.size()), count = static_cast<std::int64_t>(sizes.size());
    HostQueue queue;
    if constexpr (std::is_same_v<Sum, std::int64_t>) {
        accumulate(folds[0].data(), k, pieces.data(), parts, scratch.data(), due);
        cuda::accumulate(queue, folds[1].data(), sizes.data(), count, k, shares, found);
    } else {
        accumulate(folds[0].data(), k, pieces.data(), parts, scratch.data(), due);
        cuda::accumulate(queue, folds[1].data(), sizes.data(), count, k, shares, found);
    }
}

template <class Sum>
void try_accumulate(const std::vector<std::int64_t>& sizes, std::int64_t k, bool plain, std::uint32_t seed,
                    bool aligned, Numbers numbers) {
    Problem make(seed, aligned, numbers);
    const auto count = static_cast<std::int64_t>(sizes.size());
    const auto parts = static_cast<std::int64_t>(pieces_of(sizes).size());
    std::vector<Typed> ys;
    std::vector<Array<float>> bases;
    std::vector<SumOf<Sum>> accs, outs[2];
    std::vector<std::vector<ClientUpdate>> sent;
    std::vector<Fold<Sum>> folds[2];
    for (std::int64_t s = 0; s < count; ++s) {
        for (int b = 0; b < 2; ++b) bases.push_back(make.values<float>(sizes[s]));
        for (std::int64_t i = 0; i < k; ++i) ys.emplace_back(make, plain ? Dtype::float32 : kDtypes[i % 4], sizes[s]);
        accs.emplace_back(make, sizes[s], true);
        for (auto& out : outs) out.emplace_back(make, sizes[s], false);
    }
    for (std::int64_t s = 0; s < count; ++s) {
        sent.emplace_back();
        for (std::int64_t i = 0; i < k; ++i) {
            const std::int64_t kind = seed % 2 == 0 ? 0 : i / 2 % 3;  // all of one base, or late ones among them
            const float* base = kind == 2 ? nullptr : bases[2 * s + kind].data();
            Typed& y = ys[s * k + i];
            sent.back().push_back(
                {y.data(), y.dtype, base, 0.5f + static_cast<float>(i), static_cast<double>(i % 5) - 1.75});
        }
        for (int side = 0; side < 2; ++side) {
            folds[side].push_back({{}, outs[side][s].data(), sent[s].data()});
            if (seed % 3 != 0) folds[side].back().acc = read(accs[s]);
        }
    }
    std::vector<double> scratch(parts * k + 1), shares(parts * k + 1), due(k), found(k);
    const bool wanted = seed % 4 < 2;
    accumulate_on_both(folds, sizes, k, scratch, due.data(), wanted ? shares.data() : nullptr, found.data());
    CHECK(same_norms(due, found));
    CHECK(!wanted || same_norms(scratch, shares));
    if (std::is_same_v<Sum, std::int64_t> && !are_finite(due)) return;  // the words are invalid
    for (std::int64_t s = 0; s < count; ++s) CHECK(outs[0][s].same(outs[1][s]));
}

template <class Sum>
void try_step(std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
    for (int parts = 0; parts < 8; ++parts) {
        Problem make(seed, aligned, numbers);
        const auto sum = make.values<Sum>(n);
        const auto control = make.values<double>(n);
        auto total = make.values<double>(n);
        auto momentum = make.values<float>(n), x = make.values<float>(n);
        const bool has_total = parts % 2 != 0, has_momentum = parts / 2 % 2 != 0, has_control = parts / 4 != 0;
        const Step step{{0.75, 0.5, -0.25, 1.5, 0}, {1.25, -0.5, 0.875, parts % 3 == 0 ? 0 : 0.3, 2}, 0.0625};
        auto v = make.empty<float>(n), moved = make.empty<float>(n);
        auto kept = make.empty<double>(n);
        std::vector<double> scratch(2 * block_count(n) + 1), shares(scratch.size()), due(2), found(2);
        const StepInputs<Sum> in{sum.data(), has_total ? total.data() : nullptr,
                                 has_momentum ? momentum.data() : nullptr, has_control ? control.data() : nullptr,
                                 x.data()};
        server_step(step, in, {v.data(), has_total ? kept.data() : nullptr, moved.data()}, n, scratch.data(),
                    due.data());
        // in place: what it replaces is read first
        HostQueue queue;
        auto own = make.empty<float>(n);
        float* const to = has_momentum ? momentum.data() : own.data();
        cuda::server_step(queue, step, in, {to, has_total ? total.data() : nullptr, x.data()}, n,
                          has_control ? shares.data() : nullptr, found.data());
        CHECK(same_norms(due, found));
        CHECK(!has_control || same_norms(scratch, shares));
        CHECK(same_bits(v.data(), to, n));
        CHECK(same_bits(moved, x));
        if (has_total) CHECK(same_bits(kept, total));
    }
}

}  // namespace

TEST(cuda_weighted_sums) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        try_sums({n}, 5, seed, aligned, numbers);
        if (n == 65 || n == 4129) try_sums({n, 0, 70, n / 2, 0, 2050}, 3, seed, aligned, numbers, 1);
    });
    try_sums({300}, 67, 5, true, Numbers::usual);  // more rows than are described at once
    try_sums({300}, 0, 5, true, Numbers::usual);
    try_sums({}, 2, 5, true, Numbers::usual);
    std::vector<std::int64_t> many;  // tensors that a warp finds in several steps
    for (std::int64_t s = 0; s < 40; ++s) many.push_back(s % 7 == 3 ? 0 : 20 + s);
    try_sums(many, 2, 6, false, Numbers::usual, 1);
}

TEST(cuda_accumulate) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const bool plain : {false, true}) {
            try_accumulate<float>({n}, 5, plain, seed, aligned, numbers);
            try_accumulate<double>({n, 0, 100}, 7, plain, seed, aligned, numbers);
            try_accumulate<std::int64_t>({n, 0, 100}, 7, plain, seed, aligned, numbers);
        }
    });
    try_accumulate<double>({300}, 67, true, 4, true, Numbers::usual);
    try_accumulate<double>({300}, 67, false, 5, true, Numbers::usual);
    try_accumulate<std::int64_t>({300}, 67, true, 4, true, Numbers::usual);
    try_accumulate<std::int64_t>({300}, 67, false, 5, true, Numbers::usual);
    try_accumulate<float>({300}, 0, true, 5, true, Numbers::usual);
    for (const std::uint32_t seed : {5, 6}) try_accumulate<std::int64_t>({300}, 0, true, seed, true, Numbers::usual);
}

TEST(cuda_server_step) {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        try_step<float>(n, seed, aligned, numbers);
        try_step<double>(n, seed, aligned, numbers);
    });
}
