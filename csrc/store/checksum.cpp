#include "store/checksum.h"

#include <algorithm>

#include "base/blocks.h"
#include "base/isa.h"

namespace fedcore {

using OfBlock = std::uint64_t(const char* data, std::int64_t bytes);

FEDCORE_EACH_LEVEL(OfBlock checksum_block)

namespace {

constexpr std::int64_t kPieceBytes = 1 << 18;  // small blocks are claimed together, because claims take time

}  // namespace

void checksum(const void* data, std::int64_t bytes, std::int64_t block_bytes, std::uint64_t* out) {
    static OfBlock* const of_block = FEDCORE_OF_LEVEL(OfBlock, checksum_block);
    if (bytes == 0) return;
    const auto* first = static_cast<const char*>(data);
    const std::int64_t blocks = (bytes - 1) / block_bytes + 1;
    const std::int64_t together = std::max<std::int64_t>(1, kPieceBytes / block_bytes);
    for_pieces((blocks - 1) / together + 1, bytes, [&](std::int64_t piece) {
        const std::int64_t end = std::min(piece * together + together, blocks);
        for (std::int64_t b = piece * together; b < end; ++b)
            out[b] = of_block(first + b * block_bytes, std::min(block_bytes, bytes - b * block_bytes));
    });
}

}  // namespace fedcore
