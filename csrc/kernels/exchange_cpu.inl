// What stands for a row or an anchor that there is not, where a loop of its own would not be worth it.
constexpr float kZeros[kTile] = {};

bool is_finite_tile(const float* values, std::int64_t count) {
    return largest_magnitude(values, count) < (255u << 23);
}

// What the sum sees is row' as the row stores it, rounded to float32: so it follows the rows exactly.
double swap_floats(const Streams& at, Form form, std::int64_t count, double* sum) {
    if (form == Form::control) {
        Streams all = at;
        if (at.old_row == nullptr) all.old_row = kZeros;
        if (at.anchor == nullptr) all.anchor = kZeros;
        const double squares = fold_tile<double, Form::control, true, true, true>(all, count, sum);
        // two large numbers may have a sum that is none
        return squares < __builtin_inf() && !is_finite_tile(at.new_row, count) ? __builtin_inf() : squares;
    }
    if (at.old_row == nullptr)  // nor anything that it referred to
        return fold_tile<double, Form::gradient, false, false, true>(at, count, sum);
    if (at.anchor == nullptr) return fold_tile<double, Form::gradient, true, false, true>(at, count, sum);
    return fold_tile<double, Form::gradient, true, true, true>(at, count, sum);
}

// The same through a codec, for a chunk of a tile, so that what passes between the stages stays in L1: row' as float32,
// encoded, decoded again, and that folded. Between the stages a quarter of the next chunk is fetched: all at once would
// fill the queue of misses, and the loads behind would wait. Returns whether what is stored is finite.
bool swap_chunk(Streams at, const RowSwap& row, Form form, const Chunk& next, std::int64_t first, std::int64_t count,
                double* sum, float* lanes) {
    if (is_fusible(row, form, count)) return fused_chunk(at, row, next, first, count, sum, lanes);
    alignas(64) float of_row[kChunk], made[kChunk], stored[kChunk];
    fetch_quarter(next, 0);
    at.old_row = row_tile(row.old_row, first, count, of_row);
    fetch_quarter(next, 1);
    gradients(at.y, at.base, at.scale, count, made, lanes);
    if (form == Form::control) {
        const float* const r = at.old_row != nullptr ? at.old_row : kZeros;
        const float* const q = at.anchor != nullptr ? at.anchor : kZeros;
        for (std::int64_t j = 0; j < count; ++j) made[j] = (made[j] + r[j]) + q[j];
        at.anchor = nullptr;  // the sum sees row' - r alone
    }
    fetch_quarter(next, 2);
    const Row& to = row.new_row;
    const bool finite = encode<true>(made, to.codec, row.rounding, first, count, to.data, to.scales, stored);
    fetch_quarter(next, 3);
    at.y = stored;
    if (at.old_row == nullptr)
        fold_piece<double, Form::gradient, Given::row, false, false, false>(at, count, sum);
    else if (at.anchor == nullptr)
        fold_piece<double, Form::gradient, Given::row, true, false, false>(at, count, sum);
    else
        fold_piece<double, Form::gradient, Given::row, true, true, false>(at, count, sum);
    return finite;
}

// Client i's tile, chunk by chunk.
double swap_codes(const Sent* sent, const RowSwap* rows, Form form, std::int64_t i, std::int64_t k, std::int64_t tile,
                  std::int64_t count, double* sum) {
    alignas(64) float of_y[kTile];
    float lanes[kLanes] = {};
    bool finite = true;
    for (std::int64_t done = 0; done < count; done += kChunk) {
        const std::int64_t first = tile + done, few = count - done < kChunk ? count - done : kChunk;
        const bool more = done + kChunk < count, last = i + 1 == k;
        const std::int64_t client = more ? i : last ? 0 : i + 1;
        const Chunk next = chunk_of(sent[client], rows[client].old_row,
                                    more   ? first + kChunk
                                    : last ? tile + count
                                           : tile);
        Streams at = streams_of(sent[i], first, few, of_y + done, next.y);
        if (rows[i].anchor != nullptr) at.anchor = rows[i].anchor + first;
        finite &= swap_chunk(at, rows[i], form, next, first, few, sum + done, lanes);
    }
    const double lanes_sum = sum_of_lanes(lanes);
    if (is_sound(lanes_sum)) return finite ? lanes_sum : __builtin_inf();
    const Streams at = streams_of(sent[i], tile, count, of_y, {});
    const double squares = squares_exactly(at.y, at.base, at.scale, count);
    return squares < __builtin_inf() && !finite ? __builtin_inf() : squares;
}

void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, Form form, std::int64_t k,
              std::int64_t begin, std::int64_t end, double* squares) {
    alignas(64) float of_y[kTile];
    alignas(64) float of_row[kTile];
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        double* sum = begin_tile(acc, out, tile, count);
        for (std::int64_t i = 0; i < k; ++i) {
            const RowSwap& row = rows[i];
            if (row.new_row.codec != Codec::f32) {
                squares[i] += swap_codes(sent, rows, form, i, k, tile, count, sum);
                continue;
            }
            Streams at = streams_of(sent[i], tile, count, of_y, read_next(sent, i, k, tile, count));
            at.old_row = row_tile(row.old_row, tile, count, of_row);
            if (row.anchor != nullptr) at.anchor = row.anchor + tile;
            at.new_row = static_cast<float*>(row.new_row.data) + tile;
            squares[i] += swap_floats(at, form, count, sum);
        }
    }
}
