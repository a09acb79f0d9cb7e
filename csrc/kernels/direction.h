// direction: a client's step along its corrected gradient.
//
// Elementwise; blocks are independent, so the number of threads does not matter. Callers have checked every pointer,
// length and overlap.
#pragma once

#include <cstdint>

namespace fedcore {

// One local step, y <- y - lr (a grad + b grad_prev + offset + mu (y - x) + a weight_decay y), in float32 and in this
// order, with every operation rounded:
//     g = grad + weight_decay * y      where weight_decay != 0, else grad
//     d = a * g
//     d = d + b * grad_prev            where grad_prev is not null
//     d = d + offset                   where offset is not null
//     d = d + mu * (y - x)             where x is not null
//     y = y - lr * d
// Weight decay counts as part of the gradient, so `a` multiplies it. grad_prev must include its weight decay,
// weight_decay * x_prev.
struct LocalStep {
    const float* grad;       // float32[n]
    const float* grad_prev;  // float32[n] or null
    const float* offset;     // float32[n] or null
    const float* x;          // float32[n] or null
    float a, b, mu, weight_decay, lr;
};

//   y: float32[n], overlaps no input. Moves 12 n bytes, and 4 n for each input that is not null.
void direction_step(const LocalStep& step, float* y, std::int64_t n);

}  // namespace fedcore
