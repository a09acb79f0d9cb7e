// Weighted sums of rows of any dtype, and of clients' updates. Rows are converted as they are read, up to eight in a
// pass over a tile of the sum; each element's additions stay in the order of the rows.

constexpr std::int64_t kNear = 512;  // bytes to prefetch ahead of each row; with 256 an Intel core takes 3-9 % longer

// The precision of h: float32, or float64 if rows and sum are.
template <class Row, class Sum>
struct Arithmetic {
    using Value = float;
};
template <>
struct Arithmetic<double, double> {
    using Value = double;
};

// Some rows of one tile, on their way into its sum, which they join to what is in `from`; null where it is to begin.
template <class Row, class Sum, bool kBase, bool kNorms, bool kScales = false>
struct Pass {
    using Element = Full<typename Arithmetic<Row, Sum>::Value>;
    using Total = typename Full<Sum>::Vector;
    static constexpr int kGroup = 128 / sizeof(Sum);  // elements whose sums stay in registers while the rows pass
    static constexpr int kSquares = kLanes / kFull;

    int k;
    Sum weights[kMostRows];
    float scales[kMostRows];  // of h, where kScales
    FullFloats squares[kMostRows][kSquares];

    // One group of elements.
    inline __attribute__((always_inline)) void add(const Row* const* rows, const float* base, std::int64_t at,
                                                   const Sum* from, Sum* sum) {
        Total s[kGroup / kFull];
#pragma GCC unroll 8
        for (int v = 0; v < kGroup / kFull; ++v) s[v] = from == nullptr ? Total{} : read(from + at + v * kFull);
#pragma GCC unroll 1
        for (int r = 0; r < k; ++r) {
            const Row* const y = rows[r] + at;
            for (int line = 0; line < kGroup * static_cast<int>(sizeof(Row)); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(y) + kNear + line);
            FullFloats square[kSquares];
            if (kNorms) __builtin_memcpy(square, squares[r], sizeof square);
#pragma GCC unroll 8
            for (int v = 0; v < kGroup / kFull; ++v) {
                auto h = Element::of(read(y + v * kFull));
                if (kBase) h = Element::of(read(base + at + v * kFull)) - h;
                if constexpr (kScales) h = h * scales[r];
                if (kNorms) {
                    const FullFloats narrow = Full<float>::of(h);
                    square[v % kSquares] += narrow * narrow;
                }
                s[v] = s[v] + weights[r] * Full<Sum>::of(h);
            }
            if (kNorms) __builtin_memcpy(squares[r], square, sizeof square);
        }
#pragma GCC unroll 8
        for (int v = 0; v < kGroup / kFull; ++v) write(sum + at + v * kFull, s[v]);
    }

    // The last elements, fewer than a group: from copies that end in zeros.
    __attribute__((noinline)) void add_rest(const Row* const* rows, const float* base, std::int64_t at,
                                            std::int64_t count, const Sum* from, Sum* sum) {
        Row copies[kMostRows][kGroup] = {};
        const Row* pointers[kMostRows];
        for (int r = 0; r < k; ++r) {
            __builtin_memcpy(copies[r], rows[r] + at, count * sizeof(Row));
            pointers[r] = copies[r];
        }
        float x[kGroup] = {};
        if (kBase) __builtin_memcpy(x, base + at, count * sizeof(float));
        Sum sums[kGroup] = {};
        if (from != nullptr) __builtin_memcpy(sums, from + at, count * sizeof(Sum));
        add(pointers, x, 0, from == nullptr ? nullptr : sums, sums);
        __builtin_memcpy(sum + at, sums, count * sizeof(Sum));
    }

    void begin_tile() {
        if (kNorms) __builtin_memset(squares, 0, sizeof squares);
    }

    // Elements of one tile, all of them or a chunk.
    __attribute__((noinline)) void add_all(const Row* const* rows, const float* base, std::int64_t begin,
                                           std::int64_t end, const Sum* from, Sum* sum) {
        std::int64_t j = begin;
        for (; j + kGroup <= end; j += kGroup) add(rows, base, j, from, sum);
        if (j < end) add_rest(rows, base, j, end - j, from, sum);
    }

    double squared_norm(int r) const { return fold_lanes(squares[r], nullptr, 0); }
};

// |h|^2 in float64, of one row.
template <class Row, class Sum, bool kBase>
double squared_norm_exactly(const Row* row, const float* base, std::int64_t begin, std::int64_t end) {
    Sum h[kChunk];  // the sum of one row of weight one
    double lanes[kLanes] = {};
    Pass<Row, Sum, kBase, false> pass = {1, {1}, {}, {}};
    for (std::int64_t first = begin; first < end; first += kChunk) {
        const std::int64_t few = end - first < kChunk ? end - first : kChunk;
        const Row* const rows[] = {row + first};
        pass.add_all(rows, kBase ? base + first : base, 0, few, nullptr, h);
        add_squares_exactly(h, few, lanes);
    }
    return sum_of_lanes(lanes);
}

// Rows first .. first + k - 1 of the run [tile, tile + count); `sum` is the run's, `squares` those of the block that it
// starts in, at element `within` of that; `stride` lies between blocks' squares.
template <class Row, class Sum, bool kBase, bool kNorms>
void add_rows(const RowSum& segment, const double* weights, std::int64_t first, int k, std::int64_t tile,
              std::int64_t count, Sum* sum, double* squares, std::int64_t within, std::int64_t stride) {
    Pass<Row, Sum, kBase, kNorms> pass;
    pass.k = k;
    const Row* rows[kMostRows];
    for (int r = 0; r < k; ++r) {
        rows[r] = static_cast<const Row*>(segment.rows[first + r]) + tile;
        pass.weights[r] = static_cast<Sum>(weights[first + r]);
    }
    const float* const base = kBase ? segment.base + tile : nullptr;
    for (std::int64_t begin = 0; begin < count; begin += kTile) {
        const std::int64_t end = count - begin < kTile ? count : begin + kTile;
        pass.begin_tile();
        pass.add_all(rows, base, begin, end, first == 0 ? nullptr : sum, sum);
        if (!kNorms) continue;
        for (int r = 0; r < k; ++r) {
            const double square = pass.squared_norm(r);
            squares[(within + begin) / kBlock * stride + first + r] +=
                is_sound(square) ? square : squared_norm_exactly<Row, Sum, kBase>(rows[r], base, begin, end);
        }
    }
}

__attribute__((noinline)) double square_of_sum(const float* sum, std::int64_t count) {
    return sum_of_squares(sum, count);
}
__attribute__((noinline)) double square_of_sum(const double* sum, std::int64_t count) {
    float narrow[kChunk], lanes[kLanes] = {};
    for (std::int64_t first = 0; first < count; first += kChunk) {
        const std::int64_t few = count - first < kChunk ? count - first : kChunk;
        from_float64(sum + first, few, narrow);
        add_squares(narrow, few, lanes);
    }
    const double square = sum_of_lanes(lanes);
    return is_sound(square) ? square : sum_of_squares_exactly(sum, count);
}

inline void round_to_half(const float* sum, std::int64_t count, Dtype dtype, std::uint16_t* out) {
    if (dtype == Dtype::bfloat16)
        to_half<Bf16, false>(sum, Nearest{}, 0, count, out, nullptr);
    else
        to_half<F16, false>(sum, Nearest{}, 0, count, out, nullptr);
}
inline void round_to_half(const double* sum, std::int64_t count, Dtype dtype, std::uint16_t* out) {
    float odd[kChunk];
    for (std::int64_t begin = 0; begin < count; begin += kChunk) {
        const std::int64_t few = count - begin < kChunk ? count - begin : kChunk;
        for (std::int64_t j = 0; j < few; ++j) odd[j] = to_odd(sum[begin + j]);
        round_to_half(odd, few, dtype, out + begin);
    }
}

template <class Sum>
__attribute__((noinline)) void round_to(const Sum* sum, std::int64_t count, Dtype dtype, void* out, std::int64_t at) {
    if (dtype == Dtype::float32)
        for (std::int64_t j = 0; j < count; ++j) static_cast<float*>(out)[at + j] = static_cast<float>(sum[j]);
    else if (dtype == Dtype::float64)
        for (std::int64_t j = 0; j < count; ++j) static_cast<double*>(out)[at + j] = static_cast<double>(sum[j]);
    else
        round_to_half(sum, count, dtype, static_cast<std::uint16_t*>(out) + at);
}

// Float32 numbers of a sum, past the caches.
template <class Sum>
__attribute__((noinline)) void put_rounded(const Sum* sum, std::int64_t count, float* out) {
    alignas(64) float narrow[kChunk];
    for (std::int64_t first = 0; first < count; first += kChunk) {
        const std::int64_t few = count - first < kChunk ? count - first : kChunk;
        round_to(sum + first, few, Dtype::float32, narrow, 0);
        put(narrow, few, out + first);
    }
}

template <class Row, class Sum, bool kBase, bool kNorms>
void sum_rows(const RowSum& segment, const double* weights, std::int64_t k, std::int64_t begin, std::int64_t end,
              double* squares, const Tiling& tiling) {
    constexpr Dtype kSum = sizeof(Sum) == 8 ? Dtype::float64 : Dtype::float32;
    const std::int64_t passes = k == 0 ? 1 : (k + tiling.rows - 1) / tiling.rows;  // none at all leaves zeros
    if (kNorms)
        for (std::int64_t i = 0; i < (end - begin + kBlock - 1) / kBlock * (k + 1); ++i) squares[i] = 0;
    const bool same_dtype = segment.out_dtype == kSum;
    const bool staged =
        kHasPastCaches && tiling.past_caches && same_dtype && passes == 1;  // else the sum is read again
    const bool in_place = same_dtype && !staged;
    const bool leaving =
        kHasPastCaches && tiling.past_caches && kSum == Dtype::float64 && segment.out_dtype == Dtype::float32;
    constexpr std::int64_t kOwn = 2 * kTile / (sizeof(Sum) / 4);  // 16 KiB of the stack
    const std::int64_t run = in_place ? tiling.run : kOwn;
    alignas(64) Sum own[kOwn];
    for (std::int64_t tile = begin; tile < end; tile += run) {
        const std::int64_t count = end - tile < run ? end - tile : run;
        const std::int64_t within = (tile - begin) % kBlock;
        double* const of_block = kNorms ? squares + (tile - begin) / kBlock * (k + 1) : nullptr;
        Sum* const sum = in_place ? static_cast<Sum*>(segment.out) + tile : own;
        for (std::int64_t pass = 0; pass < passes; ++pass) {
            const std::int64_t first = k * pass / passes, last = k * (pass + 1) / passes;
            add_rows<Row, Sum, kBase, kNorms>(segment, weights, first, static_cast<int>(last - first), tile, count, sum,
                                              of_block, within, k + 1);
        }
        if (staged)
            put(own, count, static_cast<Sum*>(segment.out) + tile);
        else if (leaving)
            put_rounded(own, count, static_cast<float*>(segment.out) + tile);
        else if (!in_place)
            round_to(sum, count, segment.out_dtype, segment.out, tile);
        if (kNorms)
            for (std::int64_t j = 0; j < count; j += kTile)
                of_block[(within + j) / kBlock * (k + 1) + k] +=
                    square_of_sum(sum + j, count - j < kTile ? count - j : kTile);
    }
    if (staged || leaving) fence();
}

template <class Row, class Sum>
void sum_rows(const RowSum& segment, const double* weights, std::int64_t k, std::int64_t begin, std::int64_t end,
              double* squares, const Tiling& tiling) {
    const auto loop = segment.base != nullptr
                          ? (squares != nullptr ? sum_rows<Row, Sum, true, true> : sum_rows<Row, Sum, true, false>)
                          : (squares != nullptr ? sum_rows<Row, Sum, false, true> : sum_rows<Row, Sum, false, false>);
    loop(segment, weights, k, begin, end, squares, tiling);
}

template <class Sum>
void weighted_sum(const RowSum& segment, const double* weights, std::int64_t k, std::int64_t begin, std::int64_t end,
                  double* squares, const Tiling& tiling) {
    switch (segment.rows_dtype) {
        case Dtype::float32:
            return sum_rows<float, Sum>(segment, weights, k, begin, end, squares, tiling);
        case Dtype::float64:
            return sum_rows<double, Sum>(segment, weights, k, begin, end, squares, tiling);
        case Dtype::float16:
            return sum_rows<Float16, Sum>(segment, weights, k, begin, end, squares, tiling);
        case Dtype::bfloat16:
            return sum_rows<BFloat16, Sum>(segment, weights, k, begin, end, squares, tiling);
    }
}
