// Compiled once per ISA level (isa.cmake). Everything below stands in that level's namespace and calls no
// inline function of a shared header: the linker would keep one copy for all levels, and might keep the
// AVX-512 one.
#include "kernels/table.h"

namespace fedcore::FEDCORE_LEVEL {
namespace {

#include "kernels/norms_cpu.inl"
// after the norms, whose lanes and tiles they use
#include "kernels/aggregate_cpu.inl"
#include "kernels/direction_cpu.inl"
#include "kernels/exchange_cpu.inl"
#include "kernels/mix_cpu.inl"
#include "kernels/quantise_cpu.inl"

}  // namespace

extern const Table loops;
const Table loops = {weighted_sum,   accumulate,       exchange, server_step, squared_norm,
                     direction_step, direction_offset, mix,      quantise,    dequantise};

}  // namespace fedcore::FEDCORE_LEVEL
