// Squares on the CPU's 16 lanes: of tiles whose elements lie in shared memory, and of rows.
#pragma once

#include "kernels/cuda/tiles.cuh"

namespace fedcore::cuda {

// Rows of a tile as float32, for their squares. The pad puts two rows' lanes into different banks.
struct Values {
    static constexpr int kStride = kTile + kLanes;
    alignas(16) float row[kTogether][kStride];

    __device__ void put(int r, const float (&v)[kEach]) {
        *reinterpret_cast<float4*>(&row[r][first()]) = make_float4(v[0], v[1], v[2], v[3]);
        *reinterpret_cast<float4*>(&row[r][first() + 32]) = make_float4(v[4], v[5], v[6], v[7]);
    }
    __device__ float at(int r, int e) const { return row[r][first() + place(e)]; }  // of what this thread has put
};

template <int kCount = kLanes, class T>
__device__ T sum_of_lanes(T sum) {
    const unsigned mask = ((1u << kCount) - 1) << (threadIdx.x % 32 / kCount * kCount);
#pragma unroll
    for (int width = kCount / 2; width > 0; width /= 2) sum += __shfl_down_sync(mask, sum, width, kCount);
    return sum;  // in lane 0
}

// By 16 threads for each row: |row|^2 in thread 16 r. exactly(r, j) is element j, in float64, of a row that float32
// cannot hold well.
template <class Exactly>
__device__ double squares_of(const Values& values, int count, const Exactly& exactly) {
    const int r = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
    float sum = 0.0f;
    if (count == kTile) {
#pragma unroll 8
        for (int j = 0; j < kTile; j += kLanes) sum += values.row[r][j + lane] * values.row[r][j + lane];
    } else {
#pragma unroll 1
        for (int j = lane; j < count; j += kLanes) sum += values.row[r][j] * values.row[r][j];
    }
    const unsigned mask = 0xffffu << (threadIdx.x & 16u);
    const double squares = __shfl_sync(mask, sum_of_lanes(sum), 0, kLanes);
    if (is_sound(squares)) return squares;
    double wide = 0.0;
#pragma unroll 1
    for (int j = lane; j < count; j += kLanes) {
        const double value = exactly(r, j);
        wide += value * value;
    }
    return sum_of_lanes(wide);
}

struct TotalMemory {
    double of_piece[kThreads];
};

// squares[i, part] into sums[i]: a piece is its parts' sum, and the total the pieces', each in order. A block is a row.
__device__ inline void add_squares(const TotalCall& call, TotalMemory& shared) {
    const std::int64_t parts = static_cast<std::int64_t>(call.pieces) * call.parts;
    const double* const row = call.squares + static_cast<std::int64_t>(blockIdx.x) * parts;
    double total = 0.0;
    for (int begin = 0; begin < call.pieces; begin += kThreads) {
        const int piece = begin + static_cast<int>(threadIdx.x);
        double sum = 0.0;
        if (piece < call.pieces)
            for (int part = 0; part < call.parts; ++part)
                sum += row[static_cast<std::int64_t>(piece) * call.parts + part];
        __syncthreads();
        shared.of_piece[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int p = 0; p < min(kThreads, call.pieces - begin); ++p) total += shared.of_piece[p];
    }
    if (threadIdx.x == 0) call.sums[blockIdx.x] = total;
}

template <bool kVector>
__device__ void norms_tile(const NormsCall& call, std::int64_t begin, int count, Values& values) {
    const int first_row = static_cast<int>(blockIdx.y) * kTogether, few = min(kTogether, call.k - first_row);
    Raw<float> raw[kTogether];
#pragma unroll
    for (int r = 0; r < kTogether; ++r)
        raw[r] = r < few ? Raw<float>::load<kVector>(call.rows[first_row + r] + begin, count) : Raw<float>::zero();
#pragma unroll
    for (int r = 0; r < kTogether; ++r)
        if (r < few) values.put(r, raw[r].v);
    __syncthreads();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kLanes * few) return;
    const double squares =
        squares_of(values, count, [&](int r, int j) { return static_cast<double>(values.row[r][j]); });
    if (thread % kLanes == 0)
        call.squares[static_cast<std::int64_t>(first_row + thread / kLanes) * gridDim.x + blockIdx.x] = squares;
}

// A block is a tile of four rows.
__device__ inline void squared_norms(const NormsCall& call, Values& values) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    if (count == kTile && call.vector != 0)
        norms_tile<true>(call, begin, count, values);
    else
        norms_tile<false>(call, begin, count, values);
}

}  // namespace fedcore::cuda
