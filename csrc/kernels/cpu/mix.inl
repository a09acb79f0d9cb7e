// out[0..count) = (w[0] * y[0] + w[1] * y[1]) + ..., over K columns; what `out` held comes first if kAdd. Column kOwn,
// if it is not -1, is what `out` holds, which goes to `kept` as it passes. Meanwhile the tile at `ahead` is fetched
// into L2: the hardware follows p streams of one tile each no further than their ends.
template <int K, bool kAdd, int kOwn>
__attribute__((noinline)) void combine(const float* const* columns, const float* weights, std::int64_t count,
                                       const float* ahead, float* out, float* kept) {
    const float* y[K];
    float w[K];
    for (int c = 0; c < K; ++c) y[c] = columns[c], w[c] = weights[c];
    std::int64_t j = 0;
    for (; j + kStretch <= count; j += kStretch) {
        if (!kAdd)
            for (int line = 0; line < kStretch; line += 16) __builtin_prefetch(ahead + j + line, 0, 2);
#pragma GCC unroll 2
        for (std::int64_t at = j; at < j + kStretch; at += kFull) {
            const FullFloats own = kOwn >= 0 ? read(out + at) : FullFloats{};
            if (kOwn >= 0) write(kept + at, own);
            FullFloats sum = w[0] * (kOwn == 0 ? own : read(y[0] + at));
            if (kAdd) sum = read(out + at) + sum;
#pragma GCC unroll 4
            for (int c = 1; c < K; ++c) sum = sum + w[c] * (kOwn == c ? own : read(y[c] + at));
            write(out + at, sum);
        }
    }
    for (; j < count; ++j) {
        const float own = kOwn >= 0 ? out[j] : 0.0f;
        if (kOwn >= 0) kept[j] = own;
        float sum = w[0] * (kOwn == 0 ? own : y[0][j]);
        if (kAdd) sum = out[j] + sum;
        for (int c = 1; c < K; ++c) sum = sum + w[c] * (kOwn == c ? own : y[c][j]);
        out[j] = sum;
    }
}

using Combine = void (*)(const float* const*, const float*, std::int64_t, const float*, float*, float*);
constexpr int kTogether = 4;  // columns of a pass; more are not faster, because the slots in L2 limit the speed

// By the number of columns.
template <bool kAdd>
constexpr Combine kCombine[kTogether + 1] = {nullptr, combine<1, kAdd, -1>, combine<2, kAdd, -1>, combine<3, kAdd, -1>,
                                             combine<4, kAdd, -1>};

// By that, and by which of them is the row's own.
constexpr Combine kKeep[kTogether + 1][kTogether] = {
    {},
    {combine<1, false, 0>},
    {combine<2, false, 0>, combine<2, false, 1>},
    {combine<3, false, 0>, combine<3, false, 1>, combine<3, false, 2>},
    {combine<4, false, 0>, combine<4, false, 1>, combine<4, false, 2>, combine<4, false, 3>}};

// The index of the row's own model among its few entries, if exactly one is; -1 otherwise, or with more entries.
inline std::int64_t own_entry(const Mixing& matrix, std::int64_t row) {
    const std::int64_t first = matrix.starts[row], count = matrix.starts[row + 1] - first;
    if (count > kTogether) return -1;
    std::int64_t own = -1;
    for (std::int64_t e = 0; e < count; ++e) {
        if (matrix.columns[first + e] != row) continue;
        if (own >= 0) return -1;
        own = e;
    }
    return own;
}

__attribute__((noinline)) void copy(const float* __restrict from, std::int64_t count, float* __restrict to) {
    for (std::int64_t j = 0; j < count; ++j) to[j] = from[j];
}

void mix(const Mixing& matrix, const MixPlan& plan, float* const* models, std::int64_t begin, std::int64_t end,
         float* slots, std::int64_t stride) {
    // The first tile is cut short so that the others start where model 0 starts a cache line; arrays of one allocator
    // mostly agree in that, and loads and stores across lines cost half the speed.
    std::int64_t count = plan.tile;
    if (matrix.p != 0) count -= reinterpret_cast<std::uintptr_t>(models[0] + begin) / 4 % 16;
    for (std::int64_t at = begin; at < end; at += count, count = plan.tile) {
        if (count > end - at) count = end - at;
        for (std::int64_t i = 0; i < matrix.p; ++i) {
            float* const out = models[i] + at;
            float* const kept = plan.keeps[i] >= 0 ? slots + plan.keeps[i] * stride : nullptr;
            const std::int64_t own = kept != nullptr ? own_entry(matrix, i) : -1;
            if (kept != nullptr && own < 0) copy(out, count, kept);
            const std::int64_t next = i + plan.ahead;
            const float* fetched =
                next < matrix.p ? models[plan.order[next]] + at : models[plan.order[next - matrix.p]] + at + count;
            const std::int64_t first = matrix.starts[i], last = matrix.starts[i + 1];
            if (first == last)
                for (std::int64_t j = 0; j < count; ++j) out[j] = 0.0f;
            for (std::int64_t e = first; e < last; e += kTogether) {
                const std::int64_t k = last - e < kTogether ? last - e : kTogether;
                const float* columns[kTogether];
                for (std::int64_t c = 0; c < k; ++c)
                    columns[c] = plan.sources[e + c] < 0 ? models[matrix.columns[e + c]] + at
                                                         : slots + plan.sources[e + c] * stride;
                const Combine pass = own >= 0 ? kKeep[k][own] : e == first ? kCombine<false>[k] : kCombine<true>[k];
                pass(columns, matrix.weights + e, count, fetched, out, kept);
            }
        }
    }
}
