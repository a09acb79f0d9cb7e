// The checksum of one block (checksum.h). Its chunks of 64 bytes feed each lane once.

constexpr std::uint64_t kP = 0x9E3779B185EBCA87u, kQ = 0xC2B2AE3D27D4EB4Fu;
constexpr std::int64_t kChunk = 64;

static std::uint64_t step(std::uint64_t s, std::uint64_t w) {
    const std::uint64_t t = s + w * kQ;
    return (t << 31 | t >> 33) * kP;
}

#if defined(__AVX512DQ__)

// This level multiplies eight words at once.
typedef std::uint64_t Words __attribute__((vector_size(64)));
typedef std::uint64_t WordsAt __attribute__((vector_size(64), aligned(1), may_alias));

static void feed(std::uint64_t* lanes, const char* data, std::int64_t chunks) {
    Words lane = *reinterpret_cast<const WordsAt*>(lanes);
    for (std::int64_t j = 0; j < chunks; ++j) {
        const Words t = lane + *reinterpret_cast<const WordsAt*>(data + kChunk * j) * kQ;
        lane = (t << 31 | t >> 33) * kP;
    }
    *reinterpret_cast<WordsAt*>(lanes) = lane;
}

#else

static std::uint64_t word_at(const char* bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
#    if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#    endif
    return word;
}

static void feed(std::uint64_t* lanes, const char* data, std::int64_t chunks) {
    // By name: as an array they would stay in memory.
    std::uint64_t l0 = lanes[0], l1 = lanes[1], l2 = lanes[2], l3 = lanes[3];
    std::uint64_t l4 = lanes[4], l5 = lanes[5], l6 = lanes[6], l7 = lanes[7];
    for (std::int64_t j = 0; j < chunks; ++j) {
        const char* chunk = data + kChunk * j;
        l0 = step(l0, word_at(chunk));
        l1 = step(l1, word_at(chunk + 8));
        l2 = step(l2, word_at(chunk + 16));
        l3 = step(l3, word_at(chunk + 24));
        l4 = step(l4, word_at(chunk + 32));
        l5 = step(l5, word_at(chunk + 40));
        l6 = step(l6, word_at(chunk + 48));
        l7 = step(l7, word_at(chunk + 56));
    }
    lanes[0] = l0, lanes[1] = l1, lanes[2] = l2, lanes[3] = l3;
    lanes[4] = l4, lanes[5] = l5, lanes[6] = l6, lanes[7] = l7;
}

#endif

std::uint64_t checksum_block(const char* data, std::int64_t bytes) {
    std::uint64_t lanes[8], sum = 0;
    for (int i = 0; i < 8; ++i) lanes[i] = static_cast<std::uint64_t>(i + 1) * kP;
    const std::int64_t chunks = bytes / kChunk, rest = bytes % kChunk;
    feed(lanes, data, chunks);
    if (rest != 0) {
        char last[kChunk] = {};
        std::memcpy(last, data + kChunk * chunks, static_cast<std::size_t>(rest));
        feed(lanes, last, 1);
    }
    for (const std::uint64_t lane : lanes) sum = step(sum, lane);
    return step(sum, static_cast<std::uint64_t>(bytes));
}
