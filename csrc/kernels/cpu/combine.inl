constexpr int kHeld = 4;  // vectors of a sum that stay in registers while the terms are added

// sum[0..kHeld) = or += coefficient * the term's elements from `at` on
template <bool First, class T>
[[gnu::always_inline]] inline void add_values(const T* values, double coefficient, FullDoubles* sum) {
#pragma GCC unroll 4
    for (int part = 0; part < kHeld; ++part) {
        const FullDoubles term = coefficient * Full<double>::of(read(values + part * kFull));
        sum[part] = First ? term : sum[part] + term;
    }
#pragma GCC unroll 4
    for (int at = 0; at < kHeld * kFull; at += 64 / static_cast<int>(sizeof(T)))
        __builtin_prefetch(values + kAhead + at);
}

template <bool First>
[[gnu::always_inline]] inline void add_term(const Term& term, std::int64_t at, FullDoubles* sum) {
    if (term.wide)
        add_values<First>(static_cast<const double*>(term.values) + at, term.coefficient, sum);
    else
        add_values<First>(static_cast<const float*>(term.values) + at, term.coefficient, sum);
}

// to[0..count) = elements [at, at + count) of the combination; all terms of an element are read before it is written.
template <class Out>
void combine_into(const Term* terms, std::int64_t k, std::int64_t at, std::int64_t count, Out* to) {
    std::int64_t j = 0;
    for (; j + kHeld * kFull <= count; j += kHeld * kFull) {
        FullDoubles sum[kHeld];
        add_term<true>(terms[0], at + j, sum);
        for (std::int64_t i = 1; i < k; ++i) add_term<false>(terms[i], at + j, sum);
#pragma GCC unroll 4
        for (int part = 0; part < kHeld; ++part) write(to + j + part * kFull, Full<Out>::of(sum[part]));
    }
    for (; j < count; ++j) {
        double sum = 0;
        for (std::int64_t i = 0; i < k; ++i) {
            const double value = terms[i].wide
                                     ? static_cast<const double*>(terms[i].values)[at + j]
                                     : static_cast<double>(static_cast<const float*>(terms[i].values)[at + j]);
            sum = i == 0 ? terms[i].coefficient * value : sum + terms[i].coefficient * value;
        }
        to[j] = static_cast<Out>(sum);
    }
}

template <class Out>
void combine(const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end, Out* out) {
    combine_into(terms, k, begin, end - begin, out + begin);
}

double combined_square(const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end) {
    alignas(64) double sum[kChunk];
    double lanes[kLanes] = {};
    for (std::int64_t at = begin; at < end; at += kChunk) {
        const std::int64_t count = end - at < kChunk ? end - at : kChunk;
        combine_into(terms, k, at, count, sum);
        add_squares_exactly(sum, count, lanes);
    }
    return sum_of_lanes(lanes);
}
