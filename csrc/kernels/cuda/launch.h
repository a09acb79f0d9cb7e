// Shared by all launches: tables, partitions, and sums of squares.
#pragma once

#include <initializer_list>
#include <vector>

#include "base/blocks.h"
#include "kernels/cuda/calls.h"
#include "kernels/cuda/queue.h"
#include "kernels/partials.h"

namespace fedcore::cuda {

static_assert(kPiece == kBlock, "the device's pieces are the CPU's blocks");

template <class T>
struct Table {
    T* host;
    T* device;
};

template <class T>
Table<T> table(Queue& queue, std::int64_t count) {
    const Queue::Memory memory = queue.table(static_cast<std::size_t>(count) * sizeof(T));
    return {static_cast<T*>(memory.host), static_cast<T*>(memory.device)};
}

// A copy of count elements for the device.
template <class T>
const T* copied(Queue& queue, const T* from, std::int64_t count) {
    const Table<T> to = table<T>(queue, count);
    for (std::int64_t i = 0; i < count; ++i) to.host[i] = from[i];
    return to.device;
}

inline bool is_aligned(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}
inline bool are_aligned(std::initializer_list<const void*> addresses) {
    for (const void* address : addresses)
        if (!is_aligned(address)) return false;
    return true;
}

template <class Word>
bool is_aligned(const ExactWords<Word>& sum) {
    return are_aligned({sum.high, sum.low});
}

inline std::int64_t tile_count(std::int64_t n) {
    return (n + kTile - 1) / kTile;
}

// Tensors in whole pieces, and how many there are.
struct Pieces {
    Segments segments;
    std::int64_t count;
    std::int64_t tiles() const { return count * kPieceTiles; }
};

inline Pieces pieces_of(Queue& queue, const std::int64_t* n, std::int64_t count) {
    const Table<std::int32_t> first = table<std::int32_t>(queue, count + 1);
    std::int64_t pieces = 0;
    for (std::int64_t s = 0; s <= count; ++s) {
        first.host[s] = static_cast<std::int32_t>(pieces);
        if (s < count) pieces += block_count(n[s]);
    }
    return {{first.device, static_cast<std::int32_t>(count)}, pieces};
}

// Memory for a square of each of `rows` in each of `parts`.
inline double* squares_for(Queue& queue, std::int64_t rows, std::int64_t parts) {
    return static_cast<double*>(queue.scratch(static_cast<std::size_t>(rows * parts) * sizeof(double)));
}

// partials[piece, i] = the sum of row i's parts in that piece, in the device's order.
inline void read_partials(Queue& queue, const double* squares, std::int64_t rows, std::int64_t pieces, int parts,
                          double* partials) {
    std::vector<double> read(rows * pieces * parts);
    if (!read.empty()) queue.read(squares, read.size() * sizeof(double), read.data());
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t piece = 0; piece < pieces; ++piece)
            add_partials(read.data() + (row * pieces + piece) * parts, parts, 1, partials + piece * rows + row);
}

// sums[i] = the sum of row i's parts, `parts` a piece; partials: float64[pieces, rows] or null.
inline void read_totals(Queue& queue, const double* squares, std::int64_t rows, std::int64_t pieces, int parts,
                        double* partials, double* sums) {
    if (rows == 0) return;
    if (partials != nullptr) {
        read_partials(queue, squares, rows, pieces, parts, partials);
        return add_partials(partials, pieces, rows, sums);
    }
    auto* const totals = static_cast<double*>(queue.scratch(static_cast<std::size_t>(rows) * sizeof(double)));
    const TotalCall call{squares, totals, static_cast<std::int32_t>(pieces), parts};
    queue.launch(Kernel::add_squares, {rows}, &call);
    queue.read(totals, static_cast<std::size_t>(rows) * sizeof(double), sums);
}

}  // namespace fedcore::cuda
