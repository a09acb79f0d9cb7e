#include "kernels/quantise.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"

namespace fedcore {
namespace {

static_assert(kBlock % kCodeBlock == 0, "blocks of one scale must not be cut");

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;

std::uint64_t mix64(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

std::int64_t traffic(Codec codec, std::int64_t n) {
    return codec == Codec::int8 ? 5 * n : 6 * n;
}

}  // namespace

void quantise(const float* x, Codec codec, const Rounding& rounding, std::int64_t n, void* codes, float* scales) {
    const Table& loops = table();
    const std::uint64_t row_key = mix64(rounding.seed + kGolden) + rounding.row + kGolden;
    for_blocks(n, traffic(codec, n), [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        // 2^32 is a multiple of the block, so that one key serves all of it
        const std::uint64_t key = mix64(row_key ^ mix64(static_cast<std::uint64_t>(begin) >> 32));
        loops.quantise(x, codec, rounding.dither ? &key : nullptr, begin, end, codes, scales);
    });
}

void dequantise(const void* codes, const float* scales, Codec codec, std::int64_t n, float* out) {
    const Table& loops = table();
    for_blocks(n, traffic(codec, n), [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        loops.dequantise(codes, scales, codec, begin, end, out);
    });
}

}  // namespace fedcore
