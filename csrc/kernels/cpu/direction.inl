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
