// The kernels' arguments: plain structs with the same layout in nvcc and all host compilers. The arithmetic is
// described by the structs of the CPU's headers; arrays of them are tables in the device's memory.
#pragma once

#include <cstdint>

#include "kernels/aggregate.h"
#include "kernels/combine.h"
#include "kernels/direction.h"
#include "kernels/exact.h"
#include "kernels/exchange.h"
#include "kernels/mix.h"
#include "kernels/optimizer.h"
#include "kernels/quantise.h"
#include "kernels/robust.h"

namespace fedcore::cuda {

// The CPU's partition, which fixes every sum of squares: 16 lanes over a tile, the tiles of a piece in order, the
// pieces in order. A piece is the CPU's block; a block of threads handles one tile.
constexpr int kLanes = 16;
constexpr int kTile = 2048;
constexpr int kPieceTiles = 8;
constexpr int kPiece = kTile * kPieceTiles;
constexpr int kChunk = 512;  // elements under one bound in combine_exact

constexpr int kThreads = 256;            // of a block
constexpr int kEach = kTile / kThreads;  // elements of a thread: four, and the four that are 32 elements later
constexpr int kTogether = 4;             // rows whose squares are summed at once
constexpr int kStaged = 64;              // rows whose descriptions lie in shared memory at once

// `vector` in all that follows: whether every array starts at a multiple of 16 bytes.

// Separate tensors are numbered in whole pieces: first_piece[s] is the first of tensor s among all pieces, and
// first_piece[count] their number.
struct Segments {
    const std::int32_t* first_piece;
    std::int32_t count;
};

struct SumSegment {
    RowSum sum;
    std::int64_t n;
    std::int32_t vector;
};

struct SumsCall {
    const SumSegment* tensors;
    const double* weights;  // float64[k]
    double* squares;        // float64[k + 1, tiles] or null
    Segments segments;
    std::int32_t k;
};

template <class Sum>
struct FoldSegment {
    Fold<Sum> fold;
    std::int64_t n;
    std::int32_t vector;
};

template <class Sum>
struct FoldCall {
    const FoldSegment<Sum>* tensors;
    const RowExchange* rows;  // [k], or null where no rows are exchanged
    Forms forms;
    double* squares;  // float64[k, tiles]
    Segments segments;
    std::int32_t k;
};

template <class Sum>
struct StepCall {
    Step step;
    StepInputs<Sum> in;
    StepOutputs out;
    double* squares;  // float64[2, tiles]
    std::int64_t n;
    std::int32_t vector;
};

struct OptimizerCall {
    OptimizerStep step;
    OptimizerInputs in;
    OptimizerOutputs out;
    double* squares;  // float64[tiles]
    std::int64_t n;
    std::int32_t vector;
};

struct CombineCall {
    const Term* terms;  // [k]
    void* out;          // Out[n], or null where only the square is wanted
    double* squares;    // float64[pieces], or null
    std::int64_t n;
    std::int32_t k, vector;
};

struct CombineExactCall {
    const ExactTerm* terms;  // [k]
    ExactSum out;
    double* overflows;  // float64[tiles]: infinite for a tile that may overflow, else 0
    std::int64_t n;
    std::int32_t k, vector;
};

struct ReadExactCall {
    ConstExactSum sum;
    void* out;  // Out[n]
    std::int64_t n;
    std::int32_t vector;
};

struct NormsCall {
    const float* const* rows;  // [k]
    double* squares;           // float64[k, tiles]
    std::int64_t n;
    std::int32_t k, vector;
};

struct DirectionCall {
    LocalStep step;
    float* y;
    std::int64_t n;
    std::int32_t vector;
};

struct CodesCall {
    float* x;  // read by quantise, written by dequantise
    Row row;
    DitherKey key;
    std::int64_t n;
    std::int32_t vector;
};

constexpr int kGramSide = 32;   // rows that a block multiplies by each other, or by as many others
constexpr int kGramWidth = 64;  // elements of a tile of two sides
constexpr int kGramPad = 2;     // elements between the rows of a tile

struct GramCall {
    Updates updates;
    double* products;  // float64[k (k + 1) / 2, pieces]
    std::int64_t n;
    std::int32_t width;  // elements of a tile: as many as its memory holds of the rows
    std::int32_t plain;  // whether every y is float32
};

struct ColumnCall {
    Updates updates;
    const double* mixing;  // float64[rows, k] or null
    Statistic of;
    float* out;
    float* scratch;  // float32[blocks, rows (+ k with a mixing), kThreads], or null where shared memory holds a block's
    std::int64_t n;
    std::int32_t rows, plain;
};

struct MixCall {
    Mixing matrix;
    float* const* models;  // [p]
    std::int64_t n;
    std::int32_t width;  // elements of every model that a block takes
};

// sums[i] = squares[i, 0 .. parts * pieces), of which `parts` make a piece's sum, and these the total, each in order.
struct TotalCall {
    const double* squares;
    double* sums;
    std::int32_t pieces, parts;
};

}  // namespace fedcore::cuda
