// The steps of whole vectors: the server's along the round's direction, an optimiser's, and a client's. A block is a
// tile. Each output may be the input that it replaces: a thread reads all of its elements before it writes one.
#pragma once

#include "kernels/cuda/norms.cuh"

namespace fedcore::cuda {

// v, T' and x' as in aggregate.h, in float64.
template <class Sum, bool kVector>
__device__ void server_step_tile(const StepCall<Sum>& call, std::int64_t begin, int count, Values& values) {
    const Linear of_v = call.step.v, of_total = call.step.total;
    const bool has_total = call.in.total != nullptr, has_momentum = call.in.momentum != nullptr;
    const bool has_control = call.in.control != nullptr;
    const auto sum = Raw<Sum>::template load<kVector>(call.in.sum + begin, count);
    const auto x = Raw<float>::load<kVector>(call.in.x + begin, count);
    auto total = Raw<double>::zero(), control = Raw<double>::zero();
    auto momentum = Raw<float>::zero();
    if (has_total) total = Raw<double>::load<kVector>(call.in.total + begin, count);
    if (has_momentum) momentum = Raw<float>::load<kVector>(call.in.momentum + begin, count);
    if (has_control) control = Raw<double>::load<kVector>(call.in.control + begin, count);
    float v[kEach], moved[kEach];
    double kept[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const double a = static_cast<double>(sum.at(e)), g = static_cast<double>(momentum.at(e));
        double wide = of_v.A * a;
        if (has_total) wide = wide + of_v.T * total.at(e);
        if (has_momentum) wide = wide + of_v.g * g;
        if (has_control) wide = wide + of_v.B * control.at(e);
        v[e] = static_cast<float>(wide);
        kept[e] = of_total.T * total.at(e) + of_total.A * a;
        if (has_control) kept[e] = kept[e] + of_total.B * control.at(e);
        if (has_momentum && of_total.g != 0) kept[e] = kept[e] + of_total.g * g;
        kept[e] = kept[e] + of_total.v * static_cast<double>(v[e]);
        moved[e] = static_cast<float>(static_cast<double>(x.at(e)) - call.step.gamma * static_cast<double>(v[e]));
    }
    store<kVector>(call.out.v + begin, count, v);
    store<kVector>(call.out.x + begin, count, moved);
    if (has_total) store<kVector>(call.out.total + begin, count, kept);
    values.put(0, v);
    values.put(1, moved);
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= 2 * kLanes) return;
    const double squares =
        squares_of(values, count, [&](int r, int j) { return static_cast<double>(values.row[r][j]); });
    if (thread % kLanes == 0)
        call.squares[static_cast<std::int64_t>(thread / kLanes) * gridDim.x + blockIdx.x] = squares;
}

template <class Sum>
__device__ void server_step(const StepCall<Sum>& call, Values& values) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    if (count == kTile && call.vector != 0)
        server_step_tile<Sum, true>(call, begin, count, values);
    else
        server_step_tile<Sum, false>(call, begin, count, values);
}

// m', s' and x' as in optimizer.h, in float32.
template <Second kSecond, bool kVector>
__device__ void optimizer_tile(const OptimizerCall& call, std::int64_t begin, int count, Values& values) {
    const auto v = Raw<float>::load<kVector>(call.in.v + begin, count);
    auto m = Raw<float>::load<kVector>(call.in.m + begin, count);
    auto x = Raw<float>::load<kVector>(call.in.x + begin, count);
    auto s = Raw<float>::zero();
    if (kSecond != Second::none) s = Raw<float>::load<kVector>(call.in.s + begin, count);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const Moments<float> to = turned<kSecond>(call.step, v.at(e), Moments<float>{m.at(e), s.at(e), x.at(e)});
        m.v[e] = to.m;
        s.v[e] = to.s;
        x.v[e] = to.x;
    }
    store<kVector>(call.out.m + begin, count, m.v);
    if (kSecond != Second::none) store<kVector>(call.out.s + begin, count, s.v);
    store<kVector>(call.out.x + begin, count, x.v);
    values.put(0, x.v);
    __syncthreads();
    if (threadIdx.x >= kLanes) return;
    const double square =
        squares_of(values, count, [&](int r, int j) { return static_cast<double>(values.row[r][j]); });
    if (threadIdx.x == 0) call.squares[blockIdx.x] = square;
}

template <Second kSecond>
__device__ void optimizer_step(const OptimizerCall& call, Values& values) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    if (count == kTile && call.vector != 0)
        optimizer_tile<kSecond, true>(call, begin, count, values);
    else
        optimizer_tile<kSecond, false>(call, begin, count, values);
}

// y as in direction.h, in float32.
template <bool kVector>
__device__ void direction_tile(const DirectionCall& call, std::int64_t begin, int count) {
    const LocalStep& step = call.step;
    const auto grad = Raw<float>::load<kVector>(step.grad + begin, count);
    auto y = Raw<float>::load<kVector>(call.y + begin, count);
    auto prev = Raw<float>::zero(), offset = Raw<float>::zero(), x = Raw<float>::zero();
    if (step.grad_prev != nullptr) prev = Raw<float>::load<kVector>(step.grad_prev + begin, count);
    if (step.offset != nullptr) offset = Raw<float>::load<kVector>(step.offset + begin, count);
    if (step.x != nullptr) x = Raw<float>::load<kVector>(step.x + begin, count);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        float g = grad.at(e);
        if (step.weight_decay != 0.0f) g = g + step.weight_decay * y.at(e);
        float d = step.a * g;
        if (step.grad_prev != nullptr) d = d + step.b * prev.at(e);
        if (step.offset != nullptr) d = d + offset.at(e);
        if (step.x != nullptr) d = d + step.mu * (y.at(e) - x.at(e));
        y.v[e] = y.at(e) - step.lr * d;
    }
    store<kVector>(call.y + begin, count, y.v);
}

__device__ inline void direction_step(const DirectionCall& call) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    if (count == kTile && call.vector != 0)
        direction_tile<true>(call, begin, count);
    else
        direction_tile<false>(call, begin, count);
}

}  // namespace fedcore::cuda
