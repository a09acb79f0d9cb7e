// The scalars that the CPU's loops also use, and their CUDA helpers.
// Compiled with -fmad=false -ftz=false -prec-div=true -prec-sqrt=true, so that each operation rounds as the CPU's does.
#pragma once

#include "kernels/cuda/calls.h"

namespace fedcore::cuda {

__device__ inline float square_roots(float value) {
    return sqrtf(value);
}

#define FEDCORE_SCALAR __device__ inline
// clang-format off
#include "kernels/scalar/codes.inl"
#include "kernels/scalar/forms.inl"
#include "kernels/scalar/exact.inl"
#include "kernels/scalar/norms.inl"
#include "kernels/scalar/optimizer.inl"
// clang-format on
#undef FEDCORE_SCALAR

__device__ inline float to_odd(float value) {
    return value;
}

__device__ inline double infinity() {
    return static_cast<double>(float_of(0x7f800000u));
}

// As an integer that sorts by magnitude, with infinity above all numbers, and every NaN above infinity.
__device__ inline std::uint32_t magnitude_of(float value) {
    return bits_of(value) & 0x7fffffffu;
}
constexpr std::uint32_t kInfinite = 0x7f800000u;

// The value of a 16-bit code. A GPU has an instruction for float16, which differs from F16::value only for NaN.
template <class Half>
__device__ inline float value_of(std::uint32_t code) {
    return Half::value(code);
}
#if defined(__CUDA_ARCH__)
template <>
__device__ inline float value_of<F16>(std::uint32_t code) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(code)));
    return value;
}
#endif

// The random bits of element j, whose bit 5 is not set.
__device__ inline std::uint32_t word_of(Nearest, std::int64_t) {
    return 0;
}
__device__ inline std::uint32_t word_of(const Dither& dither, std::int64_t j) {
    return dither.word(static_cast<std::uint32_t>(j));
}

}  // namespace fedcore::cuda
