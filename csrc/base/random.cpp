#include "base/random.h"

#include "base/isa.h"

namespace fedcore {

using Fill = void(const std::uint64_t* key, const std::uint64_t* use, std::uint64_t first, std::int64_t blocks,
                  std::uint64_t* out);

FEDCORE_EACH_LEVEL(Fill threefry4x64)

void random_words(const Stream& stream, std::uint64_t first, std::int64_t blocks, std::uint64_t* out) {
    static Fill* const fill = FEDCORE_OF_LEVEL(Fill, threefry4x64);
    const std::uint64_t key[4] = {stream.key.seed, stream.key.round, stream.key.client, stream.key.purpose};
    fill(key, stream.use, first, blocks, out);
}

Words::Words(const Stream& stream, std::uint64_t first_word) : stream_(stream), block_(first_word / kWordsPerBlock) {
    refill();
    at_ = static_cast<std::int64_t>(first_word % kWordsPerBlock);
}

void Words::refill() {
    random_words(stream_, block_, kHeld / kWordsPerBlock, held_);
    block_ += kHeld / kWordsPerBlock;
    at_ = 0;
}

std::uint64_t below(Words& words, std::uint64_t bound) {
    for (;;) {
        const auto product = static_cast<unsigned __int128>(words.next()) * bound;
        const auto low = static_cast<std::uint64_t>(product);
        // Reject the words whose low half is below 2^64 mod bound. The division is needed only if low < bound.
        if (low >= bound || low >= (0 - bound) % bound) return static_cast<std::uint64_t>(product >> 64);
    }
}

}  // namespace fedcore
