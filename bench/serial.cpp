// How long small problems take on one thread and on several: what kSerialBytes in base/blocks.h is drawn from.
//
//   serial THREADS REPEATS prints a line for each kernel, number of bytes and state:
//       kernel bytes state best_alone best_shared median_alone median_shared      (microseconds)
//   The two take turns. "hot": call upon call on the same arrays, which stay in the caches where they fit. "cold": each
//   call comes after 2 ms of sleep, and 64 MiB of other memory were read before that, as between two updates that
//   arrive over a network. Pieces are the blocks that the kernels have anyway.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "base/blocks.h"
#include "kernels/dispatch.h"

using namespace fedcore;

namespace {

constexpr std::int64_t kRows = 8;

// The arrays of all four kernels, for the longest of them.
struct Arrays {
    explicit Arrays(std::int64_t n)
        : ys(kRows, std::vector<float>(n, 1.5f)), rows(ys), x(n, 0.5f), y(n, 0.25f), out(n), acc(n), sum(n) {
        for (std::int64_t i = 0; i < kRows; ++i) {
            pointers.push_back(ys[i].data());
            weights.push_back(0.125);
            sent.push_back({ys[i].data(), Dtype::float32, x.data(), 0.5f, 0.125});
            const Row row = {Codec::f32, rows[i].data(), nullptr};
            row_exchanges.push_back({row, nullptr, row, {}});
        }
        scratch.resize(kRows * block_count(n));
    }

    std::vector<std::vector<float>> ys, rows;
    std::vector<float> x, y, out;
    std::vector<double> acc, sum, scratch, weights;
    std::vector<const void*> pointers;
    std::vector<ClientUpdate> sent;
    std::vector<RowExchange> row_exchanges;
};

struct Kernel {
    const char* name;
    std::int64_t bytes;  // an element
    std::function<void(Arrays&, std::int64_t block, std::int64_t begin, std::int64_t end)> run;
};

const Kernel kKernels[] = {
    {"weighted_sum", 4 * (kRows + 1),
     [](Arrays& a, std::int64_t, std::int64_t begin, std::int64_t end) {
         const RowSum rows = {a.pointers.data(), nullptr, a.out.data(), Dtype::float32, Dtype::float32};
         table().sums32.weighted_sum(rows, a.weights.data(), kRows, begin, end, nullptr, kInCaches);
     }},
    {"accumulate", 4 * kRows + 20,
     [](Arrays& a, std::int64_t block, std::int64_t begin, std::int64_t end) {
         table().sums64.accumulate({a.acc.data(), a.sum.data(), a.sent.data()}, kRows, begin, end,
                                   a.scratch.data() + block * kRows, kInCaches);
     }},
    {"exchange", 12 * kRows + 20,
     [](Arrays& a, std::int64_t block, std::int64_t begin, std::int64_t end) {
         table().exchange(a.acc.data(), a.sum.data(), a.sent.data(), a.row_exchanges.data(),
                          Forms{{1, 0, 0}, {1, -1, 0, 1}}, kRows, begin, end, a.scratch.data() + block * kRows,
                          kInCaches);
     }},
    {"direction", 16,
     [](Arrays& a, std::int64_t, std::int64_t begin, std::int64_t end) {
         const LocalStep step{a.ys[0].data(), nullptr, a.x.data(), nullptr, 1, 0, 0, 0, 0.01f};
         table().direction_step(step, begin, end, a.y.data());
     }},
};

std::vector<double> other(8 << 20);  // 64 MiB

double microseconds(const Kernel& kernel, Arrays& arrays, std::int64_t n, bool shared) {
    const auto piece = [&](std::int64_t block) {
        kernel.run(arrays, block, block * kBlock, std::min((block + 1) * kBlock, n));
    };
    const auto began = std::chrono::steady_clock::now();
    if (shared)
        parallel_for(block_count(n), piece);
    else
        for (std::int64_t block = 0; block < block_count(n); ++block) piece(block);
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count();
}

void cool() {
    volatile double sum = 0;
    for (std::size_t j = 0; j < other.size(); j += 8) sum = sum + other[j];
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

void measure(const Kernel& kernel, Arrays& arrays, std::int64_t bytes, bool cold, int repeats) {
    const std::int64_t n = bytes / kernel.bytes;
    std::vector<double> times[2];
    for (int i = 0; i < repeats; ++i)
        for (const bool shared : {false, true}) {
            if (cold) cool();
            for (int warm = 0; !cold && warm < 2; ++warm) microseconds(kernel, arrays, n, shared);
            times[shared].push_back(microseconds(kernel, arrays, n, shared));
        }
    for (std::vector<double>& all : times) std::sort(all.begin(), all.end());
    std::printf("%s %lld %s %.1f %.1f %.1f %.1f\n", kernel.name, static_cast<long long>(bytes), cold ? "cold" : "hot",
                times[0].front(), times[1].front(), times[0][times[0].size() / 2], times[1][times[1].size() / 2]);
    std::fflush(stdout);
}

}  // namespace

int main(int, char** arguments) {
    set_threads(std::atoi(arguments[1]));
    const int repeats = std::atoi(arguments[2]);
    constexpr std::int64_t kMost = 16 << 20;
    Arrays arrays(kMost / 16);
    for (const Kernel& kernel : kKernels)
        for (std::int64_t bytes = 64 << 10; bytes <= kMost; bytes *= 2)
            for (const bool cold : {false, true}) measure(kernel, arrays, bytes, cold, repeats);
}
