// BLAKE2b, a hash of any bytes, with a digest of 8 bytes and without a key.
//   Reference: Saarinen, Aumasson, "The BLAKE2 Cryptographic Hash and Message Authentication Code (MAC)", RFC 7693.
#pragma once

#include <cstdint>
#include <string_view>

namespace fedcore {

// The digest of 8 bytes, as a little-endian number.
std::uint64_t blake2b_8(std::string_view bytes);

}  // namespace fedcore
