// ChaCha20, the stream of cryptographic random words for noise that protects privacy: without the key, no word can be
// predicted from others. Reference: RFC 8439, Sec. 2.3.
#pragma once

#include <cstdint>

namespace fedcore {

inline constexpr std::int64_t kChachaBlocks = 16, kChachaWords = 16 * kChachaBlocks;  // of a group

// out[256 g + 16 w + i] = word w of the block with counter `counter` + 16 g + i, for g in [0, groups): the vectors as
// they are computed. Integers only: the same words on every platform and level.
//   key: 8 words; nonce: 3 words, little-endian as in the RFC.
void chacha20(const std::uint32_t* key, std::uint32_t counter, const std::uint32_t* nonce, std::int64_t groups,
              std::uint32_t* out);

}  // namespace fedcore
