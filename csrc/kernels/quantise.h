// quantise: float32 to 16 or 8 bits and back. Elementwise (int8: per block of 64), so the number of threads does not
// matter.
#pragma once

#include <cstdint>

namespace fedcore {

// bf16: the upper half of a float32. f16: IEEE binary16. int8: codes in -127..127 and, for every 64 elements, one
// float32 scale = max|x| / 127, so that x is about scale * code. f32: not encoded, only for rows of `exchange`.
enum class Codec { f32, bf16, f16, int8 };

inline constexpr std::int64_t kCodeBlock = 64;  // elements that share a scale

// The key of stochastic rounding: up with a probability equal to the fraction that would be lost, which is unbiased.
// The random bits of element j are a hash of (seed, row, j).
//
//     key_h = mix64(mix64(seed + G) + row + G ^ mix64(h)), h = j >> 32;  its low and high half are k0 and k1
//     u = (j mod 2^32 without the bit 32) + k0
//     u ^= u >> 16;  u *= 0x7feb352d;  u ^= u >> 15;  u += k1;  u *= 0x846ca68b;  u ^= u >> 16
//
// in unsigned arithmetic, G = 0x9e3779b97f4a7c15 and mix64 the finaliser of splitmix64. j and j + 32 of a block of 64
// share u, which the second rotates by 16 bits. Each uses the upper 16 bits and, as finer steps, the other's upper
// bits. bf16 uses the upper 16 bits, f16 the upper 13 (20 where the result is subnormal) and int8 the upper 24, as the
// fraction of a fixed-point number.
struct DitherKey {
    std::uint64_t seed, row;
    std::int64_t first = 0;  // j of element 0, if this is a part of a row: a multiple of 64
};

// Codes of x: uint16[n] for bf16 and f16, int8[n] for int8; with a key rounded stochastically, else (null) to the
// nearest, ties to even.
//   scales: float32[ceil(n / 64)] for int8, else null. Nothing overlaps. Moves 6 n or (5 + 1/16) n bytes.
//   bf16, f16: an infinity stays an infinity and a NaN becomes the quiet NaN of its sign; numbers that round past the
//   largest finite number become infinities, as in IEEE; subnormal numbers are kept.
//   int8: a block with a NaN or an infinity gets it as its scale, and codes 0; a block whose largest magnitude is below
//   2^-96 gets scale 0 and codes 0.
void quantise(const float* x, Codec codec, const DitherKey* key, std::int64_t n, void* codes, float* scales);

// out[j] = the value of code j: exact for bf16 and f16 (where a NaN becomes quiet), float32(scale * code) for int8.
void dequantise(const void* codes, const float* scales, Codec codec, std::int64_t n, float* out);

}  // namespace fedcore
