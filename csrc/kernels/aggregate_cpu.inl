// The sum of a tile stays in a buffer of its own, in the precision asked for, while all rows pass.
template <class Sum>
void weighted_sum(const float* const* rows, const float* weights, std::int64_t k, std::int64_t begin, std::int64_t end,
                  float* out) {
    using Wide = typename In<Sum>::Vector;
    for (std::int64_t tile = begin; tile < end; tile += kSumTile) {
        const std::int64_t count = end - tile < kSumTile ? end - tile : kSumTile;
        alignas(64) Sum sum[kSumTile];
        for (std::int64_t j = 0; j < count; ++j) sum[j] = 0;
        std::int64_t i = 0;
        // Four rows a pass: their additions stay in order, but the sum is loaded and stored once for all four.
        for (; i + 4 <= k; i += 4) {
            const float* const a = rows[i] + tile;
            const float* const b = rows[i + 1] + tile;
            const float* const c = rows[i + 2] + tile;
            const float* const d = rows[i + 3] + tile;
            // What is read after this tile: the same tile of the next four rows, or the first four's next tile.
            const bool more = i + 8 <= k;
            const std::int64_t then = more ? tile : tile + count;
            const float* const* const next = more ? rows + i + 4 : rows;
            const Sum wa = weights[i], wb = weights[i + 1], wc = weights[i + 2], wd = weights[i + 3];
            std::int64_t j = 0;
            for (; j + kLanes <= count; j += kLanes) {
                const std::int64_t ahead = j + kAhead;
                if (ahead < count) {
                    __builtin_prefetch(a + ahead);
                    __builtin_prefetch(b + ahead);
                    __builtin_prefetch(c + ahead);
                    __builtin_prefetch(d + ahead);
                } else {
                    for (int r = 0; r < 4; ++r) __builtin_prefetch(next[r] + then + (ahead - count));
                }
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) {
                    const std::int64_t at = j + v * kWidth;
                    Wide s = load(sum + at);
                    s += (Wide{} + wa) * In<Sum>::of(load(a + at));
                    s += (Wide{} + wb) * In<Sum>::of(load(b + at));
                    s += (Wide{} + wc) * In<Sum>::of(load(c + at));
                    s += (Wide{} + wd) * In<Sum>::of(load(d + at));
                    store(sum + at, s);
                }
            }
            for (; j < count; ++j) {
                sum[j] += wa * static_cast<Sum>(a[j]);
                sum[j] += wb * static_cast<Sum>(b[j]);
                sum[j] += wc * static_cast<Sum>(c[j]);
                sum[j] += wd * static_cast<Sum>(d[j]);
            }
        }
        for (; i < k; ++i) {
            const float* const a = rows[i] + tile;
            const Sum wa = weights[i];
            for (std::int64_t j = 0; j < count; ++j) sum[j] += wa * static_cast<Sum>(a[j]);
        }
        for (std::int64_t j = 0; j < count; ++j) out[tile + j] = static_cast<float>(sum[j]);
    }
}

// Four rows of one base in one pass: their additions stay in order, but the base is loaded, and the sum loaded and
// stored, once for all four.
template <class Sum>
void fold_four(const Sent* sent, const Sent* next, std::int64_t next_tile, std::int64_t tile, std::int64_t count,
               Sum* __restrict sum, double* squares) {
    using Wide = typename In<Sum>::Vector;
    const float* const base = sent[0].base + tile;
    Floats part[4][kVectors] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        const std::int64_t ahead = j + kAhead;
        for (int r = 0; r < 4; ++r)
            __builtin_prefetch(ahead < count ? sent[r].y + tile + ahead : next[r].y + next_tile + (ahead - count));
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t at = j + v * kWidth;
            const Floats x = load(base + at);
            Wide s = load(sum + at);
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
                const Floats h = (x - load(sent[r].y + tile + at)) * (Floats{} + sent[r].scale);
                part[r][v] += h * h;
                s += (Wide{} + static_cast<Sum>(sent[r].weight)) * In<Sum>::of(h);
            }
            store(sum + at, s);
        }
    }
    float tail[4][kLanes];
    int rest = 0;
    for (; j < count; ++j, ++rest)
        for (int r = 0; r < 4; ++r) {
            const float h = (base[j] - sent[r].y[tile + j]) * sent[r].scale;
            tail[r][rest] = h * h;
            sum[j] += static_cast<Sum>(sent[r].weight) * static_cast<Sum>(h);
        }
    for (int r = 0; r < 4; ++r) {
        const double square = fold_lanes(part[r], tail[r], rest);
        squares[r] += is_sound(square) ? square : gradient_squares_exactly(sent[r], tile, count);
    }
}

template <class Sum>
void accumulate(const Sum* acc, Sum* out, const Sent* sent, std::int64_t k, std::int64_t begin, std::int64_t end,
                double* squares) {
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        Sum* sum = begin_tile(acc, out, tile, count);
        for (std::int64_t i = 0; i < k;) {
            const Sent* four = sent + i;
            if (i + 4 <= k && four[0].base != nullptr && four[1].base == four[0].base && four[2].base == four[0].base &&
                four[3].base == four[0].base) {
                const bool more = i + 8 <= k;
                fold_four(four, more ? four + 4 : sent, more ? tile : tile + count, tile, count, sum, squares + i);
                i += 4;
            } else {
                const float* next = read_next(sent, i, k, tile, count);
                squares[i] += fold_row<Sum, false, false, false>(sent[i], nullptr, next, tile, count, sum);
                ++i;
            }
        }
    }
}

template <class Sum>
void server_step(const Step& step, const Sum* sum, const double* total, const float* x, float* v, double* total_out,
                 float* x_out, std::int64_t begin, std::int64_t end, double* squares) {
    const Step s = step;
    squares[0] = squares[1] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t stop = end - tile < kTile ? end : tile + kTile;
        // v first, and in a loop of its own: T' may be written over the T that v needs.
        if (total != nullptr) {
            for (std::int64_t j = tile; j < stop; ++j)
                v[j] = static_cast<float>(s.from_sum * static_cast<double>(sum[j]) + s.from_total * total[j]);
            for (std::int64_t j = tile; j < stop; ++j)
                total_out[j] =
                    (total[j] + s.keep_sum * static_cast<double>(sum[j])) + s.keep_v * static_cast<double>(v[j]);
        } else {
            for (std::int64_t j = tile; j < stop; ++j)
                v[j] = static_cast<float>(s.from_sum * static_cast<double>(sum[j]));
        }
        for (std::int64_t j = tile; j < stop; ++j)
            x_out[j] = static_cast<float>(static_cast<double>(x[j]) - s.gamma * static_cast<double>(v[j]));
        squares[0] += sum_of_squares(v + tile, stop - tile);
        squares[1] += sum_of_squares(x_out + tile, stop - tile);
    }
}
