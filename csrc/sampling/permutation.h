// A permutation of any length that is computed place by place.
//
// A Feistel network on pairs (l, r) of [0, rows) x [0, columns), rows * columns >= population, whose rounds add a
// random function of one half to the other: l += F(r) mod rows, then r += G(l) mod columns. A result past the
// population is put in again, until it is inside ("cycle walking").
//   Reference: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, Sec. 4 and 5.
#pragma once

#include <cstdint>

#include "base/random.h"

namespace fedcore {

// out[j] = pi(start + j), int64[count], for a permutation pi of [0, population) that depends on the key alone.
// 0 <= start, start + count <= population <= 2^63 - 1.
//   pi is pseudo-random: where every order must have exactly the same probability, shuffle. With ideal round
//   functions the distance from uniform over all orders is below 2e-8 up to a population of 6 (enumerated); above
//   that the parity and pairs of places are tested, nothing is proven.
//   O(count) time. Constant memory where count is below about sqrt(population); else the rounds' functions are
//   tabulated: 35 KB at most up to a population of 4,096, about 96 sqrt(population) bytes above. Runs on the pool.
void permutation(std::int64_t population, std::int64_t start, std::int64_t count, const Key& key, std::int64_t* out);

}  // namespace fedcore
