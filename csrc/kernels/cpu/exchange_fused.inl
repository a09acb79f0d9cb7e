// The exchange of a chunk through a codec in registers, for the level whose instructions narrow and widen whole
// vectors. It does the work of the stages of cpu/exchange.inl with the same operations, and so the same bits. It
// handles only the usual case: replaced rows, old and new row in the same codec, whole blocks of a scale. kRows clients
// of one base pass together, as in fold_piece.

// Clients whose rows are exchanged in one pass, if they have the same arrays; and float32 rows at most.
constexpr int kExchanges = 2, kMostExchanges = 4;

// The arrays of a client's chunk.
struct Passing {
    Streams at;
    Row old_row, new_row;
    Dither dither;
    Chunk next;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of operands never set in the functions that take no mask

// Whether fused_chunk may be called for a client, except for the chunk's length.
inline bool is_fusible(const RowExchange& row, const Forms& forms) {
    const Codec codec = row.new_row.codec;
    return (codec == Codec::bf16 || codec == Codec::int8) && forms.replaces() &&
           (row.old_row.data == nullptr || row.old_row.codec == codec);
}

// The random words of a block, each for elements j and j + 32: what fill_words makes. Of j = 0 .. 15 and 16 .. 31.
struct BlockWords {
    __m512i of[2];
};

inline BlockWords words_of(Dither dither, std::int64_t first) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const std::uint32_t start = static_cast<std::uint32_t>(first) + dither.k0;
    BlockWords words;
    for (int v = 0; v < 2; ++v) {
        __m512i u =
            _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(start + 16u * static_cast<unsigned>(v))));
        u = _mm512_xor_si512(u, _mm512_maskz_srli_epi32(kAll, u, 16));
        u = _mm512_mullo_epi32(u, _mm512_set1_epi32(0x7feb352d));
        u = _mm512_xor_si512(u, _mm512_maskz_srli_epi32(kAll, u, 15));
        u = _mm512_add_epi32(u, _mm512_set1_epi32(static_cast<int>(dither.k1)));
        u = _mm512_mullo_epi32(u, _mm512_set1_epi32(static_cast<int>(0x846ca68bu)));
        words.of[v] = _mm512_xor_si512(u, _mm512_maskz_srli_epi32(kAll, u, 16));
    }
    return words;
}

template <bool kBase>
inline __m512 gradient_of(__m512 base, const float* y, __m512 scale) {
    const __m512 sent = _mm512_loadu_ps(y);
    return kBase ? (base - sent) * scale : -sent * scale;
}

inline FullDoubles doubles_of(__m512 values) {
    return to_doubles(FullFloats(values));
}

// Of 16 elements, so that none has to be moved to be widened.
struct Halves {
    __m256 low, high;
};

// sum + weight * (stored - old + anchor), 16 elements of it.
template <bool kOld, bool kAnchor>
inline FullDoubles add_change(FullDoubles sum, __m512 stored, Halves old, const float* anchor, double weight) {
    FullDoubles change = doubles_of(stored);
    if (kOld) change = change - FullDoubles{Doubles(_mm512_cvtps_pd(old.low)), Doubles(_mm512_cvtps_pd(old.high))};
    if (kAnchor) change = change + to_doubles(read(anchor));
    return sum + weight * change;
}

// 16 elements' worth of the next chunk, the lines being fetched one after another.
[[gnu::always_inline]] inline void fetch_vector(const Chunk& next, std::int64_t j) {
    __builtin_prefetch(next.y.at + j * next.y.size);
    if ((j & 16) == 0) __builtin_prefetch(next.row.at + j * next.row.size);
}

// The numbers whose upper halves are the codes; a NaN, which the addition might carry into another number, becomes the
// quiet one of its sign, as in Bf16::code.
inline __m512i rounded_bf16(__m512 values, __m512i random) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i quiet = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0x80000000u))),
                                          _mm512_set1_epi32(0x7fc00000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_add_epi32(bits, random), is_nan, quiet);
}

template <int kRows, bool kBase, bool kOld, bool kAnchor>
void fused_bf16(const Passing* rows, std::int64_t first, std::int64_t count, double* sum, float (*lanes)[kLanes]) {
    // The upper or the lower half of 32 numbers, in order; and 16 codes as such upper halves.
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m256i widen = _mm256_set_epi16(7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    const __m256i widen_rest = _mm256_add_epi16(widen, _mm256_set1_epi16(8));
    const __m512i kept = _mm512_set1_epi32(-65536), low = _mm512_set1_epi32(0xffff);
    __m512 squares[kRows];
    for (int r = 0; r < kRows; ++r) squares[r] = _mm512_loadu_ps(lanes[r]);
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        BlockWords words[kRows];
        for (int r = 0; r < kRows; ++r) words[r] = words_of(rows[r].dither, first + block);
#    pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const std::int64_t at_half = block + half * kCodeBlock / 2;
            __m512i rounded[kRows][2];
            __m256i old_codes[kRows][2];
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < 2; ++v)
                    if (kOld)
                        old_codes[r][v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
                            static_cast<const std::uint16_t*>(rows[r].old_row.data) + first + at_half + v * 16));
#    pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const std::int64_t j = at_half + v * 16;
                const __m512 x = kBase ? _mm512_loadu_ps(rows[0].at.base + j) : _mm512_setzero_ps();
                FullDoubles s = read(sum + j);
#    pragma GCC unroll 2
                for (int r = 0; r < kRows; ++r) {
                    const Passing& row = rows[r];
                    fetch_vector(row.next, j);
                    const __m512 h = gradient_of<kBase>(x, row.at.y + j, _mm512_set1_ps(row.at.scale));
                    squares[r] += h * h;
                    const __m512i word = words[r].of[v];
                    const __m512i random =
                        half == 0 ? _mm512_maskz_srli_epi32(kAll, word, 16) : _mm512_and_si512(word, low);
                    rounded[r][v] = rounded_bf16(h, random);
                    const __m512 stored = _mm512_castsi512_ps(_mm512_and_si512(rounded[r][v], kept));
                    Halves old{};
                    if (kOld)
                        old = {
                            _mm256_castsi256_ps(_mm256_maskz_permutexvar_epi16(0xaaaa, widen, old_codes[r][v])),
                            _mm256_castsi256_ps(_mm256_maskz_permutexvar_epi16(0xaaaa, widen_rest, old_codes[r][v]))};
                    s = add_change<kOld, kAnchor>(s, stored, old, row.at.anchor + j, row.at.weight);
                }
                write(sum + j, s);
            }
            for (int r = 0; r < kRows; ++r)
                _mm512_storeu_si512(static_cast<std::uint16_t*>(rows[r].new_row.data) + first + at_half,
                                    _mm512_permutex2var_epi16(rounded[r][0], upper, rounded[r][1]));
        }
    }
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(lanes[r], squares[r]);
}

inline __m256 decoded(const std::int8_t* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}

inline __m512i larger(__m512i a, __m512i b) {
    return _mm512_maskz_max_epu32(kAll, a, b);
}

// Element i: the largest of vector i's 16.
inline __m512i largest_of(const __m512i* vectors) {
    __m512i by_four[4];
    for (int i = 0; i < 4; ++i) {
        const __m512i *a = vectors + 4 * i, *b = a + 1, *c = a + 2, *d = a + 3;
        const __m512i ab = larger(_mm512_maskz_unpacklo_epi32(kAll, *a, *b), _mm512_maskz_unpackhi_epi32(kAll, *a, *b));
        const __m512i cd = larger(_mm512_maskz_unpacklo_epi32(kAll, *c, *d), _mm512_maskz_unpackhi_epi32(kAll, *c, *d));
        by_four[i] = larger(_mm512_maskz_unpacklo_epi64(0xff, ab, cd), _mm512_maskz_unpackhi_epi64(0xff, ab, cd));
    }
    const auto fold = [](__m512i a, __m512i b) {
        return larger(_mm512_maskz_shuffle_i32x4(kAll, a, b, 0x88), _mm512_maskz_shuffle_i32x4(kAll, a, b, 0xdd));
    };
    return fold(fold(by_four[0], by_four[1]), fold(by_four[2], by_four[3]));
}

template <int kRows, bool kBase, bool kOld, bool kAnchor>
void fused_int8(const Passing* rows, std::int64_t first, std::int64_t count, double* sum, float (*lanes)[kLanes]) {
    constexpr int kBlocks = kChunk / kCodeBlock;
    static_assert(kExchanges * kBlocks == 16, "the blocks' largest magnitudes fill a vector");
    alignas(64) float made[kRows][kChunk];
    alignas(64) __m512i most[16];
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (__m512i& vector : most) vector = _mm512_setzero_si512();
    for (int r = 0; r < kRows; ++r) {
        const Streams& at = rows[r].at;
        const __m512 scale = _mm512_set1_ps(at.scale);
        __m512 squares = _mm512_loadu_ps(lanes[r]);
        for (std::int64_t block = 0; block < count; block += kCodeBlock) {
            __m512i largest = _mm512_setzero_si512();
#    pragma GCC unroll 4
            for (std::int64_t j = block; j < block + kCodeBlock; j += 16) {
                const __m512 x = kBase ? _mm512_loadu_ps(at.base + j) : _mm512_setzero_ps();
                const __m512 h = gradient_of<kBase>(x, at.y + j, scale);
                squares += h * h;
                largest = larger(largest, _mm512_and_si512(_mm512_castps_si512(h), magnitude));
                _mm512_store_ps(made[r] + j, h);
            }
            most[r * kBlocks + block / kCodeBlock] = largest;
        }
        _mm512_storeu_ps(lanes[r], squares);
    }
    alignas(64) std::uint32_t largest[16];
    alignas(64) float scales[16], inverses[16];
    _mm512_store_si512(largest, largest_of(most));
    for (int b = 0; b < 16; ++b) scale_of(largest[b], scales + b, inverses + b);
    for (int b = 0; b < 16; ++b) inverses[b] *= 0x1p24f;  // as in code_of

    // What `turned` and a shift by 8 make of a word; and the order of groups of four that packing leaves.
    const __m512i turn = _mm512_set4_epi32(static_cast<int>(0x800d0c0fu), static_cast<int>(0x8009080bu),
                                           static_cast<int>(0x80050407u), static_cast<int>(0x80010003u));
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const std::int64_t b = block / kCodeBlock, stored_at = first / kCodeBlock + b;
        __m512i codes[kRows][4];
        BlockWords words[kRows];
        __m256 old_scales[kRows];
        __mmask16 coded[kRows];
        for (int r = 0; r < kRows; ++r) {
            words[r] = words_of(rows[r].dither, first + block);
            // NaN times zero is none, and would be a code other than 0
            coded[r] = inverses[r * kBlocks + b] != 0 ? kAll : __mmask16{0};
            old_scales[r] = _mm256_set1_ps(kOld ? rows[r].old_row.scales[stored_at] : 0.0f);
            rows[r].new_row.scales[stored_at] = scales[r * kBlocks + b];  // behind that load, as the codes below
        }
#    pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            const std::int64_t j = block + v * 16;
            FullDoubles s = read(sum + j);
#    pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                const Passing& row = rows[r];
                fetch_vector(row.next, j);
                const __m512 inverse = _mm512_set1_ps(inverses[r * kBlocks + b]);
                const __m512 scale = _mm512_set1_ps(scales[r * kBlocks + b]);
                const __m512i fixed = _mm512_maskz_cvttps_epi32(coded[r], _mm512_load_ps(made[r] + j) * inverse);
                const __m512i random = v < 2 ? _mm512_maskz_srli_epi32(kAll, words[r].of[v], 8)
                                             : _mm512_maskz_shuffle_epi8(~__mmask64{0}, words[r].of[v - 2], turn);
                codes[r][v] = _mm512_maskz_srai_epi32(kAll, _mm512_add_epi32(fixed, random), 24);
                const __m512 stored = scale * _mm512_maskz_cvtepi32_ps(kAll, codes[r][v]);
                Halves old{};
                if (kOld) {
                    const auto* const at = static_cast<const std::int8_t*>(row.old_row.data) + first + j;
                    old = {old_scales[r] * decoded(at), old_scales[r] * decoded(at + 8)};
                }
                s = add_change<kOld, kAnchor>(s, stored, old, row.at.anchor + j, row.at.weight);
            }
            write(sum + j, s);
        }
        for (int r = 0; r < kRows; ++r) {
            const __m512i low = _mm512_packs_epi32(codes[r][0], codes[r][1]);
            const __m512i high = _mm512_packs_epi32(codes[r][2], codes[r][3]);
            _mm512_storeu_si512(static_cast<std::int8_t*>(rows[r].new_row.data) + first + block,
                                _mm512_maskz_permutexvar_epi32(kAll, in_order, _mm512_packs_epi16(low, high)));
        }
    }
}

template <int kRows, bool kBase, bool kOld, bool kAnchor>
void fused(const Passing* rows, std::int64_t first, std::int64_t count, double* sum, float (*lanes)[kLanes]) {
    if (rows[0].new_row.codec == Codec::int8)
        fused_int8<kRows, kBase, kOld, kAnchor>(rows, first, count, sum, lanes);
    else
        fused_bf16<kRows, kBase, kOld, kAnchor>(rows, first, count, sum, lanes);
}

// Elements [first, first + count), whole blocks of a scale, of kRows clients that are alike (exchange_alike).
template <int kRows>
void fused_chunk(const Passing* rows, std::int64_t first, std::int64_t count, double* sum, float (*lanes)[kLanes]) {
    const bool old = rows[0].old_row.data != nullptr, anchor = rows[0].at.anchor != nullptr;
    const auto chunk = rows[0].at.base == nullptr ? (!old     ? fused<kRows, false, false, false>
                                                     : anchor ? fused<kRows, false, true, true>
                                                              : fused<kRows, false, true, false>)
                       : !old                     ? fused<kRows, true, false, false>
                       : anchor                   ? fused<kRows, true, true, true>
                                                  : fused<kRows, true, true, false>;
    chunk(rows, first, count, sum, lanes);
}

#else

inline bool is_fusible(const RowExchange&, const Forms&) {
    return false;
}

template <int kRows>
void fused_chunk(const Passing*, std::int64_t, std::int64_t, double*, float (*)[kLanes]) {}

#endif
