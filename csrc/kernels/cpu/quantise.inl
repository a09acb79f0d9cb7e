// Loops without branches over the scalars of scalar/codes.inl, which the compiler turns into vectors on every level.

constexpr std::int64_t kGroup = 8 * kCodeBlock;  // elements that an encoder looks at before it writes their codes

// The words of a group, one for every two elements, j and j + 32 of each block of 64, in a loop of its own: the chain
// that makes one is long, and more of them overlap this way.
inline void fill_words(Nearest, std::int64_t, std::int64_t, std::uint32_t*) {}
inline void fill_words(Dither dither, std::int64_t first, std::int64_t count, std::uint32_t* __restrict words) {
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const std::uint32_t start = static_cast<std::uint32_t>(first + block);
        for (int i = 0; i < kCodeBlock / 2; ++i)
            words[block / 2 + i] = dither.word(start + static_cast<std::uint32_t>(i));
    }
}

inline std::uint32_t word_at(Nearest, const std::uint32_t*, std::int64_t) {
    return 0;
}
inline std::uint32_t word_at(Dither, const std::uint32_t* words, std::int64_t i) {
    return words[i];
}

// element(i, bits) for i in [0, count), which is a block or less.
template <class Round, class Element>
inline void each(Round round, const std::uint32_t* words, std::int64_t count, const Element& element) {
    constexpr int kHalf = kCodeBlock / 2;
    if (count == kCodeBlock) {
        for (int i = 0; i < kHalf; ++i) {
            const std::uint32_t bits = word_at(round, words, i);
            element(i, bits);
            element(i + kHalf, turned(bits));
        }
    } else {
        for (int i = 0; i < count; ++i) {
            const std::uint32_t bits = word_at(round, words, i % kHalf);
            element(i, i < kHalf ? bits : turned(bits));
        }
    }
}

// As an integer that sorts by magnitude, with infinity above all numbers, and every NaN above infinity.
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

// With kBack the encoders also write the decoded values.
template <class Half, bool kBack, class Round>
void to_half(const float* x, Round round, std::int64_t first, std::int64_t count, std::uint16_t* codes, float* back) {
    alignas(64) std::uint32_t words[kGroup / 2];
    for (std::int64_t i = 0; i < count; i += kGroup) {
        const std::int64_t few = count - i < kGroup ? count - i : kGroup;
        float* const to = kBack ? back + i : nullptr;
        fill_words(round, first + i, few, words);
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

// One block of `count` elements.
template <bool kBack, class Round>
inline void to_int8_block(const float* __restrict x, Round round, const std::uint32_t* words, float scale,
                          float inverse, std::int64_t count, std::int8_t* __restrict codes, float* __restrict back) {
    alignas(64) std::int32_t wide[kCodeBlock];  // narrowed in a separate loop, which the compiler vectorises better
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
    fill_words(round, first, count, words);
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

// Decodes elements [first, first + count) of a row into `out`.
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
