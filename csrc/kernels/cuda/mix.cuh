// Replaces every model by a weighted sum of all models, in place, as in mix.h. A block loads its elements of all models
// into shared memory before it writes any, so that each model is read and written once, for any matrix.
#pragma once

#include "kernels/cuda/calls.h"

namespace fedcore::cuda {

__device__ inline void mix(const MixCall& call, float* before) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * call.width;
    const int count = static_cast<int>(min(static_cast<std::int64_t>(call.width), call.n - begin));
    const int p = static_cast<int>(call.matrix.p);
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    for (int i = warp; i < p; i += kThreads / 32)
        for (int j = lane; j < count; j += 32) before[i * call.width + j] = __ldcs(call.models[i] + begin + j);
    __syncthreads();
    for (int i = warp; i < p; i += kThreads / 32) {
        const std::int64_t from = call.matrix.starts[i], to = call.matrix.starts[i + 1];
        for (int j = lane; j < count; j += 32) {
            float sum = 0.0f;
            for (std::int64_t e = from; e < to; ++e) {
                const float term = call.matrix.weights[e] * before[call.matrix.columns[e] * call.width + j];
                sum = e == from ? term : sum + term;
            }
            __stwb(call.models[i] + begin + j, sum);
        }
    }
}

}  // namespace fedcore::cuda
