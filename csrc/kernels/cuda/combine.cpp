#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {
namespace {

CombineCall call_of(Queue& queue, const Term* terms, std::int64_t k, void* out, double* squares, std::int64_t n) {
    bool vector = is_aligned(out);
    for (std::int64_t i = 0; i < k; ++i) vector = vector && is_aligned(terms[i].values);
    return {copied(queue, terms, k), out, squares, n, static_cast<std::int32_t>(k), vector};
}

Kernel combine_kernel(const float*) {
    return Kernel::combine_f32;
}
Kernel combine_kernel(const double*) {
    return Kernel::combine_f64;
}
Kernel read_kernel(const float*) {
    return Kernel::read_exact_f32;
}
Kernel read_kernel(const double*) {
    return Kernel::read_exact_f64;
}

}  // namespace

template <class Out>
void combine(Queue& queue, const Term* terms, std::int64_t k, Out* out, std::int64_t n) {
    queue.begin();
    const CombineCall call = call_of(queue, terms, k, out, nullptr, n);
    if (n > 0) queue.launch(combine_kernel(out), {tile_count(n)}, &call);
}
template void combine(Queue&, const Term*, std::int64_t, float*, std::int64_t);
template void combine(Queue&, const Term*, std::int64_t, double*, std::int64_t);

double combined_square(Queue& queue, const Term* terms, std::int64_t k, std::int64_t n, double* partials) {
    queue.begin();
    const std::int64_t pieces = block_count(n);
    const CombineCall call = call_of(queue, terms, k, nullptr, squares_for(queue, 1, pieces), n);
    if (pieces > 0) queue.launch(Kernel::combined_square, {pieces}, &call);
    double square = 0;
    read_totals(queue, call.squares, 1, pieces, 1, partials, &square);
    return square;
}

bool combine_exact(Queue& queue, const ExactTerm* terms, std::int64_t k, ExactSum out, std::int64_t n) {
    queue.begin();
    const std::int64_t tiles = tile_count(n);
    bool vector = is_aligned(out);
    for (std::int64_t i = 0; i < k; ++i) vector = vector && is_aligned(terms[i].values) && is_aligned(terms[i].sum);
    const CombineExactCall call{copied(queue, terms, k),      out,   squares_for(queue, 1, tiles), n,
                                static_cast<std::int32_t>(k), vector};
    if (tiles > 0) queue.launch(Kernel::combine_exact, {tiles}, &call);
    double overflows = 0;
    read_totals(queue, call.overflows, 1, tiles, 1, nullptr, &overflows);
    return overflows == 0;
}

template <class Out>
void read_exact(Queue& queue, ConstExactSum sum, Out* out, std::int64_t n) {
    queue.begin();
    const ReadExactCall call{sum, out, n, is_aligned(sum) && is_aligned(out)};
    if (n > 0) queue.launch(read_kernel(out), {tile_count(n)}, &call);
}
template void read_exact(Queue&, ConstExactSum, float*, std::int64_t);
template void read_exact(Queue&, ConstExactSum, double*, std::int64_t);

}  // namespace fedcore::cuda
