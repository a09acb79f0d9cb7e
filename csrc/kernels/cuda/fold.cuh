// Folds clients' updates into a sum, and exchanges their rows: the operations of aggregate.h and exchange.h, with the
// same order of additions. Each sum stays in its thread's registers during the loop over clients.
#pragma once

#include "kernels/cuda/codes.cuh"
#include "kernels/cuda/norms.cuh"

namespace fedcore::cuda {

// A client's arrays in shared memory. Not a RowExchange, because shared memory cannot hold types with a constructor,
// and a device makes no checksums.
struct Client {
    ClientUpdate sent;
    Row old_row, new_row;
    const float* anchor;
    Dither dither;
};

struct FoldMemory {
    Values values;
    Client client[kStaged];
    alignas(16) float base[kTile];  // where rows are exchanged: of each thread its own, for which registers are short
    unsigned bad;                   // a bit for each of the rows at hand: what is stored is not finite
};

// A client's update as float32. If not every y is float32, a load waits for its conversion.
template <bool kPlain, bool kVector>
__device__ Raw<float> load_sent(const ClientUpdate& sent, std::int64_t begin, int count) {
    if (kPlain || sent.dtype == Dtype::float32)
        return Raw<float>::load<kVector>(static_cast<const float*>(sent.y) + begin, count);
    Raw<float> out;
    if (sent.dtype == Dtype::float64) {
        const Raw<double> raw = Raw<double>::load<kVector>(static_cast<const double*>(sent.y) + begin, count);
#pragma unroll
        for (int e = 0; e < kEach; ++e) out.v[e] = static_cast<float>(raw.at(e));
        return out;
    }
    const Raw<Code16> raw = Raw<Code16>::load<kVector>(static_cast<const Code16*>(sent.y) + begin, count);
#pragma unroll
    for (int e = 0; e < kEach; ++e) out.v[e] = sent.dtype == Dtype::float16 ? raw.as<F16>(e) : raw.as<Bf16>(e);
    return out;
}

__device__ inline float sent_at(const ClientUpdate& sent, std::int64_t j) {
    switch (sent.dtype) {
        case Dtype::float32:
            return static_cast<const float*>(sent.y)[j];
        case Dtype::float64:
            return static_cast<float>(static_cast<const double*>(sent.y)[j]);
        case Dtype::float16:
            return value_of<F16>(static_cast<const Code16*>(sent.y)[j].bits);
        default:
            return value_of<Bf16>(static_cast<const Code16*>(sent.y)[j].bits);
    }
}

// Adds a client's terms to an element of a sum; kTerms: of an exact sum, their number, less those that are taken off.
template <bool kRows, Form kForm, class Sum>
__device__ void add_terms(const SumForm& adds, double weight_of, float made, float old, float h, float anchor,
                          Sum& sum) {
    const auto weight = static_cast<Sum>(weight_of), stored = static_cast<Sum>(made), before = static_cast<Sum>(old);
    Sum change = stored;
    if constexpr (kForm != Form::replaces)
        change = seen_of<kForm, Sum>(adds, stored, before, static_cast<Sum>(h), static_cast<Sum>(anchor));
    else if constexpr (kRows)
        change = (stored - before) + static_cast<Sum>(anchor);
    sum = sum + weight * change;
}
template <bool kRows, Form kForm>
__device__ void add_terms(const SumForm& adds, double weight, float made, float old, float h, float anchor,
                          ExactElement& sum) {
    if constexpr (kForm != Form::replaces)
        return add_seen_of<kForm, double>(weighed(adds, weight), made, old, h, anchor, sum);
    add_rounded(weight * static_cast<double>(made), sum);
    if constexpr (kRows) {
        add_rounded<false>(weight * static_cast<double>(old), sum);
        add_rounded(weight * static_cast<double>(anchor), sum);
    }
}
template <Form kForm>
constexpr int kTerms = kForm == Form::replaces ? 1 : 4;

// Whether a sum can take the elements of a new row, of which `largest` is the largest magnitude.
template <class Sum>
__device__ bool is_taken(std::uint32_t largest, const SumForm& adds, double weight) {
    if constexpr (std::is_same<Sum, std::int64_t>::value) return is_held(float_of(largest), adds, weight);
    return largest < kInfinite;
}

// Normalises an exact sum to which `clients` were added.
template <Form kForm, class Sum>
__device__ void settle_all(RunningSum<Sum>& sum, int clients) {
    if constexpr (std::is_same<Sum, std::int64_t>::value) {
        const Biases biases = biases_of(kTerms<kForm> * clients);
#pragma unroll
        for (int e = 0; e < kEach; ++e) settle(sum.v[e].high, sum.v[e].low, biases);
    }
}

// A missing base is -0, so that no loop asks for it: -0 - y is -y for every y.
template <bool kVector>
__device__ Raw<float> load_base(const float* base, std::int64_t begin, int count) {
    return base != nullptr ? Raw<float>::load<kVector>(base + begin, count) : Raw<float>::minus_zero();
}

__device__ inline float mean_gradient(float base, float y, float scale) {
    return gradient<Given::model>(base, y, scale);
}

// Clients whose loads are in flight at once: 64 to 128 bytes a thread, and no more than registers hold.
template <bool kRows, bool kPlain, Form kForm>
constexpr int kFetched = !kRows ? (kPlain ? 4 : 2) : (kPlain && kForm == Form::replaces ? 2 : 1);

// kRows: rows are exchanged, to kCodec. kPlain: every y is float32, and every old row of the new one's codec.
template <class Sum, bool kRows, Codec kCodec, Form kForm, bool kPlain, bool kVector>
__device__ void fold_tile(const FoldCall<Sum>& call, const Where& at, int some, FoldMemory& shared) {
    const int count = kVector ? kTile : some;
    const FoldSegment<Sum>& segment = call.tensors[at.segment];  // read again where it is used: registers are few
    constexpr bool kReplaces = kForm == Form::replaces;
    constexpr int kPart = kVector ? kFetched<kRows, kPlain, kForm> : 1;
    static_assert(kTogether % kPart == 0, "a part is not cut");
    using Old = std::conditional_t<kPlain, Coded<kCodec>, CodedFloat>;
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t tiles = static_cast<std::int64_t>(gridDim.x);
    auto sum = RunningSum<Sum>::template load<kVector>(segment.fold.acc, at.begin, count);
    // A launch has one base: the host splits a cohort where the base changes, which only late replies cause.
    const Raw<float> x = load_base<kVector>(call.k > 0 ? segment.fold.sent[0].base : nullptr, at.begin, count);
    if (kRows) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) shared.base[first() + place(e)] = x.at(e);
    }
    for (int staged = 0; staged < call.k; staged += kStaged) {
        const int rest = min(kStaged, call.k - staged);
        __syncthreads();
        if (thread < rest) {
            Client& client = shared.client[thread];
            client.sent = segment.fold.sent[staged + thread];
            if (kRows) {
                const RowExchange& row = call.rows[staged + thread];
                client.old_row = row.old_row;
                client.new_row = row.new_row;
                client.anchor = row.anchor;
                client.dither = dither_of(row.key, at.begin);
            }
        }
        if (thread == 0) shared.bad = 0;
        __syncthreads();
        for (int begin = 0; begin < rest; begin += kTogether) {
            const int few = min(kTogether, rest - begin);
            unsigned bad = 0;
#pragma unroll 1
            for (int part = 0; part < few; part += kPart) {
                Raw<float> y[kPart], anchor[kPart];
                Old old[kPart];
#pragma unroll
                for (int r = 0; r < kPart; ++r) {
                    const int i = begin + part + r;
                    y[r] = Raw<float>::zero();
                    // nothing is changed by subtracting 0, or by adding -0
                    old[r] = Old::none();
                    anchor[r] = kReplaces ? Raw<float>::minus_zero() : Raw<float>::zero();
                    if (i >= rest) continue;
                    const Client& client = shared.client[i];
                    y[r] = load_sent<kPlain, kVector>(client.sent, at.begin, count);
                    if (!kRows) continue;
                    const bool has_old = client.old_row.data != nullptr;
                    if constexpr (kPlain) {
                        if (has_old) old[r] = Old::template load<kVector>(client.old_row, at.begin, count);
                    } else {
                        if (has_old) old[r] = {load_row<kVector>(client.old_row, at.begin, count)};
                    }
                    if (client.anchor != nullptr && (has_old || !kReplaces))
                        anchor[r] = Raw<float>::load<kVector>(client.anchor + at.begin, count);
                }
                if (part == 0) __syncthreads();  // the squares of the rows before have been added
#pragma unroll
                for (int r = 0; r < kPart; ++r) {
                    const int i = begin + part + r;
                    if (i >= rest) continue;  // alike in all threads: there are shuffles below
                    const Client& client = shared.client[i];
                    const float scale = client.sent.scale;
                    float h[kEach], made[kEach];
#pragma unroll
                    for (int e = 0; e < kEach; ++e) {
                        h[e] = mean_gradient(kRows ? shared.base[first() + place(e)] : x.at(e), y[r].at(e), scale);
                        made[e] = kReplaces ? h[e] : row_of(call.forms.row, h[e], old[r].at(e), anchor[r].at(e));
                    }
                    shared.values.put(part + r, h);
                    if constexpr (kRows) encode<kCodec, kVector>(client.new_row, client.dither, at.begin, count, made);
                    const double weight = client.sent.weight;
                    std::uint32_t largest = 0;
#pragma unroll
                    for (int e = 0; e < kEach; ++e) {
                        const float sent = kReplaces ? 0.0f : shared.values.at(part + r, e);  // h; registers are short
                        add_terms<kRows, kForm>(call.forms.adds, weight, made[e], old[r].at(e), sent, anchor[r].at(e),
                                                sum.at(e));
                        if (kRows && (kVector || first() + place(e) < count))
                            largest = max(largest, magnitude_of(made[e]));
                    }
                    if (kRows && !is_taken<Sum>(largest, call.forms.adds, weight)) bad |= 1u << (part + r);
                }
            }
            if (kRows && bad != 0) atomicOr(&shared.bad, bad);
            __syncthreads();
            if (thread < kLanes * few) {
                double squares = squares_of(shared.values, count, [&](int r, int j) {
                    const ClientUpdate& one = shared.client[begin + r].sent;
                    const float start = one.base != nullptr ? one.base[at.begin + j] : -0.0f;
                    return static_cast<double>(mean_gradient(start, sent_at(one, at.begin + j), one.scale));
                });
                const int r = thread / kLanes;
                if (kRows && (shared.bad >> r & 1u) != 0 && squares < infinity()) squares = infinity();
                if (thread % kLanes == 0) call.squares[(staged + begin + r) * tiles + at.tile] = squares;
            }
            if (kRows && __syncthreads_or(bad != 0) != 0) {  // rare, and alike in all threads
                if (thread == 0) shared.bad = 0;
                __syncthreads();
            }
        }
        settle_all<kForm>(sum, rest);
    }
    sum.template store_to<kVector>(segment.fold.out, at.begin, count);
}

template <class Sum, bool kRows, Codec kCodec, Form kForm, bool kPlain>
__device__ void fold(const FoldCall<Sum>& call, FoldMemory& shared) {
    const Where at = where(call.segments);
    const FoldSegment<Sum>& segment = call.tensors[at.segment];
    const int count = extent(segment.n, at.begin);
    if (count == 0) {  // behind the end: tiles are counted in whole pieces
        const std::int64_t tiles = static_cast<std::int64_t>(gridDim.x);
        for (int i = static_cast<int>(threadIdx.x); i < call.k; i += kThreads) call.squares[i * tiles + at.tile] = 0.0;
    } else if (count == kTile && segment.vector != 0) {
        fold_tile<Sum, kRows, kCodec, kForm, kPlain, true>(call, at, count, shared);
    } else {
        fold_tile<Sum, kRows, kCodec, kForm, kPlain, false>(call, at, count, shared);
    }
}

template <class Sum, bool kPlain>
__device__ void accumulate(const FoldCall<Sum>& call, FoldMemory& shared) {
    fold<Sum, false, Codec::f32, Form::replaces, kPlain>(call, shared);
}

template <class Sum, Codec kCodec, Form kForm, bool kPlain>
__device__ void exchange(const FoldCall<Sum>& call, FoldMemory& shared) {
    fold<Sum, true, kCodec, kForm, kPlain>(call, shared);
}

}  // namespace fedcore::cuda
