// One client's update folded into one tile: the loop that accumulate and exchange share.

// Where the client's arrays stand at the tile; null where it has none. `next` is what will be read after this tile.
struct Streams {
    const float* y;
    const float* base;
    const float* old_row;
    const float* anchor;
    float* new_row;
    const float* next;
    float scale;
    double weight;
};

// sum[j] += weight * (h - old_row[j] + anchor[j]) in Sum's precision, new_row[j] = h; returns the sum of h^2. All that
// is optional is known when this is compiled, so that the loop has no branches.
template <class Sum, bool kBase, bool kOld, bool kAnchor, bool kKeep>
double fold_piece(const Streams& piece, std::int64_t count, Sum* __restrict sum) {
    using Wide = typename In<Sum>::Vector;
    const float* const y = piece.y;
    const float* const base = piece.base;
    const float* const old_row = piece.old_row;
    const float* const anchor = piece.anchor;
    float* const new_row = piece.new_row;
    const Floats scale = Floats{} + piece.scale;
    const Sum weight = static_cast<Sum>(piece.weight);
    const Wide weights = Wide{} + weight;
    Floats part[kVectors] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        // One cache line of each stream, two KiB ahead; near the tile's end the head of what comes next.
        __builtin_prefetch(j + kAhead < count ? y + j + kAhead : piece.next + (j + kAhead - count));
        if (kOld) __builtin_prefetch(old_row + j + kAhead);
        if (kAnchor) __builtin_prefetch(anchor + j + kAhead);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const std::int64_t at = j + v * kWidth;
            const Floats h = (kBase ? load(base + at) - load(y + at) : -load(y + at)) * scale;
            part[v] += h * h;
            Wide change = In<Sum>::of(h);
            if (kOld) change -= In<Sum>::of(load(old_row + at));
            if (kAnchor) change += In<Sum>::of(load(anchor + at));
            store(sum + at, load(sum + at) + weights * change);
            if (kKeep) store(new_row + at, h);  // behind the load of old_row, which it may be
        }
    }
    float tail[kLanes];
    int rest = 0;
    for (; j < count; ++j, ++rest) {
        const float h = (kBase ? base[j] - y[j] : -y[j]) * piece.scale;
        tail[rest] = h * h;
        Sum change = h;
        if (kOld) change -= static_cast<Sum>(old_row[j]);
        if (kAnchor) change += static_cast<Sum>(anchor[j]);
        sum[j] += weight * change;
        if (kKeep) new_row[j] = h;
    }
    return fold_lanes(part, tail, rest);
}

double gradient_squares_exactly(const Sent& sent, std::int64_t tile, std::int64_t count) {
    float h[kTile];
    for (std::int64_t j = 0; j < count; ++j)
        h[j] = (sent.base != nullptr ? sent.base[tile + j] - sent.y[tile + j] : -sent.y[tile + j]) * sent.scale;
    return sum_of_squares_exactly(h, count);
}

// One client in the tile that starts at `tile`; `next` is what will be read after it.
template <class Sum, bool kOld, bool kAnchor, bool kKeep>
double fold_row(const Sent& sent, const RowSwap* row, const float* next, std::int64_t tile, std::int64_t count,
                Sum* sum) {
    Streams at = {sent.y + tile, nullptr, nullptr, nullptr, nullptr, next, sent.scale, sent.weight};
    if (kOld) at.old_row = row->old_row + tile;
    if (kAnchor) at.anchor = row->anchor + tile;
    if (kKeep) at.new_row = row->new_row + tile;
    if (sent.base != nullptr) at.base = sent.base + tile;
    const double squares = sent.base != nullptr ? fold_piece<Sum, true, kOld, kAnchor, kKeep>(at, count, sum)
                                                : fold_piece<Sum, false, kOld, kAnchor, kKeep>(at, count, sum);
    return is_sound(squares) ? squares : gradient_squares_exactly(sent, tile, count);
}

// The tile of `out`, with what is in `acc`.
template <class Sum>
Sum* begin_tile(const Sum* acc, Sum* out, std::int64_t tile, std::int64_t count) {
    if (acc != out)
        for (std::int64_t j = tile; j < tile + count; ++j) out[j] = acc[j];
    return out + tile;
}

// What is read after client i's part of this tile: the next client's, or the first one's next tile.
inline const float* read_next(const Sent* sent, std::int64_t i, std::int64_t k, std::int64_t tile, std::int64_t count) {
    return i + 1 < k ? sent[i + 1].y + tile : sent[0].y + tile + count;
}
