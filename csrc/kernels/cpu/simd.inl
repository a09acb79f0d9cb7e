// Vectors of as many float32 as a register of the level holds, or of as many float64 in two registers. Plain loops
// would do, but the compiler keeps neither the 16 lanes of a sum nor a converted vector in registers. Each lane is an
// IEEE operation of its own, so the bits are those of a scalar loop, whatever the width.

#if defined(__AVX512F__)
#    define FEDCORE_WIDTH 8
#elif defined(__AVX__)
#    define FEDCORE_WIDTH 4
#else
#    define FEDCORE_WIDTH 2
#endif

constexpr int kWidth = FEDCORE_WIDTH;  // float64 elements of a register
constexpr int kFull = 2 * kWidth;      // elements of a vector
constexpr int kLanes = 16;             // of every sum of squares: a multiple of every level's kFull

typedef float Floats __attribute__((vector_size(4 * FEDCORE_WIDTH)));
typedef float FullFloats __attribute__((vector_size(8 * FEDCORE_WIDTH)));
typedef double Doubles __attribute__((vector_size(8 * FEDCORE_WIDTH)));
#undef FEDCORE_WIDTH

struct FullDoubles {
    Doubles low, high;
};
inline FullDoubles operator+(FullDoubles a, FullDoubles b) {
    return {a.low + b.low, a.high + b.high};
}
inline FullDoubles operator-(FullDoubles a, FullDoubles b) {
    return {a.low - b.low, a.high - b.high};
}
inline FullDoubles operator*(double a, FullDoubles b) {
    return {a * b.low, a * b.high};
}

// (By intrinsics: GCC 12 makes scalars or several steps of its general conversion.)
inline FullDoubles to_doubles(FullFloats values) {
#if defined(__AVX512F__)
    return {Doubles(_mm512_cvtps_pd(_mm512_castps512_ps256(__m512(values)))),
            Doubles(_mm512_cvtps_pd(_mm512_extractf32x8_ps(__m512(values), 1)))};
#elif defined(__AVX__)
    return {Doubles(_mm256_cvtps_pd(_mm256_castps256_ps128(__m256(values)))),
            Doubles(_mm256_cvtps_pd(_mm256_extractf128_ps(__m256(values), 1)))};
#elif defined(__SSE2__)
    return {Doubles(_mm_cvtps_pd(__m128(values))),
            Doubles(_mm_cvtps_pd(_mm_movehl_ps(__m128(values), __m128(values))))};
#else
    Floats half[2];
    __builtin_memcpy(half, &values, sizeof half);
    return {__builtin_convertvector(half[0], Doubles), __builtin_convertvector(half[1], Doubles)};
#endif
}

// to_doubles of what lies in memory, of which each half is loaded and converted by itself.
inline FullDoubles doubles_at(const float* at) {
#if defined(__AVX__) && !defined(__AVX512F__)
    return {Doubles(_mm256_cvtps_pd(_mm_loadu_ps(at))), Doubles(_mm256_cvtps_pd(_mm_loadu_ps(at + kWidth)))};
#else
    FullFloats values;
    __builtin_memcpy(&values, at, sizeof values);
    return to_doubles(values);
#endif
}

inline FullFloats to_floats(FullDoubles values) {
#if defined(__AVX512F__)
    const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps(__m512d(values.low)));
    return FullFloats(_mm512_insertf32x8(low, _mm512_cvtpd_ps(__m512d(values.high)), 1));
#elif defined(__AVX__)
    const __m256 low = _mm256_castps128_ps256(_mm256_cvtpd_ps(__m256d(values.low)));
    return FullFloats(_mm256_insertf128_ps(low, _mm256_cvtpd_ps(__m256d(values.high)), 1));
#elif defined(__SSE2__)
    return FullFloats(_mm_movelh_ps(_mm_cvtpd_ps(__m128d(values.low)), _mm_cvtpd_ps(__m128d(values.high))));
#else
    const Floats half[2] = {__builtin_convertvector(values.low, Floats), __builtin_convertvector(values.high, Floats)};
    FullFloats full;
    __builtin_memcpy(&full, half, sizeof full);
    return full;
#endif
}

// (By intrinsics: of a loop GCC would call the library, for the sake of errno.)
inline FullFloats square_roots(FullFloats values) {
#if defined(__AVX512F__)
    return FullFloats(_mm512_sqrt_ps(__m512(values)));
#elif defined(__AVX__)
    return FullFloats(_mm256_sqrt_ps(__m256(values)));
#elif defined(__SSE2__)
    return FullFloats(_mm_sqrt_ps(__m128(values)));
#else
    for (int l = 0; l < kFull; ++l) values[l] = __builtin_sqrtf(values[l]);
    return values;
#endif
}

// a * b + c, rounded once: for what is known to be the same rounded twice, since a * b is exact.
#if defined(__AVX512F__)
constexpr bool kHasFused = true;
inline Doubles fused(double a, Doubles b, Doubles c) {
    return Doubles(_mm512_fmadd_pd(_mm512_set1_pd(a), __m512d(b), __m512d(c)));
}
#elif defined(__FMA__)
constexpr bool kHasFused = true;
inline Doubles fused(double a, Doubles b, Doubles c) {
    return Doubles(_mm256_fmadd_pd(_mm256_set1_pd(a), __m256d(b), __m256d(c)));
}
#else
constexpr bool kHasFused = false;
inline Doubles fused(double a, Doubles b, Doubles c) {
    return a * b + c;
}
#endif

inline Doubles fused(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
    return Doubles(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__FMA__)
    return Doubles(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#else
    return a * b + c;
#endif
}

// A vector of the precision of `Value`, from whichever there is.
template <class Value>
struct Full;
template <>
struct Full<float> {
    using Vector = FullFloats;
    static Vector of(FullFloats values) { return values; }
    static Vector of(FullDoubles values) { return to_floats(values); }
};
template <>
struct Full<double> {
    using Vector = FullDoubles;
    static Vector of(FullFloats values) { return to_doubles(values); }
    static Vector of(FullDoubles values) { return values; }
};

inline FullFloats read(const float* at) {
    FullFloats values;
    __builtin_memcpy(&values, at, sizeof values);
    return values;
}
inline FullDoubles read(const double* at) {
    Doubles low, high;
    __builtin_memcpy(&low, at, sizeof low);
    __builtin_memcpy(&high, at + kWidth, sizeof high);
    return {low, high};
}
inline void write(float* at, FullFloats values) {
    __builtin_memcpy(at, &values, sizeof values);
}
inline void write(double* at, FullDoubles values) {
    __builtin_memcpy(at, &values.low, sizeof values.low);
    __builtin_memcpy(at + kWidth, &values.high, sizeof values.high);
}
