// optimizer: a server optimiser's step along the round's direction, with its moments.
//
// Elementwise, with one sum over the fixed blocks, so the number of threads does not matter. Callers have checked every
// pointer, length and overlap.
#pragma once

#include <cstdint>

namespace fedcore {

// The rule of the second moment s, with q = v * v.
enum class Second {
    none,   // no second moment
    decay,  // s' = from_s * s + from_square * q
    yogi,   // s' = s - from_square * q * sign(s - q)
};

// One step, in float32 and in this order, with every operation rounded:
//     m' = from_m * m + from_v * v
//     s' by the rule `second`
//     u  = m' / (sqrt(s') + tau), or m' without a second moment
//     x' = x - gamma * u
struct OptimizerStep {
    Second second;
    float from_m, from_v, from_s, from_square, tau, gamma;
};

struct OptimizerInputs {
    const float* v;  // float32[n]
    const float* m;  // float32[n]
    const float* s;  // float32[n], or null without a second moment
    const float* x;  // float32[n]
};

// Each may be the input that it replaces, and overlaps nothing else.
struct OptimizerOutputs {
    float* m;
    float* s;  // null without a second moment
    float* x;
};

//   scratch: float64[block_count(n)]. Returns |x'|^2 as in norms.h, not finite if an element of x' is not.
//   Moves 28 n bytes, 20 n without a second moment.
double optimizer_step(const OptimizerStep& step, const OptimizerInputs& in, const OptimizerOutputs& out, std::int64_t n,
                      double* scratch);

}  // namespace fedcore
