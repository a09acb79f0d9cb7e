// ChaCha20 on the counters state[12] + i; a vector has one word of several blocks.

#if defined(__AVX512F__)
constexpr int kChachaLanes = 16;
#elif defined(__AVX2__)
constexpr int kChachaLanes = 8;
#else
constexpr int kChachaLanes = 4;
#endif
typedef std::uint32_t ChachaWords __attribute__((vector_size(4 * kChachaLanes)));

#define FEDCORE_CHACHA_STEP(a, b, d, rotation) \
    x[a] += x[b];                              \
    x[d] ^= x[a];                              \
    x[d] = x[d] << (rotation) | x[d] >> (32 - (rotation));
#define FEDCORE_CHACHA_QUARTER(a, b, c, d) \
    FEDCORE_CHACHA_STEP(a, b, d, 16)       \
    FEDCORE_CHACHA_STEP(c, d, b, 12)       \
    FEDCORE_CHACHA_STEP(a, b, d, 8)        \
    FEDCORE_CHACHA_STEP(c, d, b, 7)

void chacha20_blocks(const std::uint32_t* state, std::int64_t groups, std::uint32_t* out) {
    for (std::int64_t first = 0; first < 16 * groups; first += kChachaLanes) {
        ChachaWords start[16], x[16];
        std::uint32_t counters[kChachaLanes];
        for (int l = 0; l < kChachaLanes; ++l) counters[l] = state[12] + static_cast<std::uint32_t>(first + l);
#pragma GCC unroll 16
        for (int w = 0; w < 16; ++w) start[w] = ChachaWords{} + state[w];
        __builtin_memcpy(&start[12], counters, sizeof counters);
#pragma GCC unroll 16
        for (int w = 0; w < 16; ++w) x[w] = start[w];
        for (int twice = 0; twice < 10; ++twice) {
            FEDCORE_CHACHA_QUARTER(0, 4, 8, 12)
            FEDCORE_CHACHA_QUARTER(1, 5, 9, 13)
            FEDCORE_CHACHA_QUARTER(2, 6, 10, 14)
            FEDCORE_CHACHA_QUARTER(3, 7, 11, 15)
            FEDCORE_CHACHA_QUARTER(0, 5, 10, 15)
            FEDCORE_CHACHA_QUARTER(1, 6, 11, 12)
            FEDCORE_CHACHA_QUARTER(2, 7, 8, 13)
            FEDCORE_CHACHA_QUARTER(3, 4, 9, 14)
        }
        std::uint32_t* const to = out + first / 16 * 256 + first % 16;
#pragma GCC unroll 16
        for (int w = 0; w < 16; ++w) {
            x[w] += start[w];
            __builtin_memcpy(to + 16 * w, &x[w], sizeof x[w]);
        }
    }
}

#undef FEDCORE_CHACHA_QUARTER
#undef FEDCORE_CHACHA_STEP
