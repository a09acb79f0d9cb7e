// SipHash-1-3: a hash with a secret key. Without the key an attacker cannot choose inputs that collide.
//   Reference: Aumasson, Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012, with one round a word and three
//   at the end, as in the hash tables of CPython and Rust.
#pragma once

#include <cstdint>
#include <string_view>

namespace fedcore {

struct SipKey {
    std::uint64_t k0, k1;
};

// Of any bytes.
std::uint64_t siphash(const SipKey& key, std::string_view bytes);

// Of the word's eight bytes in little-endian order.
std::uint64_t siphash(const SipKey& key, std::uint64_t word);

}  // namespace fedcore
