// The exchange of a chunk through a codec in registers, for the level whose instructions narrow and widen whole
// vectors: what the stages of exchange_cpu.inl do one after another, with the same operations and so the same bits.
// For what is usual alone: gradient form, rounding to nearest, old and new row in one codec, whole vectors.

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

inline __m512d lower(__m512 values) {
    return _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, values, 0));
}

inline __m512d upper(__m512 values) {
    return _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, values, 1));
}

// sum[j] += weight * (stored - old + anchor), 16 elements of it.
template <bool kOld, bool kAnchor>
inline void add_change(__m512 stored, __m512 old, const float* anchor, __m512d weight, double* sum) {
    __m512d low = lower(stored), high = upper(stored);
    if (kOld) {
        low -= lower(old);
        high -= upper(old);
    }
    if (kAnchor) {
        const __m512 v = _mm512_loadu_ps(anchor);
        low += lower(v);
        high += upper(v);
    }
    _mm512_storeu_pd(sum, _mm512_loadu_pd(sum) + weight * low);
    _mm512_storeu_pd(sum + 8, _mm512_loadu_pd(sum + 8) + weight * high);
}

template <bool kBase>
inline __m512 gradient_of(const float* base, const float* y, __m512 scale) {
    const __m512 sent = _mm512_loadu_ps(y);
    return kBase ? (_mm512_loadu_ps(base) - sent) * scale : -sent * scale;
}

inline __m512i magnitude_of(__m512i bits) {
    return _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
}

// 16 elements' worth of the next chunk, the lines being fetched one after another.
inline void fetch_vector(const Chunk& next, std::int64_t j) {
    __builtin_prefetch(next.y.at + j * next.y.size);
    if ((j & 16) == 0) __builtin_prefetch(next.row.at + j * next.row.size);
}

template <bool kBase, bool kOld, bool kAnchor>
bool fused_bf16(const Streams& at, const std::uint16_t* old_row, std::uint16_t* new_row, const Chunk& next,
                std::int64_t count, double* sum, float* lanes) {
    const __m512 scale = _mm512_set1_ps(at.scale);
    const __m512d weight = _mm512_set1_pd(at.weight);
    const __m512i half = _mm512_set1_epi32(0x7fff), one = _mm512_set1_epi32(1), kept = _mm512_set1_epi32(-65536);
    __m512 squares = _mm512_loadu_ps(lanes);
    __m512i most = _mm512_setzero_si512();
    for (std::int64_t j = 0; j < count; j += 16) {
        fetch_vector(next, j);
        const __m512 h = gradient_of<kBase>(at.base + j, at.y + j, scale);
        squares += h * h;
        const __m512i bits = _mm512_castps_si512(h);
        const __m512i even = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), one);
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(half, even));
        const __m512i stored = _mm512_and_si512(rounded, kept);
        most = _mm512_maskz_max_epu32(0xffff, most, magnitude_of(stored));
        __m512 old = _mm512_setzero_ps();
        if (kOld) old = _mm512_castsi512_ps(reinterpret_cast<__m512i>(read_codes(old_row + j) << 16));
        _mm512_mask_cvtepi32_storeu_epi16(new_row + j, 0xffff, _mm512_maskz_srli_epi32(0xffff, rounded, 16));
        add_change<kOld, kAnchor>(_mm512_castsi512_ps(stored), old, at.anchor + j, weight, sum + j);
    }
    _mm512_storeu_ps(lanes, squares);
    return _mm512_cmplt_epu32_mask(most, _mm512_set1_epi32(0x7f800000)) == 0xffff;
}

// The largest magnitude of each block of 64 gradients, which are left in `made`.
template <bool kBase>
void gradient_blocks(const Streams& at, std::int64_t count, float* made, float* lanes, std::uint32_t* largest) {
    const __m512 scale = _mm512_set1_ps(at.scale);
    __m512 squares = _mm512_loadu_ps(lanes);
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        __m512i most = _mm512_setzero_si512();
        for (std::int64_t j = block; j < block + kCodeBlock; j += 16) {
            const __m512 h = gradient_of<kBase>(at.base + j, at.y + j, scale);
            squares += h * h;
            most = _mm512_maskz_max_epu32(0xffff, most, magnitude_of(_mm512_castps_si512(h)));
            _mm512_store_ps(made + j, h);
        }
        largest[block / kCodeBlock] = _mm512_reduce_max_epu32(most);
    }
    _mm512_storeu_ps(lanes, squares);
}

template <bool kBase, bool kOld, bool kAnchor>
bool fused_int8(const Streams& at, const Row& from, const Row& to, const Chunk& next, std::int64_t first,
                std::int64_t count, double* sum, float* lanes) {
    constexpr std::int64_t kBlocks = kChunk / kCodeBlock;
    alignas(64) float made[kChunk];
    std::uint32_t largest[kBlocks] = {};
    float scales[kBlocks], inverses[kBlocks];
    bool finite = true;
    gradient_blocks<kBase>(at, count, made, lanes, largest);
    for (std::int64_t b = 0; b < kBlocks; ++b) {
        scale_of(largest[b], scales + b, inverses + b);
        finite &= largest[b] < (255u << 23);
    }
    const auto* const old_codes = static_cast<const std::int8_t*>(from.data) + (kOld ? first : 0);
    auto* const codes = static_cast<std::int8_t*>(to.data) + first;
    const __m512 magic = _mm512_set1_ps(12582912.0f);  // as in code_of
    const __m512d weight = _mm512_set1_pd(at.weight);
    for (std::int64_t block = 0; block < count; block += kCodeBlock) {
        const std::int64_t b = block / kCodeBlock, stored_at = first / kCodeBlock + b;
        const __m512 inverse = _mm512_set1_ps(inverses[b]), scale = _mm512_set1_ps(scales[b]);
        const __m512 old_scale = _mm512_set1_ps(kOld ? from.scales[stored_at] : 0.0f);
        for (std::int64_t j = block; j < block + kCodeBlock; j += 16) {
            fetch_vector(next, j);
            const __m512 shifted = _mm512_load_ps(made + j) * inverse + magic;
            const __m512i code = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000));
            __m512 old = _mm512_setzero_ps();
            if (kOld) {
                const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(old_codes + j));
                const __m512i wide = _mm512_maskz_cvtepi8_epi32(0xffff, narrow);
                old = old_scale * _mm512_maskz_cvtepi32_ps(0xffff, wide);
            }
            _mm512_mask_cvtepi32_storeu_epi8(codes + j, 0xffff, code);
            add_change<kOld, kAnchor>(scale * (shifted - magic), old, at.anchor + j, weight, sum + j);
        }
        to.scales[stored_at] = scales[b];
    }
    return finite;
}

template <bool kBase, bool kOld, bool kAnchor>
bool fused(const Streams& at, const RowSwap& row, const Chunk& next, std::int64_t first, std::int64_t count,
           double* sum, float* lanes) {
    if (row.new_row.codec == Codec::int8)
        return fused_int8<kBase, kOld, kAnchor>(at, row.old_row, row.new_row, next, first, count, sum, lanes);
    const auto* const old = static_cast<const std::uint16_t*>(row.old_row.data);
    auto* const codes = static_cast<std::uint16_t*>(row.new_row.data);
    return fused_bf16<kBase, kOld, kAnchor>(at, old + (kOld ? first : 0), codes + first, next, count, sum, lanes);
}

// Whether fused_chunk may be called; an anchor is only where there is an old row.
inline bool is_fusible(const RowSwap& row, Form form, std::int64_t count) {
    const Codec codec = row.new_row.codec;
    const bool known = (codec == Codec::bf16 && count % 16 == 0) || (codec == Codec::int8 && count % kCodeBlock == 0);
    return known && form == Form::gradient && !row.rounding.dither &&
           (row.old_row.data == nullptr || row.old_row.codec == codec);
}

bool fused_chunk(const Streams& at, const RowSwap& row, const Chunk& next, std::int64_t first, std::int64_t count,
                 double* sum, float* lanes) {
    const bool old = row.old_row.data != nullptr, anchor = at.anchor != nullptr;
    const auto chunk = at.base == nullptr ? (!old     ? fused<false, false, false>
                                             : anchor ? fused<false, true, true>
                                                      : fused<false, true, false>)
                       : !old             ? fused<true, false, false>
                       : anchor           ? fused<true, true, true>
                                          : fused<true, true, false>;
    return chunk(at, row, next, first, count, sum, lanes);
}

#else

inline bool is_fusible(const RowSwap&, Form, std::int64_t) {
    return false;
}

inline bool fused_chunk(const Streams&, const RowSwap&, const Chunk&, std::int64_t, std::int64_t, double*, float*) {
    return false;
}

#endif
