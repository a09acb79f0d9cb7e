// Clients whose updates are folded in one pass.
constexpr int kFolds = 4;

// Whether the kFolds clients from i on start from the same base.
inline bool share_base(const Sent* sent, std::int64_t i, std::int64_t k) {
    if (i + kFolds > k) return false;
    for (int r = 1; r < kFolds; ++r)
        if (sent[i + r].base != sent[i].base) return false;
    return true;
}

// kRows clients, tile by tile of a run.
template <int kRows, class Sum>
void accumulate_rows(const Sent* sent, std::int64_t begin, std::int64_t end, Sum* out, double* squares) {
    alignas(64) float scratch[kRows][kTile];
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        Streams rows[kRows];
        for (int r = 0; r < kRows; ++r) rows[r] = streams_of(sent[r], tile, count, scratch[r]);
        double of_tile[kRows];
        fold_tile<kRows, Sum, Form::gradient, false, false, false>(rows, count, out + tile, of_tile);
        for (int r = 0; r < kRows; ++r) squares[r] += of_tile[r];
    }
}

template <class Sum>
void accumulate(const Sum* acc, Sum* out, const Sent* sent, std::int64_t k, std::int64_t begin, std::int64_t end,
                double* squares) {
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t first = begin; first < end; first += kRun) {
        const std::int64_t last = end - first < kRun ? end : first + kRun;
        begin_run(acc, out, first, last);
        for (std::int64_t i = 0; i < k;) {
            if (share_base(sent, i, k)) {
                accumulate_rows<kFolds>(sent + i, first, last, out, squares + i);
                i += kFolds;
            } else {
                accumulate_rows<1>(sent + i, first, last, out, squares + i);
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
