// The exchange of a chunk through a codec in registers, for the level whose instructions narrow and widen whole
// vectors: what the stages of exchange_cpu.inl do one after another, with the same operations and so the same bits.
// For what is usual alone: gradient form, old and new row in one codec, whole blocks of a scale. kRows clients of one
// base pass together, as in fold_piece.

// Clients whose rows are exchanged in one pass, if they have the same arrays.
constexpr int kSwaps = 2;

// What a chunk reads and writes for a client.
struct Passing {
    Streams at;
    Row old_row, new_row;
    Dither dither;
    Chunk next;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

constexpr __mmask16 kAll = 0xffff;

// Whether fused_chunk may be called for a client, but for the chunk's length.
inline bool is_fusible(const RowSwap& row, Form form) {
    const Codec codec = row.new_row.codec;
    return (codec == Codec::bf16 || codec == Codec::int8) && form == Form::gradient &&
           (row.old_row.data == nullptr || row.old_row.codec == codec);
}

// A client's chunk between the stages, which stays in L1.
struct Scratch {
    alignas(64) float stored[kChunk];  // what its new codes stand for; before that, what is encoded
    alignas(64) float old[kChunk];
};

// The words that Dither::fill makes for a block, of its elements 0 .. 15 and 16 .. 31 (and 32 .. 47 and 48 .. 63).
struct BlockWords {
    __m512i of[2];
};

inline __m512i shifted_down(__m512i words, unsigned bits) {
    return _mm512_maskz_srli_epi32(kAll, words, bits);
}

inline BlockWords words_of(Dither dither, std::int64_t first) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i k1 = _mm512_set1_epi32(static_cast<int>(dither.k1));
    const std::uint32_t start = static_cast<std::uint32_t>(first) + dither.k0;
    BlockWords words;
    for (std::uint32_t v = 0; v < 2; ++v) {
        __m512i u = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(start + 16 * v)), lanes);
        u = _mm512_xor_si512(u, shifted_down(u, 16));
        u = _mm512_mullo_epi32(u, _mm512_set1_epi32(0x7feb352d));
        u = _mm512_xor_si512(u, shifted_down(u, 15));
        u = _mm512_add_epi32(u, k1);
        u = _mm512_mullo_epi32(u, _mm512_set1_epi32(static_cast<int>(0x846ca68bu)));
        words.of[v] = _mm512_xor_si512(u, shifted_down(u, 16));
    }
    return words;
}

template <bool kBase>
inline __m512 gradient_of(const Streams& at, std::int64_t j, __m512 scale) {
    const __m512 sent = _mm512_loadu_ps(at.y + j);
    return kBase ? (_mm512_loadu_ps(at.base + j) - sent) * scale : -sent * scale;
}

// The next chunk's lines, two blocks of 32 elements at once: what codes take less of is asked for twice.
[[gnu::always_inline]] inline void fetch_block(const Chunk& next, std::int64_t j) {
    const char *const y = next.y.at + j * next.y.size, *const row = next.row.at + j * next.row.size;
    __builtin_prefetch(y);
    __builtin_prefetch(y + 16 * next.y.size);
    __builtin_prefetch(row);
}

template <bool kBase>
void encode_bf16(const Passing& row, std::int64_t first, std::int64_t count, float* stored, float* lanes) {
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);  // half of each number
    const __m512i kept = _mm512_set1_epi32(-65536), low = _mm512_set1_epi32(0xffff);
    const __m512 scale = _mm512_set1_ps(row.at.scale);
    auto* const codes = static_cast<std::uint16_t*>(row.new_row.data) + first;
    __m512 squares = _mm512_loadu_ps(lanes);
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const BlockWords words = words_of(row.dither, first + block);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const std::int64_t start = block + half * kCodeBlock / 2;
            __m512i rounded[2];
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const __m512 h = gradient_of<kBase>(row.at, start + v * 16, scale);
                squares += h * h;
                const __m512i random =
                    half == 0 ? shifted_down(words.of[v], 16) : _mm512_and_si512(words.of[v], low);
                rounded[v] = _mm512_add_epi32(_mm512_castps_si512(h), random);
                _mm512_store_si512(stored + start + v * 16, _mm512_and_si512(rounded[v], kept));
            }
            _mm512_storeu_si512(codes + start, _mm512_permutex2var_epi16(rounded[0], upper, rounded[1]));
        }
    }
    _mm512_storeu_ps(lanes, squares);
}

void decode_bf16(const std::uint16_t* codes, std::int64_t count, float* out) {
    for (std::int64_t j = 0; j < count; j += 16)
        write(out + j, read(reinterpret_cast<const BFloat16*>(codes + j)));
}

inline __m512i larger(__m512i a, __m512i b) {
    return _mm512_maskz_max_epu32(kAll, a, b);
}

// Element i: the largest of vector i's 16.
inline __m512i largest_of(const __m512i* vectors) {
    const auto pair = [](__m512i a, __m512i b) {
        return larger(_mm512_maskz_unpacklo_epi32(kAll, a, b), _mm512_maskz_unpackhi_epi32(kAll, a, b));
    };
    const auto halves = [](__m512i a, __m512i b) {
        return larger(_mm512_maskz_shuffle_i32x4(kAll, a, b, 0x88), _mm512_maskz_shuffle_i32x4(kAll, a, b, 0xdd));
    };
    __m512i four[4];
    for (int i = 0; i < 4; ++i) {
        const __m512i* const v = vectors + 4 * i;
        const __m512i ab = pair(v[0], v[1]), cd = pair(v[2], v[3]);
        four[i] = larger(_mm512_maskz_unpacklo_epi64(0xff, ab, cd), _mm512_maskz_unpackhi_epi64(0xff, ab, cd));
    }
    return halves(halves(four[0], four[1]), halves(four[2], four[3]));
}

// h into `made`, and of each block of a scale the largest magnitude of each lane.
template <bool kBase>
void gradient_blocks(const Streams& at, std::int64_t count, float* made, float* lanes, __m512i* largest) {
    const __m512 scale = _mm512_set1_ps(at.scale);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 squares = _mm512_loadu_ps(lanes);
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (std::int64_t j = block; j < block + kCodeBlock; j += 16) {
            const __m512 h = gradient_of<kBase>(at, j, scale);
            squares += h * h;
            most = larger(most, _mm512_and_si512(_mm512_castps_si512(h), magnitude));
            _mm512_store_ps(made + j, h);
        }
        largest[block / kCodeBlock] = most;
    }
    _mm512_storeu_ps(lanes, squares);
}

// The codes of `made`, which becomes what they stand for.
void encode_int8(const Passing& row, const float* scales, const float* inverses, std::int64_t first,
                 std::int64_t count, float* made) {
    // What `turned` and a shift by 8 make of a word; and the order of groups of four that packing leaves.
    const __m512i turn = _mm512_set4_epi32(static_cast<int>(0x800d0c0fu), static_cast<int>(0x8009080bu),
                                           static_cast<int>(0x80050407u), static_cast<int>(0x80010003u));
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    auto* const codes = static_cast<std::int8_t*>(row.new_row.data) + first;
    float* const kept_scales = row.new_row.scales + first / kCodeBlock;
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const std::int64_t b = block / kCodeBlock;
        const BlockWords words = words_of(row.dither, first + block);
        const __m512 inverse = _mm512_set1_ps(inverses[b]), scale = _mm512_set1_ps(scales[b]);
        __m512i code[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            float* const at = made + block + v * 16;
            const __m512i fixed = _mm512_maskz_cvttps_epi32(kAll, _mm512_load_ps(at) * inverse);
            const __m512i random = v < 2 ? shifted_down(words.of[v], 8)
                                         : _mm512_maskz_shuffle_epi8(~__mmask64{0}, words.of[v - 2], turn);
            code[v] = _mm512_maskz_srai_epi32(kAll, _mm512_add_epi32(fixed, random), 24);
            _mm512_store_ps(at, scale * _mm512_maskz_cvtepi32_ps(kAll, code[v]));
        }
        const __m512i low = _mm512_packs_epi32(code[0], code[1]), high = _mm512_packs_epi32(code[2], code[3]);
        const __m512i packed = _mm512_packs_epi16(low, high);
        _mm512_storeu_si512(codes + block, _mm512_maskz_permutexvar_epi32(kAll, in_order, packed));
        kept_scales[b] = scales[b];
    }
}

void decode_int8(const std::int8_t* codes, const float* scales, std::int64_t count, float* out) {
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const __m512 scale = _mm512_set1_ps(scales[block / kCodeBlock]);
#pragma GCC unroll 4
        for (std::int64_t j = block; j < block + kCodeBlock; j += 16) {
            const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + j));
            _mm512_store_ps(out + j, scale * _mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepi8_epi32(kAll, narrow)));
        }
    }
}

// sum[j] += weight * (stored - old + anchor), of one client after another. By four: widening four numbers from memory is
// one operation, where eight take a shuffle too, which is what there is too little of.
template <int kRows, bool kOld, bool kAnchor>
void add_changes(const Passing* rows, const Scratch* scratch, std::int64_t count, double* sum) {
    Chunk next[kRows];
    const float* anchors[kRows];
    __m256d weights[kRows];
    for (int r = 0; r < kRows; ++r) {
        next[r] = rows[r].next;
        anchors[r] = rows[r].at.anchor;
        weights[r] = _mm256_set1_pd(rows[r].at.weight);
    }
    for (std::int64_t block = 0; block < count; block += 32) {
        for (int r = 0; r < kRows; ++r) fetch_block(next[r], block);
#pragma GCC unroll 8
        for (std::int64_t j = block; j < block + 32; j += 4) {
            __m256d s = _mm256_loadu_pd(sum + j);
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                __m256d change = _mm256_cvtps_pd(_mm_load_ps(scratch[r].stored + j));
                if (kOld) change -= _mm256_cvtps_pd(_mm_load_ps(scratch[r].old + j));
                if (kAnchor) change += _mm256_cvtps_pd(_mm_loadu_ps(anchors[r] + j));
                s += weights[r] * change;
            }
            _mm256_storeu_pd(sum + j, s);
        }
    }
}

template <int kRows, bool kBase>
void fused_bf16(const Passing* rows, std::int64_t first, std::int64_t count, Scratch* scratch,
                float (*lanes)[kLanes]) {
    for (int r = 0; r < kRows; ++r) {
        if (rows[r].old_row.data != nullptr)
            decode_bf16(static_cast<const std::uint16_t*>(rows[r].old_row.data) + first, count, scratch[r].old);
        encode_bf16<kBase>(rows[r], first, count, scratch[r].stored, lanes[r]);
    }
}

template <int kRows, bool kBase>
void fused_int8(const Passing* rows, std::int64_t first, std::int64_t count, Scratch* scratch,
                float (*lanes)[kLanes]) {
    constexpr int kBlocks = kChunk / kCodeBlock;
    static_assert(kSwaps * kBlocks == 16, "the blocks' largest magnitudes fill a vector");
    alignas(64) __m512i most[16];
    alignas(64) std::uint32_t largest[16];
    alignas(64) float scales[16], inverses[16];
    for (__m512i& none : most) none = _mm512_setzero_si512();
    for (int r = 0; r < kRows; ++r)
        gradient_blocks<kBase>(rows[r].at, count, scratch[r].stored, lanes[r], most + r * kBlocks);
    _mm512_store_si512(largest, largest_of(most));
    for (int b = 0; b < 16; ++b) scale_of(largest[b], scales + b, inverses + b);
    for (float& inverse : inverses) inverse *= 0x1p24f;  // as in code_of
    for (int r = 0; r < kRows; ++r)                      // while the divisions go on
        if (rows[r].old_row.data != nullptr)
            decode_int8(static_cast<const std::int8_t*>(rows[r].old_row.data) + first,
                        rows[r].old_row.scales + first / kCodeBlock, count, scratch[r].old);
    for (int r = 0; r < kRows; ++r)
        encode_int8(rows[r], scales + r * kBlocks, inverses + r * kBlocks, first, count, scratch[r].stored);
}

// Elements [first, first + count), whole blocks of a scale, of kRows clients who are alike.
template <int kRows>
void fused_chunk(const Passing* rows, std::int64_t first, std::int64_t count, double* sum, float (*lanes)[kLanes]) {
    const bool based = rows[0].at.base != nullptr;
    Scratch scratch[kRows];
    if (rows[0].new_row.codec == Codec::int8)
        (based ? fused_int8<kRows, true> : fused_int8<kRows, false>)(rows, first, count, scratch, lanes);
    else
        (based ? fused_bf16<kRows, true> : fused_bf16<kRows, false>)(rows, first, count, scratch, lanes);
    if (rows[0].old_row.data == nullptr)  // nor anything that it referred to
        add_changes<kRows, false, false>(rows, scratch, count, sum);
    else if (rows[0].at.anchor == nullptr)
        add_changes<kRows, true, false>(rows, scratch, count, sum);
    else
        add_changes<kRows, true, true>(rows, scratch, count, sum);
}

#else

inline bool is_fusible(const RowSwap&, Form) {
    return false;
}

template <int kRows>
void fused_chunk(const Passing*, std::int64_t, std::int64_t, double*, float (*)[kLanes]) {}

#endif
