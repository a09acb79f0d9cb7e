// Sums of integers (scalar/exact.inl): the folds of fold.inl and weighted_sum.inl, with two words an element.

typedef std::uint64_t Words __attribute__((vector_size(8 * kWidth)));

// kFull elements of a sum.
struct FullWords {
    Words high[2], low[2];
};

// (Vector by vector: of two at once GCC 12 makes four copies of halves.)
inline Words read(const std::int64_t* at) {
    Words words;
    __builtin_memcpy(&words, at, sizeof words);
    return words;
}
inline FullWords read(ConstExactSum sum, std::int64_t at) {
    return {{read(sum.high + at), read(sum.high + at + kWidth)}, {read(sum.low + at), read(sum.low + at + kWidth)}};
}
inline FullWords read(ExactSum sum, std::int64_t at) {
    return read(ConstExactSum{sum.high, sum.low}, at);
}
inline void write(std::int64_t* at, Words words) {
    __builtin_memcpy(at, &words, sizeof words);
}
inline void write(std::int64_t* high_at, std::int64_t* low_at, Words high, Words low, Biases biases) {
    settle(high, low, biases);
    write(high_at, high);
    write(low_at, low);
}
inline void write(ExactSum sum, std::int64_t at, FullWords words, Biases biases) {
    write(sum.high + at, sum.low + at, words.high[0], words.low[0], biases);
    write(sum.high + at + kWidth, sum.low + at + kWidth, words.high[1], words.low[1], biases);
}

template <bool kAdds = true>
[[gnu::always_inline]] inline void add_rounded(FullDoubles t, FullWords& sum) {
    add_rounded<kAdds>(t.low, sum.high[0], sum.low[0]);
    add_rounded<kAdds>(t.high, sum.high[1], sum.low[1]);
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

// The client's weight times the coefficients of `adds`, each rounded once.
inline SumForm weighed(const SumForm& adds, double weight) {
    return {weight * adds.row, weight * adds.r, weight * adds.h, weight * adds.q};
}

// How many terms a row of the form adds, less those that it takes off.
template <Form kForm, bool kOld, bool kAnchor>
constexpr std::int64_t kTerms = kForm == Form::replaces  ? 1 - kOld + kAnchor
                                : kForm == Form::changes ? 2
                                                         : 4;

// What `seen_of` sees, term by term, of one or more elements in float64.
template <Form kForm, class Number, class Sum>
inline void add_seen_of(const SumForm& adds, Number stored, Number r, Number h, Number q, Sum& sum) {
    add_rounded(adds.row * stored, sum);
    add_rounded(adds.r * r, sum);
    if (kForm != Form::general) return;
    add_rounded(adds.h * h, sum);
    add_rounded(adds.q * q, sum);
}

// One element of a sum.
struct Element {
    std::uint64_t high, low;
};
inline Element element(ExactSum sum, std::int64_t j) {
    return {static_cast<std::uint64_t>(sum.high[j]), static_cast<std::uint64_t>(sum.low[j])};
}
inline void write(ExactSum sum, std::int64_t j, Element words, Biases biases) {
    settle(words.high, words.low, biases);
    sum.high[j] = static_cast<std::int64_t>(words.high);
    sum.low[j] = static_cast<std::int64_t>(words.low);
}
template <bool kAdds = true>
inline void add_rounded(double t, Element& sum) {
    add_rounded<kAdds>(t, sum.high, sum.low);
}

// fold_piece into an exact sum: for the rest as there.
template <int kRows, Form kForm, Given kGiven, bool kOld, bool kAnchor, bool kKeep>
void fold_piece(const Streams* rows, const Forms* forms, std::int64_t count, ExactSum sum, float (*lanes)[kLanes]) {
    constexpr bool kBase = kGiven == Given::model, kReplaces = kForm == Form::replaces, kNorms = kGiven != Given::row;
    const float* const base = rows[0].base;
    const Biases biases = biases_of(kRows * kTerms<kForm, kOld, kAnchor>);
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
                const FullFloats old = kOld ? read(row.old_row + at) : FullFloats{};
                const FullFloats anchor = kAnchor ? read(row.anchor + at) : FullFloats{};
                const FullFloats made = kReplaces ? h : row_of(forms->row, h, old, anchor);
                if (kReplaces) {
                    add_rounded(row.weight * to_doubles(made), s);
                    if (kOld) add_rounded<false>(row.weight * to_doubles(old), s);
                    if (kAnchor) add_rounded(row.weight * to_doubles(anchor), s);
                } else {
                    add_seen_of<kForm>(adds[r], to_doubles(made), to_doubles(old), to_doubles(h), to_doubles(anchor),
                                       s);
                }
                if (kKeep) write(row.new_row + at, made);  // behind the load of old_row, which it may be
            }
            write(sum, at, s, biases);
        }
    }
    if (kNorms) __builtin_memcpy(lanes, part, sizeof part);
    for (int l = 0; j < count; ++j, ++l) {
        Element s = element(sum, j);
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
        write(sum, j, s, biases);
    }
}

template <int kRows, Form kForm, bool kOld, bool kAnchor, bool kKeep>
void fold_rows(const Streams* rows, const Forms* forms, std::int64_t count, ExactSum sum, float (*lanes)[kLanes]) {
    if (rows[0].base != nullptr)
        fold_piece<kRows, kForm, Given::model, kOld, kAnchor, kKeep>(rows, forms, count, sum, lanes);
    else
        fold_piece<kRows, kForm, Given::difference, kOld, kAnchor, kKeep>(rows, forms, count, sum, lanes);
}

// What the sum sees of a chunk whose row is stored.
template <Form kForm>
void add_seen(const SumForm& adds, double weight, const float* stored, const float* r, const float* h, const float* q,
              std::int64_t count, ExactSum sum) {
    const SumForm coefficients = weighed(adds, weight);
    const Biases biases = biases_of(kTerms<kForm, true, true>);
    for (std::int64_t j = 0; j < count; ++j) {
        Element s = element(sum, j);
        add_seen_of<kForm, double>(coefficients, stored[j], r[j], h[j], q[j], s);
        write(sum, j, s, biases);
    }
}

// Whether the weighted elements of a row that was made are such as an exact sum takes.
inline bool is_held(const float* values, std::int64_t count, const SumForm& adds, double weight) {
    const double of_row = __builtin_fabs(adds.row), of_r = __builtin_fabs(adds.r);
    const double most = of_row > of_r ? of_row : of_r;  // which it is next time
    const float largest = float_of(largest_magnitude(values, count));
    return static_cast<double>(largest) * (most * __builtin_fabs(weight)) < 2 * kLongestExact;  // as a NaN is not
}

// Some rows of one tile, on their way into its sum: Pass, for integers.
template <bool kBase>
struct ExactPass {
    static constexpr int kGroup = kLanes;  // elements whose words stay in registers while the rows pass
    static constexpr int kSquares = kLanes / kFull;

    int k;
    Biases biases;
    double weights[kRowsPerPass];
    float scales[kRowsPerPass];
    FullFloats squares[kRowsPerPass][kSquares];

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
                h = h * scales[r];
                squares[r][v] += h * h;
                add_rounded(weights[r] * to_doubles(h), s[v]);
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < kSquares; ++v) write(sum, at + v * kFull, s[v], biases);
    }

    // The last elements, fewer than a group: from copies that end in zeros.
    __attribute__((noinline)) void add_rest(const float* const* rows, const float* base, std::int64_t at,
                                            std::int64_t count, ConstExactSum from, ExactSum sum) {
        float copies[kRowsPerPass][kGroup] = {}, x[kGroup] = {};
        const float* pointers[kRowsPerPass];
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

// k clients of one base, or of none, tile by tile of a run: what is in `from`, and theirs.
template <bool kBase>
void accumulate_rows(const ClientUpdate* sent, int k, std::int64_t begin, std::int64_t end, ConstExactSum from,
                     ExactSum out, double* squares, bool past_caches) {
    alignas(64) float scratch[kRowsPerPass][kConverted];
    alignas(64) std::int64_t high[kChunk], low[kChunk];
    bool converted = false;
    ExactPass<kBase> pass;
    pass.k = k;
    pass.biases = biases_of(k);
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
            const float* rows[kRowsPerPass];
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
            squares[r] += is_sound(square) ? square : squares_exactly(sent[r], tile, count);
        }
    }
}

void accumulate_exact(const ExactFold& fold, std::int64_t k, std::int64_t begin, std::int64_t end, double* squares,
                      bool past_caches) {
    const ClientUpdate* const sent = fold.sent;
    const ExactSum out = fold.out;
    if (k == 0) {
        if (fold.acc.high != nullptr) begin_run(fold.acc, out, begin, end);
        for (std::int64_t j = begin; j < end && fold.acc.high == nullptr; ++j) out.high[j] = out.low[j] = 0;
    }
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t first = begin; first < end; first += kRun) {
        const std::int64_t last = end - first < kRun ? end : first + kRun;
        for (std::int64_t i = 0; i < k;) {
            const int together = sharing(sent, i, k);
            const auto loop = sent[i].base != nullptr ? accumulate_rows<true> : accumulate_rows<false>;
            const bool in_one_pass = together == k && fold.acc.high != out.high;  // else the sum is read again
            loop(sent + i, together, first, last, i == 0 ? fold.acc : ConstExactSum{out.high, out.low}, out,
                 squares + i, kHasPastCaches && past_caches && in_one_pass);
            i += together;
        }
    }
    if (past_caches) fence();
}

// combine_exact of elements [first, first + count): a chunk.
bool combine_chunk(const ExactTerm* terms, std::int64_t k, std::int64_t first, std::int64_t count, ExactSum out) {
    alignas(64) std::uint64_t high[kChunk] = {}, low[kChunk] = {};
    double most = 0, coefficients = 0;  // bounds of |high|, and of what low adds up
    std::uint64_t bias = 0;
    for (std::int64_t i = 0; i < k; ++i) {
        const std::int64_t c = terms[i].coefficient;
        const auto times = static_cast<std::uint64_t>(c);
        const double size = static_cast<double>(c < 0 ? -c : c);
        double largest = 0x1p50;
        coefficients += size;
        if (coefficients > 0x1p12) {  // what low adds up is more than a word holds: its upper bits go to high at once
            for (std::int64_t j = 0; j < count; ++j) {
                Element element{kHighBias * (terms[i].values == nullptr), kLowBias * (terms[i].values == nullptr)};
                if (terms[i].values != nullptr) {
                    add_rounded(static_cast<double>(terms[i].values[first + j]), element);
                } else {
                    element.high += static_cast<std::uint64_t>(terms[i].sum.high[first + j]);
                    element.low += static_cast<std::uint64_t>(terms[i].sum.low[first + j]);
                }
                const __int128 part =
                    static_cast<__int128>(static_cast<std::int64_t>(element.low - kLowBias)) * static_cast<__int128>(c);
                low[j] += static_cast<std::uint64_t>(part) & kLowMask;
                high[j] += times * (element.high - kHighBias) + static_cast<std::uint64_t>(part >> kLowBits);
            }
            coefficients -= size - 1;  // low grew by less than 2^50
        } else if (terms[i].values != nullptr) {
            const float* const values = terms[i].values + first;
            for (std::int64_t j = 0; j < count; ++j) {
                Element element{};
                add_rounded(static_cast<double>(values[j]), element);
                high[j] += times * element.high;
                low[j] += times * element.low;
            }
            bias += times;
        } else {
            const ConstExactSum sum = terms[i].sum + first;
            for (std::int64_t j = 0; j < count; ++j) high[j] += times * static_cast<std::uint64_t>(sum.high[j]);
            for (std::int64_t j = 0; j < count; ++j) low[j] += times * static_cast<std::uint64_t>(sum.low[j]);
        }
        if (terms[i].values != nullptr) {
            if (!(largest_magnitude(terms[i].values + first, count) < bits_of(0x1p40f))) return false;
        } else {
            std::int64_t highest = 0;
            for (std::int64_t j = 0; j < count; ++j) {
                const std::int64_t value = terms[i].sum.high[first + j], size_of_value = value < 0 ? ~value : value;
                highest = size_of_value > highest ? size_of_value : highest;
            }
            largest = static_cast<double>(highest) + 1;
        }
        most += size * (largest + 1);
    }
    const Biases biases = biases_of(static_cast<std::int64_t>(bias));
    for (std::int64_t j = 0; j < count; ++j) {
        settle(high[j], low[j], biases);
        out.high[first + j] = static_cast<std::int64_t>(high[j]);
        out.low[first + j] = static_cast<std::int64_t>(low[j]);
    }
    return most < 0x1p62;
}

bool combine_exact(const ExactTerm* terms, std::int64_t k, std::int64_t begin, std::int64_t end, ExactSum out) {
    bool held = true;
    for (std::int64_t first = begin; first < end; first += kChunk)
        held &= combine_chunk(terms, k, first, end - first < kChunk ? end - first : kChunk, out);
    return held;
}

template <class Out>
void read_exact(ConstExactSum sum, std::int64_t begin, std::int64_t end, Out* out) {
    for (std::int64_t j = begin; j < end; ++j)
        out[j] =
            static_cast<Out>(value_of(static_cast<std::uint64_t>(sum.high[j]), static_cast<std::uint64_t>(sum.low[j])));
}
