// All of it is integer arithmetic and selections without branches, which the compiler turns into vectors on every
// level: the conversions of newer processors would have to be matched bit by bit on the older ones.

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// `a` if the condition holds, else `b`: by masks, because GCC makes a branch of ?: and cannot make a vector of that.
inline std::uint32_t choose(bool condition, std::uint32_t a, std::uint32_t b) {
    return b ^ ((a ^ b) & (0u - static_cast<std::uint32_t>(condition)));
}

// 32 random bits of element j; see quantise.h.
struct Dither {
    std::uint32_t k0, k1;

    std::uint32_t operator()(std::int64_t j) const {
        std::uint32_t u = static_cast<std::uint32_t>(j) + k0;
        u ^= u >> 16;
        u *= 0x7feb352du;
        u ^= u >> 15;
        u += k1;
        u *= 0x846ca68bu;
        return u ^ (u >> 16);
    }
};

// What is added below the last kept bit for rounding to nearest: a half, and less by one unit if the kept part is even.
struct Nearest {};

inline std::uint32_t below(Nearest, std::int64_t, std::uint32_t magnitude, int dropped) {
    return (1u << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
}

inline std::uint32_t below(Dither dither, std::int64_t j, std::uint32_t, int dropped) {
    return dither(j) >> (32 - dropped);
}

// The integer next to t >= 0, t < 2^22.
inline std::uint32_t whole(Nearest, std::int64_t, float t) {
    return bits_of(t + 8388608.0f) & 0x7fffffu;  // 2^23: the sum has no place for a fraction
}

inline std::uint32_t whole(Dither dither, std::int64_t j, float t) {
    const std::int32_t floor = static_cast<std::int32_t>(t);
    const float fraction = t - static_cast<float>(floor);
    const float u = static_cast<float>(static_cast<std::int32_t>(dither(j) >> 8)) * 0x1p-24f;
    return static_cast<std::uint32_t>(floor + (u < fraction ? 1 : 0));
}

template <class Round>
void to_bf16(const float* __restrict x, Round round, std::int64_t begin, std::int64_t end,
             std::uint16_t* __restrict codes) {
    for (std::int64_t j = begin; j < end; ++j) {
        const std::uint32_t bits = bits_of(x[j]), magnitude = bits & 0x7fffffffu;
        const std::uint32_t rounded = (bits + below(round, j, bits, 16)) >> 16;
        const std::uint32_t special = (bits >> 16 & 0x8000u) | choose(magnitude > 0x7f800000u, 0x7fc0u, 0x7f80u);
        codes[j] = static_cast<std::uint16_t>(choose(magnitude >= 0x7f800000u, special, rounded));
    }
}

template <class Round>
void to_f16(const float* __restrict x, Round round, std::int64_t begin, std::int64_t end,
            std::uint16_t* __restrict codes) {
    for (std::int64_t j = begin; j < end; ++j) {
        const std::uint32_t bits = bits_of(x[j]), magnitude = bits & 0x7fffffffu;
        // exponents are rebased from 127 to 15; a carry out of the fraction is one into the exponent, up to infinity
        const std::uint32_t normal = (magnitude - (112u << 23) + below(round, j, magnitude, 13)) >> 13;
        // below 2^-14 a code counts units of 2^-24
        const bool tiny = magnitude < (113u << 23);
        const std::uint32_t subnormal = whole(round, j, float_of(choose(tiny, magnitude, 0)) * 0x1p24f);
        const std::uint32_t finite = choose(tiny, subnormal, normal);
        const std::uint32_t large = choose(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);
        codes[j] =
            static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | choose(magnitude >= (143u << 23), large, finite));
    }
}

inline std::int32_t code_of(Nearest, std::int64_t, float t) {
    return static_cast<std::int32_t>(bits_of(t + 12582912.0f)) - 0x4b400000;  // 3 * 2^22: for both signs
}

inline std::int32_t code_of(Dither dither, std::int64_t j, float t) {
    const std::int32_t cut = static_cast<std::int32_t>(t);
    const std::int32_t floor = cut - (static_cast<float>(cut) > t ? 1 : 0);
    const float fraction = t - static_cast<float>(floor);
    const float u = static_cast<float>(static_cast<std::int32_t>(dither(j) >> 8)) * 0x1p-24f;
    return floor + (u < fraction ? 1 : 0);
}

// 127 times it is finite; the next float32 above it, which is FLT_MAX / 127 rounded, would overflow.
constexpr float kLargestScale = 0x1.020406p+121f;

// One block of `count` elements; returns its scale.
template <class Round>
inline float to_int8_block(const float* __restrict x, Round round, std::int64_t j, std::int64_t count,
                           std::int8_t* __restrict codes) {
    // Magnitudes compare as integers like the numbers do, and a NaN is above them all: it cannot get lost.
    std::int32_t largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(x[i]) & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest < (15 << 23) || largest >= (255 << 23)) {  // below 2^-112, where 127 / max would overflow; not finite
        for (std::int64_t i = 0; i < count; ++i) codes[i] = 0;
        return largest < (15 << 23) ? 0.0f : float_of(static_cast<std::uint32_t>(largest));
    }
    const float most = float_of(static_cast<std::uint32_t>(largest));
    const float inverse = 127.0f / most;
    for (std::int64_t i = 0; i < count; ++i) {
        std::int32_t code = code_of(round, j + i, x[i] * inverse);
        code = code > 127 ? 127 : code;  // 127 / max may be rounded up
        code = code < -127 ? -127 : code;
        codes[i] = static_cast<std::int8_t>(code);
    }
    const float scale = most / 127.0f;
    return scale < kLargestScale ? scale : kLargestScale;
}

template <class Round>
void to_int8(const float* x, Round round, std::int64_t begin, std::int64_t end, std::int8_t* codes, float* scales) {
    std::int64_t j = begin;
    for (; j + kCodeBlock <= end; j += kCodeBlock)
        scales[j / kCodeBlock] = to_int8_block(x + j, round, j, kCodeBlock, codes + j);
    if (j < end) scales[j / kCodeBlock] = to_int8_block(x + j, round, j, end - j, codes + j);
}

template <class Round>
void quantise_rounding(const float* x, Codec codec, Round round, std::int64_t begin, std::int64_t end, void* codes,
                       float* scales) {
    if (codec == Codec::bf16)
        to_bf16(x, round, begin, end, static_cast<std::uint16_t*>(codes));
    else if (codec == Codec::f16)
        to_f16(x, round, begin, end, static_cast<std::uint16_t*>(codes));
    else
        to_int8(x, round, begin, end, static_cast<std::int8_t*>(codes), scales);
}

void quantise(const float* x, Codec codec, const std::uint64_t* key, std::int64_t begin, std::int64_t end, void* codes,
              float* scales) {
    if (key == nullptr)
        quantise_rounding(x, codec, Nearest{}, begin, end, codes, scales);
    else
        quantise_rounding(x, codec, Dither{static_cast<std::uint32_t>(*key), static_cast<std::uint32_t>(*key >> 32)},
                          begin, end, codes, scales);
}

void from_bf16(const std::uint16_t* __restrict codes, std::int64_t begin, std::int64_t end, float* __restrict out) {
    for (std::int64_t j = begin; j < end; ++j) out[j] = float_of(static_cast<std::uint32_t>(codes[j]) << 16);
}

void from_f16(const std::uint16_t* __restrict codes, std::int64_t begin, std::int64_t end, float* __restrict out) {
    for (std::int64_t j = begin; j < end; ++j) {
        const std::uint32_t code = codes[j], magnitude = code & 0x7fffu;
        const std::uint32_t shifted = magnitude << 13;
        const std::uint32_t rebased = shifted + choose(magnitude >= 0x7c00u, 224u << 23, 112u << 23);  // to 255, by 112
        const std::uint32_t tiny = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
        out[j] = float_of((code & 0x8000u) << 16 | choose(magnitude < 0x400u, tiny, rebased));
    }
}

void from_int8(const std::int8_t* __restrict codes, const float* __restrict scales, std::int64_t begin,
               std::int64_t end, float* __restrict out) {
    for (std::int64_t block = begin; block < end; block += kCodeBlock) {
        const float scale = scales[block / kCodeBlock];
        const std::int64_t stop = end - block < kCodeBlock ? end : block + kCodeBlock;
        for (std::int64_t j = block; j < stop; ++j) out[j] = scale * static_cast<float>(codes[j]);
    }
}

void dequantise(const void* codes, const float* scales, Codec codec, std::int64_t begin, std::int64_t end, float* out) {
    if (codec == Codec::bf16)
        from_bf16(static_cast<const std::uint16_t*>(codes), begin, end, out);
    else if (codec == Codec::f16)
        from_f16(static_cast<const std::uint16_t*>(codes), begin, end, out);
    else
        from_int8(static_cast<const std::int8_t*>(codes), scales, begin, end, out);
}
