// Rows exchanged on the emulated device, through every codec and form: the CPU's bits.
#include "kernels/exchange.h"

#include "parity.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

constexpr Codec kCodecs[] = {Codec::f32, Codec::bf16, Codec::f16, Codec::int8};
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16};

// The forms of MimiC, SCAFFOLD and FedStale, and one with every coefficient.
constexpr Forms kForms[] = {{{1, 0, 0}, {1, -1, 0, 1}},
                            {{1, 1, 1}, {1, -1, 0, 0}, true},
                            {{1, 0, 0}, {1, -0.3, 0, 0}},
                            {{0.7f, 0.25f, -2}, {0.75, -0.5, 0.3, 1.25}}};

std::int64_t width(Codec codec) {
    return codec == Codec::f32 ? 4 : codec == Codec::int8 ? 1 : 2;
}

struct Coded {
    Codec codec;
    Array<std::uint8_t> codes;
    Array<float> scales;

    Coded(Problem& make, Codec of, std::int64_t n)
        : codec(of),
          codes(make.empty<std::uint8_t>(width(of) * n)),
          scales(make.empty<float>(of == Codec::int8 ? (n + kCodeBlock - 1) / kCodeBlock : 0)) {}
    Coded(Problem& make, const Coded& from)
        : codec(from.codec), codes(copy_of(make, from.codes)), scales(copy_of(make, from.scales)) {}
    Row row() { return {codec, codes.data(), codec == Codec::int8 ? scales.data() : nullptr}; }
    void encode(const float* x, std::int64_t n) {
        if (codec == Codec::f32 && n > 0) std::memcpy(codes.data(), x, static_cast<std::size_t>(4 * n));
        if (codec != Codec::f32) quantise(x, codec, nullptr, n, codes.data(), row().scales);
    }
};

struct Case {
    Codec before, after;
    Forms forms;
    bool plain, in_place;
    std::int64_t k, n;
};

template <class Sum>
void try_exchange(const Case& c, std::uint32_t seed, bool aligned, Numbers numbers) {
    Problem make(seed, aligned, numbers);
    const std::int64_t k = c.k, n = c.n;
    const auto x = make.values<float>(n), late = make.values<float>(n);
    SumOf<Sum> acc(make, n, true), out(make, n, false);
    std::vector<Typed> ys;
    std::vector<Array<float>> anchors;
    std::vector<Coded> old_rows[2], new_rows[2];
    std::vector<ClientUpdate> sent;
    std::vector<RowExchange> rows[2];
    for (std::int64_t i = 0; i < k; ++i) {
        ys.emplace_back(make, c.plain ? Dtype::float32 : kDtypes[(seed + i) % 4], n);
        anchors.push_back(make.values<float>(n));
        Problem calm(seed + 1000, aligned, numbers == Numbers::broken ? Numbers::usual : numbers);
        const auto r = calm.values<float>(n);
        old_rows[0].emplace_back(make, c.before, n);
        old_rows[0].back().encode(r.data(), n);
        old_rows[1].emplace_back(make, old_rows[0].back());
        const Codec after = seed % 7 == 0 && i > k / 2 ? Codec::f32 : c.after;  // a cohort of two codecs
        for (auto& side : new_rows) side.emplace_back(make, after, n);
    }
    for (std::int64_t i = 0; i < k; ++i) {
        const float* base = (seed + i) % 5 == 0 ? nullptr : (seed + i) % 7 == 0 ? late.data() : x.data();
        sent.push_back({ys[i].data(), ys[i].dtype, base, 0.5f + static_cast<float>(i), 2.0 - static_cast<double>(i)});
        const bool has_row = (seed + i) % 3 != 0;
        const bool has_anchor = c.forms.replaces() ? has_row && i % 2 == 0 : i % 2 == 0;
        for (int side = 0; side < 2; ++side) {
            const bool over = c.in_place && has_row && c.before == new_rows[side][i].codec;
            rows[side].push_back({has_row ? old_rows[side][i].row() : Row{Codec::f32, nullptr, nullptr},
                                  has_anchor ? anchors[i].data() : nullptr,
                                  (over ? old_rows : new_rows)[side][i].row(),
                                  {seed, static_cast<std::uint64_t>(i)}});
        }
    }
    std::vector<double> scratch(k * block_count(n) + 1), shares(scratch.size()), due(k), found(k);
    const bool wanted = seed % 4 < 2;
    double* const share = wanted ? shares.data() : nullptr;
    HostQueue queue;
    if constexpr (std::is_same_v<Sum, std::int64_t>) {
        exchange(acc.read(), out.data(), sent.data(), rows[0].data(), c.forms, k, n, scratch.data(), due.data());
        cuda::exchange(queue, acc.read(), acc.data(), sent.data(), rows[1].data(), c.forms, k, n, share, found.data());
    } else {
        exchange(acc.data(), out.data(), sent.data(), rows[0].data(), c.forms, k, n, scratch.data(), due.data());
        cuda::exchange(queue, acc.data(), acc.data(), sent.data(), rows[1].data(), c.forms, k, n, share, found.data());
    }
    CHECK(same_norms(due, found));
    if (!are_finite(due)) return;  // refused: what it leaves is worthless
    CHECK(!wanted || same_norms(scratch, shares));
    CHECK(out.same(acc));
    for (std::int64_t i = 0; i < k; ++i)
        for (auto* stored : {old_rows, new_rows}) {
            CHECK(same_bits(stored[0][i].codes, stored[1][i].codes));
            CHECK(same_bits(stored[0][i].scales, stored[1][i].scales));
        }
}

}  // namespace

template <class Sum>
void try_exchanges() {
    at_every_shape([](std::int64_t n, std::uint32_t seed, bool aligned, Numbers numbers) {
        for (const Codec codec : kCodecs) {
            for (const Forms& forms : kForms)
                try_exchange<Sum>({codec, codec, forms, true, true, 3, n}, seed, aligned, numbers);
            const Codec other = kCodecs[seed % 4];
            if (n < 5000)
                try_exchange<Sum>({other, codec, kForms[seed / 4 % 4], false, false, 5, n}, seed, aligned, numbers);
        }
    });
    for (const bool plain : {false, true})
        try_exchange<Sum>({Codec::int8, Codec::int8, kForms[0], plain, true, 67, 300}, 3, true, Numbers::usual);
}

TEST(cuda_exchange) {
    try_exchanges<double>();
}
TEST(cuda_exchange_exact) {
    try_exchanges<std::int64_t>();
}
