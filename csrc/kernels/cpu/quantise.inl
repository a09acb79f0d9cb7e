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

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;

inline std::uint64_t mix64(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

constexpr std::int64_t kGroup = 8 * kCodeBlock;  // elements that an encoder looks at before it writes their codes

// How a range is rounded. Its words are one for every two elements, j and j + 32 of each block of 64.
struct Nearest {
    void fill(std::int64_t, std::int64_t, std::uint32_t*) const {}
    static std::uint32_t bits(const std::uint32_t*, std::int64_t) { return 0; }
};

struct Dither {
    std::uint32_t k0, k1;

    // The words of a group, in a loop of its own: the chain that makes one is long, and more of them overlap this way.
    void fill(std::int64_t first, std::int64_t count, std::uint32_t* __restrict words) const {
        for (std::int64_t block = 0; block < count; block += kCodeBlock) {
            const std::uint32_t start = static_cast<std::uint32_t>(first + block) + k0;
            for (int i = 0; i < kCodeBlock / 2; ++i) {
                std::uint32_t u = start + static_cast<std::uint32_t>(i);
                u ^= u >> 16;
                u *= 0x7feb352du;
                u ^= u >> 15;
                u += k1;
                u *= 0x846ca68bu;
                words[block / 2 + i] = u ^ (u >> 16);
            }
        }
    }

    static std::uint32_t bits(const std::uint32_t* words, std::int64_t i) { return words[i]; }
};

// The range that begins at element `first`: 2^32 is a multiple of any range, so that one key serves all of it.
Dither dither_of(const DitherKey& key, std::int64_t first) {
    const std::uint64_t row_key = mix64(key.seed + kGolden) + key.row + kGolden;
    const std::uint64_t mixed = mix64(row_key ^ mix64(static_cast<std::uint64_t>(first) >> 32));
    return {static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)};
}

inline std::uint32_t turned(std::uint32_t bits) {
    return bits << 16 | bits >> 16;
}

// element(i, bits) for i in [0, count), which is a block or less.
template <class Round, class Element>
inline void each(Round, const std::uint32_t* words, std::int64_t count, const Element& element) {
    constexpr int kHalf = kCodeBlock / 2;
    if (count == kCodeBlock) {
        for (int i = 0; i < kHalf; ++i) {
            const std::uint32_t bits = Round::bits(words, i);
            element(i, bits);
            element(i + kHalf, turned(bits));
        }
    } else {
        for (int i = 0; i < count; ++i) {
            const std::uint32_t bits = Round::bits(words, i % kHalf);
            element(i, i < kHalf ? bits : turned(bits));
        }
    }
}

// What is added below the last kept bit for rounding to nearest: a half, and less by one unit if the kept part is even.
inline std::uint32_t below(Nearest, std::uint32_t, std::uint32_t magnitude, int dropped) {
    return (1u << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
}

inline std::uint32_t below(Dither, std::uint32_t bits, std::uint32_t, int dropped) {
    return bits >> (32 - dropped);
}

// The integer next to t >= 0, t <= 2^10.
inline std::uint32_t whole(Nearest, std::uint32_t, float t) {
    return bits_of(t + 8388608.0f) & 0x7fffffu;  // 2^23: the sum has no place for a fraction
}

inline std::uint32_t whole(Dither, std::uint32_t bits, float t) {
    return (static_cast<std::uint32_t>(static_cast<std::int32_t>(t * 0x1p20f)) + (bits >> 12)) >> 20;
}

// The codecs of 16 bits: a code, and what it stands for. kAny: x may be above kUsual.
struct Bf16 {
    static constexpr std::uint32_t kUsual = 0x7f800000u;  // as a magnitude: an infinity has no fraction to be rounded

    template <bool kAny, class Round>
    static std::uint32_t code(Round round, std::uint32_t random, float x) {
        const std::uint32_t bits = bits_of(x);
        const std::uint32_t rounded = (bits + below(round, random, bits, 16)) >> 16;
        if (!kAny) return rounded;
        return choose((bits & 0x7fffffffu) > kUsual, (bits >> 16 & 0x8000u) | 0x7fc0u, rounded);
    }

    static float value(std::uint32_t code) { return float_of(code << 16); }
};

struct F16 {
    static constexpr std::uint32_t kUsual = (143u << 23) - 1;  // below 2^16

    template <bool kAny, class Round>
    static std::uint32_t code(Round round, std::uint32_t random, float x) {
        const std::uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
        // exponents are rebased from 127 to 15; a carry out of the fraction is one into the exponent, up to infinity
        const std::uint32_t normal = (magnitude - (112u << 23) + below(round, random, magnitude, 13)) >> 13;
        // below 2^-14 a code counts units of 2^-24
        const bool tiny = magnitude < (113u << 23);
        const std::uint32_t subnormal = whole(round, random, float_of(choose(tiny, magnitude, 0)) * 0x1p24f);
        const std::uint32_t finite = choose(tiny, subnormal, normal);
        if (!kAny) return sign | finite;
        return sign | choose(magnitude > kUsual, choose(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u), finite);
    }

    static float value(std::uint32_t code) {
        const std::uint32_t magnitude = code & 0x7fffu;
        const std::uint32_t shifted = magnitude << 13;
        const std::uint32_t rebased = shifted + choose(magnitude >= 0x7c00u, 224u << 23, 112u << 23);  // to 255, by 112
        const std::uint32_t tiny = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
        return float_of((code & 0x8000u) << 16 | choose(magnitude < 0x400u, tiny, rebased));
    }
};

// As an integer, in whose order the magnitudes of numbers are, infinity is above them, and every NaN above that.
inline std::uint32_t largest_magnitude(const float* x, std::int64_t count) {
    std::int32_t largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t magnitude = static_cast<std::int32_t>(bits_of(x[i]) & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return static_cast<std::uint32_t>(largest);
}

template <class Half, bool kAny, bool kBack, class Round>
void to_half_group(const float* __restrict x, Round round, const std::uint32_t* words, std::int64_t count,
                   std::uint16_t* __restrict codes, float* __restrict back) {
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const auto element = [=](std::int64_t i, std::uint32_t random) {
            const std::uint32_t code = Half::template code<kAny>(round, random, x[block + i]);
            codes[block + i] = static_cast<std::uint16_t>(code);
            if (kBack) back[block + i] = Half::value(code);
        };
        each(round, words + block / 2, count - block < kCodeBlock ? count - block : kCodeBlock, element);
    }
}

// With kBack the encoders also write what the codes stand for.
template <class Half, bool kBack, class Round>
void to_half(const float* x, Round round, std::int64_t first, std::int64_t count, std::uint16_t* codes, float* back) {
    alignas(64) std::uint32_t words[kGroup / 2];
    for (std::int64_t i = 0; i < count; i += kGroup) {
        const std::int64_t few = count - i < kGroup ? count - i : kGroup;
        float* const to = kBack ? back + i : nullptr;
        round.fill(first + i, few, words);
        if (largest_magnitude(x + i, few) <= Half::kUsual)
            to_half_group<Half, false, kBack>(x + i, round, words, few, codes + i, to);
        else
            to_half_group<Half, true, kBack>(x + i, round, words, few, codes + i, to);
    }
}

template <class Half>
void from_half(const std::uint16_t* __restrict codes, std::int64_t count, float* __restrict out) {
    for (std::int64_t j = 0; j < count; ++j) out[j] = Half::value(codes[j]);
}

// The code next to x * inverse, which is at most 127; where it is dithered, in fixed point of 24 bits, so that an
// integer addition carries with the right probability.
inline std::int32_t code_of(Nearest, std::uint32_t, float x, float inverse) {
    return static_cast<std::int32_t>(bits_of(x * inverse + 12582912.0f)) - 0x4b400000;  // 3 * 2^22: for both signs
}

inline std::int32_t code_of(Dither, std::uint32_t bits, float x, float inverse) {
    return (static_cast<std::int32_t>(x * (inverse * 0x1p24f)) + static_cast<std::int32_t>(bits >> 8)) >> 24;
}

// The scale of a block by its largest magnitude, and what its elements are multiplied with; 0 where all codes are.
// Without branches: what a maximum is cannot be foreseen.
inline void scale_of(std::uint32_t largest_bits, float* scale, float* inverse) {
    // 127 times it is finite; the next float32 above it, which is FLT_MAX / 127 rounded, would overflow
    constexpr float kMost = 0x1.020406p+121f;
    const bool tiny = largest_bits < (31u << 23);  // below 2^-96; 2^24 * 127 / max is finite elsewhere
    const bool finite = largest_bits < (255u << 23);
    const float largest = float_of(largest_bits), ratio = largest / 127.0f, over = 127.0f / largest;
    const std::uint32_t usual = bits_of(ratio < kMost ? ratio : kMost);
    *scale = float_of(choose(tiny, 0, choose(finite, usual, largest_bits)));
    // one unit less where the largest would come out above 127
    *inverse = float_of(choose(tiny | !finite, 0, bits_of(over) - static_cast<std::uint32_t>(largest * over > 127.0f)));
}

// One block of `count` elements.
template <bool kBack, class Round>
inline void to_int8_block(const float* __restrict x, Round round, const std::uint32_t* words, float scale,
                          float inverse, std::int64_t count, std::int8_t* __restrict codes, float* __restrict back) {
    alignas(64) std::int32_t wide[kCodeBlock];  // narrowed in a loop of its own, which the compiler does better
    if (inverse == 0)
        for (std::int64_t i = 0; i < count; ++i) wide[i] = 0;
    else
        each(round, words, count,
             [&](std::int64_t i, std::uint32_t random) { wide[i] = code_of(round, random, x[i], inverse); });
    for (std::int64_t i = 0; i < count; ++i) codes[i] = static_cast<std::int8_t>(wide[i]);
    if (kBack)
        for (std::int64_t i = 0; i < count; ++i) back[i] = scale * static_cast<float>(wide[i]);
}

// Up to a group; all scales before the codes, because a block alone would wait for its maximum and the division.
template <bool kBack, class Round>
void to_int8_group(const float* x, Round round, std::int64_t first, std::int64_t count, std::int8_t* codes,
                   float* scales, float* back) {
    constexpr std::int64_t kBlocks = kGroup / kCodeBlock;
    alignas(64) std::uint32_t words[kGroup / 2];
    std::uint32_t largest[kBlocks] = {};
    float inverses[kBlocks], found[kBlocks];
    const std::int64_t full = count / kCodeBlock, rest = count % kCodeBlock;
    round.fill(first, count, words);
    for (std::int64_t b = 0; b < full; ++b) largest[b] = largest_magnitude(x + b * kCodeBlock, kCodeBlock);
    if (rest > 0) largest[full] = largest_magnitude(x + full * kCodeBlock, rest);
    for (std::int64_t b = 0; b < kBlocks; ++b) scale_of(largest[b], found + b, inverses + b);
    const auto encode_block = [&](std::int64_t b, std::int64_t few) {
        const std::int64_t i = b * kCodeBlock;
        scales[b] = found[b];
        to_int8_block<kBack>(x + i, round, words + i / 2, found[b], inverses[b], few, codes + i,
                             kBack ? back + i : nullptr);
    };
    for (std::int64_t b = 0; b < full; ++b) encode_block(b, kCodeBlock);
    if (rest > 0) encode_block(full, rest);
}

template <bool kBack, class Round>
void to_int8(const float* x, Round round, std::int64_t first, std::int64_t count, std::int8_t* codes, float* scales,
             float* back) {
    for (std::int64_t i = 0; i < count; i += kGroup)
        to_int8_group<kBack>(x + i, round, first + i, count - i < kGroup ? count - i : kGroup, codes + i,
                             scales + i / kCodeBlock, kBack ? back + i : nullptr);
}

// Elements [first, first + count) of a row, which lie at x, into the row's codes.
template <bool kBack, class Round>
void encode(const float* x, Codec codec, Round round, std::int64_t first, std::int64_t count, void* codes,
            float* scales, float* back) {
    if (codec == Codec::bf16)
        to_half<Bf16, kBack>(x, round, first, count, static_cast<std::uint16_t*>(codes) + first, back);
    else if (codec == Codec::f16)
        to_half<F16, kBack>(x, round, first, count, static_cast<std::uint16_t*>(codes) + first, back);
    else
        to_int8<kBack>(x, round, first, count, static_cast<std::int8_t*>(codes) + first, scales + first / kCodeBlock,
                       back);
}

void quantise(const float* x, Codec codec, const DitherKey* key, std::int64_t begin, std::int64_t end, void* codes,
              float* scales) {
    if (key != nullptr)
        encode<false>(x + begin, codec, dither_of(*key, begin), begin, end - begin, codes, scales, nullptr);
    else
        encode<false>(x + begin, codec, Nearest{}, begin, end - begin, codes, scales, nullptr);
}

void from_int8(const std::int8_t* __restrict codes, const float* __restrict scales, std::int64_t count,
               float* __restrict out) {
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const float scale = scales[block / kCodeBlock];
        const std::int64_t stop = count - block < kCodeBlock ? count : block + kCodeBlock;
        for (std::int64_t j = block; j < stop; ++j) out[j] = scale * static_cast<float>(codes[j]);
    }
}

// What the codes of elements [first, first + count) of a row stand for, at `out`.
void decode(const void* codes, const float* scales, Codec codec, std::int64_t first, std::int64_t count, float* out) {
    if (codec == Codec::bf16)
        from_half<Bf16>(static_cast<const std::uint16_t*>(codes) + first, count, out);
    else if (codec == Codec::f16)
        from_half<F16>(static_cast<const std::uint16_t*>(codes) + first, count, out);
    else
        from_int8(static_cast<const std::int8_t*>(codes) + first, scales + first / kCodeBlock, count, out);
}

void dequantise(const void* codes, const float* scales, Codec codec, std::int64_t begin, std::int64_t end, float* out) {
    decode(codes, scales, codec, begin, end - begin, out + begin);
}
