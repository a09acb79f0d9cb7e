// mix: replaces every model by a weighted sum of all models, as decentralised methods do between neighbours.
#pragma once

#include <cstdint>

namespace fedcore {

// A p x p matrix in compressed rows: row i holds weights[e] at columns[e] for e in [starts[i], starts[i + 1]).
struct Mixing {
    const std::int64_t* starts;   // int64[p + 1]
    const std::int64_t* columns;  // int64[starts[p]], each in [0, p)
    const float* weights;         // float32[starts[p]]
    std::int64_t p;
};

// The plan of a mix, which handles `tile` elements of all models at a time. Rows are mixed in order and in place. A
// model whose old value later rows (or its own) need is first copied to a slot, which is free again after the last of
// them. A ring needs three slots for any p, a complete graph p.
struct MixPlan {
    std::int64_t tile;
    std::int64_t workers;  // threads that may work at once
    std::int64_t slots;
    std::int64_t scratch;   // in float32 elements
    std::int64_t ahead;     // row i fetches the tile of order[i + ahead], past the last that of the next tile's first
    std::int64_t* order;    // int64[p]: the models in the order of their first use
    std::int64_t* keeps;    // int64[p]: the slot that keeps model i, or -1
    std::int64_t* sources;  // int64[starts[p]]: the slot with the model of entry e, or -1 if it is still unchanged
};

// Plans in `memory`, int64[mix_memory(matrix)], which must live as long as the plan.
std::int64_t mix_memory(const Mixing& matrix);
MixPlan plan_mix(const Mixing& matrix, std::int64_t n, std::int64_t* memory);

// y_i[j] = (weights[e0] * y_c0[j] + weights[e1] * y_c1[j]) + ..., in place for all i at once: in float32, in the order
// in which row i lists its entries, from the first product on; a row without entries gives 0.
//   models: p x float32[n], disjoint; scratch: float32[plan.scratch]. Reads and writes each model once, for any matrix:
//   moves 8 p n bytes.
void mix(const Mixing& matrix, const MixPlan& plan, float* const* models, std::int64_t n, float* scratch);

}  // namespace fedcore
