#include "kernels/quantise.h"

#include <cmath>
#include <cstring>

#include "check.h"
#include "problem.h"

using namespace fedcore;
using namespace fedcore::test;

namespace {

// Every number comes back to within one unit of its code; half a unit where it is rounded to the nearest.
template <class Code>
void try_codec(Codec codec, bool dither, std::int64_t n, std::size_t first) {
    Arrays make(first);
    const auto x = make.numbers<float>(n);
    Array<Code> codes = make.empty<Code>(n);
    const bool scaled = codec == Codec::int8;
    Array<float> scales = make.empty<float>(scaled ? (n + kCodeBlock - 1) / kCodeBlock : 0),
                 back = make.empty<float>(n);
    float* scale = scaled ? scales.data() : nullptr;
    const DitherKey key{11, first};
    quantise(x.data(), codec, dither ? &key : nullptr, n, codes.data(), scale);
    dequantise(codes.data(), scale, codec, n, back.data());
    for (std::int64_t j = 0; j < n; ++j) {
        const double from = static_cast<double>(x[j]), to = static_cast<double>(back[j]);
        double unit =
            std::fabs(from) * (codec == Codec::bf16 ? 0x1p-7 : 0x1p-10) + (codec == Codec::bf16 ? 0x1p-133 : 0x1p-24);
        if (scaled) unit = static_cast<double>(scales[j / kCodeBlock]);
        CHECK(std::fabs(to - from) <= unit * (dither ? 1.0001 : 0.5001) + 0x1p-112);
    }
}

float round_trip(float value, Codec codec) {
    std::uint16_t code;
    float back;
    quantise(&value, codec, nullptr, 1, &code, nullptr);
    dequantise(&code, nullptr, codec, 1, &back);
    return back;
}

}  // namespace

TEST(codes_of_every_size_and_place) {
    at_edges([](std::int64_t n, std::size_t first) {
        for (const bool dither : {false, true}) {
            try_codec<std::uint16_t>(Codec::bf16, dither, n, first);
            try_codec<std::uint16_t>(Codec::f16, dither, n, first);
            try_codec<std::int8_t>(Codec::int8, dither, n, first);
        }
    });
    for (const int count : kThreadCounts) {
        set_threads(count);
        try_codec<std::int8_t>(Codec::int8, true, 2 * kShared, 2);
        try_codec<std::uint16_t>(Codec::f16, true, 2 * kShared, 2);
    }
}

TEST(codes_of_numbers_that_are_none) {
    for (const Codec codec : {Codec::bf16, Codec::f16}) {
        CHECK(round_trip(INFINITY, codec) == INFINITY);
        CHECK(round_trip(-INFINITY, codec) == -INFINITY);
        CHECK(std::isnan(round_trip(NAN, codec)));
        CHECK(round_trip(3.4028235e38f, codec) == INFINITY);
        CHECK(std::signbit(round_trip(-0.0f, codec)));
    }
    for (const float bad : {INFINITY, -INFINITY, NAN})
        for (std::int64_t n : {1, 63, 64, 65, 200})
            for (std::int64_t where : {std::int64_t{0}, n / 2, n - 1})
                for (const bool dither : {false, true}) {
                    Arrays make(3);
                    Array<float> x = make.numbers<float>(n), scales = make.empty<float>((n + 63) / 64);
                    Array<std::int8_t> codes = make.empty<std::int8_t>(n);
                    x[where] = bad;
                    const DitherKey key{5, 6};
                    quantise(x.data(), Codec::int8, dither ? &key : nullptr, n, codes.data(), scales.data());
                    for (std::int64_t b = 0; b < scales.size(); ++b)
                        CHECK(std::isfinite(scales[b]) == (b != where / 64));
                    CHECK(codes[where] == 0);
                }
}
