#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {
namespace {

constexpr std::int64_t kColumn = kThreads * static_cast<std::int64_t>(sizeof(float));  // bytes of a value each
constexpr std::int64_t kMostHeld = 64, kMostScratch = 64 << 20;  // values of a column in shared memory; bytes

Updates copied(Queue& queue, const Updates& updates) {
    return {copied(queue, updates.sent, updates.tensors * updates.k),
            copied(queue, updates.starts, updates.tensors + 1), updates.tensors, updates.k};
}

std::int32_t are_plain(const Updates& updates) {
    return std::all_of(updates.sent, updates.sent + updates.tensors * updates.k,
                       [](const ClientUpdate& sent) { return sent.dtype == Dtype::float32; });
}

}  // namespace

void gram(Queue& queue, const Updates& updates, std::int64_t n, double* partials, double* products) {
    queue.begin();
    const std::int64_t k = updates.k, pairs = k * (k + 1) / 2, pieces = block_count(n);
    const std::int64_t sides = (k + kGramSide - 1) / kGramSide;
    const int width = k > kGramSide ? kGramWidth : k > kGramSide / 2 ? 2 * kGramWidth : 4 * kGramWidth;
    const GramCall call{copied(queue, updates), squares_for(queue, pairs, pieces), n, width, are_plain(updates)};
    if (pieces > 0) queue.launch(Kernel::gram, {pieces * sides * (sides + 1) / 2}, &call);
    std::vector<double> sums(pairs);
    read_totals(queue, call.products, pairs, pieces, 1, partials, sums.data());
    const double* sum = sums.data();
    for (std::int64_t i = 0; i < k; ++i)
        for (std::int64_t j = i; j < k; ++j) products[i * k + j] = products[j * k + i] = *sum++;
}

void column_statistic(Queue& queue, const Updates& updates, const double* mixing, std::int64_t rows,
                      const Statistic& statistic, std::int64_t n, float* out) {
    queue.begin();
    if (n == 0) return;
    const std::int64_t held = rows + (mixing != nullptr ? updates.k : 0);
    std::int64_t blocks = (n + kThreads - 1) / kThreads;
    int place = 0;  // of the kernel for 8, 16, 32 or 64 rows, or any
    while (place < 3 && rows > 8 << place) ++place;
    if (held > kMostHeld) {
        place = 4;
        blocks = std::min(blocks, std::max<std::int64_t>(1, kMostScratch / (held * kColumn)));
    }
    const auto bytes = static_cast<std::size_t>(held * kColumn);
    const ColumnCall call{copied(queue, updates),
                          mixing != nullptr ? copied(queue, mixing, rows * updates.k) : nullptr,
                          statistic,
                          out,
                          place == 4 ? static_cast<float*>(queue.scratch(bytes * blocks)) : nullptr,
                          n,
                          static_cast<std::int32_t>(rows),
                          are_plain(updates)};
    queue.launch(behind(Kernel::columns_8, place), {blocks, 1, place == 4 ? 0 : bytes}, &call);
}

}  // namespace fedcore::cuda
