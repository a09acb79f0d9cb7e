// The first `count` elements at an address, with zeros behind them.
inline FullFloats read_some(const float* at, std::int64_t count) {
    FullFloats values = {};
    __builtin_memcpy(&values, at, sizeof(float) * count);
    return values;
}

// One tile; returns |x'|^2 of it.
template <Second kSecond>
double optimizer_tile(const OptimizerStep& step, const OptimizerInputs& in, const OptimizerOutputs& out,
                      std::int64_t tile, std::int64_t count) {
    constexpr bool kHasSecond = kSecond != Second::none;
    const OptimizerStep s = step;
    const float* const of_v = in.v + tile;
    const float* const of_m = in.m + tile;
    const float* const of_s = kHasSecond ? in.s + tile : nullptr;
    const float* const of_x = in.x + tile;
    float* const to_m = out.m + tile;
    float* const to_s = kHasSecond ? out.s + tile : nullptr;
    float* const to_x = out.x + tile;
    FullFloats squares[kLanes / kFull] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        __builtin_prefetch(of_v + j + kAhead);
        __builtin_prefetch(of_m + j + kAhead);
        if (kHasSecond) __builtin_prefetch(of_s + j + kAhead);
        __builtin_prefetch(of_x + j + kAhead);
#pragma GCC unroll 4
        for (int part = 0; part < kLanes / kFull; ++part) {
            const std::int64_t at = j + part * kFull;
            const Moments<FullFloats> from{read(of_m + at), kHasSecond ? read(of_s + at) : FullFloats{},
                                           read(of_x + at)};
            const Moments<FullFloats> to = turned<kSecond>(s, read(of_v + at), from);
            squares[part] += to.x * to.x;
            write(to_m + at, to.m);
            if (kHasSecond) write(to_s + at, to.s);
            write(to_x + at, to.x);
        }
    }
    float tail[kLanes];
    int rest = 0;
    while (j < count) {
        const std::int64_t few = count - j < kFull ? count - j : kFull;
        const Moments<FullFloats> from{read_some(of_m + j, few), kHasSecond ? read_some(of_s + j, few) : FullFloats{},
                                       read_some(of_x + j, few)};
        const Moments<FullFloats> to = turned<kSecond>(s, read_some(of_v + j, few), from);
        __builtin_memcpy(to_m + j, &to.m, sizeof(float) * few);
        if (kHasSecond) __builtin_memcpy(to_s + j, &to.s, sizeof(float) * few);
        __builtin_memcpy(to_x + j, &to.x, sizeof(float) * few);
        for (const std::int64_t end = j + few; j < end; ++j, ++rest) tail[rest] = to_x[j] * to_x[j];
    }
    const double square = fold_lanes(squares, tail, rest);
    return is_sound(square) ? square : sum_of_squares_exactly(to_x, count);
}

double optimizer_step(const OptimizerStep& step, const OptimizerInputs& in, const OptimizerOutputs& out,
                      std::int64_t begin, std::int64_t end) {
    const auto loop = step.second == Second::none    ? optimizer_tile<Second::none>
                      : step.second == Second::decay ? optimizer_tile<Second::decay>
                                                     : optimizer_tile<Second::yogi>;
    double square = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile)
        square += loop(step, in, out, tile, end - tile < kTile ? end - tile : kTile);
    return square;
}
