#include "clients/siphash.h"

#include "base/little_endian.h"

namespace fedcore {
namespace {

std::uint64_t rotated(std::uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

class State {
  public:
    explicit State(const SipKey& key)
        : v0_(key.k0 ^ 0x736f6d6570736575u),
          v1_(key.k1 ^ 0x646f72616e646f6du),
          v2_(key.k0 ^ 0x6c7967656e657261u),
          v3_(key.k1 ^ 0x7465646279746573u) {}

    void absorb(std::uint64_t word) {
        v3_ ^= word;
        round();
        v0_ ^= word;
    }

    std::uint64_t finish() {
        v2_ ^= 0xff;
        for (int i = 0; i < 3; ++i) round();
        return v0_ ^ v1_ ^ v2_ ^ v3_;
    }

  private:
    void round() {
        v0_ += v1_;
        v1_ = rotated(v1_, 13) ^ v0_;
        v0_ = rotated(v0_, 32);
        v2_ += v3_;
        v3_ = rotated(v3_, 16) ^ v2_;
        v0_ += v3_;
        v3_ = rotated(v3_, 21) ^ v0_;
        v2_ += v1_;
        v1_ = rotated(v1_, 17) ^ v2_;
        v2_ = rotated(v2_, 32);
    }

    std::uint64_t v0_, v1_, v2_, v3_;
};

}  // namespace

std::uint64_t siphash(const SipKey& key, std::string_view bytes) {
    State state(key);
    const std::size_t n = bytes.size(), whole = n / 8 * 8;
    for (std::size_t i = 0; i < whole; i += 8) state.absorb(little_endian(bytes.data() + i));
    state.absorb(little_endian(bytes.data() + whole, n - whole) | std::uint64_t{n} << 56);
    return state.finish();
}

std::uint64_t siphash(const SipKey& key, std::uint64_t word) {
    State state(key);
    state.absorb(word);
    state.absorb(std::uint64_t{8} << 56);
    return state.finish();
}

}  // namespace fedcore
