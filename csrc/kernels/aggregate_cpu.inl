// Four rows of one base in one pass: their additions stay in order, but the base is loaded, and the sum loaded and
// stored, once for all four.
template <class Sum>
void fold_four(const Streams* four, std::int64_t count, Sum* __restrict sum, double* squares) {
    using Wide = typename In<Sum>::Vector;
    const float* const base = four[0].base;
    Floats part[4][kVectors] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        for (int r = 0; r < 4; ++r)
            __builtin_prefetch(j + four[r].ahead < count
                                   ? reinterpret_cast<const char*>(four[r].y + j + four[r].ahead)
                                   : four[r].next.at + (j + four[r].ahead - count) * four[r].next.size);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t at = j + v * kWidth;
            const Floats x = load(base + at);
            Wide s = load(sum + at);
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                const Floats h = (x - load(four[r].y + at)) * (Floats{} + four[r].scale);
                part[r][v] += h * h;
                s += (Wide{} + static_cast<Sum>(four[r].weight)) * In<Sum>::of(h);
            }
            store(sum + at, s);
        }
    }
    float tail[4][kLanes];
    int rest = 0;
    for (; j < count; ++j, ++rest)
        for (int r = 0; r < 4; ++r) {
            const float h = (base[j] - four[r].y[j]) * four[r].scale;
            tail[r][rest] = h * h;
            sum[j] += static_cast<Sum>(four[r].weight) * static_cast<Sum>(h);
        }
    for (int r = 0; r < 4; ++r) {
        const double square = fold_lanes(part[r], tail[r], rest);
        squares[r] += is_sound(square) ? square : squares_exactly(four[r].y, four[r].base, four[r].scale, count);
    }
}

template <class Sum>
void accumulate(const Sum* acc, Sum* out, const Sent* sent, std::int64_t k, std::int64_t begin, std::int64_t end,
                double* squares) {
    alignas(64) float scratch[4][kTile];
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        Sum* sum = begin_tile(acc, out, tile, count);
        for (std::int64_t i = 0; i < k;) {
            const Sent* const at = sent + i;
            if (i + 4 <= k && at[0].base != nullptr && at[1].base == at[0].base && at[2].base == at[0].base &&
                at[3].base == at[0].base) {
                const bool more = i + 8 <= k;
                Streams four[4];
                for (int r = 0; r < 4; ++r)
                    four[r] = streams_of(at[r], tile, count, scratch[r],
                                         more ? upcoming(at[4 + r], tile) : upcoming(sent[r], tile + count));
                fold_four(four, count, sum, squares + i);
                i += 4;
            } else {
                const Streams one = streams_of(*at, tile, count, scratch[0], read_next(sent, i, k, tile, count));
                squares[i] += fold_tile<Sum, Form::gradient, false, false, false>(one, count, sum);
                ++i;
            }
        }
    }
}

template <class Sum>
void server_step(const Step& step, const StepInputs<Sum>& in, const StepOutputs& out, std::int64_t begin,
                 std::int64_t end, double* squares) {
    const Step s = step;
    const Sum* const sum = in.sum;
    const double* const total = in.total;
    alignas(64) double wide[kTile];
    squares[0] = squares[1] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        for (std::int64_t j = 0; j < count; ++j) wide[j] = s.from_sum * static_cast<double>(sum[tile + j]);
        if (total != nullptr)
            for (std::int64_t j = 0; j < count; ++j) wide[j] += s.from_total * total[tile + j];
        if (in.momentum != nullptr)
            for (std::int64_t j = 0; j < count; ++j)
                wide[j] += s.from_momentum * static_cast<double>(in.momentum[tile + j]);
        float* const v = out.v + tile;
        for (std::int64_t j = 0; j < count; ++j) v[j] = static_cast<float>(wide[j]);
        // behind v: T' may be written over the T that v needs
        if (total != nullptr) {
            for (std::int64_t j = 0; j < count; ++j)
                wide[j] = total[tile + j] + s.keep_sum * static_cast<double>(sum[tile + j]);
            if (in.control != nullptr)
                for (std::int64_t j = 0; j < count; ++j) wide[j] += s.keep_control * in.control[tile + j];
            for (std::int64_t j = 0; j < count; ++j)
                out.total[tile + j] = wide[j] + s.keep_v * static_cast<double>(v[j]);
        }
        for (std::int64_t j = 0; j < count; ++j)
            out.x[tile + j] =
                static_cast<float>(static_cast<double>(in.x[tile + j]) - s.gamma * static_cast<double>(v[j]));
        squares[0] += sum_of_squares(v, count);
        squares[1] += sum_of_squares(out.x + tile, count);
    }
}
