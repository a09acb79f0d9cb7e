// Inner products of clients' updates, and order statistics of their columns, as in robust.h.
#pragma once

#include "kernels/cuda/fold.cuh"

namespace fedcore::cuda {

// The k updates of an element's tensor, and the element's place in it.
struct Spot {
    const ClientUpdate* sent;
    std::int64_t at;
};

__device__ inline Spot spot_of(const Updates& updates, std::int64_t element) {
    std::int64_t low = 0, high = updates.tensors;
    while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        (updates.starts[middle] <= element ? low : high) = middle;
    }
    return {updates.sent + low * updates.k, element - updates.starts[low]};
}

// put(i, h of client i) for i = first, first + step, ... below last, kLoaded loads at once. kPlain: every y is float32.
template <int kLoaded, bool kPlain, class Put>
__device__ void load_updates(const Spot& spot, int first, int last, int step, const Put& put) {
#pragma unroll 1
    for (int begin = first; begin < last; begin += kLoaded * step) {
        float y[kLoaded] = {}, x[kLoaded] = {};
#pragma unroll
        for (int e = 0; e < kLoaded; ++e) {
            const int i = begin + e * step;
            if (i >= last) continue;
            const ClientUpdate& sent = spot.sent[i];
            y[e] = kPlain ? __ldca(static_cast<const float*>(sent.y) + spot.at) : sent_at(sent, spot.at);
            x[e] = sent.base != nullptr ? __ldca(sent.base + spot.at) : -0.0f;
        }
#pragma unroll
        for (int e = 0; e < kLoaded; ++e) {
            const int i = begin + e * step;
            if (i < last) put(i, mean_gradient(x[e], y[e], spot.sent[i].scale));
        }
    }
}

template <int kLoaded, class Put>
__device__ void load_updates(bool plain, const Spot& spot, int first, int last, int step, const Put& put) {
    if (plain)
        load_updates<kLoaded, true>(spot, first, last, step, put);
    else
        load_updates<kLoaded, false>(spot, first, last, step, put);
}

constexpr int kGramGroup = 4;  // rows of each of two groups whose products a thread has

// A tile of two sides of rows. With the pad, rows of two groups that half a warp reads lie in different banks.
struct GramMemory {
    double tile[2 * kGramSide * (kGramWidth + kGramPad)];
};

// Two groups of a block's rows, whose lanes are eight threads.
struct GramTask {
    int left, right;
    __device__ explicit GramTask(int turn) {
        const int task = static_cast<int>(threadIdx.x) / kGramLanes + turn * (kThreads / kGramLanes);
        left = task / (kGramSide / kGramGroup) * kGramGroup;
        right = task % (kGramSide / kGramGroup) * kGramGroup;
    }
};

// A block is a piece and two sides of rows, or one with itself.
__device__ inline void gram(const GramCall& call, GramMemory& shared) {
    constexpr int kTurns = kGramSide * kGramSide / (kGramGroup * kGramGroup) * kGramLanes / kThreads;
    const int k = static_cast<int>(call.updates.k), sides = (k + kGramSide - 1) / kGramSide;
    const int pairs = sides * (sides + 1) / 2, block = static_cast<int>(blockIdx.x), piece = block / pairs;
    int first = 0, second = block % pairs;
    for (; second >= sides - first; ++first) second -= sides - first;
    const int others = second > 0 ? kGramSide : 0;  // the first row of the second side, if it is another one
    second = (first + second) * kGramSide;
    first *= kGramSide;
    const auto has = [&](const GramTask& task) {
        return first + task.left < k && second + task.right < k && (others > 0 || task.left <= task.right);
    };
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kGramLanes;
    const int width = call.width, stride = width + kGramPad, column = thread % width;
    double sums[kTurns][kGramGroup][kGramGroup] = {};
    const std::int64_t start = static_cast<std::int64_t>(piece) * kPiece, end = min(start + kPiece, call.n);
    for (std::int64_t begin = start; begin < end; begin += width) {
        const int count = static_cast<int>(min(static_cast<std::int64_t>(width), end - begin));
        __syncthreads();  // the tile before has been read
        if (column < count) {
            const Spot spot = spot_of(call.updates, begin + column);
            const auto load = [&](int from, int row) {
                double* const tile = shared.tile + row * stride + column;
                load_updates<4>(call.plain != 0, spot, from + thread / width, min(from + kGramSide, k),
                                kThreads / width,
                                [&](int i, float h) { tile[(i - from) * stride] = static_cast<double>(h); });
            };
            load(first, 0);
            if (others > 0) load(second, others);
        }
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const GramTask task(turn);
            if (!has(task)) continue;
            const double* const left = shared.tile + task.left * stride;
            const double* const right = shared.tile + (others + task.right) * stride;
#pragma unroll 1
            for (int j = lane; j < count; j += kGramLanes)
#pragma unroll
                for (int r = 0; r < kGramGroup; ++r)
#pragma unroll
                    for (int c = 0; c < kGramGroup; ++c)
                        sums[turn][r][c] = sums[turn][r][c] + left[r * stride + j] * right[c * stride + j];
        }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const GramTask task(turn);
        if (!has(task)) continue;
#pragma unroll
        for (int r = 0; r < kGramGroup; ++r)
#pragma unroll
            for (int c = 0; c < kGramGroup; ++c) {
                const double product = sum_of_lanes<kGramLanes>(sums[turn][r][c]);
                const std::int64_t i = first + task.left + r, j = second + task.right + c;
                if (lane == 0 && i <= j && j < k)
                    call.products[(i * k - i * (i - 1) / 2 + j - i) * (gridDim.x / pairs) + piece] = product;
            }
    }
}

// Each row is a combination of the h_i, in the order of the clients.
__device__ inline void mix_column(const double* mixing, int rows, int k, const float* h, float* mixed) {
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
        double sum = 0.0;
        for (int i = 0; i < k; ++i)
            sum = sum + mixing[static_cast<std::int64_t>(r) * k + i] * static_cast<double>(h[i * kThreads]);
        mixed[r * kThreads] = static_cast<float>(sum);
    }
}

__device__ inline void put_in_order(float& a, float& b) {
    const float lesser = min(a, b);
    b = max(a, b);
    a = lesser;
}

// Batcher's merge exchange, as robust.cpp has it, of values in registers. A template, since a compiler need not unroll
// loops whose bounds depend on an outer one.
template <int kRows, int p = kRows / 2, int q = kRows / 2, int d = p, int r = 0>
__device__ void sort(float (&v)[kRows]) {
#pragma unroll
    for (int i = 0; i + d < kRows; ++i)
        if ((i & p) == r) put_in_order(v[i], v[i + d]);
    if constexpr (q > p)
        sort<kRows, p, q / 2, q - p, p>(v);
    else if constexpr (p > 1)
        sort<kRows, p / 2, kRows / 2, p / 2, 0>(v);
}

// The same of values that lie kThreads apart.
__device__ inline void sort(float* s, int rows) {
    int top = 1;
    while (2 * top < rows) top *= 2;
    for (int p = rows > 1 ? top : 0; p > 0; p /= 2)
        for (int q = top, r = 0, d = p; q >= p; d = q - p, q /= 2, r = p)
            for (int i = 0; i + d < rows; ++i)
                if ((i & p) == r) put_in_order(s[i * kThreads], s[(i + d) * kThreads]);
}

__device__ inline float statistic_of(const float* s, int rows, const Statistic& of) {
    const auto at = [&](int i) { return static_cast<double>(s[i * kThreads]); };
    double sum = 0.0;
    if (of.nearest == 0) {
        for (int i = static_cast<int>(of.first); i < of.last; ++i) sum = sum + at(i);
        return static_cast<float>(sum / static_cast<double>(of.last - of.first)) + 0.0f;
    }
    const int nearest = static_cast<int>(of.nearest);
    const double twice = at((rows - 1) / 2) + at(rows / 2);
    // Where the choice of the lower values starts, and that of the higher ones. Unrolled loops would spill registers.
    int low = 0, high = 0;
#pragma unroll 1
    for (int i = 0; i + nearest < rows; ++i) {
        const double both = at(i) + at(i + nearest);
        low += both < twice ? 1 : 0;
        high += both <= twice ? 1 : 0;
    }
#pragma unroll 1
    for (int i = low; i < high + nearest; ++i) {
        const int times = (i < low + nearest ? 1 : 0) + (i >= high ? 1 : 0);
        if (times > 0) sum = sum + 0.5 * times * at(i);
    }
    return static_cast<float>(sum / static_cast<double>(nearest)) + 0.0f;
}

// kRows: the values that registers hold, and shared memory before and behind; 0: any number, in the call's scratch.
template <int kRows>
__device__ void column_statistic(const ColumnCall& call, float* shared) {
    const int k = static_cast<int>(call.updates.k), rows = call.rows;
    const int held = rows + (call.mixing != nullptr ? k : 0);
    float* const all = kRows > 0 ? shared : call.scratch + static_cast<std::int64_t>(blockIdx.x) * held * kThreads;
    float* const s = all + threadIdx.x;
    float* const h = call.mixing != nullptr ? s + rows * kThreads : s;
    const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
    for (std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; j < call.n; j += step) {
        const Spot spot = spot_of(call.updates, j);
        load_updates<8>(call.plain != 0, spot, 0, k, 1, [&](int i, float value) { h[i * kThreads] = value; });
        if (call.mixing != nullptr) mix_column(call.mixing, rows, k, h, s);
        if constexpr (kRows > 0) {
            float v[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) v[i] = i < rows ? s[i * kThreads] : float_of(kInfinite);
            sort(v);
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                if (i < rows) s[i * kThreads] = v[i];
        } else {
            sort(s, rows);
        }
        call.out[j] = statistic_of(s, rows, call.of);
    }
}

}  // namespace fedcore::cuda
