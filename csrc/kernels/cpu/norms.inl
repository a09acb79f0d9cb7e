// Squares are summed on 16 lanes of float32, element j of a tile on lane j mod 16, and the lanes folded in a fixed
// tree: relative error below 1e-5, mostly 1e-7. A tile whose sum float32 cannot hold well is summed again in float64.

// The lanes' total, which is left in the first. Squares of a tile may be put on them a chunk at a time: chunks are
// whole multiples of kLanes, except the tile's last.
template <class Value>
double sum_of_lanes(Value* lane) {
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
    return static_cast<double>(lane[0]);
}

// The same of vectors, `tail` holding the squares of the elements that filled none.
inline double fold_lanes(const FullFloats* part, const float* tail, int count) {
    float lane[kLanes];
    __builtin_memcpy(lane, part, sizeof lane);
    for (int l = 0; l < count; ++l) lane[l] += tail[l];
    return sum_of_lanes(lane);
}

template <class Value>
bool are_zero(const Value* values, std::int64_t count) {
    return values[0] == 0 && __builtin_memcmp(values, values + 1, (count - 1) * sizeof(Value)) == 0;
}

template <class Value>
void add_squares_exactly(const Value* values, std::int64_t count, double* lane) {
    if (count > 0 && are_zero(values, count)) return;  // of frozen layers
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
        for (int l = 0; l < kLanes; ++l)
            lane[l] += static_cast<double>(values[j + l]) * static_cast<double>(values[j + l]);
    for (int l = 0; j < count; ++j, ++l) lane[l] += static_cast<double>(values[j]) * static_cast<double>(values[j]);
}

template <class Value>
double sum_of_squares_exactly(const Value* values, std::int64_t count) {
    double lanes[kLanes] = {};
    add_squares_exactly(values, count, lanes);
    return sum_of_lanes(lanes);
}

void add_squares(const float* values, std::int64_t count, float* lanes) {
    FullFloats part[kLanes / kFull];
    __builtin_memcpy(part, lanes, sizeof part);
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        __builtin_prefetch(values + j + kAhead);
#pragma GCC unroll 4
        for (int v = 0; v < kLanes / kFull; ++v) {
            const FullFloats value = read(values + j + v * kFull);
            part[v] += value * value;
        }
    }
    __builtin_memcpy(lanes, part, sizeof part);
    for (int l = 0; j < count; ++j, ++l) lanes[l] += values[j] * values[j];
}

double sum_of_squares(const float* values, std::int64_t count) {
    float lanes[kLanes] = {};
    add_squares(values, count, lanes);
    const double squares = sum_of_lanes(lanes);
    return is_sound(squares) ? squares : sum_of_squares_exactly(values, count);
}

double squared_norm(const float* row, std::int64_t begin, std::int64_t end) {
    double sum = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile)
        sum += sum_of_squares(row + tile, end - tile < kTile ? end - tile : kTile);
    return sum;
}
