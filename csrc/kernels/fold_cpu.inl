// One client's update folded into one tile: the loop that accumulate and exchange share.

// What the tile of a client is: a model, a difference, or already the row that is to be seen by the sum.
enum class Given { model, difference, row };

// Where the client's arrays stand at the tile; null where it has none. `next` is what will be read after this tile,
// and is fetched from `ahead` elements before this one's end.
struct Streams {
    const float* y;
    const float* base;
    const float* old_row;
    const float* anchor;
    float* new_row;
    Upcoming next;
    std::int64_t ahead;
    float scale;
    double weight;
};

// What a client sent, standing at the tile; where it must be converted, in scratch.
inline Streams streams_of(const Sent& sent, std::int64_t tile, std::int64_t count, float* scratch, Upcoming next) {
    const float* const base = sent.base != nullptr ? sent.base + tile : nullptr;
    return {
        sent_tile(sent, tile, count, scratch), base, nullptr, nullptr, nullptr, next, kAhead, sent.scale, sent.weight};
}

template <Given kGiven, class Number>
inline Number gradient(Number base, Number y, Number scale) {
    return kGiven == Given::model ? (base - y) * scale : kGiven == Given::difference ? -y * scale : y;
}

// Gradient form: row' = h, sum[j] += weight * (h - old_row[j] + anchor[j]). Control form: row' = (h + old_row[j]) +
// anchor[j], sum[j] += weight * (row' - old_row[j]). In Sum's precision; new_row[j] = row'. Returns the sum of h^2. All
// that is optional is known when this is compiled, so that the loop has no branches.
template <class Sum, Form kForm, Given kGiven, bool kOld, bool kAnchor, bool kKeep>
double fold_piece(const Streams& piece, std::int64_t count, Sum* __restrict sum) {
    using Wide = typename In<Sum>::Vector;
    constexpr bool kBase = kGiven == Given::model, kControl = kForm == Form::control;
    const float* const y = piece.y;
    const float* const base = piece.base;
    const float* const old_row = piece.old_row;
    const float* const anchor = piece.anchor;
    float* const new_row = piece.new_row;
    const std::int64_t ahead = piece.ahead;
    const Floats scale = Floats{} + piece.scale;
    const Sum weight = static_cast<Sum>(piece.weight);
    const Wide weights = Wide{} + weight;
    Floats part[kVectors] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        // One cache line of each stream, two KiB ahead; near the tile's end the head of what comes next.
        if (kGiven != Given::row) {
            __builtin_prefetch(j + ahead < count ? reinterpret_cast<const char*>(y + j + ahead)
                                                 : piece.next.at + (j + ahead - count) * piece.next.size);
            if (kOld) __builtin_prefetch(old_row + j + kAhead);
        }
        if (kAnchor) __builtin_prefetch(anchor + j + kAhead);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t at = j + v * kWidth;
            const Floats h = gradient<kGiven>(kBase ? load(base + at) : Floats{}, load(y + at), scale);
            if (kGiven != Given::row) part[v] += h * h;
            Floats row = h;
            if (kControl && kOld) row += load(old_row + at);
            if (kControl && kAnchor) row += load(anchor + at);
            Wide change = In<Sum>::of(row);
            if (kOld) change -= In<Sum>::of(load(old_row + at));
            if (!kControl && kAnchor) change += In<Sum>::of(load(anchor + at));
            store(sum + at, load(sum + at) + weights * change);
            if (kKeep) store(new_row + at, row);  // behind the load of old_row, which it may be
        }
    }
    float tail[kLanes];
    int rest = 0;
    for (; j < count; ++j, ++rest) {
        const float h = gradient<kGiven>(kBase ? base[j] : 0.0f, y[j], piece.scale);
        tail[rest] = h * h;
        float row = h;
        if (kControl && kOld) row += old_row[j];
        if (kControl && kAnchor) row += anchor[j];
        Sum change = row;
        if (kOld) change -= static_cast<Sum>(old_row[j]);
        if (!kControl && kAnchor) change += static_cast<Sum>(anchor[j]);
        sum[j] += weight * change;
        if (kKeep) new_row[j] = row;
    }
    return fold_lanes(part, tail, rest);
}

// h of some elements, h[j] being on lane j mod 16 of the sum of squares in `lanes`.
template <Given kGiven>
void gradient_piece(const float* __restrict y, const float* base, float scale, std::int64_t count, float* __restrict h,
                    float* lanes) {
    constexpr bool kBase = kGiven == Given::model;
    Floats part[kVectors];
    for (int v = 0; v < kVectors; ++v) part[v] = load(lanes + v * kWidth);
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t at = j + v * kWidth;
            const Floats value = gradient<kGiven>(kBase ? load(base + at) : Floats{}, load(y + at), Floats{} + scale);
            part[v] += value * value;
            store(h + at, value);
        }
    }
    for (int v = 0; v < kVectors; ++v) store(lanes + v * kWidth, part[v]);
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

double squares_exactly(const float* y, const float* base, float scale, std::int64_t count) {
    float h[kTile], lanes[kLanes] = {};
    gradients(y, base, scale, count, h, lanes);
    return sum_of_squares_exactly(h, count);
}

// One client's tile, `at` standing there.
template <class Sum, Form kForm, bool kOld, bool kAnchor, bool kKeep>
double fold_tile(const Streams& at, std::int64_t count, Sum* sum) {
    const double squares = at.base != nullptr
                               ? fold_piece<Sum, kForm, Given::model, kOld, kAnchor, kKeep>(at, count, sum)
                               : fold_piece<Sum, kForm, Given::difference, kOld, kAnchor, kKeep>(at, count, sum);
    return is_sound(squares) ? squares : squares_exactly(at.y, at.base, at.scale, count);
}

// The tile of `out`, with what is in `acc`.
template <class Sum>
Sum* begin_tile(const Sum* acc, Sum* out, std::int64_t tile, std::int64_t count) {
    if (acc != out)
        for (std::int64_t j = tile; j < tile + count; ++j) out[j] = acc[j];
    return out + tile;
}
