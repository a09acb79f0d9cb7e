// Linear combinations of a few vectors, and their norms, as in combine.h, in float64; combinations of exact sums, and
// their values, as in exact.h.
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

// Terms in shared memory, and the largest |high| of each term in each chunk of the tile.
struct ExactTerms {
    ExactTerm term[kStaged];
    Word largest[kStaged][kTile / kChunk];
};

// sum += times * term, in the one form; |times| <= 2^31. The low word is multiplied by halves, which 64 bits hold.
__device__ inline void add_times(std::int64_t times, ExactElement term, ExactElement& sum) {
    constexpr int kHalf = kLowBits / 2;
    constexpr std::int64_t kMask = (std::int64_t{1} << kHalf) - 1;
    const auto factor = static_cast<std::uint64_t>(times);  // unsigned: an invalid term may overflow
    const auto low = static_cast<std::int64_t>(term.low);
    const auto lower = static_cast<std::int64_t>(factor * static_cast<std::uint64_t>(low & kMask));
    const auto upper = static_cast<std::int64_t>(factor * static_cast<std::uint64_t>(low >> kHalf) +
                                                 static_cast<std::uint64_t>(lower >> kHalf));
    sum.low += static_cast<std::uint64_t>((upper & kMask) << kHalf | (lower & kMask));
    sum.high += factor * term.high + static_cast<std::uint64_t>(upper >> kHalf) + (sum.low >> kLowBits);
    sum.low &= kLowMask;
}

template <bool kVector>
__device__ void combine_exact_tile(const CombineExactCall& call, std::int64_t begin, int count, ExactTerms& shared) {
    const int thread = static_cast<int>(threadIdx.x), chunk = first() / kChunk;
    RunningSum<std::int64_t> sum = {};
    double most = 0.0;  // the bound of |high| in this thread's chunk
    bool fits = true;   // whether all numbers of vectors are below 2^40
    for (int staged = 0; staged < call.k; staged += kStaged) {
        const int rest = min(kStaged, call.k - staged);
        __syncthreads();
        if (thread < rest) {
            shared.term[thread] = call.terms[staged + thread];
            for (Word& largest : shared.largest[thread]) largest = 0;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < rest; ++i) {
            const ExactTerm term = shared.term[i];
            if (term.values != nullptr) {
                const auto values = Raw<float>::load<kVector>(term.values + begin, count);
#pragma unroll
                for (int e = 0; e < kEach; ++e) {
                    ExactElement one = {0 - kHighBias, 0 - kLowBias};
                    add_rounded(static_cast<double>(values.at(e)), one);
                    add_times(term.coefficient, one, sum.v[e]);
                    fits = fits && magnitude_of(values.at(e)) < bits_of(0x1p40f);
                }
            } else {
                const auto one = RunningSum<std::int64_t>::load<kVector>(term.sum, begin, count);
                Word largest = 0;
#pragma unroll
                for (int e = 0; e < kEach; ++e) {
                    const auto high = static_cast<std::int64_t>(one.v[e].high);
                    largest = max(largest, static_cast<Word>(high < 0 ? ~high : high));
                    add_times(term.coefficient, one.v[e], sum.v[e]);
                }
                atomicMax(&shared.largest[i][chunk], largest);
            }
        }
        __syncthreads();
        for (int i = 0; i < rest; ++i) {
            const ExactTerm& term = shared.term[i];
            const double largest = term.values != nullptr ? 0x1p50 : static_cast<double>(shared.largest[i][chunk]) + 1;
            most += static_cast<double>(term.coefficient < 0 ? -term.coefficient : term.coefficient) * (largest + 1);
        }
    }
    sum.store_to<kVector>(call.out, begin, count);
    const bool overflows = __syncthreads_or(!fits || !(most < 0x1p62)) != 0;
    if (thread == 0) call.overflows[blockIdx.x] = overflows ? infinity() : 0.0;
}

// A block is a tile.
__device__ inline void combine_exact(const CombineExactCall& call, ExactTerms& shared) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    if (count == kTile && call.vector != 0)
        combine_exact_tile<true>(call, begin, count, shared);
    else
        combine_exact_tile<false>(call, begin, count, shared);
}

template <class Out, bool kVector>
__device__ void read_exact_tile(const ReadExactCall& call, std::int64_t begin, int count) {
    const auto sum = RunningSum<std::int64_t>::load<kVector>(call.sum, begin, count);
    Out out[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) out[e] = static_cast<Out>(value_of(sum.v[e].high, sum.v[e].low));
    store<kVector>(static_cast<Out*>(call.out) + begin, count, out);
}

template <class Out>
__device__ void read_exact(const ReadExactCall& call) {
    const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kTile;
    const int count = extent(call.n, begin);
    if (count == kTile && call.vector != 0)
        read_exact_tile<Out, true>(call, begin, count);
    else
        read_exact_tile<Out, false>(call, begin, count);
}

}  // namespace fedcore::cuda
