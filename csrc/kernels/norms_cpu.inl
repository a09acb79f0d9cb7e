// What the families share: the tile, the 16-lane sum of squares, and a client's update read as a gradient.

constexpr std::int64_t kTile = 2048;  // elements: a tile of h and of the float64 sum stay in L1/L2 over the rows
constexpr int kLanes = 16;

// The lanes folded in a fixed tree: the same bits whatever the width of a vector.
inline double fold(double* lanes) {
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

// sum of values[j]^2 over [0, count): element j goes to lane j mod 16.
inline double sum_of_squares(const float* values, std::int64_t count) {
    double lanes[kLanes] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) {
            const double value = values[j + lane];
            lanes[lane] += value * value;
        }
    for (int lane = 0; j < count; ++j, ++lane) {
        const double value = values[j];
        lanes[lane] += value * value;
    }
    return fold(lanes);
}

double squared_norm(const float* row, std::int64_t begin, std::int64_t end) {
    double sum = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile)
        sum += sum_of_squares(row + tile, end - tile < kTile ? end - tile : kTile);
    return sum;
}

// h[0..count) = the gradient of `sent` at [begin, begin + count).
inline void read_gradient(const Sent& sent, std::int64_t begin, std::int64_t count, float* __restrict h) {
    const float* __restrict y = sent.y + begin;
    const double scale = sent.scale;
    if (sent.base != nullptr) {
        const float* __restrict base = sent.base + begin;
        for (std::int64_t j = 0; j < count; ++j)
            h[j] = static_cast<float>((static_cast<double>(base[j]) - static_cast<double>(y[j])) * scale);
    } else {
        for (std::int64_t j = 0; j < count; ++j) h[j] = static_cast<float>(-static_cast<double>(y[j]) * scale);
    }
}
