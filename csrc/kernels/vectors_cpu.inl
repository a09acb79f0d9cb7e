// A vector of the level's own width at a time. Plain loops would do, but the compiler keeps neither the 16 lanes of a
// sum nor a converted vector in registers. Each lane is an IEEE operation of its own, so the bits are those of a
// scalar loop, whatever the width.

#if defined(__AVX512F__)
#    define FEDCORE_WIDTH 8
#elif defined(__AVX__)
#    define FEDCORE_WIDTH 4
#else
#    define FEDCORE_WIDTH 2
#endif

constexpr int kWidth = FEDCORE_WIDTH;  // elements of a vector, of which the float64 one fills a register
constexpr int kLanes = 16;             // of every sum of squares: a multiple of every level's width
constexpr int kVectors = kLanes / kWidth;

typedef float Floats __attribute__((vector_size(4 * FEDCORE_WIDTH)));
typedef double Doubles __attribute__((vector_size(8 * FEDCORE_WIDTH)));
// The same in memory, at any element.
typedef float FloatsAt __attribute__((vector_size(4 * FEDCORE_WIDTH), aligned(4), may_alias));
typedef double DoublesAt __attribute__((vector_size(8 * FEDCORE_WIDTH), aligned(8), may_alias));
#undef FEDCORE_WIDTH

inline Floats load(const float* at) {
    return *reinterpret_cast<const FloatsAt*>(at);
}
inline Doubles load(const double* at) {
    return *reinterpret_cast<const DoublesAt*>(at);
}
inline void store(float* at, Floats values) {
    *reinterpret_cast<FloatsAt*>(at) = values;
}
inline void store(double* at, Doubles values) {
    *reinterpret_cast<DoublesAt*>(at) = values;
}

// A vector in the precision of a sum.
template <class Sum>
struct In;
template <>
struct In<float> {
    using Vector = Floats;
    static Floats of(Floats values) { return values; }
};
template <>
struct In<double> {
    using Vector = Doubles;
#if defined(__AVX512F__)  // one instruction, of which GCC 12 makes five
    static Doubles of(Floats values) { return _mm512_maskz_cvtps_pd(0xff, values); }
#else
    static Doubles of(Floats values) { return __builtin_convertvector(values, Doubles); }
#endif
};
