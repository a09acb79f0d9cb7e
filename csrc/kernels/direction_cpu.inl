// How far ahead of the loop memory is asked for: the hardware's own prefetch stops at page ends and does not
// keep up with three streams.
constexpr std::int64_t kStretch = 64;  // elements between two rounds of prefetching: four cache lines

template <bool Decay, bool Prev, bool Offset, bool Prox>
void step_loop(const LocalStep& step, std::int64_t begin, std::int64_t end, float* __restrict y) {
    const LocalStep s = step;
    const auto update = [&](std::int64_t j) {
        float g = s.grad[j];
        if (Decay) g = g + s.weight_decay * y[j];
        float d = s.a * g;
        if (Prev) d = d + s.b * s.grad_prev[j];
        if (Offset) d = d + s.offset[j];
        if (Prox) d = d + s.mu * (y[j] - s.x[j]);
        y[j] = y[j] - s.lr * d;
    };
    std::int64_t j = begin;
    for (; j + kStretch <= end; j += kStretch) {
        for (int line = 0; line < kStretch; line += 16) {
            __builtin_prefetch(y + j + kAhead + line);
            __builtin_prefetch(s.grad + j + kAhead + line);
            if (Prev) __builtin_prefetch(s.grad_prev + j + kAhead + line);
            if (Offset) __builtin_prefetch(s.offset + j + kAhead + line);
            if (Prox) __builtin_prefetch(s.x + j + kAhead + line);
        }
        for (int i = 0; i < kStretch; ++i) update(j + i);
    }
    for (; j < end; ++j) update(j);
}

void direction_step(const LocalStep& step, std::int64_t begin, std::int64_t end, float* y) {
    using Loop = void (*)(const LocalStep&, std::int64_t, std::int64_t, float*);
    static constexpr Loop kLoops[2][2][2][2] = {
        {{{step_loop<0, 0, 0, 0>, step_loop<0, 0, 0, 1>}, {step_loop<0, 0, 1, 0>, step_loop<0, 0, 1, 1>}},
         {{step_loop<0, 1, 0, 0>, step_loop<0, 1, 0, 1>}, {step_loop<0, 1, 1, 0>, step_loop<0, 1, 1, 1>}}},
        {{{step_loop<1, 0, 0, 0>, step_loop<1, 0, 0, 1>}, {step_loop<1, 0, 1, 0>, step_loop<1, 0, 1, 1>}},
         {{step_loop<1, 1, 0, 0>, step_loop<1, 1, 0, 1>}, {step_loop<1, 1, 1, 0>, step_loop<1, 1, 1, 1>}}}};
    kLoops[step.weight_decay != 0][step.grad_prev != nullptr][step.offset != nullptr][step.x != nullptr](step, begin,
                                                                                                         end, y);
}

// sum[0..count) = or += coefficient * values[0..count)
template <class T>
inline void add_term(const T* __restrict values, double coefficient, bool first, std::int64_t count,
                     double* __restrict sum) {
    if (first)
        for (std::int64_t j = 0; j < count; ++j) sum[j] = coefficient * static_cast<double>(values[j]);
    else
        for (std::int64_t j = 0; j < count; ++j) sum[j] += coefficient * static_cast<double>(values[j]);
}

void direction_offset(const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end, float* out) {
    alignas(64) double sum[kChunk];
    for (std::int64_t at = begin; at < end; at += kChunk) {
        const std::int64_t count = end - at < kChunk ? end - at : kChunk;
        for (std::int64_t i = 0; i < k; ++i) {
            if (terms[i].wide)
                add_term(static_cast<const double*>(terms[i].values) + at, terms[i].coefficient, i == 0, count, sum);
            else
                add_term(static_cast<const float*>(terms[i].values) + at, terms[i].coefficient, i == 0, count, sum);
        }
        for (std::int64_t j = 0; j < count; ++j) out[at + j] = static_cast<float>(sum[j]);
    }
}
