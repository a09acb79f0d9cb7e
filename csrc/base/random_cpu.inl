// Threefry4x64-20 on the counters (first + i, use[0], use[1], use[2]); the loop over blocks is the one that is
// vectorised.

// Two of the four MIX operations of a round; the rotations are Table 4 of Skein 1.3 (Threefish-256).
#define FEDCORE_MIX(a, b, rotation) \
    a += b;                         \
    b = (b << (rotation) | b >> (64 - (rotation))) ^ a;
#define FEDCORE_TWO_ROUNDS(r0, r1, r2, r3) \
    FEDCORE_MIX(x0, x1, r0)                \
    FEDCORE_MIX(x2, x3, r1)                \
    FEDCORE_MIX(x0, x3, r2)                \
    FEDCORE_MIX(x2, x1, r3)
// After every four rounds the key is added, rotated by `s` words, and s itself.
#define FEDCORE_ADD_KEY(s)  \
    x0 += k[(s) % 5];       \
    x1 += k[((s) + 1) % 5]; \
    x2 += k[((s) + 2) % 5]; \
    x3 += k[((s) + 3) % 5] + (s);
#define FEDCORE_FOUR_ROUNDS_EVEN(s)    \
    FEDCORE_TWO_ROUNDS(14, 16, 52, 57) \
    FEDCORE_TWO_ROUNDS(23, 40, 5, 37)  \
    FEDCORE_ADD_KEY(s)
#define FEDCORE_FOUR_ROUNDS_ODD(s)     \
    FEDCORE_TWO_ROUNDS(25, 33, 46, 12) \
    FEDCORE_TWO_ROUNDS(58, 22, 32, 32) \
    FEDCORE_ADD_KEY(s)

void threefry4x64(const std::uint64_t* key, const std::uint64_t* use, std::uint64_t first, std::int64_t blocks,
                  std::uint64_t* out) {
    const std::uint64_t parity = 0x1BD11BDAA9FC1A22u ^ key[0] ^ key[1] ^ key[2] ^ key[3];
    const std::uint64_t k[5] = {key[0], key[1], key[2], key[3], parity};
    const std::uint64_t use0 = use[0] + k[1], use1 = use[1] + k[2], use2 = use[2] + k[3];
    std::uint64_t* __restrict words = out;
    for (std::int64_t i = 0; i < blocks; ++i) {
        std::uint64_t x0 = first + static_cast<std::uint64_t>(i) + k[0], x1 = use0, x2 = use1, x3 = use2;
        FEDCORE_FOUR_ROUNDS_EVEN(1)
        FEDCORE_FOUR_ROUNDS_ODD(2)
        FEDCORE_FOUR_ROUNDS_EVEN(3)
        FEDCORE_FOUR_ROUNDS_ODD(4)
        FEDCORE_FOUR_ROUNDS_EVEN(5)
        words[4 * i] = x0;
        words[4 * i + 1] = x1;
        words[4 * i + 2] = x2;
        words[4 * i + 3] = x3;
    }
}

#undef FEDCORE_FOUR_ROUNDS_ODD
#undef FEDCORE_FOUR_ROUNDS_EVEN
#undef FEDCORE_ADD_KEY
#undef FEDCORE_TWO_ROUNDS
#undef FEDCORE_MIX
