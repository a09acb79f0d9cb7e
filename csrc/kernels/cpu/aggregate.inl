// How many clients from i on, `most` at most, start from client i's base.
inline int sharing(const ClientUpdate* sent, std::int64_t i, std::int64_t k, int most) {
    int together = 1;
    while (together < most && i + together < k && sent[i + together].base == sent[i].base) ++together;
    return together;
}

// Adds k clients, of one base or none, to `from` (null for zeros), tile by tile of a run. `squares`
// are those of the block that the run starts in; `stride` lies between blocks'.
template <class Sum, bool kBase>
void accumulate_rows(const ClientUpdate* sent, int k, std::int64_t begin, std::int64_t end, const Sum* from, Sum* out,
                     double* squares, std::int64_t stride, bool past_caches) {
    alignas(64) float scratch[kMostRows][kChunk];
    alignas(64) Sum stage[kChunk];
    bool converted = false;
    Pass<float, Sum, kBase, true, true> pass;
    pass.k = k;
    for (int r = 0; r < k; ++r) {
        pass.weights[r] = static_cast<Sum>(sent[r].weight);
        pass.scales[r] = kBase ? sent[r].scale : -sent[r].scale;
        converted |= sent[r].dtype != Dtype::float32;
    }
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        const std::int64_t stretch = converted || past_caches ? kChunk : kTile;
        pass.begin_tile();
        for (std::int64_t first = tile; first < tile + count; first += stretch) {
            const std::int64_t few = tile + count - first < stretch ? tile + count - first : stretch;
            const float* const base = kBase ? sent[0].base + first : nullptr;
            const float* rows[kMostRows];
            for (int r = 0; r < k; ++r) rows[r] = sent_tile(sent[r], first, few, scratch[r]);
            pass.add_all(rows, base, 0, few, from == nullptr ? from : from + first, past_caches ? stage : out + first);
            if (past_caches) put(stage, few, out + first);
        }
        for (int r = 0; r < k; ++r) {
            const double square = pass.squared_norm(r);
            squares[(tile - begin) / kBlock * stride + r] +=
                is_sound(square) ? square : squares_exactly(sent[r], tile, count, square);
        }
    }
}

template <class Sum>
void accumulate(const Fold<Sum>& fold, std::int64_t k, std::int64_t begin, std::int64_t end, double* squares,
                const Tiling& tiling) {
    const ClientUpdate* const sent = fold.sent;
    Sum* const out = fold.out;
    if (k == 0)
        for (std::int64_t j = begin; j < end; ++j) out[j] = fold.acc != nullptr ? fold.acc[j] : 0;
    for (std::int64_t i = 0; i < (end - begin + kBlock - 1) / kBlock * k; ++i) squares[i] = 0;
    for (std::int64_t first = begin; first < end; first += tiling.run) {
        const std::int64_t last = end - first < tiling.run ? end : first + tiling.run;
        for (std::int64_t i = 0; i < k;) {
            const int together = sharing(sent, i, k, tiling.rows);
            const auto loop = sent[i].base != nullptr ? accumulate_rows<Sum, true> : accumulate_rows<Sum, false>;
            const bool in_one_pass = together == k && fold.acc != out;  // else the sum is read again
            loop(sent + i, together, first, last, i == 0 ? fold.acc : out, out,
                 squares + (first - begin) / kBlock * k + i, k, kHasPastCaches && tiling.past_caches && in_one_pass);
            i += together;
        }
    }
    if (tiling.past_caches) fence();
}

// The step of a method that keeps no total, one tile: v from the sum and perhaps the momentum, x' from v.
template <class Sum, bool kMomentum>
void step_tile(const Step& step, const Sum* sum, const float* momentum, const float* x, std::int64_t count, float* v,
               float* moved, double* squares) {
    using Wide = Full<double>;
    FullFloats of_v[kLanes / kFull] = {}, of_x[kLanes / kFull] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
#pragma GCC unroll 4
        for (int u = 0; u < kLanes / kFull; ++u) {
            const std::int64_t at = j + u * kFull;
            FullDoubles wide = step.v.A * Wide::of(read(sum + at));
            if (kMomentum) wide = wide + step.v.g * Wide::of(read(momentum + at));
            const FullFloats direction = to_floats(wide);
            const FullFloats there = to_floats(Wide::of(read(x + at)) - step.gamma * Wide::of(direction));
            of_v[u] += direction * direction;
            of_x[u] += there * there;
            write(v + at, direction);
            write(moved + at, there);
        }
    float tail_v[kLanes], tail_x[kLanes];
    int rest = 0;
    for (; j < count; ++j, ++rest) {
        double wide = step.v.A * static_cast<double>(sum[j]);
        if (kMomentum) wide += step.v.g * static_cast<double>(momentum[j]);
        v[j] = static_cast<float>(wide);
        moved[j] = static_cast<float>(static_cast<double>(x[j]) - step.gamma * static_cast<double>(v[j]));
        tail_v[rest] = v[j] * v[j];
        tail_x[rest] = moved[j] * moved[j];
    }
    const double v_square = fold_lanes(of_v, tail_v, rest), x_square = fold_lanes(of_x, tail_x, rest);
    squares[0] += is_sound(v_square) ? v_square : sum_of_squares_exactly(v, count);
    squares[1] += is_sound(x_square) ? x_square : sum_of_squares_exactly(moved, count);
}

// The step of a method that keeps one, elementwise: elements [first, first + count).
// (Not inlined, so that other callers' stacks do not hold its scratch.)
template <class Sum>
__attribute__((noinline)) void step_chunk(const Step& s, const StepInputs<Sum>& in, const StepOutputs& out,
                                          std::int64_t first, std::int64_t count) {
    alignas(64) double wide[kChunk], kept[kChunk];
    const Sum* const sum = in.sum + first;
    const double* const total = in.total != nullptr ? in.total + first : nullptr;
    const double* const control = in.control != nullptr ? in.control + first : nullptr;
    const float* const momentum = in.momentum != nullptr ? in.momentum + first : nullptr;
    const float* const x = in.x + first;
    float* const v = out.v + first;
    // T' except for its last term: before v is, which may be written over the g that it needs
    if (total != nullptr) {
        add_term(total, s.total.T, true, count, kept);
        add_term(sum, s.total.A, false, count, kept);
        if (control != nullptr) add_term(control, s.total.B, false, count, kept);
        if (momentum != nullptr && s.total.g != 0) add_term(momentum, s.total.g, false, count, kept);
    }
    add_term(sum, s.v.A, true, count, wide);
    if (total != nullptr) add_term(total, s.v.T, false, count, wide);
    if (momentum != nullptr) add_term(momentum, s.v.g, false, count, wide);
    if (control != nullptr) add_term(control, s.v.B, false, count, wide);
    for (std::int64_t j = 0; j < count; ++j) v[j] = static_cast<float>(wide[j]);
    if (total != nullptr)
        for (std::int64_t j = 0; j < count; ++j) out.total[first + j] = kept[j] + s.total.v * static_cast<double>(v[j]);
    for (std::int64_t j = 0; j < count; ++j)
        out.x[first + j] = static_cast<float>(static_cast<double>(x[j]) - s.gamma * static_cast<double>(v[j]));
}

template <class Sum>
void server_step(const Step& step, const StepInputs<Sum>& in, const StepOutputs& out, std::int64_t begin,
                 std::int64_t end, double* squares, bool past_caches) {
    alignas(64) float of_v[kTile], of_x[kTile];
    const bool staged = kHasPastCaches && past_caches && out.v != in.momentum && out.x != in.x;
    const Step s = step;
    squares[0] = squares[1] = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t count = end - tile < kTile ? end - tile : kTile;
        if (in.total == nullptr && in.control == nullptr) {
            const auto loop = in.momentum != nullptr ? step_tile<Sum, true> : step_tile<Sum, false>;
            const float* const momentum = in.momentum != nullptr ? in.momentum + tile : nullptr;
            loop(s, in.sum + tile, momentum, in.x + tile, count, staged ? of_v : out.v + tile,
                 staged ? of_x : out.x + tile, squares);
            if (staged) {
                put(of_v, count, out.v + tile);
                put(of_x, count, out.x + tile);
            }
            continue;
        }
        for (std::int64_t first = tile; first < tile + count; first += kChunk)
            step_chunk(s, in, out, first, tile + count - first < kChunk ? tile + count - first : kChunk);
        squares[0] += sum_of_squares(out.v + tile, count);
        squares[1] += sum_of_squares(out.x + tile, count);
    }
    if (past_caches) fence();
}
