// Rounding of a number to fewer bits, and the random bits of the rounding. Included by the CPU's levels and by CUDA's
// kernels, each in its own namespace; FEDCORE_SCALAR is the prefix of a function in each.
//
// The code uses integer arithmetic and selections without branches, which the compiler vectorises on every level. The
// conversion instructions of newer processors would have to be reproduced bit by bit on older ones.

FEDCORE_SCALAR std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

FEDCORE_SCALAR float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// `a` if the condition holds, else `b`: by masks, because GCC makes a branch of ?: and cannot make a vector of that.
FEDCORE_SCALAR std::uint32_t choose(bool condition, std::uint32_t a, std::uint32_t b) {
    return b ^ ((a ^ b) & (0u - static_cast<std::uint32_t>(condition)));
}

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;

FEDCORE_SCALAR std::uint64_t mix64(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// How a number is rounded: to the nearest, or up with a probability equal to the fraction that would be lost.
struct Nearest {};

struct Dither {
    std::uint32_t k0, k1;

    // What elements j and j + 32 of a block of 64 share; j has bit 5 not set, and is taken modulo 2^32.
    FEDCORE_SCALAR std::uint32_t word(std::uint32_t j) const {
        std::uint32_t u = j + k0;
        u ^= u >> 16;
        u *= 0x7feb352du;
        u ^= u >> 15;
        u += k1;
        u *= 0x846ca68bu;
        return u ^ (u >> 16);
    }
};

// The range that begins at element `first`, which reaches past no multiple of 2^32, so that one key serves all of it: a
// block, or less. Where a part of a row begins is added once, to k0, as its multiple of 64 leaves bit 5 alone.
FEDCORE_SCALAR Dither dither_of(const DitherKey& key, std::int64_t first) {
    const std::uint64_t row_key = mix64(key.seed + kGolden) + key.row + kGolden;
    const std::uint64_t mixed = mix64(row_key ^ mix64(static_cast<std::uint64_t>(key.first + first) >> 32));
    return {static_cast<std::uint32_t>(mixed) + static_cast<std::uint32_t>(key.first),
            static_cast<std::uint32_t>(mixed >> 32)};
}

// A word as the second of its elements uses it.
FEDCORE_SCALAR std::uint32_t turned(std::uint32_t bits) {
    return bits << 16 | bits >> 16;
}

// What is added below the last kept bit for rounding to nearest: a half, and less by one unit if the kept part is even.
FEDCORE_SCALAR std::uint32_t below(Nearest, std::uint32_t, std::uint32_t magnitude, int dropped) {
    return (1u << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1);
}

FEDCORE_SCALAR std::uint32_t below(Dither, std::uint32_t bits, std::uint32_t, int dropped) {
    return bits >> (32 - dropped);
}

// The integer next to t >= 0, t <= 2^10.
FEDCORE_SCALAR std::uint32_t whole(Nearest, std::uint32_t, float t) {
    return bits_of(t + 8388608.0f) & 0x7fffffu;  // 2^23: the sum has no place for a fraction
}

FEDCORE_SCALAR std::uint32_t whole(Dither, std::uint32_t bits, float t) {
    return (static_cast<std::uint32_t>(static_cast<std::int32_t>(t * 0x1p20f)) + (bits >> 12)) >> 20;
}

// The 16-bit codecs: a number's code, and a code's value. kAny: x may be above kUsual.
struct Bf16 {
    static constexpr std::uint32_t kUsual = 0x7f800000u;  // as a magnitude: an infinity has no fraction to be rounded

    template <bool kAny, class Round>
    static FEDCORE_SCALAR std::uint32_t code(Round round, std::uint32_t random, float x) {
        const std::uint32_t bits = bits_of(x);
        const std::uint32_t rounded = (bits + below(round, random, bits, 16)) >> 16;
        if (!kAny) return rounded;
        return choose((bits & 0x7fffffffu) > kUsual, (bits >> 16 & 0x8000u) | 0x7fc0u, rounded);
    }

    static FEDCORE_SCALAR float value(std::uint32_t code) { return float_of(code << 16); }
};

struct F16 {
    static constexpr std::uint32_t kUsual = (143u << 23) - 1;  // below 2^16

    template <bool kAny, class Round>
    static FEDCORE_SCALAR std::uint32_t code(Round round, std::uint32_t random, float x) {
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

    static FEDCORE_SCALAR float value(std::uint32_t code) {
        const std::uint32_t magnitude = code & 0x7fffu;
        const std::uint32_t shifted = magnitude << 13;
        const std::uint32_t rebased = shifted + choose(magnitude >= 0x7c00u, 224u << 23, 112u << 23);  // to 255, by 112
        const std::uint32_t tiny = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
        return float_of((code & 0x8000u) << 16 | choose(magnitude < 0x400u, tiny, rebased));
    }
};

// The code next to x * inverse, which is at most 127; where it is dithered, in fixed point of 24 bits, so that an
// integer addition carries with the right probability.
FEDCORE_SCALAR std::int32_t code_of(Nearest, std::uint32_t, float x, float inverse) {
    return static_cast<std::int32_t>(bits_of(x * inverse + 12582912.0f)) - 0x4b400000;  // 3 * 2^22: for both signs
}

FEDCORE_SCALAR std::int32_t code_of(Dither, std::uint32_t bits, float x, float inverse) {
    return (static_cast<std::int32_t>(x * (inverse * 0x1p24f)) + static_cast<std::int32_t>(bits >> 8)) >> 24;
}

// The scale of a block by its largest magnitude, and the factor of its elements; 0 if all codes are 0. Without
// branches, because maxima are unpredictable.
FEDCORE_SCALAR void scale_of(std::uint32_t largest_bits, float* scale, float* inverse) {
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

// The float32 next to it towards zero, the last bit set if anything was lost: what this is rounded to in fewer bits the
// float64 itself is rounded to.
FEDCORE_SCALAR float to_odd(double value) {
    const float nearest = static_cast<float>(value);
    const double back = nearest;
    const std::uint32_t beyond = __builtin_fabs(back) > __builtin_fabs(value) ? 1 : 0, lost = back != value ? 1 : 0;
    return float_of((bits_of(nearest) - beyond) | lost);
}
