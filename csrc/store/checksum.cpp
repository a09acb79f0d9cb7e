#include "store/checksum.h"

#include <algorithm>

#include "base/blocks.h"
#include "base/isa.h"

namespace fedcore {

using OfBlock = std::uint64_t(const char* data, std::int64_t bytes);

namespace baseline {
OfBlock checksum_block;
}
#if defined(FEDCORE_X86_LEVELS)
namespace avx2 {
OfBlock checksum_block;
}
namespace avx512 {
OfBlock checksum_block;
}
#endif

namespace {

constexpr std::int64_t kPieceBytes = 1 << 18;  // small blocks are claimed together, or claiming would take longest

OfBlock* chosen() {
    switch (active_isa()) {
#if defined(FEDCORE_X86_LEVELS)
        case Isa::avx512:
            return avx512::checksum_block;
        case Isa::avx2:
            return avx2::checksum_block;
#endif
        default:
            return baseline::checksum_block;
    }
}

}  // namespace

void checksum(const void* data, std::int64_t bytes, std::int64_t block_bytes, std::uint64_t* out) {
    static OfBlock* const of_block = chosen();
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
