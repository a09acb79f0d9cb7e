// Inner products and order statistics of clients' updates, tile by tile.

// h of client i, elements [first, first + count); `tensor` is the one that element `first` lies in.
inline void read_h(const Updates& updates, std::int64_t i, std::int64_t tensor, std::int64_t first, std::int64_t count,
                   float* h) {
    for (std::int64_t few; count > 0; first += few, h += few, count -= few, ++tensor) {
        const std::int64_t at = first - updates.starts[tensor], rest = updates.starts[tensor + 1] - first;
        few = rest < count ? rest : count;
        const ClientUpdate& sent = updates.sent[tensor * updates.k + i];
        const float* const y = sent_tile(sent, at, few, h);  // where h will be, if it must be converted
        const float* const base = sent.base != nullptr ? sent.base + at : nullptr;
        std::int64_t j = 0;
        for (; j + kFull <= few; j += kFull)
            write(h + j, base != nullptr ? gradient<Given::model>(read(base + j), read(y + j), sent.scale)
                                         : gradient<Given::difference>(FullFloats{}, read(y + j), sent.scale));
        for (; j < few; ++j)
            h[j] = base != nullptr ? gradient<Given::model>(base[j], y[j], sent.scale)
                                   : gradient<Given::difference>(0.0f, y[j], sent.scale);
    }
}

// Brings a tile of all updates from memory, some cache lines at a time, while the processor computes with another.
struct Fetching {
    const Updates& updates;
    std::int64_t tensor, at, count;  // elements [at, at + count) of the tensor, or what lies behind it
    std::int64_t i = 0, byte = 0;

    [[gnu::always_inline]] inline void lines(std::int64_t some) {
        for (; some > 0 && i < updates.k; --some) {
            const Upcoming next = upcoming(updates.sent[tensor * updates.k + i], at);
            __builtin_prefetch(next.at + byte);
            byte += 64;
            if (byte < count * next.size) continue;
            byte = 0;
            ++i;
        }
    }
};

// The tile behind the one of `count` elements from `first` on.
inline Fetching fetching(const Updates& updates, std::int64_t tensor, std::int64_t first, std::int64_t count) {
    return {updates, tensor, first + count - updates.starts[tensor], count};
}

// The tensor that an element lies in.
inline std::int64_t tensor_of(const Updates& updates, std::int64_t element) {
    std::int64_t low = 0, high = updates.tensors;
    while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        (updates.starts[middle] <= element ? low : high) = middle;
    }
    return low;
}

// lanes[r][c] += the products of rows r of `left` and c of `right`, element j on lane j mod 8; c >= r where both are
// the same rows.
template <bool kSame>
inline void multiply_rows(const double* left, const double* right, std::int64_t count,
                          double (*lanes)[kGramRows][kGramLanes]) {
    for (int lane = 0; lane < kGramLanes; lane += kWidth) {
        Doubles sums[kGramRows][kGramRows];
#pragma GCC unroll 4
        for (int r = 0; r < kGramRows; ++r)
#pragma GCC unroll 4
            for (int c = kSame ? r : 0; c < kGramRows; ++c)
                __builtin_memcpy(&sums[r][c], lanes[r][c] + lane, sizeof sums[r][c]);
        for (std::int64_t j = lane; j < count; j += kGramLanes) {
            Doubles a[kGramRows], b[kGramRows];
#pragma GCC unroll 4
            for (int r = 0; r < kGramRows; ++r) {
                __builtin_memcpy(&a[r], left + r * kGramStride + j, sizeof a[r]);
                __builtin_memcpy(&b[r], right + r * kGramStride + j, sizeof b[r]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kGramRows; ++r)
#pragma GCC unroll 4
                for (int c = kSame ? r : 0; c < kGramRows; ++c) sums[r][c] = fused(a[r], b[c], sums[r][c]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kGramRows; ++r)
#pragma GCC unroll 4
            for (int c = kSame ? r : 0; c < kGramRows; ++c)
                __builtin_memcpy(lanes[r][c] + lane, &sums[r][c], sizeof sums[r][c]);
    }
}

// The total of lanes, in a fixed tree; they hold anything afterwards.
inline double fold_gram_lanes(double* lane) {
    for (int width = kGramLanes / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
    return lane[0];
}

// The block's share of the upper triangle, row by row. scratch: as gram_scratch says.
void gram(const Updates& updates, std::int64_t begin, std::int64_t end, double* scratch, double* shares) {
    alignas(64) float h[kGramTile];
    const std::int64_t k = updates.k, rows = (k + kGramRows - 1) / kGramRows * kGramRows, groups = rows / kGramRows;
    double* const tile = scratch;
    const auto lanes = reinterpret_cast<double (*)[kGramRows][kGramRows][kGramLanes]>(scratch + rows * kGramStride);
    const std::int64_t pairs = groups * (groups + 1) / 2, some = k * kGramTile / 16 / pairs + 1;
    __builtin_memset(lanes, 0, pairs * sizeof *lanes);
    for (std::int64_t e = k * kGramStride; e < rows * kGramStride; ++e) tile[e] = 0;
    for (std::int64_t first = begin; first < end; first += kGramTile) {
        const std::int64_t count = end - first < kGramTile ? end - first : kGramTile;
        const std::int64_t padded = (count + kLanes - 1) / kLanes * kLanes, tensor = tensor_of(updates, first);
        for (std::int64_t j = count; j < padded; ++j) h[j] = 0;
        for (std::int64_t i = 0; i < k; ++i) {
            read_h(updates, i, tensor, first, count, h);
            for (std::int64_t j = 0; j < padded; j += kFull) write(tile + i * kGramStride + j, doubles_at(h + j));
        }
        Fetching next = fetching(updates, tensor, first, kGramTile);
        std::int64_t pair = 0;
        for (std::int64_t i = 0; i < groups; ++i)
            for (std::int64_t j = i; j < groups; ++j, ++pair) {
                next.lines(some);
                const double *const left = tile + i * kGramRows * kGramStride, *const right =
                                                                                   tile + j * kGramRows * kGramStride;
                const auto multiply = i == j ? multiply_rows<true> : multiply_rows<false>;
                multiply(left, right, padded, lanes[pair]);
            }
    }
    std::int64_t pair = 0;
    for (std::int64_t i = 0; i < groups; ++i)
        for (std::int64_t j = i; j < groups; ++j, ++pair)
            for (int r = 0; r < kGramRows; ++r)
                for (int c = i == j ? r : 0; c < kGramRows; ++c) {
                    const std::int64_t a = i * kGramRows + r, b = j * kGramRows + c;
                    if (a < k && b < k) shares[a * k - a * (a - 1) / 2 + b - a] = fold_gram_lanes(lanes[pair][r][c]);
                }
}

inline FullFloats lesser(FullFloats a, FullFloats b) {
#if defined(__AVX512F__)
    return FullFloats(_mm512_min_ps(__m512(a), __m512(b)));
#elif defined(__AVX__)
    return FullFloats(_mm256_min_ps(__m256(a), __m256(b)));
#elif defined(__SSE2__)
    return FullFloats(_mm_min_ps(__m128(a), __m128(b)));
#else
    return a < b ? a : b;
#endif
}
inline FullFloats greater(FullFloats a, FullFloats b) {
#if defined(__AVX512F__)
    return FullFloats(_mm512_max_ps(__m512(a), __m512(b)));
#elif defined(__AVX__)
    return FullFloats(_mm256_max_ps(__m256(a), __m256(b)));
#elif defined(__SSE2__)
    return FullFloats(_mm_max_ps(__m128(a), __m128(b)));
#else
    return a > b ? a : b;
#endif
}

inline void compare_rows(const Comparator& c, float* rows, std::int64_t stride, std::int64_t count) {
    float* const low = rows + c.low * stride;
    float* const high = rows + c.high * stride;
    if (!c.keeps_high) {
        for (std::int64_t j = 0; j < count; j += kFull) write(low + j, lesser(read(low + j), read(high + j)));
    } else if (!c.keeps_low) {
        for (std::int64_t j = 0; j < count; j += kFull) write(high + j, greater(read(low + j), read(high + j)));
    } else {
        for (std::int64_t j = 0; j < count; j += kFull) {
            const FullFloats a = read(low + j), b = read(high + j);
            write(low + j, lesser(a, b));
            write(high + j, greater(a, b));
        }
    }
}

// mixed[r][j] = sum_i mixing[r][i] * h[i][j], in the order of the clients.
inline void mix_rows(const double* mixing, std::int64_t rows, std::int64_t k, const float* h, std::int64_t stride,
                     std::int64_t count, float* mixed) {
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t j = 0; j < count; j += kFull) {
            FullDoubles sum = {};
            for (std::int64_t i = 0; i < k; ++i) sum = sum + mixing[r * k + i] * doubles_at(h + i * stride + j);
            write(mixed + r * stride + j, to_floats(sum));
        }
}

// A mean, as float32; a product of a power of two is the same, and quicker.
inline FullFloats mean_of(FullDoubles sum, std::int64_t count) {
    const double n = static_cast<double>(count), inverse = 1 / n;
    if ((count & (count - 1)) == 0) return to_floats(inverse * sum) + 0.0f;
    return to_floats({sum.low / n, sum.high / n}) + 0.0f;
}

inline void mean_of_kept(const float* rows, std::int64_t stride, const Statistic& of, std::int64_t count, float* out) {
    for (std::int64_t j = 0; j < count; j += kFull) {
        FullDoubles sum = {};
        for (std::int64_t i = of.first; i < of.last; ++i) sum = sum + doubles_at(rows + i * stride + j);
        write(out + j, mean_of(sum, of.last - of.first));
    }
}

// Where a < b, `left`, else `right`.
inline Doubles where_less(Doubles a, Doubles b, Doubles left, Doubles right) {
    return a < b ? left : right;
}
inline FullDoubles where_less(FullDoubles a, FullDoubles b, FullDoubles left, FullDoubles right) {
    return {where_less(a.low, b.low, left.low, right.low), where_less(a.high, b.high, left.high, right.high)};
}

// The values nearest the median lie side by side. s_i is too far down exactly if s_(i + nearest) is nearer; that
// holds for the first few i.
inline void mean_of_nearest(const float* rows, std::int64_t k, std::int64_t stride, std::int64_t nearest,
                            std::int64_t count, float* out) {
    for (std::int64_t j = 0; j < count; j += kFull) {
        const auto at = [&](std::int64_t i) { return doubles_at(rows + i * stride + j); };
        const FullDoubles twice = at((k - 1) / 2) + at(k / 2), zero = {};
        FullDoubles sum = {};
        for (std::int64_t i = 0; i < k; ++i) {
            FullDoubles value = at(i);
            if (i + nearest < k) value = where_less(value + at(i + nearest), twice, zero, value);
            if (i >= nearest) value = where_less(at(i - nearest) + at(i), twice, value, zero);
            sum = sum + value;
        }
        write(out + j, mean_of(sum, nearest));
    }
}

// scratch: float32[rows (+ k with a mixing) + 1, stride].
void column_statistic(const Updates& updates, const ColumnPlan& plan, std::int64_t begin, std::int64_t end,
                      float* scratch, float* out) {
    const std::int64_t stride = plan.stride, k = updates.k;
    float* const result = scratch;
    float* const all = scratch + stride;
    float* const h = plan.mixing != nullptr ? all + plan.rows * stride : all;
    const std::int64_t some = k * plan.run / 16 / (plan.comparators + 1) + 1;
    for (std::int64_t first = begin; first < end; first += plan.tile) {
        const std::int64_t count = end - first < plan.tile ? end - first : plan.tile;
        const std::int64_t padded = (count + kFull - 1) / kFull * kFull, tensor = tensor_of(updates, first);
        for (std::int64_t i = 0; i < k; ++i) {
            read_h(updates, i, tensor, first, count, h + i * stride);
            for (std::int64_t j = count; j < padded; ++j) h[i * stride + j] = 0;
        }
        Fetching next = fetching(updates, tensor, first, plan.tile);
        if (plan.mixing != nullptr) mix_rows(plan.mixing, plan.rows, k, h, stride, padded, all);
        for (std::int64_t at = 0; at < padded; at += plan.run) {
            const std::int64_t few = padded - at < plan.run ? padded - at : plan.run;
            float* const rows = all + at;
            for (std::int64_t c = 0; c < plan.comparators; ++c) {
                next.lines(some);
                compare_rows(plan.network[c], rows, stride, few);
            }
            if (plan.of.nearest > 0)
                mean_of_nearest(rows, plan.rows, stride, plan.of.nearest, few, result + at);
            else
                mean_of_kept(rows, stride, plan.of, few, result + at);
        }
        __builtin_memcpy(out + first, result, count * sizeof(float));
    }
}
