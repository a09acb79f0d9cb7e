// Stores past the caches, for arrays that are written as a whole and not read before they would have left the caches
// anyway: a plain store first reads its line from memory, which is a fourth of an exchange's traffic. They are made
// line by line from a stage in L1. Straight from a loop that stores to other arrays as well, they are slower than plain
// ones: a processor has few buffers that collect them, and each other store may send a half-filled one off.

#if defined(__SSE2__)
constexpr bool kHasPastCaches = true;  // whether this level has such stores
#else
constexpr bool kHasPastCaches = false;
#endif

constexpr std::int64_t kLine = 64;  // bytes of a cache line

// Bytes from an address to the next start of a line.
inline std::int64_t to_line(const void* at) {
    return static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(at) % kLine);
}

// `to` starts a line.
inline void put_line(const char* from, char* to) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
    for (int at = 0; at < kLine; at += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
#elif defined(__SSE2__)
    for (int at = 0; at < kLine; at += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
#else
    __builtin_memcpy(to, from, kLine);
#endif
}

// Copies a stage to where it belongs, past the caches except for the lines at its ends that it has only a part of.
// Before each line, ahead(bytes before it) may fetch what comes next.
template <class Value, class Ahead>
inline void put(const Value* stage, std::int64_t count, Value* out, const Ahead& ahead) {
    const char* const from = reinterpret_cast<const char*>(stage);
    char* const to = reinterpret_cast<char*>(out);
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(Value));
    std::int64_t at = to_line(to) < bytes ? to_line(to) : bytes;
    __builtin_memcpy(to, from, static_cast<std::size_t>(at));
    for (; at + kLine <= bytes; at += kLine) {
        ahead(at);
        put_line(from + at, to + at);
    }
    __builtin_memcpy(to + at, from + at, static_cast<std::size_t>(bytes - at));
}

template <class Value>
inline void put(const Value* stage, std::int64_t count, Value* out) {
    put(stage, count, out, [](std::int64_t) {});
}

// Other threads may see stores past the caches in any order. This orders those before it before all later stores.
inline void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
