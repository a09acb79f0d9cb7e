// The exchange through codecs, of what clients send in every dtype: as its parts say, element by element.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/blocks.h"
#include "check.h"
#include "kernels/exchange.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

constexpr Codec kCodecs[] = {Codec::f32, Codec::bf16, Codec::f16, Codec::int8};
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16};

std::int64_t width(Codec codec) {
    return codec == Codec::f32 ? 4 : codec == Codec::int8 ? 1 : 2;
}

void copy(const void* from, std::int64_t bytes, void* to) {
    if (bytes != 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));  // an empty vector has no address
}

// A row in a codec, next to unreadable memory.
struct Coded {
    Codec codec;
    Array<std::uint8_t> codes;
    Array<float> scales;

    Coded(Arrays& make, Codec of, std::int64_t n)
        : codec(of),
          codes(make.empty<std::uint8_t>(width(of) * n)),
          scales(make.empty<float>(of == Codec::int8 ? (n + kCodeBlock - 1) / kCodeBlock : 0)) {}

    float* scale() { return codec == Codec::int8 ? scales.data() : nullptr; }
    Row row() { return {codec, codes.data(), scale()}; }

    void encode(const float* x, const DitherKey* key, std::int64_t n) {
        if (codec == Codec::f32)
            copy(x, 4 * n, codes.data());
        else
            quantise(x, codec, key, n, codes.data(), scale());
    }
    void decode(std::int64_t n, float* out) {
        if (codec == Codec::f32)
            copy(codes.data(), 4 * n, out);
        else
            dequantise(codes.data(), scale(), codec, n, out);
    }
};

// Converts y to another dtype, and leaves the rounded numbers in y.
Array<std::uint8_t> sent_as(Arrays& make, Dtype dtype, std::vector<float>& y) {
    const auto n = static_cast<std::int64_t>(y.size());
    if (dtype == Dtype::float64) {
        const std::vector<double> wide(y.begin(), y.end());
        Array<std::uint8_t> bytes = make.empty<std::uint8_t>(8 * n);
        copy(wide.data(), 8 * n, bytes.data());
        return bytes;
    }
    const Codec codec = dtype == Dtype::float32 ? Codec::f32 : dtype == Dtype::float16 ? Codec::f16 : Codec::bf16;
    Coded coded(make, codec, n);
    coded.encode(y.data(), nullptr, n);
    coded.decode(n, y.data());
    return std::move(coded.codes);
}

// The forms of MimiC, SCAFFOLD and FedStale, and one with every coefficient.
constexpr Forms kForms[] = {{{1, 0, 0}, {1, -1, 0, 1}},
                            {{1, 1, 1}, {1, -1, 0, 0}},
                            {{1, 0, 0}, {1, -0.3, 0, 0}},
                            {{0.7f, 0.25f, -2}, {0.75, -0.5, 0.3, 1.25}}};

struct Case {
    Codec before, after;
    Forms forms;
    bool in_place;
    Dtype dtype;
    std::int64_t k, n;
    std::size_t first;  // place and seed of the arrays, and which clients have a base, a row and an anchor
};

// `bad`: NaN or infinities for every client's y; the row is then invalid, but the same everywhere.
void try_codes(const Case& c, const std::vector<std::pair<std::int64_t, float>>& bad = {}) {
    const std::int64_t k = c.k, n = c.n;
    Arrays make(c.first);
    const auto x = make.numbers<float>(n);
    const auto ys = make.rows<float>(k, n), anchors = make.rows<float>(k, n), rs = make.rows<float>(k, n);
    Array<double> acc = make.numbers<double>(n);
    Array<double> scratch = make.empty<double>(k * block_count(n)), norms = make.empty<double>(k);
    std::vector<double> due(acc.begin(), acc.end()), squares(static_cast<std::size_t>(k));
    std::vector<Coded> befores, afters, due_rows;
    std::vector<Array<std::uint8_t>> sents;
    std::vector<ClientUpdate> sent;
    std::vector<RowExchange> row_exchanges;
    std::vector<float> r(static_cast<std::size_t>(n)), made(r), stored(r), hs(r);
    for (std::int64_t i = 0; i < k; ++i) {
        const bool has_base = (c.first + i) % 4 != 0, has_row = (c.first + i) % 5 != 0;
        const bool has_anchor = !c.forms.replaces() ? i % 2 == 0 : has_row && (c.first / 2 + i) % 3 != 0;
        std::vector<float> y(ys[i].data(), ys[i].data() + n);
        for (const auto& [at, value] : bad) y[at] = value;
        sents.push_back(sent_as(make, c.dtype, y));
        const float scale = 0.5f + static_cast<float>(i);
        const double weight = 2.0 - static_cast<double>(i);
        sent.push_back({sents.back().data(), c.dtype, has_base ? x.data() : nullptr, scale, weight});

        const DitherKey key{c.first, static_cast<std::uint64_t>(i)};
        befores.emplace_back(make, c.before, n);
        befores.back().encode(rs[i].data(), nullptr, n);
        afters.emplace_back(make, c.after, n);
        const bool over = c.in_place && has_row && c.before == c.after;
        row_exchanges.push_back({has_row ? befores.back().row() : Row{Codec::f32, nullptr, nullptr},
                                 has_anchor ? anchors[i].data() : nullptr, (over ? befores : afters).back().row(),
                                 key});

        std::fill(r.begin(), r.end(), 0.0f);
        if (has_row) befores.back().decode(n, r.data());
        for (std::int64_t j = 0; j < n; ++j) {
            const float h = (has_base ? x[j] - y[j] : -y[j]) * scale, q = has_anchor ? anchors[i][j] : 0.0f;
            made[j] = c.forms.row.h * h;
            if (c.forms.row.r != 0) made[j] += c.forms.row.r * r[j];
            if (c.forms.row.q != 0) made[j] += c.forms.row.q * q;
            hs[j] = h;
            squares[i] += static_cast<double>(h) * static_cast<double>(h);
        }
        due_rows.emplace_back(make, c.after, n);
        due_rows.back().encode(made.data(), &key, n);
        due_rows.back().decode(n, stored.data());
        for (std::int64_t j = 0; j < n; ++j) {
            const auto& adds = c.forms.adds;
            double change = adds.row * static_cast<double>(stored[j]) + adds.r * static_cast<double>(r[j]);
            if (adds.h != 0) change += adds.h * static_cast<double>(hs[j]);
            if (adds.q != 0) change += adds.q * static_cast<double>(has_anchor ? anchors[i][j] : 0.0f);
            due[j] += weight * change;
        }
    }
    exchange(acc.data(), acc.data(), sent.data(), row_exchanges.data(), c.forms, k, n, scratch.data(), norms.data());
    for (std::int64_t i = 0; i < k; ++i) {
        const Row& row = row_exchanges[i].new_row;
        CHECK(n == 0 || std::memcmp(row.data, due_rows[i].codes.data(), due_rows[i].codes.size()) == 0);
        for (std::int64_t b = 0; b < due_rows[i].scales.size(); ++b)
            CHECK(std::memcmp(row.scales + b, &due_rows[i].scales[b], 4) == 0);
        CHECK(bad.empty() ? close(norms[i], squares[i]) : !std::isfinite(norms[i]));
    }
    if (bad.empty()) CHECK(same(acc, due));
}

}  // namespace

TEST(exchanges_through_codecs) {
    at_edges_and_past_caches([](std::int64_t n, std::size_t first) {
        const Dtype dtype = kDtypes[first % 4];
        // Of codecs and forms every two meet at some of the sizes and places, or at each, where those are few.
        const bool many = kSizes.size() > 8;
        const std::size_t turns = !many ? 1 : n > kBlock ? 2 : 4, turn = n > kBlock ? first : first / 4;
        for (std::size_t i = 0; i < 4; ++i)
            for (std::size_t j = 0; j < 4; ++j) {
                if ((i + j + turn) % turns != 0) continue;
                const Codec codec = kCodecs[i], other = kCodecs[(first + 1) % 4];
                const Forms& forms = kForms[j];
                if (n > kBlock) {  // shared by threads, which makes no other case
                    try_codes({codec, codec, forms, true, dtype, 5, n, first});
                    continue;
                }
                for (const std::int64_t k : {1, 2, 5}) {
                    if (other != codec) try_codes({other, codec, forms, false, dtype, k, n, first});
                    for (const bool in_place : {false, true})
                        try_codes({codec, codec, forms, in_place, dtype, k, n, first});
                }
            }
    });
}

TEST(exchanges_of_every_dtype) {
    for (const Dtype dtype : kDtypes)
        for (const Codec codec : kCodecs)
            for (const Forms& forms : kForms)
                for (const std::int64_t n : {1, 700, 5000}) try_codes({codec, codec, forms, true, dtype, 5, n, 3});
}

TEST(exchanges_of_numbers_that_are_none) {
    float loud;  // a NaN whose bits, with anything added, are those of another number
    const std::uint32_t bits = 0x7fffffff;
    std::memcpy(&loud, &bits, sizeof loud);
    for (const float none : {INFINITY, -INFINITY, NAN, -NAN, loud, -loud})
        for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16})
            for (const Codec codec : kCodecs)
                for (const Forms& forms : kForms)
                    for (const std::int64_t k : {1, 2, 3})
                        for (const std::int64_t where : {0, 63, 511, 1030})
                            for (const std::size_t first : {0, 3})
                                try_codes({codec, codec, forms, false, dtype, k, 1100, first}, {{where, none}});
}
