#include "kernels/combine.h"

#include "base/blocks.h"
#include "kernels/dispatch.h"
#include "kernels/partials.h"

namespace fedcore {

namespace {

std::int64_t bytes_of(const Term* terms, std::int64_t k) {
    std::int64_t bytes = 0;
    for (std::int64_t i = 0; i < k; ++i) bytes += terms[i].wide ? 8 : 4;
    return bytes;
}

void combine_range(const Table& loops, const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end,
                   float* out) {
    loops.combine32(terms, k, begin, end, out);
}
void combine_range(const Table& loops, const Term* terms, std::int64_t k, std::int64_t begin, std::int64_t end,
                   double* out) {
    loops.combine64(terms, k, begin, end, out);
}

}  // namespace

template <class Out>
void combine(const Term* terms, std::int64_t k, Out* out, std::int64_t n) {
    const Table& loops = table();
    const auto bytes = bytes_of(terms, k) + static_cast<std::int64_t>(sizeof(Out));
    for_blocks(n, bytes * n, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        combine_range(loops, terms, k, begin, end, out);
    });
}

template void combine(const Term*, std::int64_t, float*, std::int64_t);
template void combine(const Term*, std::int64_t, double*, std::int64_t);

double combined_square(const Term* terms, std::int64_t k, std::int64_t n, double* scratch) {
    const Table& loops = table();
    for_blocks(n, bytes_of(terms, k) * n, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
        scratch[block] = loops.combined_square(terms, k, begin, end);
    });
    double square = 0;
    add_partials(scratch, block_count(n), 1, &square);
    return square;
}

}  // namespace fedcore
