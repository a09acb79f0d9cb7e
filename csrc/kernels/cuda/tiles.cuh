// A block's threads and a tile: each thread's elements, and their loads and stores.
#pragma once

#include <type_traits>

#include "kernels/cuda/scalars.cuh"

namespace fedcore::cuda {

// Thread t has elements first() .. + 3 and first() + 32 .. + 35 of the tile: those that share a word of random bits.
// Eight threads have 64 elements, so that each of a warp's loads of 16 bytes covers four whole lines of 128.
__device__ inline int first() {
    return static_cast<int>(threadIdx.x / 8) * kCodeBlock + static_cast<int>(threadIdx.x % 8) * 4;
}
__device__ constexpr int place(int e) {
    return e < 4 ? e : e + 28;
}

struct Where {
    int segment, tile;  // tile among all, of which each segment has a multiple of 8
    std::int64_t begin;
};

// The segment of this block, by all lanes of a warp together: 32 probes a step.
__device__ inline Where where(const Segments& segments) {
    const std::int32_t* const first_piece = segments.first_piece;
    const int tile = static_cast<int>(blockIdx.x), piece = tile / kPieceTiles;
    const int lane = static_cast<int>(threadIdx.x % 32);
    int low = 0, high = segments.count;
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, probe = low + step * lane;
        const unsigned votes = __ballot_sync(0xffffffffu, probe < high && first_piece[probe] <= piece);
        low += step * (31 - __clz(static_cast<int>(votes)));
        high = min(high, low + step);
    }
    const std::int64_t begin = static_cast<std::int64_t>(piece - first_piece[low]) * kPiece;
    return {low, tile, begin + tile % kPieceTiles * kTile};
}

// Elements of the tile, 0 .. kTile.
__device__ inline int extent(std::int64_t n, std::int64_t begin) {
    const std::int64_t rest = n - begin;
    return rest < 0 ? 0 : rest < kTile ? static_cast<int>(rest) : kTile;
}

// ---- A thread's eight elements of a row in memory format: this code does not wait for loads ----

struct Code16 {
    std::uint16_t bits;
};

using Word = unsigned long long;

template <class Number>
using Pair = std::conditional_t<std::is_same<Number, double>::value, double2, ulonglong2>;

// Elements of 8 bytes, two a load.
template <class Number>
struct Raw {
    Number v[kEach];
    template <bool kVector>
    static __device__ Raw load(const Number* tile, int count) {
        Raw raw;
        if (kVector) {
#pragma unroll
            for (int e = 0; e < kEach; e += 2) {
                const auto a = __ldcs(reinterpret_cast<const Pair<Number>*>(tile + first() + place(e)));
                raw.v[e] = a.x;
                raw.v[e + 1] = a.y;
            }
        } else {
#pragma unroll
            for (int e = 0; e < kEach; ++e)
                raw.v[e] = first() + place(e) < count ? __ldca(tile + first() + place(e)) : Number{};
        }
        return raw;
    }
    static __device__ Raw zero() { return {{}}; }
    __device__ Number at(int e) const { return v[e]; }
};

template <>
struct Raw<float> {
    float v[kEach];
    template <bool kVector>
    static __device__ Raw load(const float* tile, int count) {
        Raw raw;
        if (kVector) {
            const float4 a = __ldcs(reinterpret_cast<const float4*>(tile + first()));
            const float4 b = __ldcs(reinterpret_cast<const float4*>(tile + first() + 32));
            raw = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
        } else {
#pragma unroll
            for (int e = 0; e < kEach; ++e)
                raw.v[e] = first() + place(e) < count ? __ldca(tile + first() + place(e)) : 0.0f;
        }
        return raw;
    }
    static __device__ Raw zero() { return {{}}; }
    static __device__ Raw minus_zero() { return {{-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f}}; }
    __device__ float at(int e) const { return v[e]; }
};

// Two codes of 16 bits a word.
template <>
struct Raw<Code16> {
    std::uint32_t v[kEach / 2];
    template <bool kVector>
    static __device__ Raw load(const Code16* tile, int count) {
        Raw raw;
        if (kVector) {
            const uint2 a = __ldcs(reinterpret_cast<const uint2*>(tile + first()));
            const uint2 b = __ldcs(reinterpret_cast<const uint2*>(tile + first() + 32));
            raw = {{a.x, a.y, b.x, b.y}};
        } else {
#pragma unroll
            for (int e = 0; e < kEach; e += 2) {
                const int at = first() + place(e);
                const std::uint32_t low = at < count ? __ldca(&tile[at].bits) : 0;
                const std::uint32_t high = at + 1 < count ? __ldca(&tile[at + 1].bits) : 0;
                raw.v[e / 2] = high << 16 | low;
            }
        }
        return raw;
    }
    static __device__ Raw zero() { return {{}}; }
    template <class Half>
    __device__ float as(int e) const {
        return value_of<Half>(e % 2 == 0 ? v[e / 2] & 0xffffu : v[e / 2] >> 16);
    }
};

// Four codes of 8 bits a word.
template <>
struct Raw<std::int8_t> {
    std::uint32_t v[kEach / 4];
    template <bool kVector>
    static __device__ Raw load(const std::int8_t* tile, int count) {
        Raw raw;
        if (kVector) {
            raw.v[0] = __ldcs(reinterpret_cast<const unsigned*>(tile + first()));
            raw.v[1] = __ldcs(reinterpret_cast<const unsigned*>(tile + first() + 32));
        } else {
            raw = zero();
#pragma unroll
            for (int e = 0; e < kEach; ++e) {
                const int at = first() + place(e);
                const std::uint32_t code = at < count ? __ldca(reinterpret_cast<const unsigned char*>(tile) + at) : 0;
                raw.v[e / 4] |= code << (8 * (e % 4));
            }
        }
        return raw;
    }
    static __device__ Raw zero() { return {{}}; }
    __device__ float code(int e) const {
        return static_cast<float>(static_cast<std::int8_t>(v[e / 4] >> (8 * (e % 4)) & 0xffu));
    }
};

template <bool kVector>
__device__ void store(float* tile, int count, const float (&v)[kEach]) {
    if (kVector) {
        __stwb(reinterpret_cast<float4*>(tile + first()), make_float4(v[0], v[1], v[2], v[3]));
        __stwb(reinterpret_cast<float4*>(tile + first() + 32), make_float4(v[4], v[5], v[6], v[7]));
    } else {
#pragma unroll
        for (int e = 0; e < kEach; ++e)
            if (first() + place(e) < count) __stwb(tile + first() + place(e), v[e]);
    }
}

template <bool kVector, class Number>
__device__ void store(Number* tile, int count, const Number (&v)[kEach]) {
    if (kVector) {
#pragma unroll
        for (int e = 0; e < kEach; e += 2)
            __stwb(reinterpret_cast<Pair<Number>*>(tile + first() + place(e)), Pair<Number>{v[e], v[e + 1]});
    } else {
#pragma unroll
        for (int e = 0; e < kEach; ++e)
            if (first() + place(e) < count) __stwb(tile + first() + place(e), v[e]);
    }
}

template <bool kVector>
__device__ void store_codes(std::uint16_t* tile, int count, const std::uint32_t (&code)[kEach]) {
    if (kVector) {
        const std::uint32_t a = code[0] | code[1] << 16, b = code[2] | code[3] << 16;
        const std::uint32_t c = code[4] | code[5] << 16, d = code[6] | code[7] << 16;
        __stcs(reinterpret_cast<uint2*>(tile + first()), make_uint2(a, b));
        __stcs(reinterpret_cast<uint2*>(tile + first() + 32), make_uint2(c, d));
    } else {
#pragma unroll
        for (int e = 0; e < kEach; ++e)
            if (first() + place(e) < count) __stwb(tile + first() + place(e), static_cast<unsigned short>(code[e]));
    }
}

template <bool kVector>
__device__ void store_codes(std::int8_t* tile, int count, const std::int32_t (&code)[kEach]) {
    if (kVector) {
        std::uint32_t word[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < kEach; ++e) word[e / 4] |= (static_cast<std::uint32_t>(code[e]) & 0xffu) << (8 * (e % 4));
        __stcs(reinterpret_cast<unsigned*>(tile + first()), word[0]);
        __stcs(reinterpret_cast<unsigned*>(tile + first() + 32), word[1]);
    } else {
#pragma unroll
        for (int e = 0; e < kEach; ++e)
            if (first() + place(e) < count)
                __stwb(reinterpret_cast<signed char*>(tile) + first() + place(e), static_cast<signed char>(code[e]));
    }
}

// ---- A thread's eight elements of a sum ----

template <class Sum>
struct RunningSum {
    Raw<Sum> raw;
    __device__ Sum& at(int e) { return raw.v[e]; }
    template <bool kVector>
    static __device__ RunningSum load(const Sum* sum, std::int64_t begin, int count) {
        return {sum != nullptr ? Raw<Sum>::template load<kVector>(sum + begin, count) : Raw<Sum>::zero()};
    }
    template <bool kVector>
    __device__ void store_to(Sum* sum, std::int64_t begin, int count) const {
        store<kVector>(sum + begin, count, raw.v);
    }
};

template <>
struct RunningSum<std::int64_t> {
    ExactElement v[kEach];
    __device__ ExactElement& at(int e) { return v[e]; }
    template <bool kVector>
    static __device__ RunningSum load(ConstExactSum sum, std::int64_t begin, int count) {
        RunningSum running = {};
        if (sum.high == nullptr) return running;
        const auto high = Raw<Word>::load<kVector>(reinterpret_cast<const Word*>(sum.high) + begin, count);
        const auto low = Raw<Word>::load<kVector>(reinterpret_cast<const Word*>(sum.low) + begin, count);
#pragma unroll
        for (int e = 0; e < kEach; ++e) running.v[e] = {high.at(e), low.at(e)};
        return running;
    }
    template <bool kVector>
    __device__ void store_to(ExactSum sum, std::int64_t begin, int count) const {
        Word high[kEach], low[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            high[e] = v[e].high;
            low[e] = v[e].low;
        }
        store<kVector>(reinterpret_cast<Word*>(sum.high) + begin, count, high);
        store<kVector>(reinterpret_cast<Word*>(sum.low) + begin, count, low);
    }
};

}  // namespace fedcore::cuda
