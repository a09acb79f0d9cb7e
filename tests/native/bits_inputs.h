// What bits.cpp tries the kernels on: the same numbers everywhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/blocks.h"
#include "kernels/aggregate.h"
#include "kernels/exchange.h"
#include "kernels/quantise.h"

namespace fedcore {

using Bytes = std::vector<char>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr std::int64_t kRows = 5;
constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16};
constexpr Codec kCodecs[] = {Codec::f32, Codec::bf16, Codec::f16, Codec::int8};
inline std::uint64_t word() {
    static std::uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

// Zeros and subnormal numbers among others of 2^-39 to 2^8.
inline float number() {
    const std::uint64_t random = word();
    if (random % 61 == 0) return 0;
    auto bits = static_cast<std::uint32_t>(random >> 32) & 0x807fffffu;
    if (random % 37 != 0) bits |= static_cast<std::uint32_t>(88 + random % 48) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline Floats numbers(std::int64_t n) {
    Floats values(n);
    for (float& value : values) value = number();
    return values;
}

inline Doubles wide_numbers(std::int64_t n) {
    Doubles values(n);
    for (double& value : values) {
        value = static_cast<double>(number()) * (1 + 1e-9 * static_cast<double>(number()));
    }
    return values;
}

inline std::int64_t scale_count(Codec codec, std::int64_t n) {
    return codec == Codec::int8 ? n / kCodeBlock + 1 : 0;
}

// x in a codec, rounded to the nearest.
struct Coded {
    Codec codec;
    Bytes codes;
    Floats scales;

    Coded(Codec of, const Floats& x) : codec(of), codes(4 * x.size()), scales(scale_count(of, x.size())) {
        if (codec == Codec::f32)
            std::memcpy(codes.data(), x.data(), codes.size());
        else
            quantise(x.data(), codec, nullptr, static_cast<std::int64_t>(x.size()), codes.data(), scale());
    }
    float* scale() { return codec == Codec::int8 ? scales.data() : nullptr; }
    Row row() { return {codec, codes.data(), scale()}; }
};

inline Bytes row_of(Dtype dtype, const Floats& x) {
    if (dtype == Dtype::float64) {
        const Doubles wide = wide_numbers(static_cast<std::int64_t>(x.size()));
        Bytes bytes(8 * x.size());
        std::memcpy(bytes.data(), wide.data(), bytes.size());
        return bytes;
    }
    return Coded(dtype == Dtype::float32 ? Codec::f32 : dtype == Dtype::float16 ? Codec::f16 : Codec::bf16, x).codes;
}

// What all of one length are tried on.
struct Problem {
    std::int64_t n;
    Floats x = numbers(n), g = numbers(n);
    std::vector<Floats> ys, olds, anchors;
    Doubles acc = wide_numbers(n), total = wide_numbers(n), control = wide_numbers(n);
    Doubles weights{1.5, -0.3, 2e-3, 7, 0.1}, norms = Doubles(kRows + 1);
    Doubles scratch = Doubles((kRows + 1) * (block_count(n) + 1));
    std::vector<Piece> pieces;

    explicit Problem(std::int64_t length) : n(length) {
        for (std::vector<Floats>* rows : {&ys, &olds, &anchors})
            for (std::int64_t i = 0; i < kRows; ++i) rows->push_back(numbers(n));
        for (std::int64_t begin = 0; begin < n; begin += kBlock)
            pieces.push_back({0, begin, std::min(begin + kBlock, n)});
    }
    std::int64_t count() const { return static_cast<std::int64_t>(pieces.size()); }
};

}  // namespace fedcore
