// Sums of integers (scalar/exact.inl): the folds of fold.inl and weighted_sum.inl, with two words an element.

typedef std::uint64_t Words __attribute__((vector_size(8 * kWidth)));

// kFull elements of a sum. (Four members and no arrays: GCC 12 would keep those in memory.)
struct FullWords {
    Words high0, high1, low0, low1;
};

// Holds a sum of integers as it is: the compiler would add several rows' terms up first, and keep them in memory.
inline void hold([[maybe_unused]] Words& words) {
#if defined(__SSE2__)
    __asm__("" : "+v"(words));
#elif defined(__aarch64__)
    __asm__("" : "+w"(words));
#endif
}

inline Words read(const std::int64_t* at) {
    Words words;
    __builtin_memcpy(&words, at, sizeof words);
    return words;
}
inline FullWords read(ConstExactSum sum, std::int64_t at) {
    return {read(sum.high + at), read(sum.high + at + kWidth), read(sum.low + at), read(sum.low + at + kWidth)};
}
inline FullWords read(ExactSum sum, std::int64_t at) {
    return read(ConstExactSum{sum.high, sum.low}, at);
}
inline void write(std::int64_t* at, Words words) {
    __builtin_memcpy(at, &words, sizeof words);
}

constexpr std::int64_t kMostTerms = 2048;  // terms after which words are normalised: half of their capacity

// How words are left: as they are, or settled, which the last pass over them does for all terms.
struct Leaving {
    Biases biases;
    bool settles;
};

inline void write(ExactSum sum, std::int64_t at, FullWords words, const Leaving& leaving) {
    if (leaving.settles) {
        settle(words.high0, words.low0, leaving.biases);
        settle(words.high1, words.low1, leaving.biases);
    }
    write(sum.high + at, words.high0);
    write(sum.high + at + kWidth, words.high1);
    write(sum.low + at, words.low0);
    write(sum.low + at + kWidth, words.low1);
}

template <bool kAdds = true>
[[gnu::always_inline]] inline void add_rounded(FullDoubles t, FullWords& sum) {
    add_rounded<kAdds>(t.low, sum.high0, sum.low0);
    add_rounded<kAdds>(t.high, sum.high1, sum.low1);
}

// Whether products with float32 numbers are exact in float64, so that a fused operation has the bits of two.
inline bool is_short(double weight) {
    std::uint64_t bits;
    __builtin_memcpy(&bits, &weight, sizeof bits);
    return (bits & 0xffffffu) == 0;  // 29 bits of 53
}

// add_rounded of weight * h; kShort where the weight is.
template <bool kShort, bool kAdds = true>
[[gnu::always_inline]] inline void add_product(double weight, Doubles h, Words& high, Words& low) {
    if constexpr (!kShort || !kHasFused) return add_rounded<kAdds>(weight * h, high, low);
    const Doubles coarse = fused(weight, h, kHighMagic - Doubles{});
    const Doubles fine = fused(weight, h, kBothMagic - coarse);
    high = kAdds ? high + words_of<Words>(coarse) : high - words_of<Words>(coarse);
    low = kAdds ? low + words_of<Words>(fine) : low - words_of<Words>(fine);
    hold(high);
    hold(low);
}
template <bool kShort, bool kAdds = true>
[[gnu::always_inline]] inline void add_product(double weight, FullDoubles h, FullWords& sum) {
    add_product<kShort, kAdds>(weight, h.low, sum.high0, sum.low0);
    add_product<kShort, kAdds>(weight, h.high, sum.high1, sum.low1);
}

template <class Word>
inline ExactWords<Word> operator+(ExactWords<Word> sum, std::int64_t count) {
    return {sum.high + count, sum.low + count};
}

inline void begin_run(ConstExactSum acc, ExactSum out, std::int64_t begin, std::int64_t end) {
    if (acc.high == out.high) return;
    for (std::int64_t j = begin; j < end; ++j) out.high[j] = acc.high[j];
    for (std::int64_t j = begin; j < end; ++j) out.low[j] = acc.low[j];
}

// Where rows are exchanged into a sum.
struct ExactPlace {
    ExactSum words;
    Leaving leaving;
};
inline ExactPlace operator+(ExactPlace place, std::int64_t count) {
    return {place.words + count, place.leaving};
}

// What the rows of one pass over a sum leave: those of the last, or of so many that a word could not hold more.
class Settling {
  public:
    // The next `count` rows; last where none come behind them.
    ExactPlace pass(ExactSum out, const RowExchange* rows, int count, Form form, bool last) {
        for (int r = 0; r < count; ++r) terms_ += terms(rows[r], form);
        rows_ += count;
        const bool settles = last || 4 * rows_ >= kMostTerms;
        const ExactPlace place{out, {biases_of(terms_), settles}};
        if (settles) terms_ = rows_ = 0;
        return place;
    }

  private:
    // How many terms a row adds, less those that it takes off.
    static std::int64_t terms(const RowExchange& row, Form form) {
        if (form != Form::replaces) return form == Form::changes ? 2 : 4;
        return row.old_row.data == nullptr ? 1 : row.anchor != nullptr;
    }

    std::int64_t terms_ = 0, rows_ = 0;
};
inline ExactPlace before_last(ExactPlace place) {
    place.leaving.settles = false;
    return place;
}

inline ExactElement element(ExactSum sum, std::int64_t j) {
    return {static_cast<std::uint64_t>(sum.high[j]), static_cast<std::uint64_t>(sum.low[j])};
}
inline void write(ExactSum sum, std::int64_t j, ExactElement words, const Leaving& leaving) {
    if (leaving.settles) settle(words.high, words.low, leaving.biases);
    sum.high[j] = static_cast<std::int64_t>(words.high);
    sum.low[j] = static_cast<std::int64_t>(words.low);
}

// fold_piece into an exact sum; otherwise the same.
template <int kRows, Form kForm, Given kGiven, bool kOld, bool kAnchor, bool kKeep, bool kShort = false>
void fold_piece(const Streams* rows, const Forms* forms, std::int64_t count, ExactPlace place, float (*lanes)[kLanes]) {
    constexpr bool kBase = kGiven == Given::model, kReplaces = kForm == Form::replaces, kNorms = kGiven != Given::row;
    const float* const base = rows[0].base;
    const auto [sum, leaving] = place;
    SumForm adds[kRows];
    for (int r = 0; r < kRows && !kReplaces; ++r) adds[r] = weighed(forms->adds, rows[r].weight);
    FullFloats part[kRows][kLanes / kFull] = {};
    if (kNorms) __builtin_memcpy(part, lanes, sizeof part);
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        for (int r = 0; r < kRows; ++r) {
            const Streams& row = rows[r];
            if (kNorms) {
                __builtin_prefetch(row.y + j + kFetch);
                if (kOld) __builtin_prefetch(row.old_row + j + kFetch);
            }
            if (kAnchor) __builtin_prefetch(row.anchor + j + kFetch);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kLanes / kFull; ++v) {
            const std::int64_t at = j + v * kFull;
            const FullFloats x = kBase ? read(base + at) : FullFloats{};
            FullWords s = read(sum, at);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const Streams& row = rows[r];
                const FullFloats h = gradient<kGiven>(x, read(row.y + at), row.scale);
                if (kNorms) part[r][v] += h * h;
                const FullFloats old = kOld && !kReplaces ? read(row.old_row + at) : FullFloats{};
                const FullFloats anchor = kAnchor && !kReplaces ? read(row.anchor + at) : FullFloats{};
                const FullFloats made = kReplaces ? h : row_of(forms->row, h, old, anchor);
                if (kReplaces) {
                    add_product<kShort>(row.weight, to_doubles(made), s);
                    if (kOld) add_product<kShort, false>(row.weight, doubles_at(row.old_row + at), s);
                    if (kAnchor) add_product<kShort>(row.weight, doubles_at(row.anchor + at), s);
                } else {
                    add_seen_of<kForm>(adds[r], to_doubles(made), to_doubles(old), to_doubles(h), to_doubles(anchor),
                                       s);
                }
                if (kKeep) write(row.new_row + at, made);  // behind the load of old_row, which it may be
            }
            write(sum, at, s, leaving);
        }
    }
    if (kNorms) __builtin_memcpy(lanes, part, sizeof part);
    for (int l = 0; j < count; ++j, ++l) {
        ExactElement s = element(sum, j);
        for (int r = 0; r < kRows; ++r) {
            const Streams& row = rows[r];
            const float h = gradient<kGiven>(kBase ? base[j] : 0.0f, row.y[j], row.scale);
            if (kNorms) lanes[r][l] += h * h;
            const float old = kOld ? row.old_row[j] : 0.0f, anchor = kAnchor ? row.anchor[j] : 0.0f;
            const float made = kReplaces ? h : row_of(forms->row, h, old, anchor);
            if (kReplaces) {
                add_rounded(row.weight * static_cast<double>(made), s);
                if (kOld) add_rounded<false>(row.weight * static_cast<double>(old), s);
                if (kAnchor) add_rounded(row.weight * static_cast<double>(anchor), s);
            } else {
                add_seen_of<kForm, double>(adds[r], made, old, h, anchor, s);
            }
            if (kKeep) row.new_row[j] = made;
        }
        write(sum, j, s, leaving);
    }
}

template <int kRows, Form kForm, bool kOld, bool kAnchor, bool kKeep>
void fold_rows(const Streams* rows, const Forms* forms, std::int64_t count, ExactPlace place, float (*lanes)[kLanes]) {
    bool all_short = kForm == Form::replaces;
    for (int r = 0; r < kRows; ++r) all_short &= is_short(rows[r].weight);
    const auto piece = rows[0].base != nullptr
                           ? (all_short ? fold_piece<kRows, kForm, Given::model, kOld, kAnchor, kKeep, true>
                                        : fold_piece<kRows, kForm, Given::model, kOld, kAnchor, kKeep, false>)
                           : (all_short ? fold_piece<kRows, kForm, Given::difference, kOld, kAnchor, kKeep, true>
                                        : fold_piece<kRows, kForm, Given::difference, kOld, kAnchor, kKeep, false>);
    piece(rows, forms, count, place, lanes);
}

// The sum's term for a chunk whose row is stored.
template <Form kForm>
void add_seen(const SumForm& adds, double weight, const float* stored, const float* r, const float* h, const float* q,
              std::int64_t count, ExactPlace place) {
    const SumForm coefficients = weighed(adds, weight);
    for (std::int64_t j = 0; j < count; ++j) {
        ExactElement s = element(place.words, j);
        add_seen_of<kForm, double>(coefficients, stored[j], r[j], h[j], q[j], s);
        write(place.words, j, s, place.leaving);
    }
}

inline bool is_held(const float* values, std::int64_t count, const SumForm& adds, double weight) {
    return is_held(float_of(largest_magnitude(values, count)), adds, weight);
}

// Some rows of one tile, on their way into its sum: Pass, for integers.
template <bool kBase, bool kShort, bool kScales>
struct ExactPass {
    static constexpr int kGroup = kLanes;  // elements whose words stay in registers while the rows pass
    static constexpr int kSquares = kLanes / kFull;

    int k;
    Leaving leaving;
    double weights[kMostRows];
    float scales[kMostRows];
    FullFloats squares[kMostRows][kSquares];

    inline __attribute__((always_inline)) void add(const float* const* rows, const float* base, std::int64_t at,
                                                   ConstExactSum from, ExactSum sum) {
        FullWords s[kSquares];
#pragma GCC unroll 8
        for (int v = 0; v < kSquares; ++v) s[v] = from.high == nullptr ? FullWords{} : read(from, at + v * kFull);
#pragma GCC unroll 1
        for (int r = 0; r < k; ++r) {
            const float* const y = rows[r] + at;
            for (int line = 0; line < kGroup * static_cast<int>(sizeof(float)); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(y) + kNear + line);
#pragma GCC unroll 8
            for (int v = 0; v < kSquares; ++v) {
                FullFloats h = read(y + v * kFull);
                if (kBase) h = read(base + at + v * kFull) - h;
                if (kScales) h = h * scales[r];
                squares[r][v] += h * h;
                add_product<kShort>(weights[r], to_doubles(h), s[v]);
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < kSquares; ++v) write(sum, at + v * kFull, s[v], leaving);
    }

    // The last elements, fewer than a group: from copies that end in zeros.
    __attribute__((noinline)) void add_rest(const float* const* rows, const float* base, std::int64_t at,
                                            std::int64_t count, ConstExactSum from, ExactSum sum) {
        float copies[kMostRows][kGroup] = {}, x[kGroup] = {};
        const float* pointers[kMostRows];
        for (int r = 0; r < k; ++r) {
            __builtin_memcpy(copies[r], rows[r] + at, count * sizeof(float));
            pointers[r] = copies[r];
        }
        if (kBase) __builtin_memcpy(x, base + at, count * sizeof(float));
        std::int64_t high[kGroup] = {}, low[kGroup] = {};
        if (from.high != nullptr) {
            __builtin_memcpy(high, from.high + at, count * sizeof(std::int64_t));
            __builtin_memcpy(low, from.low + at, count * sizeof(std::int64_t));
        }
        add(pointers, x, 0, {high, low}, {high, low});
        __builtin_memcpy(sum.high + at, high, count * sizeof(std::int64_t));
        __builtin_memcpy(sum.low + at, low, count * sizeof(std::int64_t));
    }

    __attribute__((noinline)) void add_all(const float* const* rows, const float* base, std::int64_t count,
                                           ConstExactSum from, ExactSum sum) {
        std::int64_t j = 0;
        for (; j + kGroup <= count; j += kGroup) add(rows, base, j, from, sum);
        if (j < count) add_rest(rows, base, j, count - j, from, sum);
    }
};

// Adds k clients, of one base or none, to `from`, tile by tile of a run.
template <bool kBase, bool kShort, bool kScales>
void accumulate_rows(const ClientUpdate* sent, int k, std::int64_t begin, std::int64_t end, ConstExactSum from,
                     ExactSum out, const Leaving& leaving, double* squares, std::int64_t stride, bool past_caches) {
    alignas(64) float scratch[kMostRows][kConverted];
    alignas(64) std::int64_t high[kChunk], low[kChunk];
    bool converted = false;
    ExactPass<kBase, kShort, kScales> pass;
    pass.k = k;
    pass.leaving = leaving;
    for (int r = 0; r < k; ++r) {
        pass.weights[r] = sent[r].weight;
        pass.scales[r] = kBase ? sent[r].scale : -sent[r].scale;
        converted |= sent[r].dtype != Dtype::float32;
    }
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        const std::int64_t stretch = converted ? kConverted : past_caches ? kChunk : kTile;
        __builtin_memset(pass.squares, 0, sizeof pass.squares);
        for (std::int64_t first = tile; first < tile + count; first += stretch) {
            const std::int64_t few = tile + count - first < stretch ? tile + count - first : stretch;
            const float* rows[kMostRows];
            for (int r = 0; r < k; ++r) rows[r] = sent_tile(sent[r], first, few, scratch[r]);
            pass.add_all(rows, kBase ? sent[0].base + first : nullptr, few, from.high == nullptr ? from : from + first,
                         past_caches ? ExactSum{high, low} : out + first);
            if (past_caches) {
                put(high, few, out.high + first);
                put(low, few, out.low + first);
            }
        }
        for (int r = 0; r < k; ++r) {
            const double square = fold_lanes(pass.squares[r], nullptr, 0);
            squares[(tile - begin) / kBlock * stride + r] +=
                is_sound(square) ? square : squares_exactly(sent[r], tile, count, square);
        }
    }
}

// The loop for these clients: most send models that are averaged, with whole numbers of examples.
template <bool kBase>
auto rows_loop(const ClientUpdate* sent, int k) {
    bool all_short = true, scales = !kBase;
    for (int r = 0; r < k; ++r) {
        all_short &= is_short(sent[r].weight);
        scales |= sent[r].scale != 1;
    }
    if (!all_short) return accumulate_rows<kBase, false, true>;
    return scales ? accumulate_rows<kBase, true, true> : accumulate_rows<kBase, true, !kBase>;
}

void accumulate_exact(const ExactFold& fold, std::int64_t k, std::int64_t begin, std::int64_t end, double* squares,
                      const Tiling& tiling) {
    const ClientUpdate* const sent = fold.sent;
    const ExactSum out = fold.out;
    if (k == 0) {
        if (fold.acc.high != nullptr) begin_run(fold.acc, out, begin, end);
        for (std::int64_t j = begin; j < end && fold.acc.high == nullptr; ++j) out.high[j] = out.low[j] = 0;
    }
    for (std::int64_t i = 0; i < (end - begin + kBlock - 1) / kBlock * k; ++i) squares[i] = 0;
    for (std::int64_t first = begin; first < end; first += tiling.run) {
        const std::int64_t last = end - first < tiling.run ? end : first + tiling.run;
        std::int64_t terms = 0;  // that are not settled
        for (std::int64_t i = 0; i < k;) {
            const int together = sharing(sent, i, k, tiling.rows);
            terms += together;
            const Leaving leaving{biases_of(terms), i + together == k || terms >= kMostTerms};
            if (leaving.settles) terms = 0;
            const auto loop =
                sent[i].base != nullptr ? rows_loop<true>(sent + i, together) : rows_loop<false>(sent + i, together);
            const bool in_one_pass = together == k && fold.acc.high != out.high;  // else the sum is read again
            loop(sent + i, together, first, last, i == 0 ? fold.acc : ConstExactSum{out.high, out.low}, out, leaving,
                 squares + (first - begin) / kBlock * k + i, k, kHasPastCaches && tiling.past_caches && in_one_pass);
            i += together;
        }
    }
    if (tiling.past_caches) fence();
}
