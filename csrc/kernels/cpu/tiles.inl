// Tile stages: other formats are converted to float32 in scratch of a tile's length, so that the folds need one loop
// for all dtypes and codecs.

void from_float64(const double* __restrict values, std::int64_t count, float* __restrict out) {
    for (std::int64_t j = 0; j < count; ++j) out[j] = static_cast<float>(values[j]);
}

// Elements [tile, tile + count) of a client's update: in place, or converted into `scratch`.
const float* sent_tile(const ClientUpdate& sent, std::int64_t tile, std::int64_t count, float* scratch) {
    switch (sent.dtype) {
        case Dtype::float32:
            return static_cast<const float*>(sent.y) + tile;
        case Dtype::float64:
            from_float64(static_cast<const double*>(sent.y) + tile, count, scratch);
            break;
        case Dtype::float16:
            from_half<F16>(static_cast<const std::uint16_t*>(sent.y) + tile, count, scratch);
            break;
        case Dtype::bfloat16:
            from_half<Bf16>(static_cast<const std::uint16_t*>(sent.y) + tile, count, scratch);
            break;
    }
    return scratch;
}

// The same of a row; null for one that was never written.
const float* row_tile(const Row& row, std::int64_t tile, std::int64_t count, float* scratch) {
    if (row.data == nullptr) return nullptr;
    if (row.codec == Codec::f32) return static_cast<const float*>(row.data) + tile;
    decode(row.data, row.scales, row.codec, tile, count, scratch);
    return scratch;
}

// Memory that will be read next: where it starts, and the bytes of an element.
struct Upcoming {
    const char* at;
    std::int64_t size;
};

inline Upcoming upcoming(const ClientUpdate& sent, std::int64_t first) {
    const std::int64_t size = sent.dtype == Dtype::float64 ? 8 : sent.dtype == Dtype::float32 ? 4 : 2;
    return {static_cast<const char*>(sent.y) + first * size, size};
}

// A client's arrays that a chunk reads.
struct Chunk {
    Upcoming y, row;
};

inline Chunk chunk_of(const ClientUpdate& sent, const Row& row, std::int64_t first) {
    const Upcoming y = upcoming(sent, first);
    if (row.data == nullptr) return {y, {y.at, 0}};
    const std::int64_t size = row.codec == Codec::f32 ? 4 : row.codec == Codec::int8 ? 1 : 2;
    return {y, {static_cast<const char*>(row.data) + first * size, size}};
}

// Always inline: GCC takes a function of prefetches for one without effects, and drops its calls.
[[gnu::always_inline]] inline void fetch_quarter(Upcoming next, int quarter) {
    const std::int64_t bytes = kChunk / 4 * next.size;
    for (std::int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(next.at + quarter * bytes + b);
}

[[gnu::always_inline]] inline void fetch_quarter(const Chunk& next, int quarter) {
    fetch_quarter(next.y, quarter);
    fetch_quarter(next.row, quarter);
}

// sum[0..count) = or += coefficient * values[0..count)
template <class T>
inline void add_term(const T* __restrict values, double coefficient, bool first, std::int64_t count,
                     double* __restrict sum) {
    if (first)
        for (std::int64_t j = 0; j < count; ++j) sum[j] = coefficient * static_cast<double>(values[j]);
    else
        for (std::int64_t j = 0; j < count; ++j) sum[j] += coefficient * static_cast<double>(values[j]);
}
