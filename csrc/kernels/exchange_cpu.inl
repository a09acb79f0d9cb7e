void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, std::int64_t k, std::int64_t begin,
              std::int64_t end, double* squares) {
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
            const float* r = rows[i].old_row;
            const float* v = rows[i].anchor;
            // What is stored is h rounded to float32, so that is what the sum must see: it follows the rows
            // exactly.
            if (r != nullptr && v != nullptr) {
                for (std::int64_t j = 0; j < count; ++j)
                    sum[j] += weight * ((static_cast<double>(h[j]) - static_cast<double>(r[tile + j])) +
                                        static_cast<double>(v[tile + j]));
            } else if (r != nullptr) {
                for (std::int64_t j = 0; j < count; ++j)
                    sum[j] += weight * (static_cast<double>(h[j]) - static_cast<double>(r[tile + j]));
            } else {  // no row, so nothing that it referred to
                for (std::int64_t j = 0; j < count; ++j) sum[j] += weight * static_cast<double>(h[j]);
            }
            float* __restrict row = rows[i].new_row + tile;
            for (std::int64_t j = 0; j < count; ++j) row[j] = h[j];
        }
    }
}
