// The lanes of one block's checksum (store/checksum.h), fed piece by piece by code that reads or writes the block
// anyway.

constexpr std::uint64_t kP = 0x9E3779B185EBCA87u, kQ = 0xC2B2AE3D27D4EB4Fu;
constexpr std::int64_t kFeed = 64;  // bytes that feed each lane once

inline std::uint64_t sum_step(std::uint64_t s, std::uint64_t w) {
    const std::uint64_t t = s + w * kQ;
    return (t << 31 | t >> 33) * kP;
}

inline std::uint64_t word_at(const char* bytes) {
    std::uint64_t word;
    __builtin_memcpy(&word, bytes, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

#if defined(__AVX512DQ__)

// This level multiplies eight words at once.
typedef std::uint64_t Words __attribute__((vector_size(64)));
typedef std::uint64_t WordsAt __attribute__((vector_size(64), aligned(1), may_alias));

#elif defined(__AVX2__)

// Four lanes in a vector, by the products of their halves. The scalar unit multiplies one word at a time, and handles
// the other four lanes meanwhile.
typedef std::uint64_t Words __attribute__((vector_size(32)));
typedef std::uint64_t WordsAt __attribute__((vector_size(32), aligned(1), may_alias));

inline Words times(Words words, std::uint64_t factor) {
    const __m256i low = _mm256_set1_epi64x(static_cast<long long>(factor & 0xffffffffu));
    const __m256i high = _mm256_set1_epi64x(static_cast<long long>(factor >> 32));
    const Words crossed =
        Words(_mm256_mul_epu32(__m256i(words >> 32), low)) + Words(_mm256_mul_epu32(__m256i(words), high));
    return Words(_mm256_mul_epu32(__m256i(words), low)) + (crossed << 32);
}

#endif

// Feeds `lines` times kFeed bytes. Before each line, each(bytes before it) may do other work, which is free if it waits
// for memory.
template <class Each>
inline void feed(std::uint64_t* lanes, const char* data, std::int64_t lines, const Each& each) {
    const std::int64_t end = kFeed * lines;
#if defined(__AVX512DQ__)
    Words lane = *reinterpret_cast<const WordsAt*>(lanes);
    for (std::int64_t at = 0; at < end; at += kFeed) {
        each(at);
        const Words t = lane + *reinterpret_cast<const WordsAt*>(data + at) * kQ;
        lane = (t << 31 | t >> 33) * kP;
    }
    *reinterpret_cast<WordsAt*>(lanes) = lane;
#else
    // Separate variables, because an array would stay in memory.
    std::uint64_t l0 = lanes[0], l1 = lanes[1], l2 = lanes[2], l3 = lanes[3];
#    if defined(__AVX2__)
    Words lane = *reinterpret_cast<const WordsAt*>(lanes + 4);
#    else
    std::uint64_t l4 = lanes[4], l5 = lanes[5], l6 = lanes[6], l7 = lanes[7];
#    endif
    for (std::int64_t at = 0; at < end; at += kFeed) {
        each(at);
        const char* const line = data + at;
        l0 = sum_step(l0, word_at(line));
        l1 = sum_step(l1, word_at(line + 8));
        l2 = sum_step(l2, word_at(line + 16));
        l3 = sum_step(l3, word_at(line + 24));
#    if defined(__AVX2__)
        asm("" : "+r"(l0), "+r"(l1), "+r"(l2), "+r"(l3));  // GCC would put these into a vector too, which takes longer
        const Words t = lane + times(*reinterpret_cast<const WordsAt*>(line + 32), kQ);
        lane = times(t << 31 | t >> 33, kP);
#    else
        l4 = sum_step(l4, word_at(line + 32));
        l5 = sum_step(l5, word_at(line + 40));
        l6 = sum_step(l6, word_at(line + 48));
        l7 = sum_step(l7, word_at(line + 56));
#    endif
    }
    lanes[0] = l0, lanes[1] = l1, lanes[2] = l2, lanes[3] = l3;
#    if defined(__AVX2__)
    *reinterpret_cast<WordsAt*>(lanes + 4) = lane;
#    else
    lanes[4] = l4, lanes[5] = l5, lanes[6] = l6, lanes[7] = l7;
#    endif
#endif
}

// A block's checksum, fed in pieces.
struct BlockSum {
    std::uint64_t lanes[8];
    std::int64_t bytes;

    void begin() {
        for (int i = 0; i < 8; ++i) lanes[i] = static_cast<std::uint64_t>(i + 1) * kP;
        bytes = 0;
    }
    // Every piece but the last is a multiple of kFeed bytes. each(bytes before it) is called before each kFeed bytes.
    template <class Each>
    void add(const void* data, std::int64_t count, const Each& each) {
        const char* const first = static_cast<const char*>(data);
        const std::int64_t whole = count / kFeed, rest = count % kFeed;
        feed(lanes, first, whole, each);
        if (rest != 0) {
            char last[kFeed] = {};
            __builtin_memcpy(last, first + kFeed * whole, static_cast<std::size_t>(rest));
            feed(lanes, last, 1, [](std::int64_t) {});
        }
        bytes += count;
    }
    std::uint64_t sum() const {
        std::uint64_t total = 0;
        for (const std::uint64_t lane : lanes) total = sum_step(total, lane);
        return sum_step(total, static_cast<std::uint64_t>(bytes));
    }
};
