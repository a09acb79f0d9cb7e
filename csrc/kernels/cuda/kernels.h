// The kernels on a device, each with the bits of the function in kernels/*.h if the result is finite, and not finite if
// that is not. Arrays are on the device. Structs, lists of pointers, weights and coefficients are on the host, and are
// read before a call returns. Calls with norms wait for them; all others are only queued.
//
// Callers have checked every pointer, length and overlap; tensors have less than 2^28 pieces together.
#pragma once

#include "kernels/cuda/calls.h"
#include "kernels/cuda/queue.h"

namespace fedcore::cuda {

// partials: float64[pieces, k] on the host, in which the pieces' shares of k sums of squares are left, or null.

// Tensor s has n[s] elements.
//   squared_norms: float64[k + 1] or null
void weighted_sums(Queue& queue, const RowSum* sums, const std::int64_t* n, std::int64_t count, const double* weights,
                   std::int64_t k, Precision precision, double* squared_norms);

template <class Sum>
void accumulate(Queue& queue, const Fold<Sum>* folds, const std::int64_t* n, std::int64_t count, std::int64_t k,
                double* partials, double* squared_norms);

void exchange(Queue& queue, const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows,
              const Forms& forms, std::int64_t k, std::int64_t n, double* partials, double* squared_norms);

void accumulate(Queue& queue, const ExactFold* folds, const std::int64_t* n, std::int64_t count, std::int64_t k,
                double* partials, double* squared_norms);

void exchange(Queue& queue, ConstExactSum acc, ExactSum out, const ClientUpdate* sent, const RowExchange* rows,
              const Forms& forms, std::int64_t k, std::int64_t n, double* partials, double* squared_norms);

template <class Sum>
void server_step(Queue& queue, const Step& step, const StepInputs<Sum>& in, const StepOutputs& out, std::int64_t n,
                 double* partials, double* squares);

double optimizer_step(Queue& queue, const OptimizerStep& step, const OptimizerInputs& in, const OptimizerOutputs& out,
                      std::int64_t n, double* partials);

void direction_step(Queue& queue, const LocalStep& step, float* y, std::int64_t n);

template <class Out>
void combine(Queue& queue, const Term* terms, std::int64_t k, Out* out, std::int64_t n);
double combined_square(Queue& queue, const Term* terms, std::int64_t k, std::int64_t n, double* partials);

bool combine_exact(Queue& queue, const ExactTerm* terms, std::int64_t k, ExactSum out, std::int64_t n);
template <class Out>
void read_exact(Queue& queue, ConstExactSum sum, Out* out, std::int64_t n);

void squared_norms(Queue& queue, const float* const* rows, std::int64_t k, std::int64_t n, double* partials,
                   double* squared_norms);

//   partials: float64[pieces, k (k + 1) / 2]
void gram(Queue& queue, const Updates& updates, std::int64_t n, double* partials, double* products);
void column_statistic(Queue& queue, const Updates& updates, const double* mixing, std::int64_t rows,
                      const Statistic& statistic, std::int64_t n, float* out);

void quantise(Queue& queue, const float* x, Codec codec, const DitherKey* key, std::int64_t n, void* codes,
              float* scales);
void dequantise(Queue& queue, const void* codes, const float* scales, Codec codec, std::int64_t n, float* out);

// The most models that a block's shared memory holds elements of: 64 KiB, as every GPU since 7.5 has.
inline constexpr std::int64_t kMostMixed = (64 << 10) / static_cast<std::int64_t>(sizeof(float));
//   matrix.p <= kMostMixed; the matrix lies on the host
void mix(Queue& queue, const Mixing& matrix, float* const* models, std::int64_t n);

}  // namespace fedcore::cuda
