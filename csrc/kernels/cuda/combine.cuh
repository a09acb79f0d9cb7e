// Linear combinations of a few vectors, and their norms, as in combine.h, in float64.
#pragma once

#include "kernels/cuda/norms.cuh"

namespace fedcore::cuda {

// A tile of the combination.
struct CombinedMemory {
    alignas(16) double sum[kTile];
};

template <bool kVector>
__device__ Raw<double> combined(const CombineCall& call, std::int64_t begin, int count) {
    Raw<double> sum = Raw<double>::zero();
#pragma unroll 1
    for (int i = 0; i < call.k; ++i) {
        const Term term = call.terms[i];
        Raw<double> value;
        if (term.wide) {
            value = Raw<double>::load<kVector>(static_cast<const double*>(term.values) + begin, count);
        } else {
            const auto narrow = Raw<float>::load<kVector>(static_cast<const float*>(term.values) + begin, count);
#pragma unroll
            for (int e = 0; e < kEach; ++e) value.v[e] = static_cast<double>(narrow.at(e));
        }
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const double product = term.coefficient * value.at(e);
            sum.v[e] = i == 0 ? product : sum.at(e) + product;
        }
    }
    return sum;
}

__device__ inline Raw<double> combined(const CombineCall& call, std::int64_t begin, int count) {
    return count == kTile && call.vector != 0 ? combined<true>(call, begin, count)
                                              : combined<false>(call, begin, count);
}

// A block is a tile.
template <class Out>
__device__ void combine(const CombineCall& call) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    const Raw<double> sum = combined(call, begin, count);
    Out out[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) out[e] = static_cast<Out>(sum.at(e));
    Out* const to = static_cast<Out*>(call.out) + begin;
    if (count == kTile && call.vector != 0)
        store<true>(to, count, out);
    else
        store<false>(to, count, out);
}

// A block is a piece, over whose tiles the lanes go on: float64 needs no tile of its own.
__device__ inline void combined_square(const CombineCall& call, CombinedMemory& shared) {
    const int lane = static_cast<int>(threadIdx.x);
    const std::int64_t piece = static_cast<std::int64_t>(blockIdx.x) * kPiece;
    double squares = 0.0;
    for (int tile = 0; tile < kPieceTiles; ++tile) {
        const std::int64_t begin = piece + tile * kTile;
        const int count = extent(call.n, begin);
        if (count == 0) break;  // alike in all threads
        const Raw<double> sum = combined(call, begin, count);
        __syncthreads();  // the squares of the tile before have been added
#pragma unroll
        for (int e = 0; e < kEach; ++e) shared.sum[first() + place(e)] = sum.at(e);
        __syncthreads();
        if (lane < kLanes)
            for (int j = lane; j < count; j += kLanes) squares += shared.sum[j] * shared.sum[j];
    }
    if (lane >= kLanes) return;
    const double all = sum_of_lanes(squares);
    if (lane == 0) call.squares[blockIdx.x] = all;
}

}  // namespace fedcore::cuda
