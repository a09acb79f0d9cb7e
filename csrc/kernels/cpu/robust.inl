// Inner products and order statistics of clients' updates, tile by tile.

// h of client i, elements [first, first + count), in float32 or float64; `tensor` is the one that element `first` lies
// in. scratch: float32[count], or h itself.
template <class Number>
inline void read_h(const Updates& updates, std::int64_t i, std::int64_t tensor, std::int64_t first, std::int64_t count,
                   float* scratch, Number* h) {
    for (std::int64_t few; count > 0; first += few, h += few, count -= few, ++tensor) {
        const std::int64_t at = first - updates.starts[tensor], rest = updates.starts[tensor + 1] - first;
        few = rest < count ? rest : count;
        const ClientUpdate& sent = updates.sent[tensor * updates.k + i];
        if constexpr (sizeof(Number) == sizeof(float)) scratch = h;
        const float* const y = sent_tile(sent, at, few, scratch);
        const float* const base = sent.base != nullptr ? sent.base + at : nullptr;
        const float scale = sent.scale;
        std::int64_t j = 0;
        if (base != nullptr) {
            for (; j + kFull <= few; j += kFull)
                write(h + j, Full<Number>::of(gradient<Given::model>(read(base + j), read(y + j), scale)));
            for (; j < few; ++j) h[j] = gradient<Given::model>(base[j], y[j], scale);
        } else {
            for (; j + kFull <= few; j += kFull)
                write(h + j, Full<Number>::of(gradient<Given::difference>(FullFloats{}, read(y + j), scale)));
            for (; j < few; ++j) h[j] = gradient<Given::difference>(0.0f, y[j], scale);
        }
    }
}

// Brings some elements of all updates from memory into the L2, some cache lines at a time, while the processor computes
// with those before.
struct Fetching {
    const Updates& updates;
    std::int64_t tensor, at, count;  // elements [at, at + count) of the tensor, or what lies behind it
    std::int64_t i = 0, byte = 0;

    [[gnu::always_inline]] inline void lines(std::int64_t some) {
        for (; i < updates.k; ++i, byte = 0) {
            const Upcoming next = upcoming(updates.sent[tensor * updates.k + i], at);
            for (; byte < count * next.size; byte += 64) {
                if (--some < 0) return;
                __builtin_prefetch(next.at + byte, 0, 2);
            }
        }
    }
};

// The tensor that an element lies in.
inline std::int64_t tensor_of(const Updates& updates, std::int64_t element) {
    std::int64_t low = 0, high = updates.tensors;
    while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        (updates.starts[middle] <= element ? low : high) = middle;
    }
    return low;
}

// Rows are multiplied in groups of as many as leave room in the registers for the square of sums, its row and a value.
#if defined(__AVX512F__)
constexpr int kGramRows = 5;
#else
constexpr int kGramRows = 3;
#endif
static_assert(kGramRows <= kMostGramRows, "the scratch has room for a group");

// lanes[r][c] += the products of rows r of `left` and c of `right`, element j on lane j mod 8; c >= r where both are
// the same rows.
template <bool kSame>
inline void multiply_rows(const double* left, const double* right, std::int64_t count,
                          double (*lanes)[kGramRows][kGramLanes]) {
    for (int lane = 0; lane < kGramLanes; lane += kWidth) {
        Doubles sums[kGramRows][kGramRows];
#pragma GCC unroll 8
        for (int r = 0; r < kGramRows; ++r)
#pragma GCC unroll 8
            for (int c = kSame ? r : 0; c < kGramRows; ++c)
                __builtin_memcpy(&sums[r][c], lanes[r][c] + lane, sizeof sums[r][c]);
        std::int64_t j = lane;
        do {  // count is positive
            Doubles a[kGramRows];
#pragma GCC unroll 8
            for (int r = 0; r < kGramRows; ++r) __builtin_memcpy(&a[r], left + r * kGramStride + j, sizeof a[r]);
#pragma GCC unroll 8
            for (int c = 0; c < kGramRows; ++c) {
                Doubles b;
                __builtin_memcpy(&b, right + c * kGramStride + j, sizeof b);
#pragma GCC unroll 8
                for (int r = 0; r < (kSame ? c + 1 : kGramRows); ++r) sums[r][c] = fused(a[r], b, sums[r][c]);
            }
        } while ((j += kGramLanes) < count);
#pragma GCC unroll 8
        for (int r = 0; r < kGramRows; ++r)
#pragma GCC unroll 8
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
        Fetching next{updates, tensor, first + count - updates.starts[tensor], kGramTile};
        std::int64_t pair = 0;
        for (std::int64_t j = 0; j < groups; ++j) {
            double* const right = tile + j * kGramRows * kGramStride;
            for (std::int64_t r = 0; r < kGramRows && j * kGramRows + r < k; ++r) {
                double* const row = right + r * kGramStride;
                read_h(updates, j * kGramRows + r, tensor, first, count, h, row);
                for (std::int64_t e = count; e < padded; ++e) row[e] = 0;
            }
            for (std::int64_t i = 0; i <= j; ++i, ++pair) {
                next.lines(some);
                const auto multiply = i == j ? multiply_rows<true> : multiply_rows<false>;
                multiply(tile + i * kGramRows * kGramStride, right, padded, lanes[pair]);
            }
        }
    }
    std::int64_t pair = 0;
    for (std::int64_t j = 0; j < groups; ++j)
        for (std::int64_t i = 0; i <= j; ++i, ++pair)
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

inline void compare_rows(const SortingStep& step, float* rows, std::int64_t stride, std::int64_t count) {
    float* const low = rows + step.low * stride;
    float* const high = rows + step.high * stride;
    if (!step.keeps_high) {
        for (std::int64_t j = 0; j < count; j += kFull) write(low + j, lesser(read(low + j), read(high + j)));
    } else if (!step.keeps_low) {
        for (std::int64_t j = 0; j < count; j += kFull) write(high + j, greater(read(low + j), read(high + j)));
    } else {
        for (std::int64_t j = 0; j < count; j += kFull) {
            const FullFloats a = read(low + j), b = read(high + j);
            write(low + j, lesser(a, b));
            write(high + j, greater(a, b));
        }
    }
}

// Pairs of values to compare in turn.
struct Pairs {
    int count = 0, low[kSortedRows * 4] = {}, high[kSortedRows * 4] = {};

    constexpr void add(int i, int j) {
        low[count] = i;
        high[count++] = j;
    }
};

// Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2, Algorithm M) sorts any values.
template <int kRows>
struct Sorting {
    static constexpr Pairs pairs() {
        Pairs all;
        int top = 1;
        while (2 * top < kRows) top *= 2;
        for (int p = top; p > 0; p /= 2)
            for (int q = top, r = 0, d = p;; d = q - p, q /= 2, r = p) {
                for (int i = 0; i + d < kRows; ++i)
                    if ((i & p) == r) all.add(i, i + d);
                if (q == p) break;
            }
        return all;
    }
};

// Sorts values that rise and then fall, or the reverse.
template <int kRows>
struct Merging {
    static constexpr Pairs pairs() {
        Pairs all;
        for (int d = kRows / 2; d > 0; d /= 2)
            for (int i = 0; i < kRows; ++i)
                if ((i & d) == 0) all.add(i, i + d);
        return all;
    }
};

template <class Network, int kRows, std::size_t... kPair>
[[gnu::always_inline]] inline void compare_all(FullFloats (&values)[kRows], std::index_sequence<kPair...>) {
    [[maybe_unused]] constexpr Pairs pairs = Network::pairs();  // one row has none
    [[maybe_unused]] const auto compare = [](FullFloats& low, FullFloats& high) {
        const FullFloats least = lesser(low, high);
        high = greater(low, high);
        low = least;
    };
    (compare(values[pairs.low[kPair]], values[pairs.high[kPair]]), ...);
}

// Compares kRows rows in registers. Meanwhile memory brings the rows at `ahead`.
template <class Network, int kRows>
void order_rows(float* rows, std::int64_t stride, std::int64_t count, const char* const* ahead) {
    for (std::int64_t j = 0; j < count; j += kFull) {
        FullFloats values[kRows];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            values[r] = read(rows + r * stride + j);
            if (ahead != nullptr) __builtin_prefetch(ahead[r] + j * sizeof(float));
        }
        compare_all<Network>(values, std::make_index_sequence<Network::pairs().count>{});
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) write(rows + r * stride + j, values[r]);
    }
}

using OrderRows = void (*)(float*, std::int64_t, std::int64_t, const char* const*);
template <std::size_t... kLess>
inline OrderRows sorting_of(std::int64_t rows, std::index_sequence<kLess...>) {
    static constexpr OrderRows all[] = {order_rows<Sorting<kLess + 1>, kLess + 1>...};
    return all[rows - 1];
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

// The values nearest the median lie side by side. s_i is too far down exactly if s_(i + nearest) is nearer, and too far
// up if s_(i - nearest) is. If two are equally near, the mean of both choices counts: the one with lower values, `low`,
// and the one with higher values.
inline void mean_of_nearest(const float* rows, std::int64_t k, std::int64_t stride, std::int64_t nearest,
                            std::int64_t count, float* out) {
    for (std::int64_t j = 0; j < count; j += kFull) {
        const auto at = [&](std::int64_t i) { return doubles_at(rows + i * stride + j); };
        const FullDoubles twice = at((k - 1) / 2) + at(k / 2), zero = {};
        FullDoubles sum = {};
        for (std::int64_t i = 0; i < k; ++i) {
            FullDoubles low = at(i), high = low;
            if (i + nearest < k) {
                const FullDoubles both = at(i) + at(i + nearest);
                low = where_less(both, twice, zero, low);
                high = where_less(twice, both, high, zero);
            }
            if (i >= nearest) {
                const FullDoubles both = at(i - nearest) + at(i);
                low = where_less(both, twice, low, zero);
                high = where_less(twice, both, zero, high);
            }
            sum = sum + 0.5 * (low + high);
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
    for (std::int64_t first = begin; first < end; first += plan.tile) {
        const std::int64_t count = end - first < plan.tile ? end - first : plan.tile;
        const std::int64_t padded = (count + kFull - 1) / kFull * kFull, tensor = tensor_of(updates, first);
        for (std::int64_t i = 0; i < k; ++i) {
            read_h(updates, i, tensor, first, count, h + i * stride, h + i * stride);
            for (std::int64_t j = count; j < padded; ++j) h[i * stride + j] = 0;
        }
        const std::int64_t next = first + count - updates.starts[tensor];  // the tile behind, or what lies there
        if (plan.mixing != nullptr) mix_rows(plan.mixing, plan.rows, k, h, stride, padded, all);
        for (std::int64_t at = 0; at < padded; at += plan.run) {
            const std::int64_t few = padded - at < plan.run ? padded - at : plan.run;
            float* const rows = all + at;
            for (std::int64_t c = 0; c < plan.steps; ++c) {
                const SortingStep& step = plan.sorting[c];
                if (step.kind == SortingStep::compare) {
                    compare_rows(step, rows, stride, few);
                } else if (step.kind == SortingStep::merge) {
                    order_rows<Merging<kSortedRows>, kSortedRows>(rows + step.low * stride, stride, few, nullptr);
                } else {
                    const char* ahead[kSortedRows];
                    for (std::int64_t i = step.low; i < step.high; ++i) {
                        const Upcoming row = upcoming(updates.sent[tensor * k + (i < k ? i : 0)], next + at);
                        ahead[i - step.low] = row.at;
                    }
                    sorting_of(step.high - step.low, std::make_index_sequence<kSortedRows>{})(rows + step.low * stride,
                                                                                              stride, few, ahead);
                }
            }
            if (plan.of.nearest > 0)
                mean_of_nearest(rows, plan.rows, stride, plan.of.nearest, few, result + at);
            else
                mean_of_kept(rows, stride, plan.of, few, result + at);
        }
        __builtin_memcpy(out + first, result, count * sizeof(float));
    }
}
