// Replaces a missing row or anchor where a separate loop would not pay.
constexpr float kZeros[kTile] = {};

bool is_finite_tile(const float* values, std::int64_t count) {
    return largest_magnitude(values, count) < (255u << 23);
}

// Whether the sum can take the elements of a new row.
inline bool is_taken(const double*, const float* values, std::int64_t count, const SumForm&, double) {
    return is_finite_tile(values, count);
}
inline bool is_taken(const ExactPlace&, const float* values, std::int64_t count, const SumForm& adds, double weight) {
    return is_held(values, count, adds, weight);
}

// Sums that the fused loops know.
inline bool is_plain(const double*) {
    return true;
}
inline bool is_plain(const ExactPlace&) {
    return false;
}
template <int kRows>
void fused_chunk(const Passing*, std::int64_t, std::int64_t, const ExactPlace&, float (*)[kLanes]) {}

// Where the next rows of a run are added, which are its last or not: float64 has nothing to settle.
struct NothingToSettle {
    double* pass(double* out, const RowExchange*, int, Form, bool) { return out; }
};
inline NothingToSettle settling(const double*) {
    return {};
}
inline Settling settling(ExactSum) {
    return {};
}
inline double* before_last(double* out) {
    return out;
}

// The sum uses row' as stored, rounded to float32, so it follows the rows exactly.
template <int kRows, class At>
void exchange_floats(Streams* rows, const Forms& forms, std::int64_t count, At sum, float (*lanes)[kLanes]) {
    const Form form = form_of(forms);
    if (form != Form::replaces) {
        for (int r = 0; r < kRows; ++r) {
            if (rows[r].old_row == nullptr) rows[r].old_row = kZeros;
            if (rows[r].anchor == nullptr) rows[r].anchor = kZeros;
        }
        if (form == Form::changes)
            fold_rows<kRows, Form::changes, true, true, true>(rows, &forms, count, sum, lanes);
        else
            fold_rows<kRows, Form::general, true, true, true>(rows, &forms, count, sum, lanes);
    } else if (rows[0].old_row == nullptr) {  // nor anything that it referred to
        fold_rows<kRows, Form::replaces, false, false, true>(rows, nullptr, count, sum, lanes);
    } else if (rows[0].anchor == nullptr) {
        fold_rows<kRows, Form::replaces, true, false, true>(rows, nullptr, count, sum, lanes);
    } else {
        fold_rows<kRows, Form::replaces, true, true, true>(rows, nullptr, count, sum, lanes);
    }
}

// Handles a new chunk of a row: computes its checksum and, if it is in a stage, stores it past the caches. Meanwhile it
// fetches the client's next chunk, because memory would otherwise be idle.
void pass_on(const float* made, std::int64_t count, float* row, BlockSum* sum, const Chunk& next) {
    const auto fetch = [&](std::int64_t at) {
        __builtin_prefetch(next.y.at + at / 4 * next.y.size);
        __builtin_prefetch(next.row.at + at / 4 * next.row.size);
    };
    const char* const from = reinterpret_cast<const char*>(made);
    char* const to = reinterpret_cast<char*>(row);
    if (sum == nullptr)
        put(made, count, row, fetch);
    else if (made == row)
        sum->add(made, 4 * count, fetch);
    else if (to_line(to) != 0 || 4 * count % kLine != 0) {
        sum->add(made, 4 * count, fetch);
        put(made, count, row);
    } else {
        sum->add(made, 4 * count, [&](std::int64_t at) {
            fetch(at);
            put_line(from + at, to + at);
        });
    }
}

// kRows clients of float32 rows, tile by tile of a run; chunk by chunk where something has to be converted, or is
// stored past the caches or summed.
template <int kRows, class At>
void exchange_floats(const ClientUpdate* sent, const RowExchange* row_exchanges, const Forms& forms, std::int64_t begin,
                     std::int64_t end, At out, double* squares, std::int64_t stride, bool past_caches) {
    constexpr std::int64_t kPart = kRows > 2 ? kChunk / 2 : kChunk;
    alignas(64) float of_y[kRows][kPart], of_row[kRows][kPart], stage[kRows][kPart];
    BlockSum sums[kRows];
    bool converted = false, summed = false, staged = kHasPastCaches && past_caches && forms.replaces();
    for (int r = 0; r < kRows; ++r) {
        const Row &old_row = row_exchanges[r].old_row, &new_row = row_exchanges[r].new_row;
        converted |= sent[r].dtype != Dtype::float32 || (old_row.data != nullptr && old_row.codec != Codec::f32);
        staged &= old_row.data != new_row.data;
        summed |= row_exchanges[r].sums != nullptr;
        sums[r].begin();
    }
    const std::int64_t stretch = converted || staged || summed ? kPart : kTile;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        float lanes[kRows][kLanes] = {};
        for (std::int64_t first = tile; first < tile + count; first += stretch) {
            const std::int64_t few = tile + count - first < stretch ? tile + count - first : stretch;
            Streams rows[kRows];
            for (int r = 0; r < kRows; ++r) {
                rows[r] = streams_of(sent[r], first, few, of_y[r]);
                rows[r].old_row = row_tile(row_exchanges[r].old_row, first, few, of_row[r]);
                if (row_exchanges[r].anchor != nullptr) rows[r].anchor = row_exchanges[r].anchor + first;
                rows[r].new_row = staged ? stage[r] : static_cast<float*>(row_exchanges[r].new_row.data) + first;
            }
            exchange_floats<kRows>(rows, forms, few, out + first, lanes);
            if (staged || summed)
                for (int r = 0; r < kRows; ++r)
                    pass_on(rows[r].new_row, few, static_cast<float*>(row_exchanges[r].new_row.data) + first,
                            summed ? &sums[r] : nullptr, chunk_of(sent[r], row_exchanges[r].old_row, first + few));
        }
        const bool ends_block = (tile + count) % kBlock == 0 || tile + count == end;
        for (int r = 0; r < kRows; ++r) {
            const RowExchange& row = row_exchanges[r];
            const double square = sum_of_lanes(lanes[r]);
            const float* const made = static_cast<const float*>(row.new_row.data) + tile;
            double& of_block = squares[(tile - begin) / kBlock * stride + r];
            if (!forms.replaces() &&
                !is_taken(out, made, count, forms.adds, sent[r].weight))  // large numbers may have a sum that is none
                of_block += __builtin_inf();
            else
                of_block += is_sound(square) ? square : squares_exactly(sent[r], tile, count, square);
            if (!ends_block || row.sums == nullptr) continue;
            row.sums[tile / kBlock] = sums[r].sum();
            sums[r].begin();
        }
    }
}

// The sum's term for a chunk whose row is stored.
template <Form kForm>
void add_seen(const SumForm& adds, double weight, const float* stored, const float* r, const float* h, const float* q,
              std::int64_t count, double* __restrict sum) {
    for (std::int64_t j = 0; j < count; ++j)
        sum[j] += weight * seen_of<kForm, double>(adds, stored[j], r[j], h[j], q[j]);
}

// The same through a codec, for a chunk of a tile, so that what passes between the stages stays in L1: row' as float32,
// encoded, decoded again, and that folded. Between the stages a quarter of the next chunk is fetched: all at once would
// fill the queue of misses, and the loads behind would wait.
template <class At>
void exchange_chunk(const Passing& row, const Forms& forms, std::int64_t first, std::int64_t count, At sum,
                    float* lanes) {
    alignas(64) float of_row[kChunk], of_y[kChunk], made[kChunk], stored[kChunk];
    Streams at = row.at;
    fetch_quarter(row.next, 0);
    at.old_row = row_tile(row.old_row, first, count, of_row);
    fetch_quarter(row.next, 1);
    const Form form = form_of(forms);
    const float* const r = at.old_row != nullptr ? at.old_row : kZeros;
    const float* const q = at.anchor != nullptr ? at.anchor : kZeros;
    float* const h = form == Form::replaces ? made : of_y;
    gradients(at.y, at.base, at.scale, count, h, lanes);
    if (form != Form::replaces)
        for (std::int64_t j = 0; j < count; ++j) made[j] = row_of(forms.row, h[j], r[j], q[j]);
    fetch_quarter(row.next, 2);
    const Row& to = row.new_row;
    encode<true>(made, to.codec, row.dither, first, count, to.data, to.scales, stored);
    fetch_quarter(row.next, 3);
    at.y = stored;
    if (form == Form::changes)
        add_seen<Form::changes>(forms.adds, at.weight, stored, r, h, q, count, sum);
    else if (form == Form::general)
        add_seen<Form::general>(forms.adds, at.weight, stored, r, h, q, count, sum);
    else if (at.old_row == nullptr)
        fold_piece<1, Form::replaces, Given::row, false, false, false>(&at, nullptr, count, sum, nullptr);
    else if (at.anchor == nullptr)
        fold_piece<1, Form::replaces, Given::row, true, false, false>(&at, nullptr, count, sum, nullptr);
    else
        fold_piece<1, Form::replaces, Given::row, true, true, false>(&at, nullptr, count, sum, nullptr);
}

// |h|^2 of a tile by its lanes, or infinity if a stored number is not finite.
template <class At>
double squares_of_tile(At out, const ClientUpdate& sent, const Row& stored, const Forms& forms, std::int64_t tile,
                       std::int64_t count, float* lanes) {
    const double squares = sum_of_lanes(lanes);
    if (is_sound(squares) && forms.replaces() && stored.codec != Codec::f16)
        return squares;  // every |h| < 10^19, which is stored as a finite number
    const double exactly = is_sound(squares) ? squares : squares_exactly(sent, tile, count, squares);
    if (!(exactly < __builtin_inf())) return exactly;
    alignas(64) float values[kChunk];
    for (std::int64_t first = tile; first < tile + count; first += kChunk) {
        const std::int64_t few = tile + count - first < kChunk ? tile + count - first : kChunk;
        if (!is_taken(out, row_tile(stored, first, few, values), few, forms.adds, sent.weight)) return __builtin_inf();
    }
    return exactly;
}

template <int kCount>
struct Count {
    static constexpr int value = kCount;
};

// kRows clients of a run, from the i-th on, tile by tile and chunk by chunk; those behind them begin where they did.
template <int kRows, class At>
void exchange_codes(const ClientUpdate* sent, const RowExchange* row_exchanges, const Forms& forms, std::int64_t i,
                    std::int64_t k, std::int64_t begin, std::int64_t end, At out, double* squares) {
    alignas(64) float of_y[kRows][kChunk];
    const bool fusible = is_plain(out) && is_fusible(row_exchanges[i], forms);
    Passing rows[kRows];
    for (int r = 0; r < kRows; ++r) {
        const RowExchange& one = row_exchanges[i + r];
        rows[r] = {{}, one.old_row, one.new_row, dither_of(one.key, begin), {}};
    }
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        float lanes[kRows][kLanes] = {};
        for (std::int64_t first = tile; first < tile + count; first += kChunk) {
            const std::int64_t few = tile + count - first < kChunk ? tile + count - first : kChunk;
            for (int r = 0; r < kRows; ++r) {
                const std::int64_t behind = i + kRows + r, next = first + kChunk;
                const std::int64_t client = next < end ? i + r : behind < k ? behind : behind - k;
                rows[r].next = chunk_of(sent[client], row_exchanges[client].old_row,
                                        next < end   ? next
                                        : behind < k ? begin
                                                     : end);
                rows[r].at = streams_of(sent[i + r], first, few, of_y[r]);
                if (row_exchanges[i + r].anchor != nullptr) rows[r].at.anchor = row_exchanges[i + r].anchor + first;
            }
            if (fusible && few % kCodeBlock == 0)
                fused_chunk<kRows>(rows, first, few, out + first, lanes);
            else
                for (int r = 0; r < kRows; ++r)
                    exchange_chunk(rows[r], forms, first, few, (r + 1 < kRows ? before_last(out) : out) + first,
                                   lanes[r]);
        }
        for (int r = 0; r < kRows; ++r)
            squares[i + r] +=
                squares_of_tile(out, sent[i + r], row_exchanges[i + r].new_row, forms, tile, count, lanes[r]);
    }
}

// Whether the `count` clients from i on can share a pass: they have the same base and the same kinds of arrays.
inline bool exchange_alike(const ClientUpdate* sent, const RowExchange* rows, const Forms& forms, std::int64_t i,
                           std::int64_t k, int count) {
    if (i + count > k) return false;
    const RowExchange& one = rows[i];
    for (int r = 0; r < count; ++r) {
        const RowExchange& other = rows[i + r];
        if (sent[i].base != sent[i + r].base || one.new_row.codec != other.new_row.codec ||
            (one.old_row.data == nullptr) != (other.old_row.data == nullptr) ||
            (one.anchor == nullptr) != (other.anchor == nullptr) ||
            (other.new_row.codec != Codec::f32 && (count > kExchanges || !is_fusible(other, forms))))
            return false;
    }
    return true;
}

template <class From, class Sum>
void exchange(From acc, Sum out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms, std::int64_t k,
              std::int64_t begin, std::int64_t end, double* squares, const Tiling& tiling) {
    for (std::int64_t i = 0; i < (end - begin + kBlock - 1) / kBlock * k; ++i) squares[i] = 0;
    const std::int64_t run = k > 0 && rows[0].new_row.codec != Codec::f32 ? kCodedRun : tiling.run;
    for (std::int64_t first = begin; first < end; first += run) {
        const std::int64_t last = end - first < run ? end : first + run;
        double* const of_run = squares + (first - begin) / kBlock * k;
        begin_run(acc, out, first, last);
        auto settles = settling(out);
        for (std::int64_t i = 0; i < k;) {
            int together = tiling.rows >= kMostExchanges ? kMostExchanges : kExchanges;
            while (together > 1 && !exchange_alike(sent, rows, forms, i, k, together)) together /= 2;
            const auto at = settles.pass(out, rows + i, together, form_of(forms), i + together == k);
            const auto pass = [&](auto count) {
                constexpr int kRows = decltype(count)::value;
                if (rows[i].new_row.codec == Codec::f32)
                    exchange_floats<kRows>(sent + i, rows + i, forms, first, last, at, of_run + i, k,
                                           tiling.past_caches);
                else if constexpr (kRows <= kExchanges)
                    exchange_codes<kRows>(sent, rows, forms, i, k, first, last, at, of_run);
            };
            if (together == kMostExchanges)
                pass(Count<kMostExchanges>{});
            else if (together == kExchanges)
                pass(Count<kExchanges>{});
            else
                pass(Count<1>{});
            i += together;
        }
    }
    if (tiling.past_caches) fence();
}
