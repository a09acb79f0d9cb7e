#include "kernels/exact.h"

#include <atomic>
#include <limits>

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"
#include "kernels/tuner.h"

namespace fedcore {

namespace {

double larger(double a, double b) {
    b = b < 0 ? -b : b;
    return b > a ? b : a;
}

}  // namespace

double held(double square, double weight) {
    const double longest = kLongestExact / weight;
    return square < longest * longest ? square : std::numeric_limits<double>::infinity();
}

double largest_coefficient(const Forms& forms) {
    return larger(larger(larger(0, forms.adds.row * forms.row.h), forms.adds.h), forms.adds.row);
}

void accumulate(const ExactFold* folds, std::int64_t k, const Piece* pieces, std::int64_t count, double* scratch,
                double* squared_norms) {
    accumulate_pieces(table().accumulate_exact, folds, k, pieces, count, 36, scratch, squared_norms);
    for (std::int64_t i = 0; i < k; ++i) squared_norms[i] = held(squared_norms[i], folds[0].sent[i].weight);
}

void exchange(ConstExactSum acc, ExactSum out, const ClientUpdate* sent, const RowExchange* rows, const Forms& forms,
              std::int64_t k, std::int64_t n, double* scratch, double* squared_norms) {
    const Table& loops = table();
    const std::int64_t bytes = (12 * k + 36) * n;
    static Tuner tuner(kExchangeTilings);
    for_stretches(
        block_count(n), bytes, tuner, [](std::int64_t) { return true; },
        [&](std::int64_t first, std::int64_t last, const Tiling& tiling) {
            loops.exchange_exact(acc, out, sent, rows, forms, k, first * kBlock, std::min(last * kBlock, n),
                                 scratch + first * k, tiling);
        });
    add_partials(scratch, block_count(n), k, squared_norms);
    const double most = largest_coefficient(forms);
    for (std::int64_t i = 0; i < k; ++i) squared_norms[i] = held(squared_norms[i], most * sent[i].weight);
}

bool combine_exact(const ExactTerm* terms, std::int64_t k, ExactSum out, std::int64_t n) {
    const auto loop = table().combine_exact;
    std::atomic<bool> held{true};
    for_blocks(n, 16 * (k + 1) * n, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        if (!loop(terms, k, begin, end, out)) held.store(false, std::memory_order_relaxed);
    });
    return held.load(std::memory_order_relaxed);
}

template <>
void read_exact(ConstExactSum sum, float* out, std::int64_t n) {
    const auto loop = table().read_exact32;
    for_blocks(n, 20 * n, [&](std::int64_t, std::int64_t begin, std::int64_t end) { loop(sum, begin, end, out); });
}
template <>
void read_exact(ConstExactSum sum, double* out, std::int64_t n) {
    const auto loop = table().read_exact64;
    for_blocks(n, 24 * n, [&](std::int64_t, std::int64_t begin, std::int64_t end) { loop(sum, begin, end, out); });
}

void add_words(const std::uint64_t* const* terms, std::int64_t k, std::uint64_t* out, std::int64_t n) {
    const auto loop = table().add_words;
    for_blocks(n, 8 * (k + 2) * n,
               [&](std::int64_t, std::int64_t begin, std::int64_t end) { loop(terms, k, begin, end, out); });
}

}  // namespace fedcore
