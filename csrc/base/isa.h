// Which instruction sets this machine and this build have, and which one the kernels use.
#pragma once

// What is declared with this is compiled once for each level; one that the build lacks has the address 0.
#define FEDCORE_EACH_LEVEL(declaration)       \
    namespace baseline {                      \
    extern declaration __attribute__((weak)); \
    }                                         \
    namespace avx2 {                          \
    extern declaration __attribute__((weak)); \
    }                                         \
    namespace avx512 {                        \
    extern declaration __attribute__((weak)); \
    }

namespace fedcore {

enum class Isa { baseline, avx2, avx512 };  // ascending; aarch64 has only `baseline`, which is NEON

const char* name(Isa level);

// The highest level that both this build and this machine have. Throws std::runtime_error if there is none: the build
// is for another machine alone.
Isa best_isa();

// best_isa(), or the level that FEDCORE_ISA forces, read once at the first call. Throws std::runtime_error if
// that is unknown or not to be had.
Isa active_isa();

// That of the three which the active level has.
template <class Twin>
Twin* of_level(Twin* baseline, Twin* avx2, Twin* avx512) {
    switch (active_isa()) {
        case Isa::avx512:
            return avx512;
        case Isa::avx2:
            return avx2;
        default:
            return baseline;
    }
}

}  // namespace fedcore
