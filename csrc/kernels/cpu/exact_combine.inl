// Combinations of exact sums with whole coefficients, and their readings.

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
        if (coefficients > 0x1p12) {  // what low adds up is more than a word holds
            const Biases biases = biases_of(static_cast<std::int64_t>(bias));
            for (std::int64_t j = 0; j < count; ++j) settle(high[j], low[j], biases);
            bias = 0;
            coefficients = 1 + size;
        }
        if (coefficients > 0x1p12) {  // the upper bits of this term go to high at once
            for (std::int64_t j = 0; j < count; ++j) {
                ExactElement element{kHighBias * (terms[i].values == nullptr), kLowBias * (terms[i].values == nullptr)};
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
                ExactElement element{};
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

constexpr std::int64_t kWordsAhead = 128;  // words to prefetch ahead of each message

// out[j] += sum_i terms[i][j], modulo 2^64, for elements [begin, end). Words stay in registers while all terms pass.
// The terms are messages in small pages, and the processor does not prefetch across pages by itself.
void add_words(const std::uint64_t* const* terms, std::int64_t k, std::int64_t begin, std::int64_t end,
               std::uint64_t* out) {
    constexpr int kRegisters = 8, kWordsHeld = kRegisters * kWidth;
    std::int64_t j = begin;
    for (; j + kWordsHeld <= end; j += kWordsHeld) {
        Words words[kRegisters];
        __builtin_memcpy(words, out + j, sizeof words);
#pragma GCC unroll 1
        for (std::int64_t i = 0; i < k; ++i) {
            const std::uint64_t* const term = terms[i] + j;
#pragma GCC unroll 8
            for (int r = 0; r < kRegisters; ++r) {
                if (r * kWidth % 8 == 0) __builtin_prefetch(term + kWordsAhead + r * kWidth);
                Words more;
                __builtin_memcpy(&more, term + r * kWidth, sizeof more);
                words[r] += more;
            }
        }
        __builtin_memcpy(out + j, words, sizeof words);
    }
    for (; j < end; ++j)
        for (std::int64_t i = 0; i < k; ++i) out[j] += terms[i][j];
}
