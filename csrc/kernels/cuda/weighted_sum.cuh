// Weighted sums of separate rows, many tensors of many clients in one launch, with the norms of whole models.
//     out[j] = sum_i weights[i] h_i[j], one row after another; h_i[j] = rows[i][j] or base[j] - rows[i][j]
#pragma once

#include "kernels/cuda/norms.cuh"

namespace fedcore::cuda {

// Rows whose loads are in flight at once: 128 bytes a thread, or 64 of 16-bit rows.
template <class Element, bool kVector>
constexpr int kAtOnce = !kVector || sizeof(Element) == 8 ? 2 : kTogether;

// A row's type in memory, and the value of element e.
template <Dtype kDtype>
struct RowOf;
template <>
struct RowOf<Dtype::float32> {
    using Element = float;
    static __device__ float at(const Raw<float>& raw, int e) { return raw.at(e); }
    static __device__ float number(float element) { return element; }
};
template <>
struct RowOf<Dtype::float64> {
    using Element = double;
    static __device__ double at(const Raw<double>& raw, int e) { return raw.at(e); }
    static __device__ double number(double element) { return element; }
};
template <>
struct RowOf<Dtype::float16> {
    using Element = Code16;
    static __device__ float at(const Raw<Code16>& raw, int e) { return raw.as<F16>(e); }
    static __device__ float number(Code16 element) { return value_of<F16>(element.bits); }
};
template <>
struct RowOf<Dtype::bfloat16> {
    using Element = Code16;
    static __device__ float at(const Raw<Code16>& raw, int e) { return raw.as<Bf16>(e); }
    static __device__ float number(Code16 element) { return value_of<Bf16>(element.bits); }
};

// The precision of h: float32, or float64 if rows and sum are.
template <class Number, class Sum>
struct Arithmetic {
    using Value = float;
};
template <>
struct Arithmetic<double, double> {
    using Value = double;
};

// A block's memory. Only kernels.cu uses __shared__, because the emulation cannot find it in templates.
template <class Sum, bool kNorms>
struct SumsMemory {
    const void* row[kStaged];
    Sum weight[kStaged];
};
template <class Sum>
struct SumsMemory<Sum, true> {
    Values values;
    const void* row[kStaged];
    Sum weight[kStaged];
};

// Rounded from the sum once, to the nearest and ties to even.
template <bool kVector, class Sum>
__device__ void store_sum(const Sum (&sum)[kEach], Dtype dtype, void* out, std::int64_t begin, int count) {
    if (dtype == Dtype::float32) {
        float v[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) v[e] = static_cast<float>(sum[e]);
        store<kVector>(static_cast<float*>(out) + begin, count, v);
    } else if (dtype == Dtype::float64) {
        double v[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) v[e] = static_cast<double>(sum[e]);
        store<kVector>(static_cast<double*>(out) + begin, count, v);
    } else {
        std::uint32_t code[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e)
            code[e] = dtype == Dtype::bfloat16 ? Bf16::code<true>(Nearest{}, 0, to_odd(sum[e]))
                                               : F16::code<true>(Nearest{}, 0, to_odd(sum[e]));
        store_codes<kVector>(static_cast<std::uint16_t*>(out) + begin, count, code);
    }
}

template <Dtype kDtype, class Sum, bool kBase, bool kNorms, bool kVector>
__device__ void sum_tile(const SumsCall& call, const SumSegment& segment, const Where& at, int count,
                         SumsMemory<Sum, kNorms>& shared) {
    using Row = RowOf<kDtype>;
    using Element = typename Row::Element;
    using Value = typename Arithmetic<decltype(Row::number(Element{})), Sum>::Value;
    constexpr int kRows = kAtOnce<Element, kVector>;
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t tiles = static_cast<std::int64_t>(gridDim.x);
    const void* const* const rows = segment.sum.rows;
    const float* const base = kBase ? segment.sum.base + at.begin : nullptr;
    const Raw<float> x = kBase ? Raw<float>::load<kVector>(base, count) : Raw<float>::zero();
    Sum sum[kEach] = {};
    for (int staged = 0; staged < call.k; staged += kStaged) {
        const int rest = min(kStaged, call.k - staged);
        __syncthreads();
        if (thread < rest) {
            shared.row[thread] = rows[staged + thread];
            shared.weight[thread] = static_cast<Sum>(call.weights[staged + thread]);
        }
        __syncthreads();
        for (int begin = 0; begin < rest; begin += kRows) {
            Raw<Element> raw[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                raw[r] = begin + r < rest ? Raw<Element>::template load<kVector>(
                                                static_cast<const Element*>(shared.row[begin + r]) + at.begin, count)
                                          : Raw<Element>::zero();
            if (kNorms) __syncthreads();  // the squares of the rows before have been added
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (begin + r >= rest) break;
                const Sum weight = shared.weight[begin + r];
                float narrow[kEach];
#pragma unroll
                for (int e = 0; e < kEach; ++e) {
                    Value h = static_cast<Value>(Row::at(raw[r], e));
                    if (kBase) h = static_cast<Value>(x.at(e)) - h;
                    sum[e] = sum[e] + weight * static_cast<Sum>(h);
                    narrow[e] = static_cast<float>(h);
                }
                if constexpr (kNorms) shared.values.put(r, narrow);
            }
            if constexpr (kNorms) {
                __syncthreads();
                if (thread < kLanes * min(kRows, rest - begin)) {
                    const double squares = squares_of(shared.values, count, [&](int r, int j) {
                        Value h = static_cast<Value>(
                            Row::number((static_cast<const Element*>(shared.row[begin + r]) + at.begin)[j]));
                        if (kBase) h = static_cast<Value>(base[j]) - h;
                        return static_cast<double>(static_cast<Sum>(h));
                    });
                    if (thread % kLanes == 0)
                        call.squares[(staged + begin + thread / kLanes) * tiles + at.tile] = squares;
                }
            }
        }
    }
    store_sum<kVector>(sum, segment.sum.out_dtype, segment.sum.out, at.begin, count);
    if constexpr (kNorms) {
        // |sum|^2: its float32, and behind it in the same memory its float64, should that be wanted.
        float narrow[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) narrow[e] = static_cast<float>(sum[e]);
        double* const wide = reinterpret_cast<double*>(&shared.values.row[1][0]);
        __syncthreads();
        shared.values.put(0, narrow);
#pragma unroll
        for (int e = 0; e < kEach; ++e) wide[first() + place(e)] = static_cast<double>(sum[e]);
        __syncthreads();
        if (thread < kLanes) {
            const double squares = squares_of(shared.values, count, [&](int, int j) { return wide[j]; });
            if (thread == 0) call.squares[call.k * tiles + at.tile] = squares;
        }
    }
}

template <Dtype kDtype, class Sum, bool kBase, bool kNorms>
__device__ void weighted_sums(const SumsCall& call, SumsMemory<Sum, kNorms>& shared) {
    const Where at = where(call.segments);
    const SumSegment segment = call.tensors[at.segment];
    if (segment.sum.rows_dtype != kDtype || (segment.sum.base != nullptr) != kBase) return;  // another launch's
    const int count = extent(segment.n, at.begin);
    if (count == 0) {  // behind the end: tiles are counted in whole pieces
        const std::int64_t tiles = static_cast<std::int64_t>(gridDim.x);
        if (kNorms)
            for (int i = static_cast<int>(threadIdx.x); i <= call.k; i += kThreads)
                call.squares[i * tiles + at.tile] = 0.0;
    } else if (count == kTile && segment.vector != 0) {
        sum_tile<kDtype, Sum, kBase, kNorms, true>(call, segment, at, count, shared);
    } else {
        sum_tile<kDtype, Sum, kBase, kNorms, false>(call, segment, at, count, shared);
    }
}

}  // namespace fedcore::cuda
