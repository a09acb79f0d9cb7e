#include "store/blake2b.h"

#include <algorithm>
#include <utility>

#include "base/little_endian.h"

namespace fedcore {
namespace blake2b {  // because all sources are compiled as one

constexpr std::size_t kBlock = 128;
constexpr std::uint64_t kStart[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu,
                                     0xa54ff53a5f1d36f1u, 0x510e527fade682d1u, 0x9b05688c2b3e6c1fu,
                                     0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};
constexpr std::uint8_t kOrder[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

static std::uint64_t rotated(std::uint64_t x, int bits) {
    return x >> bits | x << (64 - bits);
}

static inline void mix(std::uint64_t& a, std::uint64_t& b, std::uint64_t& c, std::uint64_t& d, std::uint64_t x,
                       std::uint64_t y) {
    a += b + x;
    d = rotated(d ^ a, 32);
    c += d;
    b = rotated(b ^ c, 24);
    a += b + y;
    d = rotated(d ^ a, 16);
    c += d;
    b = rotated(b ^ c, 63);
}

template <std::size_t kRound>
void round(std::uint64_t* v, const std::uint64_t* m) {
    constexpr const std::uint8_t* s = kOrder[kRound];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

// Each order is known at compile time, which is twice as fast as a loop.
template <std::size_t... kRounds>
void rounds(std::uint64_t* v, const std::uint64_t* m, std::index_sequence<kRounds...>) {
    (round<kRounds>(v, m), ...);
}

// Absorbs a block padded by zeros; `count` is the number of bytes so far, including it.
static void compress(std::uint64_t* h, std::string_view block, std::uint64_t count, bool is_last) {
    std::uint64_t m[16] = {}, v[16];
    for (std::size_t i = 0; i < block.size(); i += 8)
        m[i / 8] = little_endian(block.data() + i, std::min<std::size_t>(8, block.size() - i));
    std::copy(h, h + 8, v);
    std::copy(kStart, kStart + 8, v + 8);
    v[12] ^= count;
    if (is_last) v[14] = ~v[14];
    rounds(v, m, std::make_index_sequence<12>());
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

}  // namespace blake2b

std::uint64_t blake2b_8(std::string_view bytes) {
    std::uint64_t h[8], count = 0;
    std::copy(blake2b::kStart, blake2b::kStart + 8, h);
    h[0] ^= 0x01010000u ^ 8;  // no key, 8 bytes of digest, no tree
    while (bytes.size() - count > blake2b::kBlock) {
        blake2b::compress(h, bytes.substr(count, blake2b::kBlock), count + blake2b::kBlock, false);
        count += blake2b::kBlock;
    }
    blake2b::compress(h, bytes.substr(count), bytes.size(), true);
    return h[0];
}

}  // namespace fedcore
