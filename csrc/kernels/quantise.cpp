#include "kernels/quantise.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"

namespace fedcore {
namespace {

static_assert(kBlock % kCodeBlock == 0, "blocks of one scale must not be cut");

std::int64_t traffic(Codec codec, std::int64_t n) {
    return codec == Codec::int8 ? 5 * n : 6 * n;
}

}  // namespace

void quantise(const float* x, Codec codec, const DitherKey* key, std::int64_t n, void* codes, float* scales) {
    const Table& loops = table();
    for_blocks(n, traffic(codec, n), [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        loops.quantise(x, codec, key, begin, end, codes, scales);
    });
}

void dequantise(const void* codes, const float* scales, Codec codec, std::int64_t n, float* out) {
    const Table& loops = table();
    for_blocks(n, traffic(codec, n), [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        loops.dequantise(codes, scales, codec, begin, end, out);
    });
}

}  // namespace fedcore
