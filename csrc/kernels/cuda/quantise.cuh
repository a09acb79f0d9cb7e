// Encodes and decodes whole vectors, as in quantise.h. A block is a tile.
#pragma once

#include "kernels/cuda/codes.cuh"

namespace fedcore::cuda {

__device__ inline Nearest rounding(Nearest, const DitherKey&, std::int64_t) {
    return {};
}
__device__ inline Dither rounding(Dither, const DitherKey& key, std::int64_t begin) {
    return dither_of(key, begin);
}

template <Codec kCodec, class Round>
__device__ void quantise(const CodesCall& call) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    const Round round = rounding(Round{}, call.key, begin);
    if (count == kTile && call.vector != 0) {
        auto x = Raw<float>::load<true>(call.x + begin, count);
        encode<kCodec, true>(call.row, round, begin, count, x.v);
    } else {
        auto x = Raw<float>::load<false>(call.x + begin, count);
        encode<kCodec, false>(call.row, round, begin, count, x.v);
    }
}

template <Codec kCodec, bool kVector>
__device__ void dequantise_tile(const CodesCall& call, std::int64_t begin, int count) {
    const auto coded = Coded<kCodec>::template load<kVector>(call.row, begin, count);
    float x[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) x[e] = coded.at(e);
    store<kVector>(call.x + begin, count, x);
}

template <Codec kCodec>
__device__ void dequantise(const CodesCall& call) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    if (count == kTile && call.vector != 0)
        dequantise_tile<kCodec, true>(call, begin, count);
    else
        dequantise_tile<kCodec, false>(call, begin, count);
}

}  // namespace fedcore::cuda
