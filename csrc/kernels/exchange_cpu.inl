// What stands for a row or an anchor that there is not, where a loop of its own would not be worth it.
constexpr float kZeros[kTile] = {};

bool is_finite_tile(const float* values, std::int64_t count) {
    return largest_magnitude(values, count) < (255u << 23);
}

// Clients whose float32 rows are exchanged in one pass, if they have the same arrays.
constexpr int kSwaps = 2;

// What the sum sees is row' as the row stores it, rounded to float32: so it follows the rows exactly.
template <int kRows>
void swap_floats(Streams* rows, Form form, std::int64_t count, double* sum, double* squares) {
    if (form == Form::control) {
        for (int r = 0; r < kRows; ++r) {
            if (rows[r].old_row == nullptr) rows[r].old_row = kZeros;
            if (rows[r].anchor == nullptr) rows[r].anchor = kZeros;
        }
        fold_tile<kRows, double, Form::control, true, true, true>(rows, count, sum, squares);
        for (int r = 0; r < kRows; ++r)  // two large numbers may have a sum that is none
            if (!is_finite_tile(rows[r].new_row, count)) squares[r] = __builtin_inf();
        return;
    }
    if (rows[0].old_row == nullptr)  // nor anything that it referred to
        fold_tile<kRows, double, Form::gradient, false, false, true>(rows, count, sum, squares);
    else if (rows[0].anchor == nullptr)
        fold_tile<kRows, double, Form::gradient, true, false, true>(rows, count, sum, squares);
    else
        fold_tile<kRows, double, Form::gradient, true, true, true>(rows, count, sum, squares);
}

// kRows clients of float32 rows, tile by tile of a run.
template <int kRows>
void swap_floats(const Sent* sent, const RowSwap* swaps, Form form, std::int64_t begin, std::int64_t end, double* out,
                 double* squares) {
    alignas(64) float of_y[kRows][kTile], of_row[kRows][kTile];
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        Streams rows[kRows];
        for (int r = 0; r < kRows; ++r) {
            rows[r] = streams_of(sent[r], tile, count, of_y[r]);
            rows[r].old_row = row_tile(swaps[r].old_row, tile, count, of_row[r]);
            if (swaps[r].anchor != nullptr) rows[r].anchor = swaps[r].anchor + tile;
            rows[r].new_row = static_cast<float*>(swaps[r].new_row.data) + tile;
        }
        double of_tile[kRows];
        swap_floats<kRows>(rows, form, count, out + tile, of_tile);
        for (int r = 0; r < kRows; ++r) squares[r] += of_tile[r];
    }
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
    double unused;
    if (at.old_row == nullptr)
        fold_piece<1, double, Form::gradient, Given::row, false, false, false>(&at, count, sum, &unused);
    else if (at.anchor == nullptr)
        fold_piece<1, double, Form::gradient, Given::row, true, false, false>(&at, count, sum, &unused);
    else
        fold_piece<1, double, Form::gradient, Given::row, true, true, false>(&at, count, sum, &unused);
    return finite;
}

// Client i's tile, chunk by chunk. `last` is the end of the run, behind which the next client's begins at `begin`.
double swap_codes(const Sent* sent, const RowSwap* rows, Form form, std::int64_t i, std::int64_t k, std::int64_t begin,
                  std::int64_t last, std::int64_t tile, std::int64_t count, double* sum) {
    alignas(64) float of_y[kTile];
    float lanes[kLanes] = {};
    bool finite = true;
    for (std::int64_t done = 0; done < count; done += kChunk) {
        const std::int64_t first = tile + done, few = count - done < kChunk ? count - done : kChunk;
        const bool more = first + kChunk < last, of_all = i + 1 == k;
        const std::int64_t client = more ? i : of_all ? 0 : i + 1;
        const Chunk next = chunk_of(sent[client], rows[client].old_row, more ? first + kChunk : of_all ? last : begin);
        Streams at = streams_of(sent[i], first, few, of_y + done);
        if (rows[i].anchor != nullptr) at.anchor = rows[i].anchor + first;
        finite &= swap_chunk(at, rows[i], form, next, first, few, sum + done, lanes);
    }
    const double lanes_sum = sum_of_lanes(lanes);
    if (is_sound(lanes_sum)) return finite ? lanes_sum : __builtin_inf();
    const Streams at = streams_of(sent[i], tile, count, of_y);
    const double squares = squares_exactly(at.y, at.base, at.scale, count);
    return squares < __builtin_inf() && !finite ? __builtin_inf() : squares;
}

// Whether the kSwaps clients from i on can pass together.
inline bool swap_alike(const Sent* sent, const RowSwap* rows, std::int64_t i, std::int64_t k) {
    if (i + kSwaps > k) return false;
    for (int r = 1; r < kSwaps; ++r) {
        const RowSwap &one = rows[i], &other = rows[i + r];
        if (sent[i].base != sent[i + r].base || other.new_row.codec != Codec::f32 ||
            (one.old_row.data == nullptr) != (other.old_row.data == nullptr) ||
            (one.anchor == nullptr) != (other.anchor == nullptr))
            return false;
    }
    return true;
}

void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, Form form, std::int64_t k,
              std::int64_t begin, std::int64_t end, double* squares) {
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    for (std::int64_t first = begin; first < end; first += kRun) {
        const std::int64_t last = end - first < kRun ? end : first + kRun;
        begin_run(acc, out, first, last);
        for (std::int64_t i = 0; i < k;) {
            if (rows[i].new_row.codec != Codec::f32) {
                for (std::int64_t tile = first; tile < last; tile += kTile)
                    squares[i] += swap_codes(sent, rows, form, i, k, first, last, tile,
                                             last - tile < kTile ? last - tile : kTile, out + tile);
                ++i;
            } else if (swap_alike(sent, rows, i, k)) {
                swap_floats<kSwaps>(sent + i, rows + i, form, first, last, out, squares + i);
                i += kSwaps;
            } else {
                swap_floats<1>(sent + i, rows + i, form, first, last, out, squares + i);
                ++i;
            }
        }
    }
}
