// Counter-based random numbers: each 64-bit word is a pure function of a key, of its use and of its index. No state is
// seeded, advanced or shared, so any draw can be repeated separately and in any order.
//
// The function is Threefry4x64-20: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011, Sec. 4.2. Its key has 256 bits, one word for each of (seed, round, client, purpose), so two different keys
// never share a stream (Philox4x32 would have to hash them into 64 bits).
//
// The code only adds, xors, rotates and multiplies integers, and makes doubles exactly. No draw calls libm, whose log
// and exp differ between platforms. So the numbers are the same on all platforms.
#pragma once

#include <cstdint>

namespace fedcore {

struct Key {
    std::uint64_t seed, round, client, purpose;
};

// The words of one key for one use; the counter of block b is (b, use[0], use[1], use[2]).
struct Stream {
    Key key;
    std::uint64_t use[3];
};

inline constexpr std::int64_t kWordsPerBlock = 4;

// out[4 i .. 4 i + 3] = block first + i of the stream, for i in [0, blocks).
void random_words(const Stream& stream, std::uint64_t first, std::int64_t blocks, std::uint64_t* out);

// A stream read word by word.
class Words {
  public:
    explicit Words(const Stream& stream, std::uint64_t first_word = 0);
    std::uint64_t next() {
        if (at_ == kHeld) refill();
        return held_[at_++];
    }

  private:
    static constexpr std::int64_t kHeld = 32;  // two 512-bit registers of blocks: most of the vector loop's speed
    void refill();

    Stream stream_;
    std::uint64_t block_;  // the next to be read
    std::int64_t at_;
    std::uint64_t held_[kHeld];
};

// Uniform over the 2^53 multiples of 2^-53 in [0, 1).
inline double unit(std::uint64_t word) {
    return static_cast<double>(static_cast<std::int64_t>(word >> 11)) * 0x1p-53;
}

// floor(word * bound / 2^64): in [0, bound), each value with probability 1 / bound to within 2^-64.
inline std::uint64_t scaled(std::uint64_t word, std::uint64_t bound) {
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(word) * bound) >> 64);
}

// Exactly uniform over [0, bound), bound >= 1. Takes one word, and with probability < bound / 2^64 another.
//   Reference: Lemire, "Fast random integer generation in an interval", 2019.
std::uint64_t below(Words& words, std::uint64_t bound);

}  // namespace fedcore
