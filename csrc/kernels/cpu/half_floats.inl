// Rows of bfloat16 and float16, read a vector at a time. Where a level has no instruction for it, the same is done by
// integer arithmetic and selections without branches.

// A bfloat16 is the upper half of a float32, a float16 an IEEE binary16.
struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

typedef std::int32_t FullIntegers __attribute__((vector_size(4 * kFull)));

// 16 bits each, and zeros above them. (By intrinsics: GCC's general conversion takes several steps.)
inline FullIntegers read_codes(const void* at) {
#if defined(__AVX512F__)
    return FullIntegers(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at))));
#elif defined(__AVX2__)
    return FullIntegers(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
#elif defined(__SSE2__)
    return FullIntegers(_mm_unpacklo_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(at)), _mm_setzero_si128()));
#else
    typedef std::uint16_t Codes __attribute__((vector_size(2 * kFull)));
    Codes codes;
    __builtin_memcpy(&codes, at, sizeof codes);
    return __builtin_convertvector(codes, FullIntegers);
#endif
}

inline FullFloats read(const BFloat16* at) {
    return reinterpret_cast<FullFloats>(read_codes(at) << 16);
}

inline FullFloats read(const Float16* at) {
#if defined(__AVX512F__)
    return FullFloats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__F16C__)
    return FullFloats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
    const FullIntegers code = read_codes(at), magnitude = code & 0x7fff;
    // a comparison is -1 or 0 in each lane
    const FullIntegers tiny = magnitude < 0x400, special = magnitude >= 0x7c00, nan = magnitude > 0x7c00;
    // exponents are rebased from 15 to 127, that of infinities and NaN from 31 to 255
    const FullIntegers rebased = (magnitude << 13) + (112 << 23) + (special & (112 << 23));
    // below 2^-14 a code counts units of 2^-24
    const FullFloats subnormal = __builtin_convertvector(magnitude, FullFloats) * 0x1p-24f;
    // every NaN is made quiet, as the instruction does
    const FullIntegers positive =
        (tiny & reinterpret_cast<FullIntegers>(subnormal)) | (~tiny & rebased) | (nan & (1 << 22));
    return reinterpret_cast<FullFloats>(positive | (code - magnitude) << 16);
#endif
}
