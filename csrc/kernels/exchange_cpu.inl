// What is stored is h rounded to float32, so that is what the sum must see: it follows the rows exactly.
void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, std::int64_t k, std::int64_t begin,
              std::int64_t end, double* squares) {
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        double* sum = begin_tile(acc, out, tile, count);
        for (std::int64_t i = 0; i < k; ++i) {
            const float* next = read_next(sent, i, k, tile, count);
            if (rows[i].old_row == nullptr)  // nor anything that it referred to
                squares[i] += fold_row<double, false, false, true>(sent[i], rows + i, next, tile, count, sum);
            else if (rows[i].anchor == nullptr)
                squares[i] += fold_row<double, true, false, true>(sent[i], rows + i, next, tile, count, sum);
            else
                squares[i] += fold_row<double, true, true, true>(sent[i], rows + i, next, tile, count, sum);
        }
    }
}
