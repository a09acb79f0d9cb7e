// A fast 64-bit checksum that detects accidental changes of bytes. It does not protect against deliberate changes.
//
//   step(s, w) = rotate_left(s + w Q, 31) P mod 2^64, P = 0x9E3779B185EBCA87, Q = 0xC2B2AE3D27D4EB4F
//   lane_i     = (i + 1) P mod 2^64 at first, i in 0 .. 7
//   lane_i     = step(lane_i, w) for each 64-bit word w = 8 j + i of the bytes, j = 0, 1, ..., in little-endian order
//                and with zeros behind the last byte up to a multiple of 64 bytes
//   checksum   = step(step(... step(0, lane_0) ..., lane_7), bytes)
//
// P and Q are odd, so that step is a bijection of each argument while the other stays: a change within one aligned
// word, such as a flipped bit, and zeros that are cut off or added behind the last byte up to the next multiple of 64
// always change the checksum, other changes with a probability of about 1 - 2^-64. A multiplication by P would not be
// enough: it keeps the top bit in place, so flipped signs of two words could cancel. There are eight lanes because the
// operations of a step wait five cycles for each other, and because eight words fill a vector of AVX-512.
//   Reference: the step and its constants are those of XXH64 (Collet, xxHash), on twice as many lanes.
#pragma once

#include <cstdint>

namespace fedcore {

// out[b] = the checksum of block b, data[b block_bytes .. min((b + 1) block_bytes, bytes) - 1], for all blocks with at
// least one byte. `data` may have any alignment; block_bytes >= 1. Runs on the pool.
//   Equal on every platform, ISA level and thread count. Reads `bytes` bytes.
void checksum(const void* data, std::int64_t bytes, std::int64_t block_bytes, std::uint64_t* out);

}  // namespace fedcore
