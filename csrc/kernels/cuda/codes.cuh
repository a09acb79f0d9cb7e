// Rows in a codec: a thread's eight elements as they lie in memory, as numbers, and encoded.
#pragma once

#include <type_traits>

#include "kernels/cuda/tiles.cuh"

namespace fedcore::cuda {

struct CodedFloat {
    Raw<float> raw;
    template <bool kVector>
    static __device__ CodedFloat load(const Row& row, std::int64_t begin, int count) {
        return {Raw<float>::load<kVector>(static_cast<const float*>(row.data) + begin, count)};
    }
    static __device__ CodedFloat none() { return {Raw<float>::zero()}; }
    __device__ float at(int e) const { return raw.at(e); }
};

template <class Half>
struct CodedHalf {
    Raw<Code16> raw;
    template <bool kVector>
    static __device__ CodedHalf load(const Row& row, std::int64_t begin, int count) {
        return {Raw<Code16>::load<kVector>(static_cast<const Code16*>(row.data) + begin, count)};
    }
    static __device__ CodedHalf none() { return {Raw<Code16>::zero()}; }
    __device__ float at(int e) const { return raw.as<Half>(e); }
};
struct CodedByte {
    Raw<std::int8_t> raw;
    float scale;
    template <bool kVector>
    static __device__ CodedByte load(const Row& row, std::int64_t begin, int count) {
        const bool any = kVector || first() < count;
        return {Raw<std::int8_t>::load<kVector>(static_cast<const std::int8_t*>(row.data) + begin, count),
                any ? __ldca(row.scales + (begin + first()) / kCodeBlock) : 0.0f};
    }
    static __device__ CodedByte none() { return {Raw<std::int8_t>::zero(), 0.0f}; }
    __device__ float at(int e) const { return scale * raw.code(e); }
};

template <Codec kCodec>
struct CodedAs {
    using Type = CodedFloat;
};
template <>
struct CodedAs<Codec::bf16> {
    using Type = CodedHalf<Bf16>;
};
template <>
struct CodedAs<Codec::f16> {
    using Type = CodedHalf<F16>;
};
template <>
struct CodedAs<Codec::int8> {
    using Type = CodedByte;
};
template <Codec kCodec>
using Coded = typename CodedAs<kCodec>::Type;

// Writes `made` as the row stores it, and leaves in `made` what that stands for. All threads of a warp together.
template <Codec kCodec, bool kVector, class Round>
__device__ void encode(const Row& row, const Round& round, std::int64_t begin, int count, float (&made)[kEach]) {
    if constexpr (kCodec == Codec::f32) {
        store<kVector>(static_cast<float*>(row.data) + begin, count, made);
    } else if constexpr (kCodec == Codec::int8) {
        std::uint32_t largest = 0;
#pragma unroll
        for (int e = 0; e < kEach; ++e)
            if (kVector || first() + place(e) < count) largest = max(largest, magnitude_of(made[e]));
        for (int other = 1; other < 8; other *= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, other));
        float scale, inverse;
        scale_of(largest, &scale, &inverse);
        std::int32_t code[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const std::uint32_t word = word_of(round, begin + first() + e % 4);
            // 0 where the block's numbers are tiny, or one of them is none, which may not be multiplied then
            code[e] = inverse == 0.0f ? 0 : code_of(round, e < 4 ? word : turned(word), made[e], inverse);
        }
        store_codes<kVector>(static_cast<std::int8_t*>(row.data) + begin, count, code);
        __syncwarp();  // all eight have read the old scale, which the new one may lie on
        if (threadIdx.x % 8 == 0 && (kVector || first() < count))
            __stwb(row.scales + (begin + first()) / kCodeBlock, scale);
#pragma unroll
        for (int e = 0; e < kEach; ++e) made[e] = scale * static_cast<float>(code[e]);
    } else {
        using Half = std::conditional_t<kCodec == Codec::bf16, Bf16, F16>;
        std::uint32_t code[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const std::uint32_t word = word_of(round, begin + first() + e % 4);
            code[e] = Half::template code<true>(round, e < 4 ? word : turned(word), made[e]);
        }
        store_codes<kVector>(static_cast<std::uint16_t*>(row.data) + begin, count, code);
#pragma unroll
        for (int e = 0; e < kEach; ++e) made[e] = value_of<Half>(code[e]);
    }
}

// A row of any codec, as float32: a load waits for its conversion.
template <bool kVector>
__device__ Raw<float> load_row(const Row& row, std::int64_t begin, int count) {
    Raw<float> out = Raw<float>::zero();
    const auto convert = [&](const auto& coded) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) out.v[e] = coded.at(e);
    };
    switch (row.codec) {
        case Codec::f32:
            return Raw<float>::load<kVector>(static_cast<const float*>(row.data) + begin, count);
        case Codec::bf16:
            convert(CodedHalf<Bf16>::load<kVector>(row, begin, count));
            break;
        case Codec::f16:
            convert(CodedHalf<F16>::load<kVector>(row, begin, count));
            break;
        case Codec::int8:
            convert(CodedByte::load<kVector>(row, begin, count));
            break;
    }
    return out;
}

}  // namespace fedcore::cuda
