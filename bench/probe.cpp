// How fast this machine reads memory at all: the floor that kernels are measured against.
//
// Each thread reads its share of every row, `streams` rows at a time, and adds the words up so that no read can be
// left out. Compiled by probe.py for the machine at hand; it is no part of the package.
#include <cstdint>
#include <thread>
#include <vector>

namespace {

template <int Streams, bool Prefetch>
std::uint64_t read_share(const std::uint64_t* const* rows, std::int64_t k, std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kTile = 4096;  // words: 32 KiB of each stream
    std::uint64_t sum = 0;
    for (std::int64_t tile = begin; tile < end; tile += kTile) {
        const std::int64_t stop = tile + kTile < end ? tile + kTile : end;
        for (std::int64_t i = 0; i < k; i += Streams) {
            std::uint64_t lanes[8] = {};
            for (std::int64_t j = tile; j + 8 <= stop; j += 8)
                for (int s = 0; s < Streams; ++s) {
                    const std::uint64_t* at = rows[i + s] + j;
                    if (Prefetch) __builtin_prefetch(at + 256);  // 2 KiB ahead
                    for (int lane = 0; lane < 8; ++lane) lanes[lane] ^= at[lane];
                }
            for (const std::uint64_t lane : lanes) sum += lane;
        }
    }
    return sum;
}

using Share = std::uint64_t (*)(const std::uint64_t* const*, std::int64_t, std::int64_t, std::int64_t);
constexpr Share kShares[4][2] = {{read_share<1, false>, read_share<1, true>},
                                 {read_share<2, false>, read_share<2, true>},
                                 {read_share<4, false>, read_share<4, true>},
                                 {read_share<8, false>, read_share<8, true>}};

}  // namespace

// rows: k x words of 8 bytes, k a multiple of 8; log2_streams: 0..3.
extern "C" std::uint64_t fedcore_probe_read(const std::uint64_t* const* rows, std::int64_t k, std::int64_t words,
                                            int log2_streams, int prefetch, int threads) {
    const Share share = kShares[log2_streams][prefetch != 0];
    std::vector<std::uint64_t> sums(threads);
    const auto work = [&](int t) { sums[t] = share(rows, k, words * t / threads, words * (t + 1) / threads); };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
    work(0);
    for (std::thread& other : others) other.join();
    std::uint64_t sum = 0;
    for (const std::uint64_t part : sums) sum += part;
    return sum;
}
