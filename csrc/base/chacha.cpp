#include "base/chacha.h"

#include "base/isa.h"

namespace fedcore {

using Blocks = void(const std::uint32_t* state, std::int64_t groups, std::uint32_t* out);

FEDCORE_EACH_LEVEL(Blocks chacha20_blocks)

void chacha20(const std::uint32_t* key, std::uint32_t counter, const std::uint32_t* nonce, std::int64_t groups,
              std::uint32_t* out) {
    static Blocks* const fill = FEDCORE_OF_LEVEL(Blocks, chacha20_blocks);
    std::uint32_t state[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};  // "expand 32-byte k"
    for (int i = 0; i < 8; ++i) state[4 + i] = key[i];
    state[12] = counter;
    for (int i = 0; i < 3; ++i) state[13 + i] = nonce[i];
    fill(state, groups, out);
}

}  // namespace fedcore
