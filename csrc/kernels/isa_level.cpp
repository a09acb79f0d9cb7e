// Compiled once per ISA level (isa.cmake). Everything below stands in that level's namespace and calls no inline
// function of a shared header: the linker would keep one copy for all levels, and might keep the AVX-512 one.
#include <cstddef>
#include <utility>

#include "kernels/table.h"

#if defined(__SSE2__)
#    pragma GCC diagnostic push
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 about its own headers
#    include <immintrin.h>                                  // its functions are always inlined, so they make no symbols
#    pragma GCC diagnostic pop
#endif

namespace fedcore::FEDCORE_LEVEL {
namespace {

constexpr std::int64_t kTile = 2048;  // elements of a sum of squares in float32
static_assert(kTile % kCodeBlock == 0, "tiles must not cut what shares a scale");
constexpr std::int64_t kChunk = 512;  // elements that are converted at once: they stay in L1, and fit into the stack
static_assert(kTile % kChunk == 0, "lanes go from chunk to chunk of a tile");
static_assert(kBlock == kSummed, "a block is what lies under one checksum");
constexpr std::int64_t kCodedRun = 4096;  // elements of codes that are read consecutively: the loops feel it if the sum
                                          // comes from far
constexpr std::int64_t kConverted = 256;  // elements that are converted of eight rows at once, into as much
constexpr std::int64_t kAhead = 512;      // elements to prefetch ahead of a stream

#define FEDCORE_SCALAR inline
// Each file uses those before it, so their order matters.
// clang-format off
#include "base/checksum_lanes.inl"
#include "kernels/cpu/simd.inl"
#include "kernels/scalar/norms.inl"
#include "base/past_caches.inl"
#include "kernels/cpu/norms.inl"
#include "kernels/scalar/codes.inl"
#include "kernels/cpu/quantise.inl"
#include "kernels/cpu/half_floats.inl"
#include "kernels/cpu/tiles.inl"
#include "kernels/scalar/forms.inl"
#include "kernels/cpu/fold.inl"
#include "kernels/cpu/weighted_sum.inl"
#include "kernels/cpu/aggregate.inl"
#include "kernels/cpu/direction.inl"
#include "kernels/cpu/combine.inl"
#include "kernels/scalar/optimizer.inl"
#include "kernels/cpu/optimizer.inl"
#include "kernels/scalar/exact.inl"
#include "kernels/cpu/exact.inl"
#include "kernels/cpu/exact_combine.inl"
#include "kernels/cpu/exchange_fused.inl"
#include "kernels/cpu/exchange.inl"
#include "kernels/cpu/mix.inl"
#include "kernels/cpu/robust.inl"
// clang-format on
#undef FEDCORE_SCALAR

template <class Sum>
constexpr Sums<Sum> sums = {weighted_sum<Sum>, accumulate<Sum>, server_step<Sum>};

}  // namespace

extern const Table loops;
const Table loops = {sums<float>,      sums<double>,   exchange,     accumulate_exact, exchange,       combine_exact,
                     read_exact,       read_exact,     squared_norm, direction_step,   combine<float>, combine<double>,
                     combined_square,  optimizer_step, mix,          quantise,         dequantise,     gram,
                     column_statistic, add_words};

}  // namespace fedcore::FEDCORE_LEVEL
