// Noise from the discrete Gaussian: P(y) is proportional to exp(-y^2 / (2 sigma^2)) over all integers y.
//
// An integer sum with this noise has no rounding that depends on the sum, in contrast to a float with a rounded normal
// (Mironov, "On significance of the least significant bits for differential privacy", CCS 2012).
//   Reference: Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020.
//
// |y| is in one of 512 intervals of L integers, where L is the greatest power of two up to sigma / 16, at least 1. An
// alias table draws the interval with the probability of its bound L exp(-(j L)^2 / (2 sigma^2)), in units of 2^-62. A
// uniform y of the interval is kept with the probability exp((j L)^2 / (2 sigma^2) - y^2 / (2 sigma^2)) >= 1/2, in
// units of 2^-42; else all is drawn again. The table leaves out |y| > 8.9 sigma. The distance in total variation from
// the exact law is below 2^-52 apart from relative errors of at most 2^-40 of single probabilities.
#pragma once

#include <cstdint>

namespace fedcore {

inline constexpr std::int64_t kMostSigma = std::int64_t{1} << 26;

// out[j] = (round(sum[j] / grid) + y_j) grid, with half to even and y_j the noise of element j. A function of its
// arguments alone: each block of elements (blocks.h) has its own nonce, the block's number.
//   sigma in [1, kMostSigma]; grid: a power of two. `out` may be `sum`. Moves 16 n bytes, and computes about 17 bytes
//   of ChaCha20 for each element.
void add_discrete_gaussian(const double* sum, std::int64_t n, double grid, std::int64_t sigma, const std::uint32_t* key,
                           double* out);

}  // namespace fedcore
