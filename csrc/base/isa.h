// Which instruction sets this machine and this build have, and which one the kernels use.
#pragma once

namespace fedcore {

enum class Isa { baseline, avx2, avx512 };  // ascending; aarch64 has only `baseline`, which is NEON

const char* name(Isa level);

// The highest level that both this build and this machine have. Throws std::runtime_error if they have no common level
// because the build is for another machine.
Isa best_isa();

// best_isa(), or the level that FEDCORE_ISA forces, read once at the first call. Throws std::runtime_error if
// that level is unknown or unavailable.
Isa active_isa();

}  // namespace fedcore

// Declares code that is compiled once for each level. Levels that a build lacks are never used.
#define FEDCORE_EACH_LEVEL(declaration) \
    namespace baseline {                \
    extern declaration;                 \
    }                                   \
    namespace avx2 {                    \
    extern declaration;                 \
    }                                   \
    namespace avx512 {                  \
    extern declaration;                 \
    }

#if defined(FEDCORE_HAS_BASELINE)
#    define FEDCORE_IF_BASELINE(address) address
#else
#    define FEDCORE_IF_BASELINE(address) nullptr
#endif
#if defined(FEDCORE_HAS_AVX2)
#    define FEDCORE_IF_AVX2(address) address
#else
#    define FEDCORE_IF_AVX2(address) nullptr
#endif
#if defined(FEDCORE_HAS_AVX512)
#    define FEDCORE_IF_AVX512(address) address
#else
#    define FEDCORE_IF_AVX512(address) nullptr
#endif

// The address of the active level's object or function of a name; Type is the declared type.
#define FEDCORE_OF_LEVEL(Type, name) \
    of_level<Type>(FEDCORE_IF_BASELINE(&baseline::name), FEDCORE_IF_AVX2(&avx2::name), FEDCORE_IF_AVX512(&avx512::name))

namespace fedcore {

template <class Type>
Type* of_level(Type* baseline, Type* avx2, Type* avx512) {
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
