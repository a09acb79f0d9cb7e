// The kernels by name, as the driver finds them in the image.
#if !defined(__CUDACC__)
#    include "cuda_on_host.h"
#endif

#include "kernels/cuda/combine.cuh"
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/robust.cuh"
#include "kernels/cuda/step.cuh"
#include "kernels/cuda/weighted_sum.cuh"

#if defined(__CUDACC__)
extern __shared__ uint4 dynamic_shared[];
#    define FEDCORE_DYNAMIC_SHARED(Element) reinterpret_cast<Element*>(dynamic_shared)
#    define FEDCORE_BEGIN_SHARED(memory)
#endif

namespace fedcore::cuda {
namespace {

// A kernel that needs no shared memory.
struct Nothing {};

// The type between the parentheses that protect its commas.
template <class T>
struct Unwrapped;
template <class T>
struct Unwrapped<void(T)> {
    using Type = T;
};

}  // namespace

#define FEDCORE_KERNEL(NAME, CALL, MEMORY, BODY, BLOCKS)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) fedcore_##NAME(const __grid_constant__ CALL call) { \
        [[maybe_unused]] __shared__ Unwrapped<void MEMORY>::Type shared;                                               \
        FEDCORE_BEGIN_SHARED(shared);                                                                                  \
        BODY;                                                                                                          \
    }
#include "kernels/cuda/kernels.def"
#undef FEDCORE_KERNEL

}  // namespace fedcore::cuda
