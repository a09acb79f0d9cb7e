// What stands for a row or an anchor that there is not, where a loop of its own would not be worth it.
constexpr float kZeros[kTile] = {};

bool is_finite_tile(const float* values, std::int64_t count) {
    return largest_magnitude(values, count) < (255u << 23);
}

// What the sum sees is row' as the row stores it, rounded to float32: so it follows the rows exactly.
template <int kRows>
void swap_floats(Streams* rows, Form form, std::int64_t count, double* sum, float (*lanes)[kLanes]) {
    if (form == Form::control) {
        for (int r = 0; r < kRows; ++r) {
            if (rows[r].old_row == nullptr) rows[r].old_row = kZeros;
            if (rows[r].anchor == nullptr) rows[r].anchor = kZeros;
        }
        fold_rows<kRows, double, Form::control, true, true, true>(rows, count, sum, lanes);
    } else if (rows[0].old_row == nullptr) {  // nor anything that it referred to
        fold_rows<kRows, double, Form::gradient, false, false, true>(rows, count, sum, lanes);
    } else if (rows[0].anchor == nullptr) {
        fold_rows<kRows, double, Form::gradient, true, false, true>(rows, count, sum, lanes);
    } else {
        fold_rows<kRows, double, Form::gradient, true, true, true>(rows, count, sum, lanes);
    }
}

// kRows clients of float32 rows, tile by tile of a run; chunk by chunk where something has to be converted.
template <int kRows>
void swap_floats(const Sent* sent, const RowSwap* swaps, Form form, std::int64_t begin, std::int64_t end, double* out,
                 double* squares) {
    alignas(64) float of_y[kRows][kChunk], of_row[kRows][kChunk];
    bool converted = false;
    for (int r = 0; r < kRows; ++r)
        converted |= sent[r].dtype != Dtype::float32 ||
                     (swaps[r].old_row.data != nullptr && swaps[r].old_row.codec != Codec::f32);
    const std::int64_t stretch = converted ? kChunk : kTile;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        float lanes[kRows][kLanes] = {};
        for (std::int64_t first = tile; first < tile + count; first += stretch) {
            const std::int64_t few = tile + count - first < stretch ? tile + count - first : stretch;
            Streams rows[kRows];
            for (int r = 0; r < kRows; ++r) {
                rows[r] = streams_of(sent[r], first, few, of_y[r]);
                rows[r].old_row = row_tile(swaps[r].old_row, first, few, of_row[r]);
                if (swaps[r].anchor != nullptr) rows[r].anchor = swaps[r].anchor + first;
                rows[r].new_row = static_cast<float*>(swaps[r].new_row.data) + first;
            }
            swap_floats<kRows>(rows, form, few, out + first, lanes);
        }
        for (int r = 0; r < kRows; ++r) {
            const double square = sum_of_lanes(lanes[r]);
            const float* const made = static_cast<const float*>(swaps[r].new_row.data) + tile;
            if (form == Form::control && !is_finite_tile(made, count))  // two large numbers may have a sum that is none
                squares[r] += __builtin_inf();
            else
                squares[r] += is_sound(square) ? square : squares_exactly(sent[r], tile, count);
        }
    }
}

// The same through a codec, for a chunk of a tile, so that what passes between the stages stays in L1: row' as float32,
// encoded, decoded again, and that folded. Between the stages a quarter of the next chunk is fetched: all at once would
// fill the queue of misses, and the loads behind would wait.
void swap_chunk(const Passing& row, Form form, std::int64_t first, std::int64_t count, double* sum, float* lanes) {
    alignas(64) float of_row[kChunk], made[kChunk], stored[kChunk];
    Streams at = row.at;
    fetch_quarter(row.next, 0);
    at.old_row = row_tile(row.old_row, first, count, of_row);
    fetch_quarter(row.next, 1);
    gradients(at.y, at.base, at.scale, count, made, lanes);
    if (form == Form::control) {
        const float* const r = at.old_row != nullptr ? at.old_row : kZeros;
        const float* const q = at.anchor != nullptr ? at.anchor : kZeros;
        for (std::int64_t j = 0; j < count; ++j) made[j] = (made[j] + r[j]) + q[j];
        at.anchor = nullptr;  // the sum sees row' - r alone
    }
    fetch_quarter(row.next, 2);
    const Row& to = row.new_row;
    encode<true>(made, to.codec, row.dither, first, count, to.data, to.scales, stored);
    fetch_quarter(row.next, 3);
    at.y = stored;
    if (at.old_row == nullptr)
        fold_piece<1, double, Form::gradient, Given::row, false, false, false>(&at, count, sum, nullptr);
    else if (at.anchor == nullptr)
        fold_piece<1, double, Form::gradient, Given::row, true, false, false>(&at, count, sum, nullptr);
    else
        fold_piece<1, double, Form::gradient, Given::row, true, true, false>(&at, count, sum, nullptr);
}

// |h|^2 of a tile by its lanes, or infinity where what is stored is not finite.
double squares_of_tile(const Sent& sent, const Row& stored, Form form, std::int64_t tile, std::int64_t count,
                       float* lanes) {
    const double squares = sum_of_lanes(lanes);
    if (is_sound(squares) && form == Form::gradient && stored.codec != Codec::f16)
        return squares;  // every |h| < 10^19, which is stored as a finite number
    const double exactly = is_sound(squares) ? squares : squares_exactly(sent, tile, count);
    if (!(exactly < __builtin_inf())) return exactly;
    alignas(64) float values[kChunk];
    for (std::int64_t first = tile; first < tile + count; first += kChunk) {
        const std::int64_t few = tile + count - first < kChunk ? tile + count - first : kChunk;
        if (!is_finite_tile(row_tile(stored, first, few, values), few)) return __builtin_inf();
    }
    return exactly;
}

// kRows clients of a run, from the i-th on, tile by tile and chunk by chunk; those behind them begin where they did.
template <int kRows>
void swap_codes(const Sent* sent, const RowSwap* swaps, Form form, std::int64_t i, std::int64_t k, std::int64_t begin,
                std::int64_t end, double* out, double* squares) {
    alignas(64) float of_y[kRows][kChunk];
    const bool fusible = is_fusible(swaps[i], form);
    Passing rows[kRows];
    for (int r = 0; r < kRows; ++r) {
        const RowSwap& swap = swaps[i + r];
        rows[r] = {{}, swap.old_row, swap.new_row, dither_of(swap.key, begin), {}};
    }
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        float lanes[kRows][kLanes] = {};
        for (std::int64_t first = tile; first < tile + count; first += kChunk) {
            const std::int64_t few = tile + count - first < kChunk ? tile + count - first : kChunk;
            for (int r = 0; r < kRows; ++r) {
                const std::int64_t behind = i + kRows + r, next = first + kChunk;
                const std::int64_t client = next < end ? i + r : behind < k ? behind : behind - k;
                rows[r].next = chunk_of(sent[client], swaps[client].old_row,
                                        next < end   ? next
                                        : behind < k ? begin
                                                     : end);
                rows[r].at = streams_of(sent[i + r], first, few, of_y[r]);
                if (swaps[i + r].anchor != nullptr) rows[r].at.anchor = swaps[i + r].anchor + first;
            }
            if (fusible && few % kCodeBlock == 0)
                fused_chunk<kRows>(rows, first, few, out + first, lanes);
            else
                for (int r = 0; r < kRows; ++r) swap_chunk(rows[r], form, first, few, out + first, lanes[r]);
        }
        for (int r = 0; r < kRows; ++r)
            squares[i + r] += squares_of_tile(sent[i + r], swaps[i + r].new_row, form, tile, count, lanes[r]);
    }
}

// Whether the kSwaps clients from i on can pass together: they start from one base, and have alike what they have.
inline bool swap_alike(const Sent* sent, const RowSwap* rows, Form form, std::int64_t i, std::int64_t k) {
    if (i + kSwaps > k) return false;
    const RowSwap& one = rows[i];
    for (int r = 0; r < kSwaps; ++r) {
        const RowSwap& other = rows[i + r];
        if (sent[i].base != sent[i + r].base || one.new_row.codec != other.new_row.codec ||
            (one.old_row.data == nullptr) != (other.old_row.data == nullptr) ||
            (one.anchor == nullptr) != (other.anchor == nullptr) ||
            (other.new_row.codec != Codec::f32 && !is_fusible(other, form)))
            return false;
    }
    return true;
}

template <int kRows>
void swap_run(const Sent* sent, const RowSwap* rows, Form form, std::int64_t i, std::int64_t k, std::int64_t begin,
              std::int64_t end, double* out, double* squares) {
    if (rows[i].new_row.codec == Codec::f32)
        swap_floats<kRows>(sent + i, rows + i, form, begin, end, out, squares + i);
    else
        swap_codes<kRows>(sent, rows, form, i, k, begin, end, out, squares);
}

void exchange(const double* acc, double* out, const Sent* sent, const RowSwap* rows, Form form, std::int64_t k,
              std::int64_t begin, std::int64_t end, double* squares) {
    for (std::int64_t i = 0; i < k; ++i) squares[i] = 0;
    const std::int64_t run = k > 0 && rows[0].new_row.codec != Codec::f32 ? kCodedRun : kRun;
    for (std::int64_t first = begin; first < end; first += run) {
        const std::int64_t last = end - first < run ? end : first + run;
        begin_run(acc, out, first, last);
        for (std::int64_t i = 0; i < k;) {
            const bool alike = swap_alike(sent, rows, form, i, k);
            (alike ? swap_run<kSwaps> : swap_run<1>)(sent, rows, form, i, k, first, last, out, squares);
            i += alike ? kSwaps : 1;
        }
    }
}
