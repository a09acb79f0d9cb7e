// Clients' updates folded into one tile: the loop that accumulate and exchange share.

constexpr std::int64_t kFetch = 128;  // elements of each stream to prefetch ahead

inline Form form_of(const Forms& forms) {
    if (forms.replaces()) return Form::replaces;
    return forms.adds.h == 0 && forms.adds.q == 0 ? Form::changes : Form::general;
}

// Where a client's arrays stand at the tile; null where it has none.
struct Streams {
    const float* y;
    const float* base;
    const float* old_row;
    const float* anchor;
    float* new_row;
    float scale;
    double weight;
};

// What a client sent, standing at element `first`; where it must be converted, in scratch.
inline Streams streams_of(const ClientUpdate& sent, std::int64_t first, std::int64_t count, float* scratch) {
    const float* const base = sent.base != nullptr ? sent.base + first : nullptr;
    return {sent_tile(sent, first, count, scratch), base, nullptr, nullptr, nullptr, sent.scale, sent.weight};
}

// Where the form replaces rows: row' = h, sum[j] += weight * (h - old_row[j] + anchor[j]); else as `forms` say. In
// Sum's precision; new_row[j] = row'. lanes[r][j mod 16] += row r's h[j]^2, except for Given::row. kRows clients of one
// base in one pass: each element's additions stay in their order, but the base is loaded, and the sum loaded and
// stored, once for all. All that is optional is known when this is compiled, so that the loop has no branches.
template <int kRows, Form kForm, Given kGiven, bool kOld, bool kAnchor, bool kKeep, class Sum>
void fold_piece(const Streams* rows, const Forms* forms, std::int64_t count, Sum* __restrict sum,
                float (*lanes)[kLanes]) {
    using Wide = Full<Sum>;
    constexpr bool kBase = kGiven == Given::model, kReplaces = kForm == Form::replaces, kNorms = kGiven != Given::row;
    const float* const base = rows[0].base;
    FullFloats part[kRows][kLanes / kFull] = {};
    if (kNorms) __builtin_memcpy(part, lanes, sizeof part);
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        for (int r = 0; r < kRows; ++r) {
            const Streams& row = rows[r];
            if (kNorms) {  // a row to be seen by the sum has just been made
                __builtin_prefetch(row.y + j + kFetch);
                if (kOld) __builtin_prefetch(row.old_row + j + kFetch);
            }
            if (kAnchor) __builtin_prefetch(row.anchor + j + kFetch);
        }
#pragma GCC unroll 4
        for (int v = 0; v < kLanes / kFull; ++v) {
            const std::int64_t at = j + v * kFull;
            const FullFloats x = kBase ? read(base + at) : FullFloats{};
            auto s = read(sum + at);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const Streams& row = rows[r];
                const FullFloats h = gradient<kGiven>(x, read(row.y + at), row.scale);
                if (kNorms) part[r][v] += h * h;
                const FullFloats old = kOld ? read(row.old_row + at) : FullFloats{};
                const FullFloats anchor = kAnchor ? read(row.anchor + at) : FullFloats{};
                const FullFloats made = kReplaces ? h : row_of(forms->row, h, old, anchor);
                auto change = Wide::of(made);
                if (!kReplaces)
                    change = seen_of<kForm>(forms->adds, change, Wide::of(old), Wide::of(h), Wide::of(anchor));
                if (kReplaces && kOld) change = change - Wide::of(old);
                if (kReplaces && kAnchor) change = change + Wide::of(anchor);
                s = s + static_cast<Sum>(row.weight) * change;
                if (kKeep) write(row.new_row + at, made);  // behind the load of old_row, which it may be
            }
            write(sum + at, s);
        }
    }
    if (kNorms) __builtin_memcpy(lanes, part, sizeof part);
    for (int l = 0; j < count; ++j, ++l)
        for (int r = 0; r < kRows; ++r) {
            const Streams& row = rows[r];
            const float h = gradient<kGiven>(kBase ? base[j] : 0.0f, row.y[j], row.scale);
            if (kNorms) lanes[r][l] += h * h;
            const float old = kOld ? row.old_row[j] : 0.0f, anchor = kAnchor ? row.anchor[j] : 0.0f;
            const float made = kReplaces ? h : row_of(forms->row, h, old, anchor);
            Sum change = made;
            if (!kReplaces) change = static_cast<Sum>(seen_of<kForm, double>(forms->adds, made, old, h, anchor));
            if (kReplaces && kOld) change -= static_cast<Sum>(old);
            if (kReplaces && kAnchor) change += static_cast<Sum>(anchor);
            sum[j] += static_cast<Sum>(row.weight) * change;
            if (kKeep) row.new_row[j] = made;
        }
}

// h of some elements, h[j] being on lane j mod 16 of the sum of squares in `lanes`.
template <Given kGiven>
void gradient_piece(const float* __restrict y, const float* base, float scale, std::int64_t count, float* __restrict h,
                    float* lanes) {
    constexpr bool kBase = kGiven == Given::model;
    FullFloats part[kLanes / kFull];
    __builtin_memcpy(part, lanes, sizeof part);
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kLanes / kFull; ++v) {
            const std::int64_t at = j + v * kFull;
            const FullFloats value = gradient<kGiven>(kBase ? read(base + at) : FullFloats{}, read(y + at), scale);
            part[v] += value * value;
            write(h + at, value);
        }
    }
    __builtin_memcpy(lanes, part, sizeof part);
    for (int l = 0; j < count; ++j, ++l) {
        h[j] = gradient<kGiven>(kBase ? base[j] : 0.0f, y[j], scale);
        lanes[l] += h[j] * h[j];
    }
}

// h, base perhaps null.
void gradients(const float* y, const float* base, float scale, std::int64_t count, float* h, float* lanes) {
    if (base != nullptr)
        gradient_piece<Given::model>(y, base, scale, count, h, lanes);
    else
        gradient_piece<Given::difference>(y, base, scale, count, h, lanes);
}

// |h|^2 of a tile of a client's update, in float64, because its float32 sum is inaccurate.
double squares_exactly(const ClientUpdate& sent, std::int64_t tile, std::int64_t count, double in_float32) {
    if (in_float32 == 0 && sent.base != nullptr && sent.dtype == Dtype::float32 &&
        __builtin_memcmp(static_cast<const float*>(sent.y) + tile, sent.base + tile, count * sizeof(float)) == 0)
        return 0;  // a frozen layer
    alignas(64) float of_y[kChunk], h[kChunk];
    float unused[kLanes] = {};
    double lanes[kLanes] = {};
    for (std::int64_t first = tile; first < tile + count; first += kChunk) {
        const std::int64_t few = tile + count - first < kChunk ? tile + count - first : kChunk;
        const Streams at = streams_of(sent, first, few, of_y);
        gradients(at.y, at.base, at.scale, few, h, unused);
        add_squares_exactly(h, few, lanes);
    }
    return sum_of_lanes(lanes);
}

// kRows clients with the same base, or with none.
template <int kRows, Form kForm, bool kOld, bool kAnchor, bool kKeep, class Sum>
void fold_rows(const Streams* rows, const Forms* forms, std::int64_t count, Sum* sum, float (*lanes)[kLanes]) {
    if (rows[0].base != nullptr)
        fold_piece<kRows, kForm, Given::model, kOld, kAnchor, kKeep>(rows, forms, count, sum, lanes);
    else
        fold_piece<kRows, kForm, Given::difference, kOld, kAnchor, kKeep>(rows, forms, count, sum, lanes);
}

// Copies `acc` to the run of `out`.
template <class Sum>
void begin_run(const Sum* acc, Sum* out, std::int64_t begin, std::int64_t end) {
    if (acc != out)
        for (std::int64_t j = begin; j < end; ++j) out[j] = acc[j];
}
