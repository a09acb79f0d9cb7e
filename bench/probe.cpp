// The speed at which this machine reads memory, rewrites it in place, and copies it: the floors of the kernels.
//
// Reading: each thread reads its share of every row, `streams` rows at a time and a tile of each before the next, and
// adds the words up so that no read can be left out. Folding: the same, and each tile of one more row is written once
// those of all rows are read. Rewriting: each thread reads its share of `streams` rows at a time and writes the first
// again, under a mask that the compiler does not know; the mask is 0, so that the arrays under test do not change.
// Writing elsewhere: the same reads, and stores past the caches into another array, so that no line of it is read
// before; line by line, or a stretch at a time from the first-level cache. Compiled by probe.py for the machine at
// hand; it is no part of the package.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#    include <immintrin.h>
#endif

namespace {

// The row that a fold writes, or null: plainly, or past the caches.
struct Out {
    std::uint64_t* to;
    bool past;
};

void write_tile(const Out& out, const std::uint64_t* words, std::int64_t begin, std::int64_t end);

template <int Streams, bool Prefetch>
std::uint64_t read_share(const std::uint64_t* const* rows, std::int64_t k, std::int64_t begin, std::int64_t end,
                         std::int64_t most, Out out) {
    std::uint64_t sum = 0;
    for (std::int64_t tile = begin; tile < end; tile += most) {
        const std::int64_t stop = std::min(end, tile + most);
        std::uint64_t lanes[8] = {};
        for (std::int64_t i = 0; i < k; i += Streams) {
            const int streams = static_cast<int>(std::min<std::int64_t>(Streams, k - i));
            const std::uint64_t* at[Streams];
            for (int s = 0; s < Streams; ++s) at[s] = rows[i + std::min(s, streams - 1)];
            std::int64_t j = tile;
            if (streams == Streams) {
                for (; j + 8 <= stop; j += 8)
                    for (int s = 0; s < Streams; ++s) {
                        if (Prefetch) __builtin_prefetch(at[s] + j + 256);  // 2 KiB ahead
                        for (int lane = 0; lane < 8; ++lane) lanes[lane] ^= at[s][j + lane];
                    }
                for (; j < stop; ++j)
                    for (int s = 0; s < Streams; ++s) lanes[s] ^= at[s][j];
            } else {
                for (int s = 0; s < streams; ++s) {
                    for (j = tile; j + 8 <= stop; j += 8)
                        for (int lane = 0; lane < 8; ++lane) lanes[lane] ^= at[s][j + lane];
                    for (; j < stop; ++j) lanes[0] ^= at[s][j];
                }
            }
        }
        for (const std::uint64_t lane : lanes) sum += lane;
        if (out.to != nullptr) write_tile(out, lanes, tile, stop);
    }
    return sum;
}

using Share = std::uint64_t (*)(const std::uint64_t* const*, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                Out);
constexpr Share kShares[4][2] = {{read_share<1, false>, read_share<1, true>},
                                 {read_share<2, false>, read_share<2, true>},
                                 {read_share<4, false>, read_share<4, true>},
                                 {read_share<8, false>, read_share<8, true>}};

template <int Streams, bool Prefetch>
void rewrite_share(std::uint64_t* const* rows, std::int64_t begin, std::int64_t end, std::uint64_t mask) {
    std::int64_t j = begin;
    for (; j + 8 <= end; j += 8) {
        std::uint64_t lanes[8] = {};
        for (int s = 0; s < Streams; ++s) {
            const std::uint64_t* at = rows[s] + j;
            if (Prefetch) __builtin_prefetch(at + 256);  // 2 KiB ahead
            for (int lane = 0; lane < 8; ++lane) lanes[lane] ^= at[lane];
        }
        for (int lane = 0; lane < 8; ++lane) rows[0][j + lane] ^= lanes[lane] & mask;
    }
    for (; j < end; ++j) {
        std::uint64_t lane = 0;
        for (int s = 0; s < Streams; ++s) lane ^= rows[s][j];
        rows[0][j] ^= lane & mask;
    }
}

using Rewrite = void (*)(std::uint64_t* const*, std::int64_t, std::int64_t, std::uint64_t);
constexpr Rewrite kRewrites[5][2] = {{rewrite_share<1, false>, rewrite_share<1, true>},
                                     {rewrite_share<2, false>, rewrite_share<2, true>},
                                     {rewrite_share<3, false>, rewrite_share<3, true>},
                                     {rewrite_share<4, false>, rewrite_share<4, true>},
                                     {rewrite_share<5, false>, rewrite_share<5, true>}};

// Stores 8 words past the caches, where the machine has such stores; `to` starts a cache line.
inline void store_line(const std::uint64_t* words, std::uint64_t* to) {
#if defined(__AVX__)
    for (int w = 0; w < 8; w += 4)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + w),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + w)));
#elif defined(__SSE2__)
    for (int w = 0; w < 8; w += 2)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + w),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + w)));
#else
    for (int w = 0; w < 8; ++w) to[w] = words[w];
#endif
}

void write_tile(const Out& out, const std::uint64_t* words, std::int64_t begin, std::int64_t end) {
    std::int64_t j = begin;
    if (out.past) {
        for (; j < end && reinterpret_cast<std::uintptr_t>(out.to + j) % 64 != 0; ++j) out.to[j] = words[0];
        for (; j + 8 <= end; j += 8) store_line(words, out.to + j);
#if defined(__SSE2__)
        _mm_sfence();
#endif
    }
    for (; j + 8 <= end; j += 8)
        for (int lane = 0; lane < 8; ++lane) out.to[j + lane] = words[lane];
    for (; j < end; ++j) out.to[j] = words[0];
}

// words [begin, end), whole lines, of `to` become the sums of the rows': a line at a time, or a stretch.
template <int Streams, bool Prefetch, bool Stretch>
void write_share(const std::uint64_t* const* rows, std::uint64_t* to, std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kStretch = Stretch ? 256 : 8;  // words: 2 KiB
    alignas(64) std::uint64_t made[kStretch];
    for (std::int64_t first = begin; first < end; first += kStretch) {
        const std::int64_t count = std::min(kStretch, end - first);
        for (std::int64_t j = 0; j < count; j += 8) {
            std::uint64_t lanes[8] = {};
            for (int s = 0; s < Streams; ++s) {
                const std::uint64_t* at = rows[s] + first + j;
                if (Prefetch) __builtin_prefetch(at + 256);  // 2 KiB ahead
                for (int lane = 0; lane < 8; ++lane) lanes[lane] ^= at[lane];
            }
            for (int lane = 0; lane < 8; ++lane) made[j + lane] = lanes[lane];
        }
        for (std::int64_t j = 0; j < count; j += 8) store_line(made + j, to + first + j);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

using Write = void (*)(const std::uint64_t* const*, std::uint64_t*, std::int64_t, std::int64_t);
constexpr Write kWrites[4][2][2] = {{{write_share<1, false, false>, write_share<1, false, true>},
                                     {write_share<1, true, false>, write_share<1, true, true>}},
                                    {{write_share<2, false, false>, write_share<2, false, true>},
                                     {write_share<2, true, false>, write_share<2, true, true>}},
                                    {{write_share<3, false, false>, write_share<3, false, true>},
                                     {write_share<3, true, false>, write_share<3, true, true>}},
                                    {{write_share<4, false, false>, write_share<4, false, true>},
                                     {write_share<4, true, false>, write_share<4, true, true>}}};

// Threads that wait for work: a new thread often shares its caller's core at first.
class Team {
  public:
    // work(t) for t in [0, threads), each on its own thread.
    void run(int threads, const std::function<void(int)>& work) {
        while (started_ < threads - 1) std::thread(&Team::serve, this, ++started_).detach();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            threads_ = threads;
            running_ = threads - 1;
            ++turn_;
        }
        wake_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(mutex_);
        ended_.wait(lock, [this] { return running_ == 0; });
    }

  private:
    void serve(int t) {
        for (std::uint64_t seen = 0;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return turn_ != seen; });
            seen = turn_;
            if (t >= threads_) continue;
            const auto& work = *work_;
            lock.unlock();
            work(t);
            lock.lock();
            if (--running_ == 0) ended_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, ended_;
    const std::function<void(int)>* work_ = nullptr;
    int started_ = 0, threads_ = 0, running_ = 0;
    std::uint64_t turn_ = 0;
};

void on_threads(int threads, const std::function<void(int)>& work) {
    static Team& team = *new Team;  // never destroyed: its threads wait in it until the process ends
    team.run(threads, work);
}

}  // namespace

// rows: k x words of 8 bytes, k a multiple of `streams`, 1..5. Each thread takes the rows in stretches of `tile` words
// of its share, one group of `streams` after another: a tile of all words is row by row.
extern "C" void fedcore_probe_rewrite(std::uint64_t* const* rows, std::int64_t k, std::int64_t words, std::int64_t tile,
                                      int streams, int prefetch, int threads) {
    const Rewrite share = kRewrites[streams - 1][prefetch != 0];
    static volatile std::uint64_t unknown = 0;
    const std::uint64_t mask = unknown;
    on_threads(threads, [&](int t) {
        const std::int64_t end = words * (t + 1) / threads;
        for (std::int64_t begin = words * t / threads; begin < end; begin += tile)
            for (std::int64_t i = 0; i < k; i += streams)
                share(rows + i, begin, begin + tile < end ? begin + tile : end, mask);
    });
}

// rows: k x words of 8 bytes, k a multiple of `streams`, 1..4; to: k / streams x words, each starting a cache line;
// words a multiple of 8, tile likewise. As above, what is written being elsewhere.
extern "C" void fedcore_probe_write(const std::uint64_t* const* rows, std::uint64_t* const* to, std::int64_t k,
                                    std::int64_t words, std::int64_t tile, int streams, int prefetch, int stretch,
                                    int threads) {
    const Write share = kWrites[streams - 1][prefetch != 0][stretch != 0];
    on_threads(threads, [&](int t) {
        const std::int64_t end = words / 8 * (t + 1) / threads * 8;
        for (std::int64_t begin = words / 8 * t / threads * 8; begin < end; begin += tile)
            for (std::int64_t i = 0; i < k; i += streams)
                share(rows + i, to[i / streams], begin, std::min(begin + tile, end));
    });
}

// rows: segments x k, row i of segment s at rows[s * k + i], words[s] long; outs: one for each segment, or null, where
// nothing is written; tile: words of a row that are read before the next rows; log2_streams: 0..3. All of it `times`
// times, by threads that are started once.
extern "C" std::uint64_t fedcore_probe_read(const std::uint64_t* const* rows, std::uint64_t* const* outs,
                                            std::int64_t segments, std::int64_t k, const std::int64_t* words,
                                            std::int64_t tile, int log2_streams, int prefetch, int past, int times,
                                            int threads) {
    const Share share = kShares[log2_streams][prefetch != 0];
    std::vector<std::uint64_t> sums(threads);
    on_threads(threads, [&](int t) {
        for (int again = 0; again < times; ++again)
            for (std::int64_t s = 0; s < segments; ++s)
                sums[t] += share(rows + s * k, k, words[s] * t / threads, words[s] * (t + 1) / threads, tile,
                                 {outs == nullptr ? nullptr : outs[s], past != 0});
    });
    std::uint64_t sum = 0;
    for (const std::uint64_t part : sums) sum += part;
    return sum;
}
