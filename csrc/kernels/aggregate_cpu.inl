void weighted_sum(const float* const* rows, const float* weights, std::int64_t k, std::int64_t begin, std::int64_t end,
                  float* out) {
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        float* __restrict sum = out + tile;
        for (std::int64_t j = 0; j < count; ++j) sum[j] = 0.0f;
        std::int64_t i = 0;
        // Four rows a pass: their additions stay in order, but the sum is loaded and stored once for all
        // four.
        for (; i + 4 <= k; i += 4) {
            const float* __restrict a = rows[i] + tile;
            const float* __restrict b = rows[i + 1] + tile;
            const float* __restrict c = rows[i + 2] + tile;
            const float* __restrict d = rows[i + 3] + tile;
            const float wa = weights[i], wb = weights[i + 1], wc = weights[i + 2], wd = weights[i + 3];
            for (std::int64_t j = 0; j < count; ++j)
                sum[j] = (((sum[j] + wa * a[j]) + wb * b[j]) + wc * c[j]) + wd * d[j];
        }
        for (; i < k; ++i) {
            const float* __restrict a = rows[i] + tile;
            const float wa = weights[i];
            for (std::int64_t j = 0; j < count; ++j) sum[j] += wa * a[j];
        }
    }
}

void accumulate(const double* acc, double* out, const Sent* sent, std::int64_t k, std::int64_t begin, std::int64_t end,
                double* squares) {
    alignas(64) float h[kTile];
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        double* __restrict sum = out + tile;
        if (acc != out)
            for (std::int64_t j = 0; j < count; ++j) sum[j] = acc[tile + j];
        for (std::int64_t i = 0; i < k; ++i) {
            read_gradient(sent[i], tile, count, h);
            squares[i] += sum_of_squares(h, count);
            const double weight = sent[i].weight;
            for (std::int64_t j = 0; j < count; ++j) sum[j] += weight * static_cast<double>(h[j]);
        }
    }
}

void server_step(const Step& step, const double* sum, const double* total, const float* x, float* v, double* total_out,
                 float* x_out, std::int64_t begin, std::int64_t end, double* squares) {
    const Step s = step;
    squares[0] = squares[1] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t stop = end - tile < kTile ? end : tile + kTile;
        // v first: it may not be fused with T', which reads the T that v needs and may be written over it.
        if (total != nullptr) {
            for (std::int64_t j = tile; j < stop; ++j)
                v[j] = static_cast<float>(s.from_sum * sum[j] + s.from_total * total[j]);
            for (std::int64_t j = tile; j < stop; ++j)
                total_out[j] = (total[j] + s.keep_sum * sum[j]) + s.keep_v * static_cast<double>(v[j]);
        } else {
            for (std::int64_t j = tile; j < stop; ++j) v[j] = static_cast<float>(s.from_sum * sum[j]);
        }
        for (std::int64_t j = tile; j < stop; ++j)
            x_out[j] = static_cast<float>(static_cast<double>(x[j]) - s.gamma * static_cast<double>(v[j]));
        squares[0] += sum_of_squares(v + tile, stop - tile);
        squares[1] += sum_of_squares(x_out + tile, stop - tile);
    }
}
