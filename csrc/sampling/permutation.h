// A permutation of any length, computed place by place.
//
// A Feistel network on pairs (l, r) of [0, rows) x [0, columns), rows * columns >= population, whose rounds add a
// random function of one half to the other: l += F(r) mod rows, then r += G(l) mod columns. A result past the
// population is the next input, until a result is inside ("cycle walking").
//   Reference: Black, Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, Sec. 4 and 5.
#pragma once

#include <cstdint>

#include "base/random.h"

namespace fedcore {

// out[j] = pi(start + j), int64[count], for a permutation pi of [0, population) that is a function of the key.
// 0 <= start, start + count <= population <= 2^63 - 1.
//   pi is pseudo-random. If every order must have exactly the same probability, shuffle instead. With ideal round
//   functions the distance from uniform over all orders is below 2e-8 up to a population of 6 (enumerated); above
//   that, tests check the parity and pairs of places; nothing is proven.
//   O(count) time. Constant memory if count is below about sqrt(population); else the rounds' functions are tabulated:
//   35 KB at most up to a population of 4,096, about 96 sqrt(population) bytes above. Runs on the pool.
void permutation(std::int64_t population, std::int64_t start, std::int64_t count, const Key& key, std::int64_t* out);

}  // namespace fedcore
