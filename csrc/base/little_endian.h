// Bytes as numbers, the same on every platform.
#pragma once

#include <cstdint>
#include <cstring>

namespace fedcore {

// The 64-bit number of the first n <= 8 bytes in little-endian order, padded by zeros.
inline std::uint64_t little_endian(const char* bytes, std::size_t n = 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, n);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

}  // namespace fedcore
