// out[0..count) = (w[0] * a + w[1] * b) + ..., over K columns; what `out` held comes first if Add.
// Meanwhile the tile at `ahead` is fetched into L2: the hardware follows p streams of one tile each no further than
// their ends.
// (Not inlined: GCC would forget what __restrict says and test for overlap at every stretch.)
template <int K, bool Add>
__attribute__((noinline)) void combine(const float* __restrict a, const float* __restrict b, const float* __restrict c,
                                       const float* __restrict d, const float* w, std::int64_t count,
                                       const float* ahead, float* __restrict out) {
    const float wa = w[0], wb = K > 1 ? w[1] : 0, wc = K > 2 ? w[2] : 0, wd = K > 3 ? w[3] : 0;
    const auto add_up = [&](std::int64_t j) {
        float sum = Add ? out[j] + wa * a[j] : wa * a[j];
        if (K > 1) sum = sum + wb * b[j];
        if (K > 2) sum = sum + wc * c[j];
        if (K > 3) sum = sum + wd * d[j];
        out[j] = sum;
    };
    std::int64_t j = 0;
    for (; j + kStretch <= count; j += kStretch) {
        if (!Add)
            for (int line = 0; line < kStretch; line += 16) __builtin_prefetch(ahead + j + line, 0, 2);
        for (int i = 0; i < kStretch; ++i) add_up(j + i);
    }
    for (; j < count; ++j) add_up(j);
}

// The same over k columns, of which the first four at most are taken.
template <bool Add>
inline void combine_upto_four(const float* const* y, const float* w, std::int64_t k, std::int64_t count,
                              const float* ahead, float* out) {
    if (k >= 4)
        combine<4, Add>(y[0], y[1], y[2], y[3], w, count, ahead, out);
    else if (k == 3)
        combine<3, Add>(y[0], y[1], y[2], nullptr, w, count, ahead, out);
    else if (k == 2)
        combine<2, Add>(y[0], y[1], nullptr, nullptr, w, count, ahead, out);
    else
        combine<1, Add>(y[0], nullptr, nullptr, nullptr, w, count, ahead, out);
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
            float* out = models[i] + at;
            if (plan.keeps[i] >= 0) copy(out, count, slots + plan.keeps[i] * stride);
            const std::int64_t next = i + plan.ahead;
            const float* fetched =
                next < matrix.p ? models[plan.order[next]] + at : models[plan.order[next - matrix.p]] + at + count;
            const std::int64_t first = matrix.starts[i], last = matrix.starts[i + 1];
            if (first == last)
                for (std::int64_t j = 0; j < count; ++j) out[j] = 0.0f;
            for (std::int64_t e = first; e < last; e += 4) {
                const std::int64_t k = last - e < 4 ? last - e : 4;
                const float* columns[4];
                for (std::int64_t c = 0; c < k; ++c)
                    columns[c] = plan.sources[e + c] < 0 ? models[matrix.columns[e + c]] + at
                                                         : slots + plan.sources[e + c] * stride;
                if (e == first)
                    combine_upto_four<false>(columns, matrix.weights + e, k, count, fetched, out);
                else
                    combine_upto_four<true>(columns, matrix.weights + e, k, count, fetched, out);
            }
        }
    }
}
