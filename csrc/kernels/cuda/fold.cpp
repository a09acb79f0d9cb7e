#include <type_traits>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

namespace fedcore::cuda {
namespace {

// Clients first .. last - 1 of every tensor, with the same base and, if rows are exchanged, the same codec.
struct Group {
    std::int64_t first, last;
};

template <class Sum>
bool are_alike(const Fold<Sum>* folds, std::int64_t count, const RowExchange* rows, std::int64_t i, std::int64_t j) {
    for (std::int64_t s = 0; s < count; ++s)
        if (folds[s].sent[i].base != folds[s].sent[j].base) return false;
    return rows == nullptr || rows[i].new_row.codec == rows[j].new_row.codec;
}

template <class Sum>
Group group_from(const Fold<Sum>* folds, std::int64_t count, const RowExchange* rows, std::int64_t first,
                 std::int64_t k) {
    Group group{first, first + 1};
    while (group.last < k && are_alike(folds, count, rows, first, group.last)) ++group.last;
    return group;
}

bool has_aligned_rows(const RowExchange& row) {
    return are_aligned({row.old_row.data, row.anchor, row.new_row.data});
}

// A fold that continues from the result of another one.
template <class Sum>
const Sum* result_of(const Fold<Sum>& fold) {
    return fold.out;
}
ConstExactSum result_of(const ExactFold& fold) {
    return {fold.out.high, fold.out.low};
}

template <class Sum>
Kernel accumulate_kernel(bool plain);
template <>
Kernel accumulate_kernel<float>(bool plain) {
    return plain ? Kernel::accumulate_f32 : Kernel::accumulate_f32_any;
}
template <>
Kernel accumulate_kernel<double>(bool plain) {
    return plain ? Kernel::accumulate_f64 : Kernel::accumulate_f64_any;
}

template <>
Kernel accumulate_kernel<std::int64_t>(bool plain) {
    return plain ? Kernel::accumulate_exact : Kernel::accumulate_exact_any;
}

template <class Sum>
Kernel exchange_kernel(Codec codec, const Forms& forms, bool plain) {
    const Kernel first = std::is_same_v<Sum, std::int64_t> ? Kernel::exchange_exact_f32 : Kernel::exchange_f32;
    return behind(first, static_cast<int>(codec) * 4 + !forms.replaces() * 2 + !plain);
}

template <class Sum>
void fold_group(Queue& queue, const Fold<Sum>* folds, const std::int64_t* n, std::int64_t count,
                const RowExchange* rows, const Forms& forms, const Group& group, const Pieces& pieces,
                double* squares) {
    const std::int64_t k = group.last - group.first;
    const Table<FoldSegment<Sum>> tensors = table<FoldSegment<Sum>>(queue, count);
    bool plain = true, vector = true;
    for (std::int64_t i = group.first; rows != nullptr && i < group.last; ++i) {
        plain = plain && (rows[i].old_row.data == nullptr || rows[i].old_row.codec == rows[i].new_row.codec);
        vector = vector && has_aligned_rows(rows[i]);
    }
    for (std::int64_t s = 0; s < count; ++s) {
        const Fold<Sum>& fold = folds[s];
        bool aligned = vector && is_aligned(fold.acc) && is_aligned(fold.out);
        for (std::int64_t i = group.first; i < group.last; ++i) {
            plain = plain && fold.sent[i].dtype == Dtype::float32;
            aligned = aligned && are_aligned({fold.sent[i].y, fold.sent[i].base});
        }
        const auto acc = group.first == 0 ? fold.acc : result_of(fold);
        tensors.host[s] = {{acc, fold.out, copied(queue, fold.sent + group.first, k)}, n[s], aligned};
    }
    const FoldCall<Sum> call{tensors.device,  rows != nullptr ? copied(queue, rows + group.first, k) : nullptr,
                             forms,           squares + group.first * pieces.tiles(),
                             pieces.segments, static_cast<std::int32_t>(k)};
    const Kernel kernel = rows != nullptr ? exchange_kernel<Sum>(rows[group.first].new_row.codec, forms, plain)
                                          : accumulate_kernel<Sum>(plain);
    queue.launch(kernel, {pieces.tiles()}, &call);
}

template <class Sum>
void fold_all(Queue& queue, const Fold<Sum>* folds, const std::int64_t* n, std::int64_t count, const RowExchange* rows,
              const Forms& forms, std::int64_t k, double* partials, double* squared_norms) {
    queue.begin();
    const Pieces pieces = pieces_of(queue, n, count);
    double* const squares = squares_for(queue, k, pieces.tiles());
    if (pieces.count > 0) {
        if (k == 0) fold_group(queue, folds, n, count, nullptr, forms, {0, 0}, pieces, squares);
        for (std::int64_t i = 0; i < k;) {
            const Group group = group_from(folds, count, rows, i, k);
            fold_group(queue, folds, n, count, rows, forms, group, pieces, squares);
            i = group.last;
        }
    }
    read_totals(queue, squares, k, pieces.count, kPieceTiles, partials, squared_norms);
}

}  // namespace

template <class Sum>
void accumulate(Queue& queue, const Fold<Sum>* folds, const std::int64_t* n, std::int64_t count, std::int64_t k,
                double* partials, double* squared_norms) {
    fold_all(queue, folds, n, count, nullptr, Forms{}, k, partials, squared_norms);
}
template void accumulate(Queue&, const Fold<float>*, const std::int64_t*, std::int64_t, std::int64_t, double*, double*);
template void accumulate(Queue&, const Fold<double>*, const std::int64_t*, std::int64_t, std::int64_t, double*,
                         double*);

void exchange(Queue& queue, const double* acc, double* out, const ClientUpdate* sent, const RowExchange* rows,
              const Forms& forms, std::int64_t k, std::int64_t n, double* partials, double* squared_norms) {
    const Fold<double> fold{acc, out, sent};
    fold_all(queue, &fold, &n, 1, rows, forms, k, partials, squared_norms);
}

void accumulate(Queue& queue, const ExactFold* folds, const std::int64_t* n, std::int64_t count, std::int64_t k,
                double* partials, double* squared_norms) {
    fold_all(queue, folds, n, count, nullptr, Forms{}, k, partials, squared_norms);
    for (std::int64_t i = 0; i < k; ++i) squared_norms[i] = held(squared_norms[i], folds[0].sent[i].weight);
}

void exchange(Queue& queue, ConstExactSum acc, ExactSum out, const ClientUpdate* sent, const RowExchange* rows,
              const Forms& forms, std::int64_t k, std::int64_t n, double* partials, double* squared_norms) {
    const ExactFold fold{acc, out, sent};
    fold_all(queue, &fold, &n, 1, rows, forms, k, partials, squared_norms);
    const double most = largest_coefficient(forms);
    for (std::int64_t i = 0; i < k; ++i) squared_norms[i] = held(squared_norms[i], most * sent[i].weight);
}

}  // namespace fedcore::cuda
